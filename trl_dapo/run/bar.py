# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is seen of a rollout while it is sampled, and said where it falls short."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers.utils import logging

from ..config import DAPOConfig
from ..sampling.refill import Batch
from ..sampling.report import advise, describe_shortfall, describe_unscored
from ..sampling.sampler import Sampler


logger = logging.get_logger(__name__)


@contextmanager
def progress_bar(sampler: Sampler, is_hidden: bool) -> Iterator[Callable[[], None]]:
    """The groups found so far, in a bar; yields what shows a round, and warns of passes without any."""
    rollout = sampler.rollout
    # `None`: shown on a terminal only. In a file a bar is one endless line.
    disable = True if is_hidden else None
    bar_format = "{l_bar}{bar}| accepted {n_fmt}/{total_fmt}{postfix}"
    with tqdm(total=rollout.target, desc="Sampling", bar_format=bar_format, leave=False, disable=disable) as bar:

        def show() -> None:
            bar.n = rollout.target - rollout.shortfall
            bar.set_postfix_str(f"round {rollout.num_rounds}, acceptance {rollout.acceptance_rate:.0%}")
            if (num_passes := sampler.new_passes_without_group()) and PartialState().is_main_process:
                passes = "one pass" if num_passes == 1 else f"{num_passes} passes"
                said = f"No group was accepted in {passes} over the training dataset."
                logger.warning(f"{said} {advise(rollout)}".rstrip())

        yield show


def warn_of_shortfall(sampler: Sampler, batch: Batch, args: DAPOConfig, reward_names: Sequence[str]) -> None:
    """Stops or warns when the rounds were used up before the batch was full, or a reward function scored nothing."""
    num_short, rollout, is_main = sampler.num_short_rollouts, sampler.rollout, PartialState().is_main_process
    if rollout.number == 0 and is_main and (line := describe_unscored(rollout, reward_names)):
        logger.warning(line)
    max_rounds = args.dynamic_sampling_max_rounds
    if num_short and args.dynamic_sampling_on_exhausted == "error":
        raise RuntimeError(describe_shortfall(rollout, max_rounds))
    # Once when it begins and once when it has become a pattern: a line a rollout would hide all others.
    if num_short in (1, 5) and is_main:
        logger.warning(describe_shortfall(rollout, max_rounds, num_short, len(batch.train)))
