# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""axolotl's plugin, over what axolotl adds to TRL's trainer and makes of its arguments; and Unsloth's trainer."""

import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import trl
import yaml
from helpers import prompts, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.rewards import dapo_math_reward


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@dataclass
class AxolotlGRPOConfig(trl.GRPOConfig):
    curriculum_sampling: bool | None = None
    context_parallel_size: int | None = None


class SchedulerMixin:
    """One of axolotl's five, all of which call `super()`."""

    def create_scheduler(self, *args, **kwargs):
        self.made_by_axolotl = True
        return super().create_scheduler(*args, **kwargs)


class AxolotlGRPOTrainer(SchedulerMixin, trl.GRPOTrainer):
    pass


class Settings(dict):
    """As axolotl's `DictDefault`: what is not there is `None`."""

    __getattr__ = dict.get


# What stands in axolotl 0.19's files of these names. The package itself requires TRL 1.9, and is not installed here.
AXOLOTL = {
    "axolotl.core.trainers.grpo.args": {"AxolotlGRPOConfig": AxolotlGRPOConfig},
    "axolotl.core.trainers.grpo.trainer": {"AxolotlGRPOTrainer": AxolotlGRPOTrainer},
    "axolotl.integrations.base": {"BasePlugin": type("BasePlugin", (), {})},
}


@pytest.fixture
def axolotl(monkeypatch):
    """The plugin as axolotl loads it, and axolotl's strategy."""

    class GRPOStrategy:
        @classmethod
        def get_trainer_class(cls, sequence_parallel=False, async_grpo=False):
            return AxolotlGRPOTrainer

        @classmethod
        def get_training_args_class(cls, async_grpo=False):
            return AxolotlGRPOConfig

    for name, values in {**AXOLOTL, "axolotl.core.trainers.grpo": {"GRPOStrategy": GRPOStrategy}}.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(values)
    yield importlib.import_module("trl_dapo.integrations.axolotl").DAPOPlugin(), GRPOStrategy
    del sys.modules["trl_dapo.integrations.axolotl"]


def build(plugin, strategy, cfg, model, **settings):
    """What `axolotl.core.builders.rl.HFRLTrainerBuilder.build` does for `rl: grpo`, in its order."""
    plugin.pre_model_load(cfg)
    args_class = strategy.get_training_args_class(async_grpo=bool(cfg.trl.async_prefetch))
    args = args_class(logging_first_step=True, **{**settings, **plugin.get_training_args(cfg)})
    trainer_class = strategy.get_trainer_class(
        sequence_parallel=(cfg.context_parallel_size or 1) > 1, async_grpo=bool(cfg.trl.async_prefetch)
    )
    assert "tokenizer" not in inspect.signature(trainer_class).parameters
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return trainer_class(
        *(loaded, [length]),
        args=args,
        train_dataset=prompts(8),
        callbacks=[],
        processing_class=AutoTokenizer.from_pretrained(model),
    )


SMALL = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 8,
    "num_generations": 4,
    "max_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "remove_unused_columns": False,
}


def test_axolotls_plugin_trains_dapo_over_what_axolotl_adds(axolotl, tiny_model, tmp_path):
    dapo = {"overlong_buffer_length": 4, "dynamic_sampling_max_gen_batches": 1}
    cfg = Settings(rl="grpo", trl=Settings(), dapo=dapo)
    trainer = build(*axolotl, cfg, tiny_model, output_dir=str(tmp_path), curriculum_sampling=True, **SMALL)
    assert isinstance(trainer, DAPOTrainer)
    assert isinstance(trainer, AxolotlGRPOTrainer)
    assert isinstance(trainer.args, DAPOConfig)
    assert (trainer.args.overlong_buffer_length, trainer.args.epsilon_high) == (4, 0.28)
    assert trainer.args.curriculum_sampling
    assert trainer.reward_func_names == ["length", "soft_overlong_punishment"]
    trainer.train()
    assert trainer.made_by_axolotl
    assert trainer.state.global_step == 1
    assert "dynamic_sampling/acceptance_rate" in trainer.state.log_history[0]
    trainer.save_model(str(tmp_path))
    assert type(torch.load(tmp_path / "training_args.bin", weights_only=False)) is type(trainer.args)


def test_the_configuration_on_the_page_about_migrating_is_one_that_the_plugin_takes(axolotl):
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    (block,) = re.findall(r"```yaml\n(rl: grpo\n.*?)```", page, flags=re.DOTALL)
    cfg = Settings(yaml.safe_load(block))
    (name,) = cfg.plugins
    assert name == f"{type(axolotl[0]).__module__}.{type(axolotl[0]).__name__}"
    assert axolotl[0].get_training_args(cfg) == cfg.dapo
    assert cfg.trl["reward_funcs"] == [f"trl_dapo.rewards.{dapo_math_reward.__name__}"]


def test_axolotls_schema_gets_the_block(axolotl):
    module, _, name = axolotl[0].get_input_args().rpartition(".")
    args = getattr(importlib.import_module(module), name)
    assert args(dapo={"log_groups": 2}).dapo == {"log_groups": 2}
    assert args().dapo is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rl": "dpo"}, "`DAPOPlugin` trains `rl: grpo`"),
        ({"dapo": {"log_group": 2}}, r"The block `dapo` has fields .* `log_group` \(nearest: `log_groups`\)"),
        ({"trl": Settings(async_prefetch=True)}, "without .*`trl.async_prefetch`"),
        ({"context_parallel_size": 2}, "without .*`context_parallel_size`"),
        ({"trainer_cls": "trl.GRPOTrainer"}, "without `trainer_cls`"),  # which axolotl would make in its place
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_axolotls_plugin_cannot_do_is_refused(axolotl, tiny_model, tmp_path, settings, message):
    cfg = Settings({"rl": "grpo", "trl": Settings(), **settings})
    with pytest.raises(ValueError, match=message):
        build(*axolotl, cfg, tiny_model, output_dir=str(tmp_path), **SMALL)


def test_axolotls_own_arguments_are_refused_with_the_plugins_name(tiny_model, tmp_path):
    args = AxolotlGRPOConfig(str(tmp_path), **SMALL)
    type(args).__module__ = "axolotl.core.trainers.grpo.args"
    with pytest.raises(TypeError, match=r"plugins: \[trl_dapo.integrations.axolotl.DAPOPlugin\]"):
        DAPOTrainer(tiny_model, length, args, train_dataset=prompts(8))


# ---- Unsloth puts a trainer of its own in the place of TRL's ----


class UnslothGRPOTrainer(trl.GRPOTrainer):
    """In unsloth/models/rl_replacements.py `compute_loss` is another, and never asks for `_compute_loss`."""


class ImportedAfterwards(DAPOTrainer, UnslothGRPOTrainer):
    """What `DAPOTrainer` is where `unsloth` was imported first: its base is Unsloth's."""


def test_unsloths_trainer_is_refused_as_a_base_and_where_it_is_imported_later(tiny_model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Unsloth has put `UnslothGRPOTrainer` in the place of TRL's") as error:
        ImportedAfterwards(tiny_model, length, tiny_config(tmp_path), train_dataset=prompts(8))
    assert "Train in a process that does not import `unsloth`" in str(error.value)
    assert "qwen3_4b_qlora_1gpu" in str(error.value)
    monkeypatch.setattr(trl, "GRPOTrainer", UnslothGRPOTrainer)  # as `patch_trl_rl_trainers` does
    with pytest.raises(ValueError, match="Unsloth has put `UnslothGRPOTrainer`"):
        DAPOTrainer(tiny_model, length, tiny_config(tmp_path), train_dataset=prompts(8))
