# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks before a run generates its first token, so that a mistake is found before it has cost a rollout."""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging
from trl import is_conversational, maybe_apply_chat_template, prepare_multimodal_messages

from ..config import DAPOConfig
from ..rewards.checks import check_prompt_column, place_of_failure
from ..sampling.sampler import Sampler
from ..sampling.screen import Screen
from ..settings.arguments import read_mapping
from ..settings.environment import is_set
from ..settings.sampling_defaults import SamplingChoice
from ..settings.warnings import warn_once_of_missing_rewards
from .known_prompts import load_pass_rates
from .peak_memory import ran_out_of_memory
from .terminal import wrapped_for


logger = logging.get_logger(__name__)

DUMMY_COMPLETION = "Answer: 0"
THINK_FORMAT = "think_format_reward"  # of TRL


class SetupError(ValueError):
    """A mistake that the user can correct, found before anything was generated."""


@dataclass(eq=False)
class Preflight(TrainerCallback):
    """
    Checks a run on an example of the dataset.

    The reward functions are tried when training begins, because they may read the run's state.
    """

    args: DAPOConfig
    _: KW_ONLY
    examples: Callable[[], list[dict]] | None  # `None` if the prompts are not those of the dataset
    score: Callable[[list, list, list, Callable], Tensor]  # of rows, completions, their ids and a context
    reward_names: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    context: int | None  # number of tokens in the model's context
    choice: SamplingChoice
    sampler: Sampler | None

    def __post_init__(self) -> None:
        args, self._tried_on = self.args, list[dict]()  # examples for the reward functions
        memory = args.dynamic_sampling_memory
        if self.sampler is not None and isinstance(memory, str) and memory != "auto":
            self.choice.known = load_pass_rates(memory, self.sampler)

    def check_example(self) -> None:
        """Check the first example. Every process must call this method."""
        self._tried_on, state = [], PartialState()
        if state.is_main_process and (warning := describe_missing_processes(state.num_processes)):
            logger.warning(warning)
        if self.examples is None:
            return
        examples = self.examples()
        if not examples:
            raise SetupError("The training dataset has no prompts. Use a dataset with at least one row.")
        try:
            check_prompt_column(list(examples[0]))
        except ValueError as error:
            raise SetupError(str(error)) from None
        prompt = examples[0]["prompt"]
        if not (isinstance(prompt, str) or (prompt and is_conversational({"prompt": prompt}))):
            raise SetupError(
                f"The first example's `prompt` is {prompt!r:.80} ({type(prompt).__name__}). Expected text, or a list "
                "of messages with `role` and `content`."
            )
        try:
            warnings = [self._describe_context(prompt), self._describe_thinking(prompt)]
        except ValueError as error:  # the tokenizer has no chat template
            raise SetupError(
                f"{error} Set `chat_template_path`, or use prompts of plain text instead of messages."
            ) from error
        for warning in warnings:
            if warning is not None and state.is_main_process:
                logger.warning(warning)
        self._tried_on = examples

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Score an example with the reward functions. If one of them fails, every process raises an error."""
        warn_once_of_missing_rewards()
        if self._tried_on:
            self._try_rewards(self._tried_on[0])
        if line := self.choice.describe():
            PartialState().print(wrapped_for(sys.stdout, line))

    def _describe_thinking(self, prompt: str | list) -> str | None:
        """Return a warning if a reward function expects `<think>` in completions, but the prompt ends with it."""
        if THINK_FORMAT not in self.reward_names or isinstance(prompt, str):
            return None
        kwargs = read_mapping("chat_template_kwargs", self.args.chat_template_kwargs) or {}
        text = maybe_apply_chat_template({"prompt": prompt}, self.tokenizer, **kwargs)["prompt"]
        if not text.rstrip().endswith("<think>"):
            return None
        return (
            "The chat template ends the prompt with `<think>`, so no completion begins with it, and "
            f"`{THINK_FORMAT}` is 0 for all completions. Use a reward function that requires only `</think>`, or a "
            "template that does not add `<think>` (`chat_template_path`)."
        )

    def _describe_context(self, prompt: str | list) -> str | None:
        """Return a warning if the first example's prompt and a completion together exceed the model's context."""
        context, longest = self.context, self.args.max_completion_length
        if context is None or longest is None or longest >= context:
            return None  # if the completion alone is too long, the trainer has warned already
        example: dict[str, Any] = {"prompt": prompt}
        text = maybe_apply_chat_template(example, self.tokenizer)["prompt"]
        num_tokens = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if num_tokens + longest <= context:
            return None
        return (
            f"The first example's prompt has {num_tokens} tokens. Together with `max_completion_length` ({longest}) "
            f"this is more than the model's context of {context} tokens, and beyond its context a model writes noise. "
            "Lower `max_completion_length`, or set rope scaling in the model's config."
        )

    def _try_rewards(self, example: dict) -> None:
        """Score dummy completions of an example: a whole group, and then only the first ones if there is a screen."""
        num_generations = self.args.num_generations
        assert num_generations is not None
        rewards_BF = self._score(example, num_generations)
        if PartialState().is_main_process and rewards_BF.isnan().all():
            logger.warning(
                f"Every reward function ({', '.join(map(repr, self.reward_names))}) returned `None` or NaN for "
                f"{num_generations} dummy completions of the first example, {DUMMY_COMPLETION!r}. Completions without "
                "a reward are not trained on. If this one should have a reward, check the columns that the functions "
                "read."
            )
        screen = None if self.sampler is None else self.sampler.selection.find(Screen)
        if screen is None:
            return
        screen_size = screen.max_screen_size(num_generations)
        try:
            self._score(example, screen_size)
        except SetupError as error:
            if ran_out_of_memory(error):
                raise
            failed = str(error.__cause__).rstrip(".")
            setting = f"`dynamic_sampling_screen={self.args.dynamic_sampling_screen!r}`"
            why = f"{setting} scores {screen_size} completions of a group first, but {failed[:1].lower()}{failed[1:]}"
            if not self.choice.may_leave_out_screen:
                advice = "Set `dynamic_sampling_screen='off'`, or make the function score any number of completions."
                raise SetupError(f"{why}. {advice}") from error
            assert self.sampler is not None
            self.sampler.selection.remove(screen)
            self.choice.leave_out_screen(why)

    def _score(self, example: dict, num: int) -> Tensor:
        """Return the rewards of `num` equal completions of an example, computed by the first process."""
        conversational, example = is_conversational(example), {**example, "prompt": _prompt_for_rewards(example)}
        texts = [DUMMY_COMPLETION] * num
        completions = [[{"role": "assistant", "content": text}] if conversational else text for text in texts]
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rows = [copy.deepcopy(example) for _ in texts]
        shown = copy.deepcopy(completions[0])
        try:
            return self.score(rows, completions, ids, _naming)[:num]
        except Exception as error:
            hint = "Make it return a number for each completion, or `None` for one that it cannot score."
            if isinstance(error.__cause__, Exception):  # it raised an error itself, see `_naming`
                hint = "Correct the function, or the column of the dataset that it reads."
            if conversational:
                hint = 'A completion is a list of messages, and its text is `completion[0]["content"]`. ' + hint
            if ran_out_of_memory(error):
                hint = "It needs more memory than the model leaves."
            raise SetupError(
                f"{str(error).rstrip('.')}. To check it before anything is generated, it was called with an example "
                f"of the dataset and {num} completions {shown!r}. {hint}"
            ) from error


def describe_missing_processes(num_processes: int) -> str | None:
    """Return a warning if `accelerate launch` was told to start several processes but silently started one."""
    # Its launcher of a single process sets MASTER_ADDR only if several processes were requested, and never WORLD_SIZE.
    requested_several = is_set("ACCELERATE_MIXED_PRECISION") and is_set("MASTER_ADDR")
    if num_processes > 1 or not requested_several or is_set("WORLD_SIZE"):
        return None
    return (
        "`accelerate launch` was told to start several processes but started only one, as it does on a CPU. Use "
        "`trl-dapo train --num_processes N` or `accelerate launch --multi_gpu --num_processes N`, which start several "
        "processes on a CPU, too."
    )


@contextmanager
def _naming(name: str, reward_func: Any) -> Iterator[None]:
    """Add the name of the reward function, and where it failed, to an error that it raises."""
    try:
        yield
    except Exception as error:
        place = place_of_failure(error, reward_func)
        raise SetupError(f"The reward function {name!r} failed{place} with {type(error).__name__}: {error}") from error


def _prompt_for_rewards(example: dict) -> Any:
    """Return an example's prompt as TRL passes it to reward functions, with the images in its messages."""
    prompt, image = example["prompt"], example.get("image")
    images = example.get("images", None if image is None else [image])
    if isinstance(prompt, str) or images == [] or not {"image", "images"} & example.keys():
        return prompt
    return prepare_multimodal_messages(prompt, images=images)
