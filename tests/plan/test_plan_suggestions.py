# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What would help is planned again, and does help."""

import re
from pathlib import Path

import pytest
import yaml
from plan_helpers import NINE_MACHINES, ONE_GPU, RECIPES

from trl_dapo.cli.train import make_parser
from trl_dapo.plan import plan, suggest


def replanned(words, path, **options):
    """The plan of a recipe with what a suggestion says."""
    options |= dict(re.findall(r"--(\w+) (\S+?)(?:,|$)", words))
    given, overrides = re.sub(r"--\w+ \S+", "", words).strip(", "), []
    for name, value in yaml.safe_load(f"{{{given}}}").items():
        overrides += [f"--{name}", yaml.safe_dump(value, default_flow_style=True).splitlines()[0]]
    return plan(path, overrides=overrides, **options)


def test_what_would_help_is_planned_anew_and_does_help(write):
    planned = plan(write("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES))
    gains = [other.seconds_a_row for _, other in suggest(planned)]
    assert len(gains) == 3
    assert gains == sorted(gains)
    assert max(gains) < planned.seconds_a_row


@pytest.mark.parametrize(
    ("hardware", "fields"),
    [
        *((None, recipe) for recipe in RECIPES),
        ("one GPU of 24 GB", ONE_GPU),
        ("8 GPUs of 48 GB, FSDP2", {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-7B"}),
        ("8 GPUs of 48 GB", {**ONE_GPU, "use_vllm": False, "per_device_train_batch_size": 2, "batch_multiplier": 1}),
        ("8 GPUs of 80 GB", {**ONE_GPU, "loss_type": "grpo", "max_tokens_per_microbatch": None}),
        ("4 GPUs of 80 GB train, 4 serve", {**ONE_GPU, "vllm_mode": "server", "vllm_request_timeout": 60}),
        ("one GPU of 80 GB trains, one serves", {**ONE_GPU, "vllm_mode": "server", "use_dynamic_sampling": False}),
        ("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES),
        ("2 GPUs of 80 GB train, 2 serve", {**ONE_GPU, "vllm_mode": "server", "use_peft": True, "load_in_4bit": True}),
        ("2 GPUs of 80 GB train, 2 serve", {**ONE_GPU, "vllm_mode": "server", "tools": ["json.loads"]}),
    ],
    ids=lambda value: getattr(value, "stem", value) if not isinstance(value, dict) else "",
)
def test_what_would_help_is_taken_by_the_configs(write, launched_on, hardware, fields):
    path = str(fields) if hardware is None else write(hardware, fields)
    found, recipe = suggest(plan(path), most=100), yaml.safe_load(Path(path).read_text())
    assert found or path.endswith("smollm2_135m_cpu.yaml")  # a run of minutes
    again = [(each.fits, each.seconds_with_evaluation) for each in (replanned(words, path) for words, _ in found)]
    assert again == [(True, pytest.approx(other.seconds_with_evaluation)) for _, other in found]
    for words, other in found:
        after = other.recipe.settings
        assert not (after.rollouts_ahead and (after.load_in_4bit or after.tools)), words  # a run refuses it
        changed = re.findall(r"(\w+): ", re.sub(r"\{.*\}", "", words))
        copy = Path(write("any CPU", {**recipe, **{name: getattr(after, name) for name in changed}}))
        launched_on(other.recipe.cluster.num_train)
        _, args, _ = make_parser().parse_args_and_config(["--config", str(copy), "--use_cpu", "true", "--bf16=false"])
        assert args.batch_arithmetic == other.batches.arithmetic, words


def test_where_no_one_change_fits_more_gpus_a_larger_one_and_a_smaller_model_are_named(write):
    path = write("any CPU", {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-7B"})
    found = suggest(plan(path, gpus="1xL4-24GB"))
    about = [re.sub(r".*(--gpus \S+?|model_name_or_path: \S+?)(,.*|$)", r"\1", words) for words, _ in found]
    # All weights with their gradients and moments take 16 bytes each, 113 GiB on one GPU and 7 on each of 16.
    assert about == ["--gpus 16xL4-24GB", "--gpus 1xH200-141GB", "model_name_or_path: Qwen/Qwen2.5-0.5B"]
    again = [replanned(words, path, gpus="1xL4-24GB") for words, _ in found]
    assert [(each.fits, each.peak) for each in again] == [(True, pytest.approx(other.peak)) for _, other in found]
