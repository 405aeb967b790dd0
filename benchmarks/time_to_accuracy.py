# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Generated tokens and seconds until a small model reaches an accuracy on held-out problems.

    python benchmarks/time_to_accuracy.py           # about 25 minutes on two cores
    python benchmarks/time_to_accuracy.py --full    # twice the seeds, twice the gain, hours

All methods start from one checkpoint, the quickstart's model after its warm-up on faulty sums, and differ in nothing
but what their line below says. The target is fixed before any run: the checkpoint's accuracy plus 10 points in the
first task and 5 in the second. A run ends when it is reached or when `--max-seconds` are spent; a run that never
reaches it counts as slower than every other. The learning rate of a task is the one of 3e-5, 1e-4 and 3e-4 at which
GRPO got furthest with seed 0 (`--learning-rate` tries another); it was not tuned for ours.

- GRPO, one step: `GRPOTrainer`, TRL's defaults but for sizes and the learning rate
- GRPO: the same with several optimizer steps a rollout, as all below
- GRPO, Clip-Higher: the same with TRL's `loss_type="dapo"`, which is its default, and `epsilon_high=0.28`
- full batch again: each round samples as many prompts as the batch holds and surplus is discarded, as in SkyRL and
  ms-swift; the rest is ours
- ours: rounds sized by the missing groups over the acceptance rate
- ours, carry: and surplus trains in the next rollout
- ours, carry, memory: and prompts likely to be dropped are passed over for a while
- ours, screened: three completions of a prompt first, the other five where these differ
- ours, auto: the number asked first is chosen by the pass rates seen so far; both also with carry and memory
- ours, carry, server: with carry, sampled by a stand-in for vLLM's server, whose CPU seconds count too
- ours, carry, ahead: and the next rollout's first round is sampled while this one trains

Two tasks: the quickstart's own mix of problems, and one in which one prompt in ten can be learnt: the others are
products, which the model never gets right, and sums of two digits, which it gets right nearly always. Without an
engine that schedules completions, ours samples no round larger than the batch; where acceptance is low, its rounds are
then those of a full batch again but for the last.

Accuracy is the probability that a completion sampled at temperature 1 is right, averaged over every third of the
quickstart's held-out problems; `rare` is that of the problems which the checkpoint gets right between 1 time in 200
and 1 in 10, where the run ended. Both are read off the logits, after every rollout, so they have no sampling noise;
neither time nor tokens of it count. Seconds are CPU seconds of one thread: other work on the machine does not count.
With n seeds, the lowest and the highest value enclose the median with a confidence of 1 - 2^(1 - n): 94 % with 5.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from curve import Clock, accuracy, right_probabilities
from datasets import Dataset
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from runs import file_name, fingerprint, quiet, run_all
from stand_in import Model, server
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import FAMILIES, Problems, build_model, build_tokenizer, exact_answer_reward, warm_up
from trl_dapo.settings.sampling_defaults import PAPER


CHECKPOINT_SEED = 42
NUM_PROMPTS = 1024  # in the dataset
NUM_GENERATIONS = 8
RARE = 0.005, 0.1  # probabilities of the checkpoint


class Task(NamedTuple):
    shares: list[float]  # of each family among the prompts, in the order of the quickstart's FAMILIES
    gain: float  # the target, above the checkpoint's accuracy
    learning_rate: float


TASKS = {
    "quickstart": Task([family.share for family in FAMILIES], gain=0.10, learning_rate=1e-4),
    "one in ten": Task([0.05, 0.03, 0.07, 0.85], gain=0.05, learning_rate=3e-5),
}


class Meter:
    """Adds up what is generated."""

    num_tokens = 0

    def _generate_single_turn(self, *args, **kwargs):
        completion_ids, *rest = super()._generate_single_turn(*args, **kwargs)
        self.num_tokens += sum(map(len, completion_ids))
        return completion_ids, *rest


class GRPO(Meter, GRPOTrainer):
    pass


class DAPO(Meter, DAPOTrainer):
    pass


class Method(NamedTuple):
    trainer: type
    config: type
    settings: dict
    num_steps: int | None = None  # a rollout, where it is not the number that `--num-steps` says


# SkyRL's limit on rounds, for every resampler.
ROUNDS = {"dynamic_sampling_max_rounds": 30, **PAPER}
CARRY = {**ROUNDS, "dynamic_sampling_surplus": "carry"}
SERVER = {"use_vllm": True, "vllm_mode": "server"}

MEMORY = {**CARRY, "dynamic_sampling_memory": True}
METHODS = {
    "GRPO, one step": Method(GRPO, GRPOConfig, {}, num_steps=1),
    "GRPO": Method(GRPO, GRPOConfig, {}),
    "GRPO, Clip-Higher": Method(GRPO, GRPOConfig, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "full batch again": Method(DAPO, DAPOConfig, {**ROUNDS, "batch_multiplier": 1.0}),
    "ours": Method(DAPO, DAPOConfig, ROUNDS),
    "ours, carry": Method(DAPO, DAPOConfig, CARRY),
    "ours, carry, memory": Method(DAPO, DAPOConfig, MEMORY),
    "ours, screened": Method(DAPO, DAPOConfig, {**ROUNDS, "dynamic_sampling_screen": "3"}),
    "ours, auto": Method(DAPO, DAPOConfig, {**ROUNDS, "dynamic_sampling_screen": "auto"}),
    "ours, carry, memory, screened": Method(DAPO, DAPOConfig, {**MEMORY, "dynamic_sampling_screen": "3"}),
    "ours, carry, memory, auto": Method(DAPO, DAPOConfig, {**MEMORY, "dynamic_sampling_screen": "auto"}),
    "ours, carry, server": Method(DAPO, DAPOConfig, {**CARRY, **SERVER}),
    "ours, carry, ahead": Method(DAPO, DAPOConfig, {**CARRY, **SERVER, "rollouts_ahead": 1}),
}
OURS = tuple(method for method in METHODS if method.startswith("ours"))


class Promise(NamedTuple):
    """`method` over `other` in tokens or seconds, of the medians: at most `bound`."""

    task: str
    method: str
    other: str
    what: str
    bound: float


PROMISES = (
    Promise("one in ten", "ours, carry, memory", "full batch again", "tokens", 0.5),
    Promise("one in ten", "ours, carry, memory, auto", "GRPO", "tokens", 0.4),
    Promise("one in ten", "ours", "GRPO", "seconds", 1.0),
    Promise("one in ten", "ours", "GRPO, one step", "seconds", 1.0),
    Promise("quickstart", "ours", "GRPO", "seconds", 1.0),
    Promise("quickstart", "ours", "GRPO, one step", "seconds", 1.0),
)


class Job(NamedTuple):
    """One run, and everything that decides its outcome."""

    task: str
    method: str
    seed: int
    target: float
    max_seconds: float
    settings: dict

    @property
    def key(self):
        return self.task, self.method, self.seed

    @property
    def name(self):
        return file_name(self.task, self.method, self.seed)


# ---- One run ----


def settings_of(method, args, learning_rate):
    """What decides a run, but for what the method is called after."""
    return sized(args.num_prompts, METHODS[method].num_steps or args.num_steps, learning_rate)


def sized(num_prompts, num_steps, learning_rate):
    """Settings of rollouts with so many prompts and optimizer steps."""
    return {
        "num_generations": NUM_GENERATIONS,
        "per_device_train_batch_size": num_prompts * NUM_GENERATIONS // num_steps,
        "steps_per_generation": num_steps,
        "max_completion_length": 8,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2 * num_steps,
    }


def held_out(problems):
    """Few enough to be asked after every rollout; of every family its share."""
    return problems.held_out[::3]


def prompts(problems, shares, seed):
    """Training prompts without repetition, in random order; a family is drawn as often as its share says."""
    draw = random.Random(seed)
    chosen = []
    for (name, family), share in zip(problems.train.items(), shares, strict=True):
        chosen += [(name, problem) for problem in draw.sample(family, min(len(family), round(share * NUM_PROMPTS)))]
    draw.shuffle(chosen)
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": problem.text}], "solution": problem.answer, "source": name}
            for name, problem in chosen
        ]
    )


def train(job, checkpoint, output_dir, max_steps=1_000_000, every=1, method=None):
    """Trains until the target or a limit; returns the curve, the mean acceptance rate, and what rare problems gain."""
    method = method or METHODS[job.method]
    problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    at_first = right_probabilities(model, tokenizer, held_out(problems))
    config = method.config(
        output_dir=str(output_dir),
        seed=job.seed,
        max_steps=max_steps,
        logging_steps=job.settings["steps_per_generation"],
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **job.settings,
        **method.settings,
    )
    with server(Model, path=str(checkpoint), seed=job.seed) as clients:  # for methods that ask one
        trainer = method.trainer(
            model,
            exact_answer_reward,
            config,
            train_dataset=prompts(problems, TASKS[job.task].shares, job.seed),
            processing_class=tokenizer,
        )
        clock = Clock(
            job,
            lambda: accuracy(model, tokenizer, held_out(problems)),
            lambda: trainer.num_tokens,
            lambda: sum(client.cpu_seconds() for client in clients),
            every,
        )
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    rates = [1 - entry["frac_reward_zero_std"] for entry in trainer.state.log_history if "reward" in entry]
    is_rare = (at_first > RARE[0]) & (at_first < RARE[1])
    return {
        "curve": clock.curve,
        "acceptance": statistics.mean(rates) if rates else math.nan,
        "rare at first": at_first[is_rare].mean().item(),
        "rare": right_probabilities(model, tokenizer, held_out(problems))[is_rare].mean().item(),
    }


def run(job, checkpoint):
    """`train`, leaving no file behind."""
    with tempfile.TemporaryDirectory() as folder:
        return train(job, checkpoint, folder)


def make_checkpoint(folder, num_steps):
    """The quickstart's model after its warm-up; returns its accuracy. Kept for the next time."""
    path = folder / f"checkpoint-{num_steps}-{fingerprint(make_checkpoint)[:8]}"
    if path.exists():
        return path, json.loads((path / "accuracy.json").read_text())
    quiet()
    problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
    model = build_model(tokenizer, CHECKPOINT_SEED)
    warm_up(model, tokenizer, problems, num_steps)
    partial = folder / "checkpoint.partial"
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    start = accuracy(model, tokenizer, held_out(problems))
    (partial / "accuracy.json").write_text(json.dumps(start))
    partial.rename(path)
    return path, start


# ---- All runs ----


def describe(job, result):
    last = result["curve"][-1]
    return (
        f"{job.task}, {job.method}, seed {job.seed}: {last['accuracy']:.1%} after {last['tokens']:,} tokens and "
        f"{last['seconds']:.0f} s"
    )


def cost(result, target, what):
    """Tokens or seconds at the first accuracy that reaches the target; infinite if none does."""
    return next((point[what] for point in result["curve"] if point["accuracy"] >= target), math.inf)


def spread(costs, digits=0):
    """Median, lowest and highest as text; a cost that no run paid is `-`."""
    low, middle, high = (
        "-" if math.isinf(value) else f"{value:,.{digits}f}"
        for value in (min(costs), statistics.median_low(costs), max(costs))
    )
    return f"{middle} ({low} to {high})"


def ratio(mine, theirs, spent):
    """Ours over theirs, of medians, and what to print; theirs may be a bound where their median never got there."""
    mine, median = statistics.median_low(mine), statistics.median_low(theirs)
    if math.isinf(mine):
        return math.inf, "not reached"
    if math.isinf(median):
        bound = mine / statistics.median_low(spent)
        return bound, f"below {bound:.2f}"
    return mine / median, f"{mine / median:.2f}"


def of_rare(runs):
    """Accuracy on rare problems before and after, in the median; nothing where it was not asked for."""
    if "rare" not in runs[0]:
        return ""
    return " to ".join(f"{statistics.median(run[when] for run in runs):.2%}" for when in ("rare at first", "rare"))


def report(console, results, seeds, targets, methods=tuple(METHODS)):
    """A table a task, then ours beside the others as ratios, then what was promised."""
    costs = {}
    for task, target in targets.items():
        title = f"{task}: to {target:.1%} held out, {len(seeds)} seeds, median (lowest to highest)"
        table = Table("method", title=title)
        for column in ("reached", "generated tokens", "seconds", "acceptance", "rare"):
            table.add_column(column, justify="right")
        for method in methods:
            runs = [results[task, method, seed] for seed in seeds]
            paid = {what: [cost(run, target, what) for run in runs] for what in ("tokens", "seconds")}
            spent = {what: [run["curve"][-1][what] for run in runs] for what in paid}
            costs[task, method] = paid, spent
            table.add_row(
                method,
                f"{sum(map(math.isfinite, paid['tokens']))} of {len(seeds)}",
                spread(paid["tokens"]),
                spread(paid["seconds"], 1),
                f"{statistics.mean(run['acceptance'] for run in runs):.0%}",
                of_rare(runs),
            )
        console.print(table)

    def compared(task, method, other, what):
        (paid, _), (their_paid, their_spent) = costs[task, method], costs[task, other]
        return ratio(paid[what], their_paid[what], their_spent[what])

    table = Table("of the medians", title="Ours over the others")
    for column in ("tokens", "seconds"):
        table.add_column(column, justify="right")
    for task in targets:
        for other in [method for method in methods if method not in OURS]:
            for method in [method for method in methods if method in OURS]:
                cells = [compared(task, method, other, what)[1] for what in ("tokens", "seconds")]
                table.add_row(f"{task}: {method} / {other}", *cells)
    console.print(table)
    table = Table("promise", "measured", "kept", title="Promises")
    for promise in PROMISES:
        if promise.task in targets and {promise.method, promise.other} <= set(methods):
            value, text = compared(*promise[:4])
            what = f"{promise.task}: {promise.what}, {promise.method} / {promise.other}, at most {promise.bound:g}"
            table.add_row(what, text, "yes" if value <= promise.bound else "NO")
    if table.row_count:
        console.print(table)


def plot(results, seeds, targets, methods, path):
    """What every run paid, a row a method, and the medians; a run that never got there is hollow, where it ended."""
    figure = Figure(figsize=(12, 3.2 * len(targets)), layout="constrained")
    panels = figure.subplots(len(targets), 2, squeeze=False, sharey=True)
    for row, (task, target) in zip(panels, targets.items(), strict=True):
        for axes, (what, unit) in zip(row, (("tokens", "generated tokens"), ("seconds", "CPU seconds")), strict=True):
            for i, method in enumerate(methods):
                runs = [results[task, method, seed] for seed in seeds]
                costs = [cost(run, target, what) for run in runs]
                for run, paid in zip(runs, costs, strict=True):
                    reached = math.isfinite(paid)
                    fill = {} if reached else {"markerfacecolor": "none"}
                    axes.plot(paid if reached else run["curve"][-1][what], i, "o", color=f"C{i}", alpha=0.6, **fill)
                if math.isfinite(median := statistics.median_low(costs)):
                    axes.plot(median, i, "|", color=f"C{i}", markersize=20, markeredgewidth=2)
            axes.set(title=f"{task}: {unit} to {target:.1%}", xlim=(0, None), yticks=range(len(methods)))
            axes.set_yticklabels(methods)
            axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()  # of all panels, which share it
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10 seeds, twice the gain, 300 seconds a run")
    parser.add_argument("--task", choices=list(TASKS), help="only this task (default: both)")
    parser.add_argument(
        "--method", action="append", choices=list(METHODS), help="only this method; may be given again (default: all)"
    )
    parser.add_argument("--num-seeds", type=int, help="runs a method, seeds 0, 1, ... (default: 5)")
    parser.add_argument("--max-seconds", type=float, help="CPU seconds after which a run is given up (default: 75)")
    parser.add_argument("--learning-rate", type=float, help="of all methods (default: the task's)")
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts a rollout batch (default: %(default)s)")
    parser.add_argument("--num-steps", type=int, default=4, help="optimizer steps a rollout (default: %(default)s)")
    parser.add_argument("--num-warm-up-steps", type=int, default=250, help="of the checkpoint (default: %(default)s)")
    parser.add_argument("--num-processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("outputs/time_to_accuracy"),
        help="a file a run; a benchmark that was interrupted goes on from them (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, help="draw the runs here, as a PNG")
    args = parser.parse_args(argv)
    for name in ("num_seeds", "max_seconds", "learning_rate", "num_prompts", "num_steps", "num_processes"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if args.num_prompts * NUM_GENERATIONS % args.num_steps:
        parser.error(
            f"--num-prompts {args.num_prompts} makes {args.num_prompts * NUM_GENERATIONS} completions, which do not "
            f"divide into --num-steps {args.num_steps}"
        )
    args.num_seeds = args.num_seeds or (10 if args.full else 5)
    args.max_seconds = args.max_seconds or (300.0 if args.full else 75.0)
    return args


def main(argv=None):
    args = parse_args(argv)
    console = Console(width=130)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint, start = make_checkpoint(args.output_dir, args.num_warm_up_steps)
    tasks = [args.task] if args.task else list(TASKS)
    targets = {task: start + TASKS[task].gain * (2 if args.full else 1) for task in tasks}
    rates = {task: args.learning_rate or TASKS[task].learning_rate for task in tasks}
    console.print(
        f"{args.num_prompts} prompts x {NUM_GENERATIONS} completions and {args.num_steps} optimizer steps a rollout. "
        f"The checkpoint has {start:.1%} held out; a run is given up after {args.max_seconds:g} CPU seconds.",
        highlight=False,
        soft_wrap=True,
    )
    for task in tasks:
        shares = zip((family.name for family in FAMILIES), TASKS[task].shares, strict=True)
        mix = ", ".join(f"{share:.0%} {name}" for name, share in shares)
        console.print(
            f"{task}, {NUM_PROMPTS:,} prompts: {mix}; learning rate {rates[task]:g}; target {targets[task]:.1%}",
            highlight=False,
            soft_wrap=True,
        )
    seeds, methods = range(args.num_seeds), args.method or list(METHODS)
    jobs = [
        Job(task, method, seed, targets[task], args.max_seconds, settings_of(method, args, rates[task]))
        for task in tasks
        for seed in seeds
        for method in methods
    ]
    results = run_all(run, jobs, checkpoint, args.output_dir, args.num_processes, console, describe)
    report(console, results, seeds, targets, methods)
    if args.plot:
        plot(results, seeds, targets, methods, args.plot)


if __name__ == "__main__":
    main()
