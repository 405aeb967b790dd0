# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is tried once before a run generates its first token, so that no mistake in it costs a rollout.

Columns and signatures are checked when the trainer is made, and its settings are warned of there (`construction.py`,
`model_checks.py`). Here the first example is read and every reward function is called.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging
from trl import is_conversational, maybe_apply_chat_template

from ..construction import kept_columns
from ..engines.seam import keeping_pending_logs
from ..models import context_length
from ..rewards.checks import check_prompt_column, wrap_reward


if TYPE_CHECKING:
    from ..trainer import DAPOTrainer


logger = logging.get_logger(__name__)

MADE_UP = "Answer: 0"


class SetupError(ValueError):
    """What a user can mend, found before anything was generated."""


class Preflight(TrainerCallback):
    """
    Tries a run out on its first example: the example where training is asked for, the reward functions where it
    begins, since from then on the run's state is known, which they may read.

    Args:
        trainer ([`DAPOTrainer`]):
            The run.
    """

    def __init__(self, trainer: "DAPOTrainer"):
        self._trainer = trainer
        self._example: dict | None = None  # that the reward functions are tried on

    def check_example(self) -> None:
        """
        Looks at the first example. Every rank must call it.

        Raises:
            SetupError: If there is none, or it has no prompt.
        """
        trainer, self._example = self._trainer, None
        if trainer.accelerator.is_main_process and (warning := too_few_processes(trainer.accelerator.num_processes)):
            logger.warning(warning)
        if trainer.rollout_func is not None or trainer.environment_factories is not None:
            return  # what is asked, and what reward functions are given, comes with the rollout
        example = _first_example(trainer)
        _check_prompt(example)
        if trainer.accelerator.is_main_process and (warning := _describe_context(trainer, example["prompt"])):
            logger.warning(warning)
        if not trainer.args.skip_preflight:
            self._example = example

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """
        Has the reward functions score the example.

        Raises:
            SetupError: If one cannot; on every rank.
        """
        if self._example is not None:
            _try_rewards(self._trainer, self._example)


def too_few_processes(num_processes: int) -> str | None:
    """
    What `accelerate launch` does not say: that it was asked for several processes and started one, as it does on a
    CPU.

    Args:
        num_processes (`int`):
            Processes that were started.

    Returns:
        `str`, or `None` where as many were started as asked for.
    """
    # Its launcher of one process names a meeting place only where several processes were asked for, and no world.
    asked_for_several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if num_processes > 1 or not asked_for_several or "WORLD_SIZE" in os.environ:
        return None
    return (
        "`accelerate launch` was asked for several processes and started one, as it does on a CPU. Launch with "
        "`trl-dapo train --num_processes N` or `accelerate launch --multi_gpu --num_processes N`, which start them on "
        "a CPU too."
    )


def _first_example(trainer: "DAPOTrainer") -> dict:
    """The first example, with the columns that training gives to the reward functions."""
    args, example = trainer.args, next(iter(trainer.train_dataset), None)
    if example is None:
        raise SetupError("The training dataset holds no prompt.")
    if not args.remove_unused_columns:
        return example
    columns = kept_columns(trainer)
    return {name: value for name, value in example.items() if name in columns}


def _check_prompt(example: dict) -> None:
    try:
        check_prompt_column(list(example))
    except ValueError as error:
        raise SetupError(str(error)) from None
    prompt = example["prompt"]
    if isinstance(prompt, str) or (prompt and is_conversational({"prompt": prompt})):
        return
    raise SetupError(
        f"The first example's `prompt` is {prompt!r:.80} ({type(prompt).__name__}). Expected text, or a list of "
        "messages with `role` and `content`."
    )


def _describe_context(trainer: "DAPOTrainer", prompt: str | list) -> str | None:
    """A warning where the first example's prompt and a completion do not fit the model's context together."""
    context, longest = context_length(trainer.model.config), trainer.max_completion_length
    if context is None or longest is None or longest >= context or trainer._is_vlm:
        return None  # or warned of when the trainer was made
    example: dict[str, Any] = {"prompt": prompt}
    text = maybe_apply_chat_template(example, trainer._tokenizer)["prompt"]
    num_tokens = len(trainer._tokenizer(text, add_special_tokens=False)["input_ids"])
    if num_tokens + longest <= context:
        return None
    return (
        f"The first example's prompt has {num_tokens} tokens, which with `max_completion_length` ({longest}) is more "
        f"than the model's context of {context}, beyond which it writes noise. Lower it, or set rope scaling in the "
        "model's config."
    )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Says which reward function it was that failed."""
    try:
        yield
    except Exception as error:
        raise SetupError(f"The reward function {name!r} failed with {type(error).__name__}: {error}") from error


def _try_rewards(trainer: "DAPOTrainer", example: dict) -> None:
    """Has every reward function score a group of completions that nobody generated, as TRL has it score others."""
    num_rows, conversational = trainer.num_generations, is_conversational(example)
    completion = [{"role": "assistant", "content": MADE_UP}] if conversational else MADE_UP
    ids = trainer._tokenizer(MADE_UP, add_special_tokens=False)["input_ids"]
    inputs = [copy.deepcopy(example) for _ in range(num_rows)]
    own, was_training, report_to = trainer.reward_funcs, trainer.model.training, trainer.args.report_to
    trainer.reward_funcs = [
        wrap_reward(reward_func, name, within=partial(_naming, name))
        for reward_func, name in zip(own, trainer.reward_func_names, strict=True)
    ]
    trainer._completion_lengths = [len(ids)] * num_rows
    trainer.model.train()  # what is evaluated is kept for the scores
    trainer.args.report_to = []  # TRL reports how long each function takes, and no tracker is open yet
    try:
        with keeping_pending_logs(trainer), trainer._seam.recording(trainer):
            rewards_BF = trainer._calculate_rewards(
                inputs,
                [row["prompt"] for row in inputs],
                [copy.deepcopy(completion) for _ in inputs],
                [list(ids) for _ in inputs],
            )
    except Exception as error:
        hint = 'a completion is a list of messages, its text `completion[0]["content"]`; ' if conversational else ""
        raise SetupError(
            f"{str(error).rstrip('.')}. It was called once for the first example, with {num_rows} completions "
            f"{completion!r}, before anything was generated; {hint}`skip_preflight=True` leaves that out."
        ) from error
    finally:
        trainer.reward_funcs = own
        trainer.args.report_to = report_to
        trainer.model.train(was_training)
    if trainer.accelerator.is_main_process and rewards_BF.isnan().all():
        logger.warning(
            f"Every reward function ({', '.join(map(repr, trainer.reward_func_names))}) returned `None` or NaN for "
            f"{num_rows} made-up completions of the first example, {completion!r}. If it should be scored, check the "
            "columns that are read: nothing trains on what has no reward."
        )
