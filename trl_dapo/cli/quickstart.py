# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO from nothing in two minutes on a CPU: a small model learns arithmetic, first from examples, then from reward.

The warm-up is supervised, with a teacher who slips: some problems are always solved, some never. DAPO rewards right
answers only. Accuracy before and after is of problems that neither has seen.

Numbers are written as one adds by hand: operands of two digits, answers from the units up. `17+05=` is answered `220`.
"""

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from ..config import DAPOConfig
from ..evaluation import compare, evaluate, print_comparison
from ..report import plot_run
from ..run.terminal import TerminalCallback
from ..trainer import DAPOTrainer
from . import tiny


MAX_ANSWER_TOKENS = 8


class Problem(NamedTuple):
    family: str
    text: str
    answer: str


class Family(NamedTuple):
    """All problems `left operator right` of one difficulty."""

    name: str
    left: range
    operator: str
    right: range
    share: float  # of the problems drawn for training
    num_held_out: int
    slip: float  # share of the warm-up's answers that are off by 1 or by 10


ONE_DIGIT, TWO_DIGITS = range(10), range(10, 100)
FAMILIES = (
    Family("1 digit + 1 digit", ONE_DIGIT, "+", ONE_DIGIT, share=0.2, num_held_out=10, slip=0.0),
    Family("2 digits + 1 digit", TWO_DIGITS, "+", ONE_DIGIT, share=0.25, num_held_out=200, slip=0.4),
    Family("2 digits + 2 digits", TWO_DIGITS, "+", TWO_DIGITS, share=0.45, num_held_out=650, slip=0.4),
    Family("2 digits * 2 digits", TWO_DIGITS, "*", TWO_DIGITS, share=0.1, num_held_out=140, slip=0.0),
)


class Problems:
    """Problems to train on and 1,000 held out, split by the seed; with `12+34` held out, `34+12` is too."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.held_out: list[Problem] = []
        self.train: dict[str, list[Problem]] = {}
        for family in FAMILIES:
            pairs = [(a, b) for a in family.left for b in family.right]
            self._random.shuffle(pairs)
            held_out, rest = pairs[: family.num_held_out], pairs[family.num_held_out :]
            seen = {frozenset(pair) for pair in held_out}
            self.held_out += [_problem(family, *pair) for pair in held_out]
            self.train[family.name] = [_problem(family, *pair) for pair in rest if frozenset(pair) not in seen]

    def teach(self, num_examples: int) -> list[str]:
        """Problems with the answers of a teacher who slips: `17+05=220`, now and then off by 1 or by 10."""
        slip = {family.name: family.slip for family in FAMILIES}
        examples = []
        for problem in self.draw(num_examples):
            answer = problem.answer
            if self._random.random() < slip[problem.family]:
                answer = _units_first(max(0, int(answer[::-1]) + self._random.choice([-10, -1, 1, 10])))
            examples.append(f"{problem.text}={answer}")
        return examples

    def draw(self, num_problems: int) -> list[Problem]:
        """Training problems, each family as often as its share says; the same one may come twice."""
        names = self._random.choices(list(self.train), [family.share for family in FAMILIES], k=num_problems)
        return [self._random.choice(self.train[name]) for name in names]


def _problem(family: Family, left: int, right: int) -> Problem:
    answer = left + right if family.operator == "+" else left * right
    return Problem(family.name, f"{left:02d}{family.operator}{right:02d}", _units_first(answer))


def _units_first(number: int) -> str:
    return f"{number:03d}"[::-1]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of one token a character; its chat template puts `=` behind a problem."""
    return tiny.build_character_tokenizer(
        "0123456789+*=",
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ eos_token }}"
        "{%- else -%}{{ message['content'] }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}={%- endif -%}",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes: int) -> PreTrainedModel:
    """Qwen3 with random weights, 0.8 million parameters by default; `sizes` are fields of its config."""
    set_seed(seed)
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "max_position_embeddings": 64,
        # Problems are ten tokens long: positions must be told apart over that distance, not over a book's.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    return tiny.build_model(tokenizer, seed, **{**settings, **sizes})


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Problems,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 1.5e-3,
    on_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """Supervised steps in place, on problems with their answers; the loss counts the answer's tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    equals = tokenizer.convert_tokens_to_ids("=")
    model.train()
    for _ in range(num_steps):
        texts = [f"{example}{tokenizer.eos_token}" for example in problems.teach(batch_size)]
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


def measure(checkpoint: Path, problems: list[Problem], output_dir: Path, seed: int) -> dict:
    """Evaluates a checkpoint on problems, four samples each at temperature 1, in a folder that is emptied first."""
    # Another run's answers must not stand in for this one's.
    shutil.rmtree(output_dir, ignore_errors=True)
    return evaluate(
        str(checkpoint),
        _prompts(problems),
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
    """Scorer of an evaluation: right if the whole completion is the solution."""
    return text == solution, text


def exact_answer_reward(
    completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any
) -> list[float | None]:
    """Reward function: 1.0 where the completion is the solution, else 0.0."""
    answers = (completion[0]["content"] for completion in completions)
    return [float(answer == right) for answer, right in zip(answers, solution, strict=True)]


def dapo_config(output_dir: str | os.PathLike, seed: int, num_steps: int) -> DAPOConfig:
    """Settings of the DAPO phase: 16 prompts x 8 completions, one optimizer step a rollout batch."""
    return DAPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=num_steps,
        dynamic_sampling_mode="paper",
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=MAX_ANSWER_TOKENS,
        overlong_buffer_length=2,
        # At 3e-4, and without a warm-up of Adam's moments, some seeds lose in the first steps what they never regain.
        learning_rate=1e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def run_quickstart(
    output_dir: str | os.PathLike = "outputs/quickstart",
    seed: int = 42,
    num_warm_up_steps: int = 250,
    num_steps: int = 150,
    console: Console | None = None,
) -> dict:
    """Warms a small model up on arithmetic and trains it with DAPO; what `compare` says of held-out problems."""
    console = console or Console()
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Matrices this small gain little from a second thread, and lose minutes to it where the cores are shared.
    torch.set_num_threads(1)

    problems, tokenizer = Problems(seed), build_tokenizer()
    model = build_model(tokenizer, seed)
    console.print(
        f"A Qwen3 of {model.num_parameters() / 1e6:.1f} million parameters learns arithmetic on this CPU "
        f"(seed {seed}, no network). Answers are written from the units up: 17+05=220.",
        soft_wrap=True,
    )

    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[info]}"), console=console) as progress:
        task = progress.add_task("Warm-up", total=num_warm_up_steps, info="")

        def show(loss: float) -> None:
            progress.update(task, advance=1, info=f"loss {loss:.2f}")
            if not console.is_terminal and (step := progress.tasks[task].completed) % 50 == 1:  # no bar is drawn
                console.print(f"Warm-up, step {step} of {num_warm_up_steps}: loss {loss:.2f}")

        warm_up(model, tokenizer, problems, num_warm_up_steps, on_step=show)
    tiny.save(model, tokenizer, output_dir / "warm_up")
    before = measure(output_dir / "warm_up", problems.held_out, output_dir / "eval_warm_up", seed)

    args, dataset = dapo_config(output_dir, seed, num_steps), _prompts(problems.draw(4096))
    trainer = DAPOTrainer(model, exact_answer_reward, args, train_dataset=dataset, processing_class=tokenizer)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TerminalCallback):
            callback.every, callback.file = max(1, num_steps // 10), console.file
    trainer.train()
    trainer.save_state()
    tiny.save(model, tokenizer, output_dir / "trained")
    after = measure(output_dir / "trained", problems.held_out, output_dir / "eval_trained", seed)
    plot_run(trainer.state.log_history, output_dir / "run.png", title="trl-dapo quickstart")

    say = partial(console.print, highlight=False, soft_wrap=True)
    for name, summary in (("before", before), ("after", after)):
        accuracy = summary["metrics"]["avg@4"]
        say(
            f"Accuracy {name} DAPO on {summary['num_problems']:,} held-out problems, 4 samples each at temperature 1: "
            f"{accuracy['mean']:.1%}, 95 % interval {accuracy['low']:.1%} to {accuracy['high']:.1%}"
        )
    change = compare(output_dir / "eval_warm_up", output_dir / "eval_trained")
    print_comparison(change, console, in_brief=True)
    say(
        f"Checkpoint: {output_dir / 'trained'}\n"
        f"Plot:       {output_dir / 'run.png'}\n"
        f"Again:      trl-dapo compare {output_dir / 'eval_warm_up'} {output_dir / 'eval_trained'}\n"
        "Next, a language model, in minutes on a CPU (for a GPU: trl-dapo recipes):\n"
        "  trl-dapo train --config smollm2_135m_cpu"
    )
    return change


def _prompts(problems: list[Problem]) -> Dataset:
    asked = [(p, [{"role": "user", "content": p.text}]) for p in problems]
    rows = [{"id": p.text, "prompt": prompt, "solution": p.answer, "source": p.family} for p, prompt in asked]
    return Dataset.from_list(rows)
