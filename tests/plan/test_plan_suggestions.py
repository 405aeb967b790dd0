# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What would help is planned again, and does help."""

import re
from pathlib import Path

import pytest
import yaml
from plan_helpers import NINE_MACHINES, ONE_GPU, RECIPES

from trl_dapo.cli import main
from trl_dapo.cli.train import make_parser
from trl_dapo.plan import plan, suggest
from trl_dapo.plan.page import describe


def replanned(words, path, **options):
    """The plan of a recipe with what a suggestion says."""
    options |= dict(re.findall(r"--(\w+) (\S+?)(?:,|$)", words))
    given, overrides = re.sub(r"--\w+ \S+", "", words).strip(", "), []
    for name, value in yaml.safe_load(f"{{{given}}}").items():
        overrides += [f"--{name}", yaml.safe_dump(value, default_flow_style=True).splitlines()[0]]
    return plan(path, overrides=overrides, **options)


def test_what_would_help_is_planned_anew_and_does_help(write):
    path = write("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES)
    planned = plan(path)
    found = suggest(planned)
    assert len(found) == 3
    gains = [other.seconds_with_evaluation for _, other in found]
    assert gains == sorted(gains)
    assert max(gains) < planned.seconds_with_evaluation
    for words, other in found:
        again = replanned(words, path)
        assert again.seconds_with_evaluation == pytest.approx(other.seconds_with_evaluation)
        assert again.fits


def test_a_larger_rollout_is_compared_for_as_many_prompts_and_more_gpus_come_last(write):
    planned = plan(write("one GPU of 80 GB", ONE_GPU))
    *others, (more_gpus, _) = suggest(planned, most=100)
    larger = dict(others)["prompts_per_rollout: 128"]
    assert all("--gpus" not in words for words, _ in others)
    assert larger.seconds["update"] == pytest.approx(2 * planned.seconds["update"])
    assert planned.seconds["sampling"] < larger.seconds["sampling"] < 2 * planned.seconds["sampling"]
    assert more_gpus == "--gpus 2xH100-80GB, --accelerate_config multi_gpu"
    few = plan(write("8 GPUs of 80 GB", ONE_GPU), lengths=(1_000, 2_000))
    page = " ".join(describe(few).split())
    assert "further off-policy: 8 optimizer steps a rollout, not 4" in page


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
        ("2 GPUs of 80 GB", {**ONE_GPU, "prompts_per_rollout": None, "prompts_per_step": None}),
    ],
    ids=lambda value: getattr(value, "stem", value) if not isinstance(value, dict) else "",
)
def test_what_would_help_is_taken_by_the_configs(write, launched_on, hardware, fields):
    if isinstance(fields, dict) and fields["prompts_per_step"] is None:
        fields = {**fields, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    path = str(fields) if hardware is None else write(hardware, fields)
    found, recipe = suggest(plan(path), most=100), yaml.safe_load(Path(path).read_text())
    assert found or path.endswith("smollm2_135m_cpu.yaml")  # a run of minutes
    for words, other in found:
        settings, changed = other.recipe.settings, re.findall(r"(\w+): ", re.sub(r"\{.*\}", "", words))
        given = {**recipe, **{name: getattr(settings, name) for name in changed}}
        copy = Path(write("any CPU", given))
        launched_on(other.recipe.cluster.num_train)
        _, args, _ = make_parser().parse_args_and_config(["--config", str(copy), "--use_cpu", "true", "--bf16=false"])
        assert args.batch_arithmetic == other.batches.arithmetic, words


def test_no_evaluation_is_put_behind_the_last_step(write):
    evaluates = ONE_GPU | {"eval_strategy": "steps", "eval_dataset_name": "aime.parquet", "max_steps": 15}
    for eval_steps, helps in ((7, True), (8, False)):  # 14 and 16 of 15
        found = suggest(plan(write("one GPU of 80 GB", evaluates | {"eval_steps": eval_steps})), most=100)
        assert any("eval_steps" in words for words, _ in found) == helps


def test_where_no_one_change_fits_more_gpus_a_larger_one_and_a_smaller_model_are_named(write):
    path = write("any CPU", {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-7B"})
    found = suggest(plan(path, gpus="1xL4-24GB"))
    about = [re.sub(r".*(--gpus \S+?|model_name_or_path: \S+?)(,.*|$)", r"\1", words) for words, _ in found]
    # All weights with their gradients and moments take 16 bytes each, 113 GiB on one GPU and 7 on each of 16.
    assert about == ["--gpus 16xL4-24GB", "--gpus 1xH200-141GB", "model_name_or_path: Qwen/Qwen2.5-0.5B"]
    for words, other in found:
        again = replanned(words, path, gpus="1xL4-24GB")
        assert (again.fits, again.peak) == (True, pytest.approx(other.peak))


def test_several_changes_together_fit_on_a_gpu_that_is_not_on_the_list(write):
    path = write("any CPU", {**ONE_GPU, "vllm_gpu_memory_utilization": 0.9, "gradient_checkpointing": False})
    gpus = "1x48GB:A6000:0.77TB/s:155TFLOPs"
    words, other = suggest(plan(path, gpus=gpus))[0]
    assert words.count(": ") > 1
    assert "--gpus" not in words
    again = replanned(words, path, gpus=gpus)
    assert (again.fits, again.peak) == (True, pytest.approx(other.peak))


def test_a_tip_that_leaves_too_much_is_not_given(write, capsys):
    # Half a micro-batch and 8 bits for the optimizer spare some of it, and not enough.
    fields = {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-7B"}
    assert main(["plan", "--config", write("one GPU of 24 GB", fields)]) == 1
    page = capsys.readouterr().out
    assert "Would fit" in page
    assert "still too much" not in page
