# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A TRL that is newer than all tested versions: copies of the installed one, each edited in one place."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trl

from trl_dapo import trl_check


NEWER = "1.99.0"
GRPO = "trainer/grpo_trainer.py"
# For each copy: the file, what is replaced in it (a regular expression), and the replacement.
EDITS = {
    "nothing": (GRPO, "class GRPOTrainer", "class GRPOTrainer"),
    "a docstring": (GRPO, r"(def _prepare_inputs\(.*?\) -> .*?:\n)", r'\1        """Other words."""\n'),
    "a comment": (GRPO, r"(def _prepare_inputs\(.*?\) -> .*?:\n)", r"\1        # A comment\n"),
    "a private method": (GRPO, "_calculate_rewards", "_compute_rewards"),
    "a parameter": (GRPO, r"def _generate\(self, prompts: list\)", "def _generate(self, prompts: list, schema)"),
    "a tensor in the batch": (GRPO, '"advantages": advantages,', '"advantages": advantages, "weights": advantages,'),
    "a ninth element": (GRPO, r"extra_fields, images, tool_images\n", "extra_fields, images, tool_images, None\n"),
    "a body": (GRPO, r"(def _prepare_inputs\(.*?\) -> .*?:\n)", r"\1        _ = None\n"),
    "an attribute": (GRPO, "_pending_extra_logs", "_extra_logs"),
    "a function": ("trainer/*.py", "shuffle_sequence_dict", "shuffle_sequences"),
    "a class": ("generation/vllm_client.py", "class VLLMClient", "class VLLMHttpClient"),
    "a method of the client": ("generation/vllm_client.py", r"def init_communicator\(", "def open_communicator("),
}
CHECK = """
import json, os, sys, warnings
import datasets, peft, torch, transformers, transformers.trainer  # once, for all copies
for folder in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                import trl_dapo.trl_check
                said = [str(each.message) for each in caught if "trl-dapo" in str(each.message)]
            except ImportError as error:
                said = [f"ImportError: {error}"]
        with open(os.path.join(folder, "said.json"), "w") as file:
            json.dump(said, file)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return the messages for each edited copy when the trainer's module is imported with it."""
    root, package = tmp_path_factory.mktemp("copies"), Path(trl.__file__).parent
    for name, (files, old, new) in EDITS.items():
        copy, num_edits = root / name / "trl", 0
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file in copy.glob(files):
            text, num = re.subn(old, new, file.read_text(), flags=re.DOTALL)
            file.write_text(text)
            num_edits += num
        assert num_edits, name
        info = root / name / f"trl-{NEWER}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {NEWER}\n")
    folders = [str(root / name) for name in EDITS]
    subprocess.run([sys.executable, "-c", CHECK, *folders], check=True, timeout=240)
    return {name: json.loads((root / name / "said.json").read_text()) for name in EDITS}


@pytest.mark.parametrize("edited", ["nothing", "a docstring", "a comment"])
def test_what_changes_no_code_is_not_mentioned(said, edited):
    assert said[edited] == []


@pytest.mark.parametrize(
    ("edited", "method"),
    [
        ("a tensor in the batch", "_generate_and_score_completions"),
        ("a ninth element", "_generate"),
        ("a body", "_prepare_inputs"),
    ],
)
def test_changed_code_is_one_warning_that_names_the_method_and_the_newest_tested_version(said, edited, method):
    (warning,) = said[edited]
    newest = list(json.loads(trl_check.TESTED_FILE.read_text()))[-1]
    assert f"TRL {NEWER} is newer than the newest version that trl-dapo" in warning
    assert f"the code of `GRPOTrainer.{method}` has changed. All names" in warning
    assert warning.endswith(f"`pip install trl=={newest}`.")


@pytest.mark.parametrize(
    ("edited", "broken"),
    [
        ("a private method", "`GRPOTrainer._calculate_rewards` is gone"),
        ("a parameter", "`GRPOTrainer._generate` takes (self, prompts, schema), expected (self, prompts)"),
        ("an attribute", "`GRPOTrainer._pending_extra_logs` is gone"),
        ("a function", "`trl.trainer.utils.shuffle_sequence_dict` is gone"),
        ("a class", "cannot import name 'VLLMClient'"),
        ("a method of the client", "`VLLMClient.init_communicator` is gone"),
    ],
)
def test_a_missing_name_and_a_changed_signature_are_an_error_that_names_them_and_a_version(said, edited, broken):
    (error,) = said[edited]
    assert error.startswith("ImportError: trl-dapo ")
    assert f"does not work with TRL {NEWER}: {broken}" in error
    assert "`pip install trl==" in error
