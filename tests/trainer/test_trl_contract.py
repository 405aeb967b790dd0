# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Every private name that this package relies on exists in TRL, with the expected parameters."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
import trl.scripts.grpo
import trl.trainer.utils
from helpers import prompts, tiny_config
from packaging.version import Version
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

import trl_dapo
from trl_dapo import DAPOConfig, DAPOTrainer, trl_check, trl_names
from trl_dapo.cli.train import LaunchArguments
from trl_dapo.plan.recipe import DATACLASSES


WHERE = f"trl {trl.__version__}: see trl_dapo/trl_names.py for what relies on it"


def length_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    args = tiny_config(tmp_path_factory.mktemp("contract"))
    return DAPOTrainer(tiny_model, length_reward, args, train_dataset=prompts(8))


def test_trl_has_every_name_with_the_parameters_that_are_used():
    assert [*trl_check.find_broken()] == [], WHERE


def test_the_code_that_is_wrapped_is_that_of_a_version_that_is_noted_as_tested():
    """
    After reviewing a change, record it with `python -m trl_dapo.trl_check`. Hashes are the same on every version of
    Python.
    """
    tested = json.loads(trl_check.TESTED_FILE.read_text())
    if trl.__version__ not in tested:
        pytest.skip(f"TRL {trl.__version__} is not noted as tested")
    assert trl_check.hash_methods(Path(trl.__file__).parent) == tested[trl.__version__]


def assert_takes(function, parameters):
    owner = SimpleNamespace(__name__="", **{function.__name__: function})
    assert [*trl_check.find_differences(owner, function.__name__, parameters)] == [], WHERE


def test_log_probabilities_take_what_they_are_called_with_and_come_as_three(trainer):
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    method, tokens = GRPOTrainer._get_per_token_logps_and_entropies, (ids, torch.ones_like(ids))
    returned = method(trainer, trainer.model, *tokens, 2, batch_size=1, compute_entropy=True)
    assert len(returned) == len(trl_names.LOGPS_RETURNS), WHERE
    assert [tuple(part.shape) for part in returned[:2]] == [(2, 2), (2, 2)]
    assert returned[2] is None
    whole = trainer.model(ids).logits[:, :-1].log_softmax(-1)
    torch.testing.assert_close(returned[0], whole.gather(-1, ids[:, 1:, None])[..., 0], rtol=1e-4, atol=1e-5)


def test_the_script_of_trl_takes_its_arguments_in_the_order_in_which_they_are_passed():
    assert_takes(trl.scripts.grpo.main, trl_names.SCRIPT_MAIN)


def test_prompts_are_tokenized_into_what_is_generated_from(trainer):
    prompt_ids, images, fields = trainer._tokenize_prompts(["prompt 0:"])
    assert (len(prompt_ids), images, fields) == (1, None, {})
    trainer.model.train()
    completion_ids, _ = GRPOTrainer._generate_single_turn(trainer, prompt_ids, images, fields, 1)
    assert 1 <= len(completion_ids[0]) <= 8


@pytest.mark.parametrize(("package", "file", "name"), trl_names.PARSED, ids=lambda text: text.strip("_"))
def test_every_dataclass_that_a_plan_parses_is_declared_in_its_file(package, file, name):
    path = Path(importlib.import_module(package).__file__).parent / file
    module = importlib.import_module(".".join([package, *Path(file).with_suffix("").parts]))
    cls = getattr(module, name, None)
    assert dataclasses.is_dataclass(cls), f"{package}/{file} has no dataclass `{name}` ({WHERE})"
    assert Path(inspect.getsourcefile(cls)) == path, f"`{name}` moved to {inspect.getsourcefile(cls)} ({WHERE})"


def test_a_plan_parses_every_class_that_a_run_takes_fields_from():
    used = {base for cls in (DAPOConfig, trl.ModelConfig, LaunchArguments) for base in cls.__mro__}
    named = {base.__name__ for base in used if dataclasses.is_dataclass(base)}
    assert named == {name for _, _, name in DATACLASSES}, WHERE
    assert {each for each in DATACLASSES if each[0] != "trl_dapo"} == set(trl_names.PARSED)


@pytest.mark.parametrize(("module", "function", "name"), trl_names.PATCHED)
def test_the_engine_is_made_from_names_that_are_looked_up_in_their_module(module, function, name):
    owner, method = function.split(".")
    code = getattr(getattr(importlib.import_module(module), owner), method).__code__
    assert name in code.co_names, f"{function} looks up no `{name}` ({WHERE})"


@pytest.mark.parametrize(
    ("owner", "overrides", "attributes"),
    [
        (VLLMGeneration, trl_names.VLLM_OVERRIDES, trl_names.VLLM_ATTRIBUTES + trl_names.VLLM_LATER_READS),
        (VLLMClient, trl_names.CLIENT_OVERRIDES, trl_names.CLIENT_ATTRIBUTES),
    ],
    ids=["engine", "client"],
)
def test_the_engine_and_its_client_keep_what_is_overridden_and_set_what_is_read(owner, overrides, attributes):
    for name, parameters in overrides.items():
        assert tuple(inspect.signature(getattr(owner, name)).parameters) == parameters, f"{owner.__name__}.{name}"
    assert [name for name in attributes if f"self.{name} = " not in inspect.getsource(owner)] == []
    source = inspect.getsource(VLLMGeneration.__init__)
    assert "self._init_vllm()" in source, WHERE
    assert all(f"self.{name} = {name}" in source for name in trl_names.VLLM_READS), WHERE


def test_one_call_of_the_client_by_keyword_makes_all_completions_of_the_server():
    source = inspect.getsource(VLLMGeneration.generate)
    assert source.count("self.vllm_client.generate(") == 1, WHERE
    (call,) = (
        node
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.vllm_client.generate"
    )
    assert call.args == [], WHERE
    assert {"prompts", None} <= {keyword.arg for keyword in call.keywords}, WHERE  # None: the sampling parameters
    assert all(f'output["{name}"]' in source for name in trl_names.VLLM_GENERATED), WHERE
    assert "self.session = requests.Session()" in inspect.getsource(VLLMClient.__init__), WHERE


@pytest.mark.parametrize("name", trl_names.READS)
def test_every_attribute_that_is_read_exists(trainer, name):
    assert hasattr(trainer, name), f"GRPOTrainer sets no `{name}` ({WHERE})"


@pytest.mark.parametrize(("name", "first"), trl_names.LATER_NAMES.items())
def test_a_name_that_the_oldest_releases_lack_is_there_from_one_on_and_read_in_one_place(trainer, name, first):
    library, release = first.split()
    assert hasattr(trainer, name) == (Version(version(library)) >= Version(release)), f"{name} ({WHERE})"
    readers = [path.name for path in PACKAGE.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())]
    assert {*readers} == {"compat.py", "trl_names.py"}


@pytest.mark.parametrize("name", trl_names.LATER_READS)
def test_every_attribute_that_comes_later_is_set_by_trl(name):
    assert f"self.{name} =" in inspect.getsource(GRPOTrainer) + inspect.getsource(Trainer), (
        f"GRPOTrainer sets no `{name}` ({WHERE})"
    )


def test_generate_returns_what_is_recorded(trainer):
    generated = GRPOTrainer._generate(trainer, ["prompt 0:", "prompt 1:"])
    assert len(generated) == len(trl_names.GENERATED), f"GRPOTrainer._generate returns something else ({WHERE})"
    by_name = dict(zip(trl_names.GENERATED, generated, strict=True))
    assert [len(by_name[name]) for name in ("prompt_ids", "completion_ids", "completions")] == [2, 2, 2]
    assert by_name["tool_mask"] is None
    assert by_name["logprobs"] is None
    assert by_name["extra_fields"] == {}


def test_rewards_come_back_one_column_a_reward_function(trainer):
    inputs = [{"prompt": "p"}, {"prompt": "q"}]
    rewards = GRPOTrainer._calculate_rewards(trainer, inputs, ["p", "q"], ["a", "bcd"], [[3], [3, 4, 5]])
    assert rewards.tolist() == [[1.0], [3.0]]


def test_a_rollout_holds_the_keys_that_are_replayed(trainer):
    trainer.model.train()
    rollouts = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * 4)
    assert {"completion_mask", "advantages", "num_items_in_batch"} <= rollouts.keys()
    assert rollouts["num_items_in_batch"] == rollouts["completion_mask"].sum()


def test_unscored_rows_weigh_nothing_in_trls_advantages(trainer, monkeypatch):
    """Rows that only fill the batch have NaN rewards, which TRL must leave out of every mean."""
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0], *[[torch.nan]] * 4])
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *args: rewards)
    trainer.model.train()
    rollouts = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * 8)
    std = 1 / 3**0.5  # of 1, 0, 1, 0 with Bessel's correction
    expected = 0.5 / (std + 1e-4)
    assert rollouts["advantages"].tolist() == pytest.approx([expected, -expected] * 2 + [0.0] * 4, rel=1e-5)


# ---- No name is used that is not listed ----

PACKAGE = Path(trl_dapo.__file__).parent
LISTED = {
    *trl_names.OVERRIDES,
    "_get_per_token_logps_and_entropies",
    *trl_names.CALLS,
    *trl_names.READS,
    *trl_names.LATER_READS,
}


def is_trainer(node):
    """Return whether an expression is `self`, `trainer`, `self.trainer` or `super()`."""
    if isinstance(node, ast.Name):
        return node.id in ("self", "trainer")
    if isinstance(node, ast.Attribute):
        return node.attr == "trainer"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def holds_a_trainer(tree):
    """Return whether a module defines a trainer, or takes one as an argument."""
    nodes = list(ast.walk(tree))
    bases = {getattr(base, "id", None) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
    takes = {argument.arg for node in nodes if isinstance(node, ast.arguments) for argument in node.args}
    return bool(bases & {"GRPOTrainer", "TypedGRPOTrainer"}) or "trainer" in takes


def test_every_attribute_of_trls_trainer_that_is_used_is_listed():
    upstream = inspect.getsource(GRPOTrainer) + inspect.getsource(Trainer)
    modules = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    trees = [tree for tree in modules.values() if holds_a_trainer(tree)]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if is_trainer(node.value)} - {"__init__"}
    theirs = {name for name in used if hasattr(GRPOTrainer, name) or re.search(rf"self\.{name}\b", upstream)}
    # the search finds methods, attributes, and those of callbacks
    assert theirs >= {"_generate", "rollout_func", "model_wrapped"}
    assert theirs - LISTED == set()


def calls_of_trl(tree):
    """Return the calls in a module of methods of a trainer and of functions of TRL: name, arguments, keywords."""
    nodes = list(ast.walk(tree))
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl"))
    imported = {alias.name for node in imports for alias in node.names}
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        function, arguments = call.func, call.args
        if isinstance(function, ast.Name) and function.id == "partial":
            function, *arguments = arguments
        keywords = {keyword.arg for keyword in call.keywords}
        if isinstance(function, ast.Name) and function.id in imported:
            yield function.id, arguments, keywords
        elif isinstance(function, ast.Attribute) and is_trainer(function.value):
            yield function.attr, arguments, keywords
        elif ast.unparse(function) == "grpo.main":
            yield "main", arguments, keywords


def test_what_is_called_is_passed_nothing_but_the_parameters_that_are_listed():
    listed = {**trl_names.CALLS, **trl_names.UTILS, "main": trl_names.SCRIPT_MAIN}
    parameters = {name: [each for each in names if each != "self"] for name, names in listed.items()}
    seen = set()
    for path in PACKAGE.rglob("*.py"):
        for name, arguments, keywords in calls_of_trl(ast.parse(path.read_text())):
            if name in parameters:
                seen.add(name)
                assert len(arguments) <= len(parameters[name]), f"{name} in {path.name}"
                assert keywords <= {*parameters[name]}, f"{name} in {path.name}"
    assert seen == listed.keys()


def test_every_import_from_inside_trl_is_listed():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl."):
                imported |= {(node.module, alias.name) for alias in node.names}
    modules = {tuple(module.rsplit(".", 1)) for module, _, _ in trl_names.PATCHED}
    types = {tuple(name.rsplit(".", 1)) for name in trl_names.TYPES + trl_names.SCRIPTS}
    assert imported == {("trl.trainer.utils", name) for name in trl_names.UTILS} | modules | types


def test_nothing_of_trls_engine_is_used_that_is_not_listed():
    upstream = {"engine": inspect.getsource(VLLMGeneration), "client": inspect.getsource(VLLMClient)}
    listed = {
        "engine": {*trl_names.VLLM_OVERRIDES, *trl_names.VLLM_ATTRIBUTES},
        "client": {*trl_names.CLIENT_OVERRIDES, *trl_names.CLIENT_ATTRIBUTES},
    }
    for kind, file, name in (
        ("engine", "lora_sync", "AdapterGeneration"),
        ("client", "lora_client", "AdapterClient"),
        ("client", "server", "BoundClient"),
    ):
        tree = ast.parse((PACKAGE / f"engines/{file}.py").read_text())
        (used_in,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        nodes = [node for node in ast.walk(used_in) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}
        theirs = {attr for attr in used if re.search(rf"(self\.|def ){attr}\b", upstream[kind])}
        assert theirs
        assert theirs - listed[kind] == set()
