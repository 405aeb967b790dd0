# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO and DAPO on a CPU in three minutes: a small model learns arithmetic, first from examples, then from rewards.

The warm-up is supervised training on examples, some of which have an incorrect answer. After it the model solves some
problems always, some never and most of them sometimes. This model is trained twice, with `GRPOTrainer` and with
`DAPOTrainer`, with the same settings and for the same number of generated tokens. Only correct completions are
rewarded. Accuracy is measured on problems that were never trained on.

Operands have two digits, and results are written from the units up, in the order in which one adds by hand:
`17+05=220`.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from ..config import DAPOConfig
from ..evaluation import compare, evaluate, print_comparison
from ..report import plot_comparison
from ..run import counts
from ..run.terminal import TerminalCallback
from ..settings.warnings import hide_renaming_warnings
from ..trainer import DAPOTrainer
from . import tiny


MAX_ANSWER_TOKENS = 8
NUM_PROMPTS, NUM_COMPLETIONS = 16, 8  # prompts per batch, and completions per prompt


class ArithmeticProblem(NamedTuple):
    """A problem, such as `17+05`, and its answer."""

    family: str
    text: str
    answer: str


class Family(NamedTuple):
    """Problems of the same difficulty: `left operator right`."""

    name: str
    left: range
    operator: str
    right: range
    share: float  # share of this family in training
    num_held_out: int
    slip: float  # share of examples in the warm-up whose answer is off by 1 or by 10


ONE_DIGIT, TWO_DIGITS = range(10), range(10, 100)
FAMILIES = (
    Family("1 digit + 1 digit", ONE_DIGIT, "+", ONE_DIGIT, share=0.2, num_held_out=10, slip=0.0),
    Family("2 digits + 1 digit", TWO_DIGITS, "+", ONE_DIGIT, share=0.25, num_held_out=200, slip=0.4),
    Family("2 digits + 2 digits", TWO_DIGITS, "+", TWO_DIGITS, share=0.45, num_held_out=650, slip=0.4),
    Family("2 digits * 2 digits", TWO_DIGITS, "*", TWO_DIGITS, share=0.1, num_held_out=140, slip=0.0),
)


class Problems:
    """
    Problems to train on, and 1,000 problems that are held out for evaluation, split by a seed.

    If `12+34` is held out, so is `34+12`.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.held_out: list[ArithmeticProblem] = []
        self.train: dict[str, list[ArithmeticProblem]] = {}
        for family in FAMILIES:
            pairs = [(a, b) for a in family.left for b in family.right]
            self._random.shuffle(pairs)
            held_out, rest = pairs[: family.num_held_out], pairs[family.num_held_out :]
            seen = {frozenset(pair) for pair in held_out}
            self.held_out += [_problem(family, *pair) for pair in held_out]
            self.train[family.name] = [_problem(family, *pair) for pair in rest if frozenset(pair) not in seen]

    def draw_examples(self, num_examples: int) -> list[str]:
        """Draw training problems with their answers, such as `17+05=220`. Some answers are off by 1 or by 10."""
        slip = {family.name: family.slip for family in FAMILIES}
        examples = []
        for problem in self.draw(num_examples):
            answer = problem.answer
            if self._random.random() < slip[problem.family]:
                answer = _units_first(max(0, int(answer[::-1]) + self._random.choice([-10, -1, 1, 10])))
            examples.append(f"{problem.text}={answer}")
        return examples

    def draw(self, num_problems: int) -> list[ArithmeticProblem]:
        """Draw training problems with replacement, from each family according to its share."""
        names = self._random.choices(list(self.train), [family.share for family in FAMILIES], k=num_problems)
        return [self._random.choice(self.train[name]) for name in names]


def _problem(family: Family, left: int, right: int) -> ArithmeticProblem:
    answer = left + right if family.operator == "+" else left * right
    return ArithmeticProblem(family.name, f"{left:02d}{family.operator}{right:02d}", _units_first(answer))


def _units_first(number: int) -> str:
    return f"{number:03d}"[::-1]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, whose chat template adds `=` to a problem."""
    return tiny.build_character_tokenizer(
        "0123456789+*=",
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ eos_token }}"
        "{%- else -%}{{ message['content'] }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}={%- endif -%}",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: int) -> PreTrainedModel:
    """Return a Qwen3 model with random weights. It has 0.8 million parameters unless `sizes` changes its config."""
    set_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "max_position_embeddings": 64,
        # Problems have only about ten tokens, so positions have to differ over a short distance.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    return tiny.build_tiny_model(tokenizer, seed, **{**settings, **sizes})


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Problems,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 1.5e-3,
    on_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """Train a model on problems with their answers, in place. Only the tokens of answers count in the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    equals = tokenizer.convert_tokens_to_ids("=")
    model.train()
    for _ in range(num_steps):
        texts = [f"{example}{tokenizer.eos_token}" for example in problems.draw_examples(batch_size)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        is_equals = (batch["input_ids"] == equals).long()
        in_answer = is_equals.cumsum(dim=1) - is_equals
        loss = model(**batch, labels=batch["input_ids"].masked_fill(in_answer == 0, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(loss.item())


def to_dataset(problems: list[ArithmeticProblem]) -> Dataset:
    """Return problems as a dataset for the trainers and an evaluation."""
    rows = []
    for problem in problems:
        prompt = [{"role": "user", "content": problem.text}]
        rows.append({"id": problem.text, "prompt": prompt, "solution": problem.answer, "source": problem.family})
    return Dataset.from_list(rows)


def measure(checkpoint: Path, problems: list[ArithmeticProblem], output_dir: Path, seed: int) -> dict:
    """Evaluate a model with four completions per problem at temperature 1."""
    # Otherwise the evaluation would continue from the completions of an earlier quickstart.
    shutil.rmtree(output_dir, ignore_errors=True)
    return evaluate(
        str(checkpoint),
        to_dataset(problems),
        output_dir,
        k=4,
        temperature=1.0,
        top_p=1.0,
        max_completion_length=MAX_ANSWER_TOKENS,
        seed=seed,
        scorer=exact_answer,
        batch_size=1000,
        progress=False,
    )


def exact_answer(text: str, solution: str) -> tuple[bool, str]:
    """Scorer for the evaluation: a completion is correct if it equals the solution."""
    return text == solution, text


def exact_answer_reward(
    completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any
) -> list[float | None]:
    """Reward function that gives 1.0 if a completion equals the solution, otherwise 0.0."""
    answers = (completion[0]["content"] for completion in completions)
    return [float(answer == gold) for answer, gold in zip(answers, solution, strict=True)]


def training_settings(output_dir: str | os.PathLike, seed: int, num_steps: int) -> dict[str, Any]:
    """Return the settings of both trainers, with one optimizer step per batch. All others have their defaults."""
    return {
        "output_dir": str(output_dir),
        "seed": seed,
        "max_steps": num_steps,
        "num_generations": NUM_COMPLETIONS,
        "per_device_train_batch_size": NUM_PROMPTS * NUM_COMPLETIONS,
        "max_completion_length": MAX_ANSWER_TOKENS,
        # At 3e-4, or without a warm-up of the learning rate, models of some seeds get worse in the first steps and
        # never recover.
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def dapo_config(
    output_dir: str | os.PathLike, seed: int, num_steps: int, max_tokens_generated: int | None = None
) -> DAPOConfig:
    """Return the settings of `DAPOTrainer`: those of both trainers, and the number of tokens at which it stops."""
    settings = training_settings(output_dir, seed, num_steps)
    return DAPOConfig(**settings, max_tokens_generated=max_tokens_generated)


def count_generated_tokens(log_history: list[dict]) -> int:
    """Return the number of tokens of all completions in the log of a run, dropped groups included."""
    total = 0.0
    for entry in log_history:
        if "dynamic_sampling/tokens_generated" in entry:
            total += counts.total([entry], "dynamic_sampling/tokens_generated")
        elif "completions/mean_length" in entry:  # logged by `GRPOTrainer`, which samples one batch per step
            total += entry["completions/mean_length"] * NUM_PROMPTS * NUM_COMPLETIONS
    return round(total)


def run_quickstart(
    output_dir: str | os.PathLike = "outputs/quickstart",
    seed: int = 42,
    num_warm_up_steps: int = 250,
    num_steps: int = 150,
    console: Console | None = None,
) -> dict:
    """
    Train a small model on arithmetic with `GRPOTrainer` and with `DAPOTrainer`, and print the accuracy of both.

    Both trainers start from a model that was warmed up with supervised training. The accuracy is measured on held-out
    problems.

    Args:
        output_dir (`str` or `os.PathLike`, *optional*, defaults to `"outputs/quickstart"`):
            Folder for `warm_up`, `grpo` and `dapo`, each with a model and its evaluation.
        seed (`int`, *optional*, defaults to `42`):
            Random seed.
        num_warm_up_steps (`int`, *optional*, defaults to `250`):
            Number of supervised steps.
        num_steps (`int`, *optional*, defaults to `150`):
            Number of optimizer steps of `GRPOTrainer`. `DAPOTrainer` stops as soon as it has generated as many tokens.
        console ([`~rich.console.Console`], *optional*):
            Console for all output. Defaults to standard output.

    Returns:
        `dict`: The comparison of `DAPOTrainer` with `GRPOTrainer` by [`~trl_dapo.evaluation.compare`].
    """
    console = console or Console()
    say = partial(console.print, highlight=False, soft_wrap=True)
    output_dir = Path(output_dir)
    start, grpo_dir, dapo_dir = (output_dir / name for name in ("warm_up", "grpo", "dapo"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hide_renaming_warnings()
    # For such small matrices a second thread helps little, and costs minutes if other processes use the cores.
    torch.set_num_threads(1)

    problems, tokenizer = Problems(seed), build_tokenizer()
    model = build_model(tokenizer, seed)
    say(
        f"A Qwen3 model with {model.num_parameters() / 1e6:.1f} million parameters learns arithmetic on this CPU "
        f"(seed {seed}, no network). Answers are written from the units up: 17+05=220."
    )
    with _progress(console, "Warm-up", num_warm_up_steps) as show:
        warm_up(model, tokenizer, problems, num_warm_up_steps, on_step=lambda loss: show(f"loss {loss:.2f}"))
    tiny.save(model, tokenizer, start)
    dataset = to_dataset(problems.draw(4096))

    say(f"\nGRPOTrainer trains this model for {num_steps} steps.")
    grpo_args = GRPOConfig(**training_settings(grpo_dir, seed, num_steps))
    grpo = GRPOTrainer(str(start), exact_answer_reward, grpo_args, train_dataset=dataset)
    with _progress(console, "GRPO", num_steps) as show:
        _show_rewards(grpo, show)
        grpo.train()
    for entry in grpo.state.log_history:
        if "reward" in entry:
            # The mean of rewards of 0 and 1 is the share of correct completions, as `DAPOTrainer` logs it.
            entry["task_accuracy"] = entry["reward"]
    _save(grpo)
    num_tokens = count_generated_tokens(grpo.state.log_history)

    say(
        f"\nDAPOTrainer trains the same model with the same settings, until it has generated as many tokens "
        f"({num_tokens:,})."
    )
    dapo_args = dapo_config(dapo_dir, seed, num_steps, max_tokens_generated=num_tokens)
    dapo = DAPOTrainer(str(start), exact_answer_reward, dapo_args, train_dataset=dataset)
    _print_rows(dapo, max(1, num_steps // 10), console)
    dapo.train()
    _save(dapo)

    say(f"\nAccuracy on {len(problems.held_out):,} held-out problems, 4 completions each at temperature 1:")
    for name, folder, log_history in (
        ("the warm-up", start, []),
        ("GRPOTrainer", grpo_dir, grpo.state.log_history),
        ("DAPOTrainer", dapo_dir, dapo.state.log_history),
    ):
        accuracy = measure(folder, problems.held_out, folder / "eval", seed)["metrics"]["avg@4"]
        interval = f"95% interval {accuracy['low']:.1%} to {accuracy['high']:.1%}"
        line = f"  after {name}: {accuracy['mean']:.1%}, {interval}"
        if log_history:
            steps, num_tokens = log_history[-1]["step"], count_generated_tokens(log_history)
            line += f"; {steps} steps, {num_tokens:,} generated tokens"
        say(line)
    say("\nDAPOTrainer (trained) compared with GRPOTrainer (base), problem by problem:")
    change = compare(grpo_dir / "eval", dapo_dir / "eval")
    print_comparison(change, console, only_avg=True)
    say("The difference depends on the seed. Try another one with --seed 43.")
    logs = {"GRPOTrainer": grpo.state.log_history, "DAPOTrainer": dapo.state.log_history}
    plot_comparison(logs, output_dir / "run.png", title="trl-dapo quickstart")
    say(
        f"Models:  {start}, {grpo_dir}, {dapo_dir}\n"
        f"Picture: {output_dir / 'run.png'}\n"
        f"Report:  trl-dapo report {grpo_dir} {dapo_dir}\n"
        f"Compare: trl-dapo compare {start / 'eval'} {dapo_dir / 'eval'}\n"
        "Next, train a language model in minutes on a CPU (recipes for GPUs: trl-dapo recipes):\n"
        "  trl-dapo train --config smollm2_135m_cpu"
    )
    return change


def _save(trainer: GRPOTrainer) -> None:
    """Save the model and the log to the output folder."""
    trainer.save_state()
    trainer.save_model()


@contextmanager
def _progress(console: Console, title: str, num_steps: int) -> Iterator[Callable[[str], None]]:
    """
    Show a progress bar on a terminal, or otherwise a line every 50 steps.

    Yields the function to call after each step.
    """
    with Progress(
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
    ) as progress:
        task = progress.add_task(title, total=num_steps, info="")

        def show(info: str) -> None:
            progress.update(task, advance=1, info=info)
            step = int(progress.tasks[task].completed)
            if not console.is_terminal and step % 50 == 1:
                console.print(f"{title}, step {step} of {num_steps}: {info}")

        yield show


class _RewardCallback(TrainerCallback):
    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        if "reward" in entry:
            self._show(f"reward {entry['reward']:.2f}")


def _show_rewards(trainer: GRPOTrainer, show: Callable[[str], None]) -> None:
    """Make a trainer show the reward at each step instead of printing all of its metrics."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_RewardCallback(show))


def _print_rows(trainer: DAPOTrainer, every: int, console: Console) -> None:
    """Make `DAPOTrainer` print a row of its table every few steps."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TerminalCallback):
            callback.every, callback.file = every, console.file
