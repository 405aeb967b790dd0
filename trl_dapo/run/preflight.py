# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks before a run generates its first token, so that a mistake does not cost a rollout."""

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
from ..rewards.checks import check_prompt_column
from ..sampling.sampler import Sampler
from ..sampling.screen import Screen
from ..settings.arguments import read_mapping
from ..settings.environment import is_set
from ..settings.sampling_defaults import SamplingChoice
from .known_prompts import learn_from
from .terminal import wrapped_for


logger = logging.get_logger(__name__)

MADE_UP = "Answer: 0"
THINK_FORMAT = "think_format_reward"  # TRL's


class SetupError(ValueError):
    """A mistake that the user can correct, found before anything was generated."""


@dataclass(eq=False)
class Preflight(TrainerCallback):
    """Tries a run out on some examples: the reward functions as it begins, when they may read the run's state."""

    args: DAPOConfig
    _: KW_ONLY
    examples: Callable[[], list[dict]] | None  # not given where what is asked comes with the rollout
    score: Callable[[list, list, list, Callable], Tensor]  # rows, completions, their ids, within what
    reward_names: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    context: int | None  # tokens that the model is made for
    choice: SamplingChoice
    sampler: Sampler | None

    def __post_init__(self) -> None:
        args, self._tried_on = self.args, list[dict]()  # examples for the reward functions
        memory = args.dynamic_sampling_memory
        if self.sampler is not None and isinstance(memory, str) and memory != "auto":
            self.choice.known = learn_from(memory, self.sampler)

    def check_example(self) -> None:
        """Looks at the first example, and refuses a dataset without one. Every rank calls it."""
        self._tried_on, state = [], PartialState()
        if state.is_main_process and (warning := too_few_processes(state.num_processes)):
            logger.warning(warning)
        if self.examples is None:
            return
        examples = self.examples()
        if not examples:
            raise SetupError("The training dataset holds no prompt.")
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
        except ValueError as error:  # of a tokenizer without a chat template
            raise SetupError(
                f"{error} Set `chat_template_path`, or use prompts of plain text instead of messages."
            ) from error
        for warning in warnings:
            if warning is not None and state.is_main_process:
                logger.warning(warning)
        self._tried_on = examples

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Have the reward functions score an example; one that cannot is refused, on every rank."""
        if self._tried_on:
            self._try_rewards(self._tried_on[0])
        if line := self.choice.describe():
            PartialState().print(wrapped_for(sys.stdout, line))

    def _describe_thinking(self, prompt: str | list) -> str | None:
        """A warning where a reward asks completions to begin with what already ends the prompt."""
        if THINK_FORMAT not in self.reward_names or isinstance(prompt, str):
            return None
        kwargs = read_mapping("chat_template_kwargs", self.args.chat_template_kwargs) or {}
        text = maybe_apply_chat_template({"prompt": prompt}, self.tokenizer, **kwargs)["prompt"]
        if not text.rstrip().endswith("<think>"):
            return None
        return (
            "The chat template ends the prompt with `<think>`, so no completion begins with it, and "
            f"`{THINK_FORMAT}` is 0 for all of them. Use a reward function that asks for `</think>` alone, or a "
            "template that leaves `<think>` to the model (`chat_template_path`)."
        )

    def _describe_context(self, prompt: str | list) -> str | None:
        """A warning where the first example's prompt and a completion do not fit the model's context together."""
        context, longest = self.context, self.args.max_completion_length
        if context is None or longest is None or longest >= context:
            return None  # or warned of when the trainer was made
        example: dict[str, Any] = {"prompt": prompt}
        text = maybe_apply_chat_template(example, self.tokenizer)["prompt"]
        num_tokens = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if num_tokens + longest <= context:
            return None
        return (
            f"The first example's prompt has {num_tokens} tokens, which with `max_completion_length` ({longest}) is "
            f"more than the model's context of {context}, beyond which it writes noise. Lower it, or set rope scaling "
            "in the model's config."
        )

    def _try_rewards(self, example: dict) -> None:
        """Score completions of an example that nobody sampled: a whole group, and as few as a screen hands over."""
        num_generations = self.args.num_generations
        assert num_generations is not None
        rewards_BF = self._score(example, num_generations)
        if PartialState().is_main_process and rewards_BF.isnan().all():
            logger.warning(
                f"Every reward function ({', '.join(map(repr, self.reward_names))}) returned `None` or NaN for "
                f"{num_generations} made-up completions of the first example, {MADE_UP!r}. If it should be scored, "
                "check the columns that are read: nothing trains on what has no reward."
            )
        screen = None if self.sampler is None else self.sampler.selection.find(Screen)
        if screen is None:
            return
        num_first = screen.most_first(num_generations)
        try:
            self._score(example, num_first)
        except SetupError as error:
            failed = str(error.__cause__).rstrip(".")
            setting = f"`dynamic_sampling_screen={self.args.dynamic_sampling_screen!r}`"
            why = (
                f"{setting} has {num_first} completions of a group scored first, and {failed[:1].lower()}{failed[1:]}"
            )
            if not self.choice.may_leave_out_screen:
                way_out = "Set `dynamic_sampling_screen='off'`, or make the function score any number of completions."
                raise SetupError(f"{why}. {way_out}") from error
            assert self.sampler is not None
            self.sampler.selection.remove(screen)
            self.choice.leave_out_screen(why)

    def _score(self, example: dict, num: int) -> Tensor:
        """Return the rewards of `num` equal completions of an example, computed by the first process."""
        conversational, example = is_conversational(example), {**example, "prompt": _asked(example)}
        texts = [MADE_UP] * num
        completions = [[{"role": "assistant", "content": text}] if conversational else text for text in texts]
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rows = [copy.deepcopy(example) for _ in texts]
        shown = copy.deepcopy(completions[0])
        try:
            return self.score(rows, completions, ids, _naming)[:num]
        except Exception as error:
            hint = "Make it return a number for each completion, or `None` for one that it cannot score."
            if conversational:
                hint = 'A completion is a list of messages, and its text is `completion[0]["content"]`. ' + hint
            raise SetupError(
                f"{str(error).rstrip('.')}. It was called for an example with {num} completions {shown!r}, before "
                f"anything was generated. {hint}"
            ) from error


def too_few_processes(num_processes: int) -> str | None:
    """Return a warning if `accelerate launch` was asked for several processes and silently started one."""
    # Its launcher of one process sets a port to meet at only where several were asked for, and never WORLD_SIZE.
    asked_for_several = is_set("ACCELERATE_MIXED_PRECISION") and is_set("MASTER_ADDR")
    if num_processes > 1 or not asked_for_several or is_set("WORLD_SIZE"):
        return None
    return (
        "`accelerate launch` was asked for several processes and started one, as it does on a CPU. Launch with "
        "`trl-dapo train --num_processes N` or `accelerate launch --multi_gpu --num_processes N`, which start them on "
        "a CPU too."
    )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the reward function in an error that it raises."""
    try:
        yield
    except Exception as error:
        raise SetupError(f"The reward function {name!r} failed with {type(error).__name__}: {error}") from error


def _asked(example: dict) -> Any:
    """Return an example's prompt as TRL passes it to reward functions, with the images in its messages."""
    prompt, image = example["prompt"], example.get("image")
    images = example.get("images", None if image is None else [image])
    if isinstance(prompt, str) or images == [] or not {"image", "images"} & example.keys():
        return prompt
    return prepare_multimodal_messages(prompt, images=images)
