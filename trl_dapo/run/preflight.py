# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is tried once before a run generates its first token, so that no mistake in it costs a rollout."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging
from trl import is_conversational, maybe_apply_chat_template, prepare_multimodal_messages

from ..config import DAPOConfig
from ..rewards.checks import check_prompt_column, find_comparison
from ..rewards.golds import BadRow, read_gold
from ..sampling.sampler import Sampler
from ..settings.arguments import read_mapping
from ..settings.environment import is_set
from ..settings.sampling_defaults import SamplingChoice
from .known_prompts import learn_from
from .terminal import wrapped_for


logger = logging.get_logger(__name__)

MADE_UP = "Answer: 0"
THINK_FORMAT = "think_format_reward"  # TRL's
ANSWERS, NO_ANSWERS = ("answer", "solution", "ground_truth", "target", "label"), ("prompt", "id", "source")


class SetupError(ValueError):
    """What a user can mend, found before anything was generated."""


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
        if self.sampler is not None and isinstance(args.dynamic_sampling_memory, str):
            self.choice.known = learn_from(args.dynamic_sampling_memory, self.sampler)
        is_screened = args.use_dynamic_sampling and args.dynamic_sampling_screen != "off"
        self._screen = args.dynamic_sampling_screen if is_screened else None
        self._apart = f"`dynamic_sampling_screen={self._screen!r}` scores the first few completions of a group apart"

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
                f"{error} Set `chat_template_path`, or give prompts that are plain text in place of messages."
            ) from error
        for warning in filter(None, warnings if state.is_main_process else ()):
            logger.warning(warning)
        self._tried_on = examples

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Has the reward functions score the examples; one that cannot is refused, on every rank."""
        found, unsure = self._try_rewards() if self._tried_on else (None, self.reward_names)
        if found is not None and self._screen is not None:
            if not self.choice.may_leave_out_screen:
                raise SetupError(f"{self._apart}, but {found}. Leave it out, or score each completion on its own.")
            self.choice.leave_out_screen(f"{self._apart}, but {found}")
        elif unsure and self._screen is not None:
            names = ", ".join(map(repr, unsure))
            if self.choice.may_leave_out_screen:
                self.choice.leave_out_screen(f"{self._apart}, and {names} may compare them")
            elif state.is_world_process_zero:
                same = f"That {names} would give the same beside the rest is assumed, not tried."
                logger.warning(f"{self._apart}. {same}")
        if self.sampler is not None:
            if self.args.dynamic_sampling_screen == "off":
                self.sampler.screen = None
            self.sampler.has_whole_groups = self.sampler.screen is None and bool(found or unsure)
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

    def _try_rewards(self) -> tuple[str | None, Sequence[str]]:
        """What shows that one compares completions, where that matters, and the names of which nothing could tell."""
        num_rows, first = self.args.num_generations, self._tried_on[0]
        assert num_rows is not None
        matters = self._screen is not None or (self.sampler is not None and self.sampler.num_ranks > 1)
        texts = made_up_group(num_rows) if matters else [MADE_UP] * num_rows
        score, rewards_BF = self._ask(first, texts)
        if PartialState().is_main_process and rewards_BF.isnan().all():
            logger.warning(
                f"Every reward function ({', '.join(map(repr, self.reward_names))}) returned `None` or NaN for "
                f"{num_rows} made-up completions of the first example, {texts[0]!r}. If it should be scored, "
                "check the columns that are read: nothing trains on what has no reward."
            )
        found, unsure = find_comparison(score, rewards_BF, self.reward_names) if matters else (None, [])
        for example in self._tried_on if matters else ():
            if not (found or unsure):
                group = made_up_group(num_rows, right_answer(example))
                found, unsure = find_comparison(*self._ask(example, group), self.reward_names)
        return found, unsure

    def _ask(self, example: dict, texts: list[str]) -> tuple[Callable[[slice], Tensor], Tensor]:
        """What scores some completions of an example as if alone, and the rewards of all, which must have some."""
        conversational, example = is_conversational(example), {**example, "prompt": _asked(example)}
        completions = [[{"role": "assistant", "content": text}] if conversational else text for text in texts]
        all_ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

        def score(part: slice) -> Tensor:
            asked, ids = copy.deepcopy((completions[part], all_ids[part]))
            rows = [copy.deepcopy(example) for _ in asked]
            return self.score(rows, asked, ids, _naming)[: len(asked)]  # of the first rank

        try:
            return score, score(slice(None))
        except Exception as error:
            hint = "Make it return a number for each completion, or `None` for one that it cannot score."
            if conversational:
                hint = 'A completion is a list of messages, and its text is `completion[0]["content"]`. ' + hint
            raise SetupError(
                f"{str(error).rstrip('.')}. It was called for an example with {len(texts)} completions "
                f"{completions[0]!r}, before anything was generated. {hint}"
            ) from error


def made_up_group(num: int, right: str = "") -> list[str]:
    """Completions that comparisons by length, answer or sameness score otherwise once the first two stand apart."""
    answers = "1" if right == "0" else "0", right or "1"
    zero, one = (f"#### {n} <answer>{n}</answer> \\boxed{{{n}}}\nAnswer: {n}" for n in answers)
    first, last = [f"So. {one}", one], [f"So. {one}", *([right] if right else [])] if num > 3 else []
    return [*first, *[f"So so. {zero}"] * (num - 2 - len(last)), *last]


def right_answer(example: Mapping[str, Any]) -> str:
    """What a right completion would state, by the column of that name, or else by another one that is short."""
    plain = {name: x for name, x in example.items() if isinstance(x, (str, int, float)) and name not in NO_ANSWERS}
    shortest = min(map(str, plain.values()), key=len, default="")
    answer = next((plain[name] for name in ANSWERS if name in plain), shortest)
    with suppress(BadRow):
        return read_gold(answer, is_solution=True)
    return str(answer)


def too_few_processes(num_processes: int) -> str | None:
    """What `accelerate launch` does not say: that it was asked for several processes and started one."""
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
    """Says which reward function it was that failed."""
    try:
        yield
    except Exception as error:
        raise SetupError(f"The reward function {name!r} failed with {type(error).__name__}: {error}") from error


def _asked(example: dict) -> Any:
    """An example's prompt as TRL hands it to reward functions: its images stand in its messages."""
    prompt, image = example["prompt"], example.get("image")
    images = example.get("images", None if image is None else [image])
    if isinstance(prompt, str) or images == [] or not {"image", "images"} & example.keys():
        return prompt
    return prepare_multimodal_messages(prompt, images=images)
