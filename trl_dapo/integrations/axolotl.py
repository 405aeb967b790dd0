# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
DAPO in axolotl, whose `rl: grpo` it takes over.

    plugins:
      - trl_dapo.integrations.axolotl.DAPOPlugin
    dapo:
      overlong_buffer_length: 1024
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from axolotl.core.trainers.grpo import GRPOStrategy
from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..config import DAPOConfig
from ..settings.arguments import refuse_unknown_fields
from ..trainer import DAPOTrainer


class DAPOArgs(BaseModel):
    """The block that the plugin adds to axolotl's configuration."""

    dapo: dict[str, Any] | None = None


@dataclass
class AxolotlDAPOConfig(DAPOConfig, AxolotlGRPOConfig):
    """[`DAPOConfig`] with what axolotl adds to [`~trl.GRPOConfig`]."""


class AxolotlDAPOTrainer(DAPOTrainer, AxolotlGRPOTrainer):
    """[`DAPOTrainer`] over what axolotl adds to [`~trl.GRPOTrainer`]."""


class DAPOPlugin(BasePlugin):
    """Has axolotl's strategy for GRPO make a [`DAPOTrainer`]; the fields of `dapo:` are [`DAPOConfig`]'s."""

    def get_input_args(self) -> str:
        return f"{__name__}.DAPOArgs"

    def pre_model_load(self, cfg: Any) -> None:
        asynchronous = bool(cfg.trl and (cfg.trl.async_prefetch or cfg.trl.use_data_producer))
        if cfg.rl != "grpo" or asynchronous or cfg.trainer_cls or (cfg.context_parallel_size or 1) > 1:
            raise ValueError(
                "`DAPOPlugin` trains `rl: grpo` without `trainer_cls`, `context_parallel_size`, `trl.async_prefetch` "
                "and `trl.use_data_producer`. For rollouts ahead of training set `rollouts_ahead: 1` in `dapo`."
            )
        GRPOStrategy.get_trainer_class = staticmethod(lambda **kwargs: AxolotlDAPOTrainer)
        GRPOStrategy.get_training_args_class = staticmethod(lambda **kwargs: AxolotlDAPOConfig)

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        fields = dict(cfg.dapo or {})
        refuse_unknown_fields("The block `dapo`", fields, [field.name for field in dataclasses.fields(DAPOConfig)])
        return fields
