# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A recipe and accelerate's files, as a plan reads them."""

import dataclasses

import pytest
from helpers import tiny_config
from plan_helpers import ROOT, TINY_RUN
from trl import ModelConfig

from trl_dapo import DAPOConfig
from trl_dapo.cli.train import LaunchArguments, make_parser
from trl_dapo.plan import plan
from trl_dapo.plan.recipe import declared_fields, read, read_sharding
from trl_dapo.settings.sampling_defaults import DEFAULTS, PAPER


def test_sharding_is_read_from_accelerates_file():
    same = ((kind, kind) for kind in ("fsdp2", "zero2", "zero3"))
    for file, kind in (("single_gpu", "none"), ("multi_gpu", "ddp"), *same):
        found = read_sharding(ROOT / "recipes" / "accelerate" / f"{file}.yaml", 1 if kind == "none" else 8)
        assert (found.kind, found.offloads_optimizer, found.offloads_weights) == (kind, False, False)


def test_what_a_plan_does_not_know_of_accelerate_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    for text, message in (
        ("distributed_type: FSDP", "a plan knows only FSDP2"),
        ("distributed_type: XLA", "does not know `distributed_type: XLA`"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: x}}", "`zero_stage` 1 to 3"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_sharding(path, 8)
    path.write_text("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}}")
    assert read_sharding(path, 8).offloads_optimizer


def test_fields_and_defaults_are_those_of_the_configs():
    configs = [field for config in (ModelConfig, DAPOConfig, LaunchArguments) for field in dataclasses.fields(config)]
    declared = declared_fields()
    assert {field.name for field in configs if field.init} == declared.keys()
    for field in configs:
        assert declared[field.name] in (field.default, None), field.name  # `None` is for what is not a literal


def test_what_a_run_passes_to_accelerate_is_no_matter_of_a_plan_but_its_configuration_is(write):
    fields = {**TINY_RUN, "num_machines": 2, "num_processes": 16, "machine_rank": 0, "main_process_ip": "10.0.0.1"}
    assert set(fields) - set(TINY_RUN) <= make_parser().launch_options.keys()
    assert read(write("8 GPUs of 80 GB", fields)).sharding.kind == "ddp"
    assert read(write("8 GPUs of 80 GB", {**fields, "config_file": "zero3"})).sharding.kind == "zero3"
    with pytest.raises(ValueError, match="`use_fsdp`"):
        read(write("8 GPUs of 80 GB", {**fields, "use_fsdp": True}))


@pytest.mark.parametrize("no", [False, "false", "no"])  # of YAML, and of a command line
def test_off_in_a_recipe_is_no_false(write, tmp_path, no):
    off = dict.fromkeys(("dynamic_sampling_screen", "dynamic_sampling_memory"), no)
    for settings in (tiny_config(tmp_path, **off), plan(write("any CPU", {**TINY_RUN, **off})).recipe.settings):
        assert (settings.dynamic_sampling_screen, settings.dynamic_sampling_memory) == ("off", False)


@pytest.mark.parametrize("yes", [True, "true", "on"])
def test_on_in_a_recipe_is_no_true(write, tmp_path, yes):
    on = {"dynamic_sampling_screen": yes, "num_generations": 4, "per_device_train_batch_size": 4}
    for settings in (tiny_config(tmp_path, **on), plan(write("any CPU", {**TINY_RUN, **on})).recipe.settings):
        assert settings.dynamic_sampling_screen == "on"


@pytest.mark.parametrize("text", ["True", "false"])
def test_whether_rewards_are_scaled_may_be_text_in_a_recipe(write, text):
    settings = plan(write("any CPU", {**TINY_RUN, "scale_rewards": text})).recipe.settings
    assert settings.scale_rewards is (text == "True")


def test_a_mapping_that_is_no_json_is_named_by_a_plan_too(write):
    with pytest.raises(ValueError, match=r"^`generation_kwargs` must be a mapping, got '{a: 1}', which is not JSON"):
        plan(write("any CPU", {**TINY_RUN, "generation_kwargs": "{a: 1}"}))


OFF = MEMORY, SCREEN = ["dynamic_sampling_memory", "dynamic_sampling_screen"]
TWO = {"reward_funcs": ["math_verify", "dapo_math"]}


@pytest.mark.parametrize(
    ("off", "fields"),
    [
        ([], {"reward_funcs": None}),
        ([SCREEN], {"tools": ["json.loads"]}),
        ([SCREEN], {"use_cpu": False}),
        (OFF, TWO),
        ([], {**TWO, "reward_weights": [1, 0]}),
        (OFF, {"reward_funcs": [*TWO["reward_funcs"], "get_soft_overlong_punishment"], "reward_weights": [1, 1, 0]}),
        (OFF, {"reward_model_name_or_path": "org/judge", "reward_weights": [1, 0]}),
        ([], {"reward_funcs": None, "reward_model_name_or_path": "judge", "dynamic_sampling_accuracy_threshold": 2}),
        ([], {**TWO, "dynamic_sampling_rewards": ["math_verify"]}),
        (OFF, {"reward_funcs": None, "reward_model_name_or_path": "org/judge"}),
    ],
)
def test_a_run_is_planned_as_it_samples(write, off, fields):
    on = "1 GPU of 80 GB" if "use_cpu" in fields else "any CPU"
    settings = vars(plan(write(on, {**TINY_RUN, **fields})).recipe.settings)
    assert {name: settings[name] for name in PAPER} == DEFAULTS | {name: PAPER[name] for name in off}
    if MEMORY in off:
        with pytest.raises(ValueError, match="`dynamic_sampling_memory=True` needs one reward that says what is c"):
            plan(write(on, {**TINY_RUN, **fields, "dynamic_sampling_memory": True}))
