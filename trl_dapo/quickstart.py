# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO from nothing in two minutes on a CPU: a small model learns arithmetic, first from examples, then from reward.

- warm-up: supervised steps with a teacher who slips, until some problems are always solved and some never
- DAPO: the same model, rewarded for right answers only
- held out: accuracy before and after, on problems that neither phase has seen

Numbers are written as one adds by hand: operands of two digits, answers from the units up. `17+05=` is answered `220`.
"""

import json
import math
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    set_seed,
)

from .config import DAPOConfig
from .report import plot_run, series
from .trainer import DAPOTrainer


MAX_ANSWER_TOKENS = 8
Z_95 = 1.96  # standard normal quantile of a two-sided 95 % interval


# ---- Problems ----


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
    """
    Arithmetic of mixed difficulty, split into problems to train on and problems held out.

    A held-out sum or product is not trained on the other way round either: with `12+34` held out, `34+12` is too.

    Args:
        seed (`int`):
            Decides the split and what [`~Problems.draw`] draws.

    Example:

    ```python
    >>> problems = Problems(seed=42)
    >>> len(problems.held_out)
    1000
    ```
    """

    def __init__(self, seed: int):
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
        """
        Problems with the answers of a teacher who slips: now and then the answer is off by 1 or by 10.

        Args:
            num_examples (`int`):
                Number of examples.

        Returns:
            `list[str]`: Examples like `17+05=220`, or, where the teacher slipped, `17+05=320`.
        """
        slip = {family.name: family.slip for family in FAMILIES}
        examples = []
        for problem in self.draw(num_examples):
            answer = problem.answer
            if self._random.random() < slip[problem.family]:
                answer = _units_first(max(0, int(answer[::-1]) + self._random.choice([-10, -1, 1, 10])))
            examples.append(f"{problem.text}={answer}")
        return examples

    def draw(self, num_problems: int) -> list[Problem]:
        """
        Training problems, each family as often as its share says.

        Args:
            num_problems (`int`):
                Number of problems; the same one may come twice.

        Returns:
            `list[Problem]`: The problems.
        """
        names = self._random.choices(list(self.train), [family.share for family in FAMILIES], k=num_problems)
        return [self._random.choice(self.train[name]) for name in names]


def _problem(family: Family, left: int, right: int) -> Problem:
    answer = left + right if family.operator == "+" else left * right
    return Problem(family.name, f"{left:02d}{family.operator}{right:02d}", _units_first(answer))


def _units_first(number: int) -> str:
    return f"{number:03d}"[::-1]


# ---- Model ----


def build_tokenizer() -> PreTrainedTokenizerFast:
    """
    Tokenizer of one token a character, for digits, `+`, `*` and `=`. Its chat template puts `=` behind a problem.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: The tokenizer.
    """
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+*="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ eos_token }}"
        "{%- else -%}{{ message['content'] }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}={%- endif -%}"
    )
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, **sizes) -> PreTrainedModel:
    """
    Qwen3 with random weights, 0.8 million parameters by default.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Decides the vocabulary and the special tokens.
        seed (`int`):
            Seed of the weights.
        **sizes:
            Fields of [`~transformers.Qwen3Config`] to change.

    Returns:
        [`~transformers.Qwen3ForCausalLM`]: The model, on the CPU.
    """
    set_seed(seed)
    settings = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        # Problems are ten tokens long: positions must be told apart over that distance, not over a book's.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **{**settings, **sizes},
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Problems,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 1.5e-3,
    on_step: Callable[[float], None] = lambda loss: None,
) -> None:
    """
    Supervised steps on problems with their answers; the loss counts the answer's tokens only.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model to train, in place.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            From [`build_tokenizer`].
        problems ([`Problems`]):
            Where the batches are drawn from.
        num_steps (`int`):
            Number of steps.
        batch_size (`int`, *optional*, defaults to `128`):
            Problems a step.
        learning_rate (`float`, *optional*, defaults to `1.5e-3`):
            Peak of the one-cycle schedule.
        on_step (`Callable`, *optional*):
            Called with the loss after each step.
    """
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


# ---- Accuracy ----


@torch.no_grad()
def sample_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], seed: int
) -> list[str]:
    """
    One answer a problem, sampled at temperature 1.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            From [`build_tokenizer`].
        problems (`list[Problem]`):
            What to ask.
        seed (`int`):
            Seed of the sampling.

    Returns:
        `list[str]`: The answers, in the problems' order.
    """
    set_seed(seed)
    model.eval()
    inputs = tokenizer(
        [f"{problem.text}=" for problem in problems], return_tensors="pt", padding=True, return_token_type_ids=False
    )
    outputs = model.generate(
        **inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    return tokenizer.batch_decode(outputs[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def wilson_interval(num_correct: int, num_samples: int) -> tuple[float, float]:
    """
    Wilson's 95 % interval for a share (E. B. Wilson 1927).

    Args:
        num_correct (`int`):
            Successes.
        num_samples (`int`):
            Trials, at least 1.

    Returns:
        `tuple[float, float]`: Lower and upper bound, in `[0, 1]`.
    """
    share, z2 = num_correct / num_samples, Z_95**2
    centre = (share + z2 / (2 * num_samples)) / (1 + z2 / num_samples)
    margin = math.sqrt(share * (1 - share) / num_samples + z2 / (4 * num_samples**2)) * Z_95 / (1 + z2 / num_samples)
    return max(0.0, centre - margin), min(1.0, centre + margin)


def paired_difference(before: list[bool], after: list[bool]) -> tuple[float, float, float]:
    """
    Change of accuracy on the same problems, with a 95 % interval from the spread of the problems' own differences.

    Args:
        before (`list[bool]`):
            Which problems were solved before.
        after (`list[bool]`):
            Which of the same problems were solved after, in the same order; two problems or more.

    Returns:
        `tuple[float, float, float]`: Mean difference, lower and upper bound.
    """
    differences = [int(b) - int(a) for a, b in zip(before, after, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((difference - mean) ** 2 for difference in differences) / (n - 1)
    margin = Z_95 * math.sqrt(variance / n)
    return mean, mean - margin, mean + margin


# ---- The run ----


def exact_answer_reward(completions, solution, **kwargs):
    """Reward function: 1.0 where the completion is the solution, else 0.0."""
    return [
        float(completion[0]["content"] == answer) for completion, answer in zip(completions, solution, strict=True)
    ]


class _Progress(TrainerCallback):
    """Moves the bar with every step, and prints a line of means ten times in a run."""

    METRICS = (
        "reward",
        "filtered_reward",
        "dynamic_sampling/acceptance_rate",
        "entropy",
        "completions/mean_length",
    )
    HEADER = f"{'step':>7}  {'reward':>8}  {'filtered':>8}  {'accepted':>8}  {'entropy':>8}  {'length':>8}"

    def __init__(self, progress: Progress, task):
        self.progress, self.task, self.window = progress, task, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.progress.console.print(f"[dim]{self.HEADER}[/dim]", highlight=False)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" not in logs:
            return
        self.window.append({"step": state.global_step, **logs})
        self.progress.update(self.task, completed=state.global_step)
        if state.global_step % max(1, state.max_steps // 10):
            return
        cells = []
        for metric in self.METRICS:
            _, values = series(self.window, metric)
            cells.append(f"{sum(values) / len(values):8.2f}" if values else f"{'-':>8}")
        self.progress.console.print(f"{state.global_step:7d}  " + "  ".join(cells), highlight=False)
        self.window = []


def dapo_config(output_dir: str | os.PathLike, seed: int, num_steps: int) -> DAPOConfig:
    """
    Settings of the quickstart's DAPO phase: 16 prompts x 8 completions, one optimizer step a rollout batch.

    Args:
        output_dir (`str` or `os.PathLike`):
            Where the run is kept.
        seed (`int`):
            Seed of the run.
        num_steps (`int`):
            Number of optimizer steps.

    Returns:
        [`DAPOConfig`]: The settings.
    """
    return DAPOConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=num_steps,
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=MAX_ANSWER_TOKENS,
        overlong_buffer_length=2,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )


class QuickstartResult(NamedTuple):
    """What a quickstart ends with: accuracies in `[0, 1]` with 95 % intervals, and where its files lie."""

    before: float
    after: float
    difference: tuple[float, float, float]
    checkpoint: Path
    plot: Path


def run_quickstart(
    output_dir: str | os.PathLike = "outputs/quickstart",
    seed: int = 42,
    num_warm_up_steps: int = 250,
    num_steps: int = 150,
    console: Console | None = None,
) -> QuickstartResult:
    """
    Make a small model, warm it up on arithmetic, train it with DAPO, and measure the gain on held-out problems.

    Needs no network, no GPU and no download.

    Args:
        output_dir (`str` or `os.PathLike`, *optional*, defaults to `"outputs/quickstart"`):
            Folder for `warm_up/` and `trained/` (models with tokenizer), `held_out.jsonl`, `trainer_state.json` and
            `run.png`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        num_warm_up_steps (`int`, *optional*, defaults to `250`):
            Supervised steps.
        num_steps (`int`, *optional*, defaults to `150`):
            Optimizer steps of DAPO.
        console ([`~rich.console.Console`], *optional*):
            Where to write. Defaults to standard output.

    Returns:
        [`QuickstartResult`]: Accuracy before and after, the difference, and where the checkpoint and the plot lie.
    """
    console = console or Console()
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # TRL's use of names that transformers has renamed is nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # Matrices this small gain little from a second thread, and lose minutes to it where the cores are shared.
    torch.set_num_threads(1)

    problems, tokenizer = Problems(seed), build_tokenizer()
    model = build_model(tokenizer, seed)
    with open(output_dir / "held_out.jsonl", "w", encoding="utf-8") as file:
        for problem in problems.held_out:
            row = {"problem": problem.text, "answer": problem.answer, "source": problem.family}
            file.write(json.dumps(row) + "\n")
    console.print(
        f"A Qwen3 of {model.num_parameters() / 1e6:.1f} million parameters learns arithmetic on this CPU "
        f"(seed {seed}, no network).",
        soft_wrap=True,
    )

    with _progress_bar(console) as progress:
        task = progress.add_task("Warm-up", total=num_warm_up_steps, info="")
        warm_up(
            model,
            tokenizer,
            problems,
            num_warm_up_steps,
            on_step=lambda loss: progress.update(task, advance=1, info=f"loss {loss:.2f}"),
        )
    _save(model, tokenizer, output_dir / "warm_up")
    before = _solved(model, tokenizer, problems.held_out, seed)

    with _progress_bar(console) as progress:
        trainer = DAPOTrainer(
            model,
            exact_answer_reward,
            dapo_config(output_dir, seed, num_steps),
            train_dataset=_prompts(problems.draw(4096)),
            processing_class=tokenizer,
            callbacks=[_Progress(progress, progress.add_task("DAPO", total=num_steps, info=""))],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trainer.save_state()
    _save(model, tokenizer, output_dir / "trained")
    after = _solved(model, tokenizer, problems.held_out, seed)
    plot_run(trainer.state.log_history, output_dir / "run.png", title="trl-dapo quickstart")

    result = QuickstartResult(
        before=sum(before) / len(before),
        after=sum(after) / len(after),
        difference=paired_difference(before, after),
        checkpoint=output_dir / "trained",
        plot=output_dir / "run.png",
    )
    _print_result(console, problems.held_out, before, after, result)
    return result


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
    )


def _prompts(problems: list[Problem]) -> Dataset:
    rows = [{"prompt": [{"role": "user", "content": p.text}], "solution": p.answer} for p in problems]
    return Dataset.from_list(rows)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _solved(model, tokenizer, problems: list[Problem], seed: int) -> list[bool]:
    answers = sample_answers(model, tokenizer, problems, seed)
    return [answer == problem.answer for answer, problem in zip(answers, problems, strict=True)]


def _print_result(console, held_out: list[Problem], before: list[bool], after: list[bool], result: QuickstartResult):
    table = Table(title=f"Accuracy on {len(held_out):,} held-out problems, one sample each at temperature 1")
    for column in ("problems", "number", "before DAPO", "after DAPO"):
        table.add_column(column, justify="left" if column == "problems" else "right")
    for family in FAMILIES:
        of_family = [i for i, problem in enumerate(held_out) if problem.family == family.name]
        shares = [f"{sum(solved[i] for i in of_family) / len(of_family):.1%}" for solved in (before, after)]
        table.add_row(family.name, str(len(of_family)), *shares)
    table.add_section()
    bounds = [
        "{:.1%} [{:.1%}, {:.1%}]".format(sum(s) / len(s), *wilson_interval(sum(s), len(s))) for s in (before, after)
    ]
    table.add_row("all, with 95 % interval", str(len(held_out)), *bounds)
    console.print(table)
    mean, low, high = (100 * share for share in result.difference)
    verdict = "up" if low > 0 else "down" if high < 0 else "no clear change"
    console.print(f"Difference, problem by problem: {mean:+.1f} points [{low:+.1f}, {high:+.1f}]: {verdict}.")
    console.print(f"Checkpoint: {result.checkpoint}\nPlot:       {result.plot}", highlight=False, soft_wrap=True)
    console.print(
        "Next, a real model (one 80 GB GPU; from a clone of the repository):\n"
        "  accelerate launch recipes/train_dapo.py --config recipes/qwen2.5_7b_math_lora.yaml",
        highlight=False,
        soft_wrap=True,
    )
