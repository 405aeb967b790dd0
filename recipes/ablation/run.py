# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The paper's ladder (Table 1) on a CPU: what each technique adds to GRPO, on sums with a working.

    python recipes/ablation/run.py                      # 6 rungs x 5 seeds, 25 minutes on two cores
    python recipes/ablation/run.py --num-seeds 1 --num-rollouts 5

Every run starts from one checkpoint, a small model after a warm-up on a teacher who slips, and makes the same number
of optimizer steps. A rung keeps what the rungs before it added. Since dynamic sampling generates more for its steps,
GRPO then runs once more, until it has generated as much. Writes ladder.csv, a line a run, and ladder.png. A ladder
that was interrupted goes on where it stopped. The task is described in task.py. Intervals are Student's, over seeds.
"""

import argparse
import csv
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import task
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoModelForCausalLM, PrinterCallback

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import Problems, build_model, build_tokenizer, exact_answer, warm_up
from trl_dapo.evaluation import evaluate


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where the runner of many runs is

from runs import fingerprint, interval, quiet, refuse_below_one, run_all


SEED = 42  # of the checkpoint and of what is held out
NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS = 16, 8, 4  # a rollout: prompts, completions a prompt, optimizer steps
LEARNING_RATE = 1e-4

# What each rung adds. Without dynamic sampling, DAPOTrainer leaves generation to GRPOTrainer, and any loss but "dapo".
RUNGS = {
    "GRPO": {"loss_type": "grpo", "epsilon_high": 0.2, "use_dynamic_sampling": False},
    "+ overlong filtering": {"overlong_filtering": True},
    "+ Clip-Higher": {"epsilon_high": 0.28},
    "+ soft overlong punishment": {"overlong_buffer_length": 5},
    "+ token-level loss": {"loss_type": "dapo"},
    "+ dynamic sampling": {"use_dynamic_sampling": True},
}
CONTROL = "GRPO with as many tokens"
ROWS = (*RUNGS, CONTROL)
FIGURES = ("accuracy", "truncated", "length", "entropy", "clip_ratio", "spread", "tokens", "cpu_seconds")
CURVES = {
    "entropy": ("Entropy", "nats a token"),
    "completions/mean_length": ("Completion length", "tokens"),
    "reward": ("Reward, all sampled", "mean"),
}


class Job(NamedTuple):
    """One run, and everything that decides its outcome."""

    rung: str
    seed: int
    num_rollouts: int
    settings: dict

    @property
    def key(self):
        return self.rung, self.seed

    @property
    def name(self):
        return f"rung{ROWS.index(self.rung)}-seed{self.seed}"


def settings_of(rung):
    """What this rung and those before it add."""
    if rung == CONTROL:
        return RUNGS["GRPO"]
    names = list(RUNGS)
    merged = {}
    for name in names[: names.index(rung) + 1]:
        merged.update(RUNGS[name])
    return merged


# ---- One run ----


def make_checkpoint(folder, num_steps):
    """The quickstart's model after its warm-up; kept for the next time."""
    path = folder / f"checkpoint-{num_steps}-{fingerprint(make_checkpoint)[:8]}"
    if not path.exists():
        quiet()
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, SEED)
        warm_up(model, tokenizer, Problems(SEED), num_steps)
        # The working behind the answer, at a rate that leaves the answers alone.
        warm_up(model, tokenizer, task.WorkedProblems(SEED), num_steps, batch_size=64, learning_rate=7e-4)
        partial = folder / "checkpoint.partial"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(path)
    return path


def train(job, checkpoint, folder):
    """Trains and saves the model; returns the log, an entry a rollout, and the CPU seconds."""
    tokenizer = build_tokenizer()
    num_rows = NUM_PROMPTS * NUM_GENERATIONS
    config = DAPOConfig(
        output_dir=str(folder),
        seed=job.seed,
        max_steps=job.num_rollouts * NUM_STEPS,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=num_rows // NUM_STEPS,
        steps_per_generation=NUM_STEPS,
        dynamic_sampling_mode="paper",
        max_completion_length=task.MAX_LENGTH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2 * NUM_STEPS,
        logging_steps=NUM_STEPS,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **job.settings,
    )
    trainer = DAPOTrainer(
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        task.exact,
        config,
        train_dataset=task.to_dataset(task.WorkedProblems(SEED).draw(4096)),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    trainer.save_model(folder / "trained")
    tokenizer.save_pretrained(folder / "trained")
    return [entry for entry in trainer.state.log_history if "reward" in entry], seconds


def measure(checkpoint, folder, seed):
    """Accuracy, length and share of cut-off completions on problems held out, 4 samples each at temperature 1."""
    summary = evaluate(
        str(checkpoint),
        task.to_dataset(task.WorkedProblems(SEED).held_out[::2]),
        folder / "eval",
        k=4,
        temperature=1.0,
        top_p=1.0,
        max_completion_length=task.MAX_LENGTH,
        seed=seed,
        scorer=exact_answer,
        batch_size=1000,
        progress=False,
    )
    return {
        "accuracy": summary["metrics"]["avg@4"]["mean"],
        "truncated": summary["truncated"],
        "length": summary["mean_length"],
    }


def average(log, name):
    """Mean over the rollouts that have the figure: one without a group to train on has no entropy."""
    values = [entry[name] for entry in log if name in entry]
    return statistics.mean(values) if values else math.nan


def run(job, checkpoint):
    """One run and its figures."""
    with tempfile.TemporaryDirectory() as folder:
        log, seconds = train(job, checkpoint, Path(folder))
        held_out = measure(Path(folder) / "trained", Path(folder), job.seed)
    num_rows = NUM_PROMPTS * NUM_GENERATIONS
    tokens = [
        entry["completions/mean_length"] * entry.get("dynamic_sampling/completions_generated", num_rows)
        for entry in log
    ]
    late = log[-max(1, len(log) // 5) :]
    return {
        **held_out,
        "entropy": average(late, "entropy"),
        "clip_ratio": average(log, "clip_ratio/region_mean"),
        "spread": 1 - average(log, "frac_reward_zero_std"),
        "tokens": round(sum(tokens)),
        "cpu_seconds": seconds,
        "curves": {name: [entry.get(name, math.nan) for entry in log] for name in CURVES},
    }


# ---- The ladder ----


def describe(job, result):
    return (
        f"{job.rung}, seed {job.seed}: {result['accuracy']:.1%} right, {result['truncated']:.1%} cut off, "
        f"{result['cpu_seconds']:.0f} CPU seconds"
    )


def climb(seeds, num_rollouts, *how):
    """Runs the ladder, then GRPO until it has generated as many tokens as the last rung."""
    # Rung by rung within a seed, so that an interrupted ladder has whole seeds.
    jobs = [Job(rung, seed, num_rollouts, settings_of(rung)) for seed in seeds for rung in RUNGS]
    results = run_all(run, jobs, *how, describe)
    first, *_, last = (statistics.mean(results[rung, seed]["tokens"] for seed in seeds) for rung in RUNGS)
    longer = round(num_rollouts * last / first)
    jobs = [Job(CONTROL, seed, longer, settings_of(CONTROL)) for seed in seeds]
    return results | run_all(run, jobs, *how, describe)


def write_csv(results, path):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rung", "seed", *FIGURES])
        for rung, seed in sorted(results, key=lambda key: (ROWS.index(key[0]), key[1])):
            writer.writerow([rung, seed, *(results[rung, seed][name] for name in FIGURES)])


def print_table(results, seeds, start, console):
    table = Table(
        Column("rung", no_wrap=True),
        title=f"Held out, {len(seeds)} seeds, mean and 95 % interval; spread: groups whose rewards differ",
    )
    for column in ("accuracy", "step", "cut off", "length", "entropy", "clipped", "spread", "tokens"):
        table.add_column(column, justify="right")
    table.add_row("warm-up", f"{start['accuracy']:.1%}", "", f"{start['truncated']:.1%}", f"{start['length']:.1f}")
    above = None
    for rung in ROWS:
        values = {name: [results[rung, seed][name] for seed in seeds] for name in FIGURES}
        # The same seed, one row above: what the technique adds, and what the control lacks.
        step = [] if above is None else [a - b for a, b in zip(values["accuracy"], above, strict=True)]
        above = values["accuracy"]
        cells = [
            "{:.1%} ± {:.1%}".format(*interval(values["accuracy"])),
            "{:+.1%} ± {:.1%}".format(*interval(step)) if step else "",
            f"{statistics.mean(values['truncated']):.1%}",
            "{:.1f} ± {:.1f}".format(*interval(values["length"])),
            "{:.2f} ± {:.2f}".format(*interval(values["entropy"])),
            f"{statistics.mean(values['clip_ratio']):.2%}",
            f"{statistics.mean(values['spread']):.0%}",
            f"{statistics.mean(values['tokens']):,.0f}",
        ]
        table.add_row(rung, *cells)
    console.print(table)


def plot(results, seeds, start, path):
    """Accuracy by rung with intervals, and the curves, means over seeds."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    ladder, *others = figure.subplots(2, 2).flat
    means, halves = zip(*(interval([results[rung, seed]["accuracy"] for seed in seeds]) for rung in ROWS), strict=True)
    ladder.errorbar(means, range(len(ROWS)), xerr=np.nan_to_num(halves), fmt="o", capsize=4)
    ladder.axvline(start["accuracy"], color="black", linewidth=0.8, linestyle="--", label="warm-up")
    ladder.set(title="Held-out accuracy", xlabel="mean and 95 % interval over seeds")
    ladder.set_yticks(range(len(ROWS)), ROWS)
    ladder.invert_yaxis()
    ladder.legend()
    for axes, (name, (title, unit)) in zip(others, CURVES.items(), strict=True):
        for rung in RUNGS:
            axes.plot(np.mean([results[rung, seed]["curves"][name] for seed in seeds], axis=0), label=rung)
        axes.set(title=title, xlabel="rollout", ylabel=unit)
    for axes in (ladder, *others):
        axes.grid(alpha=0.3)
    figure.legend(*others[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RUNGS))
    figure.savefig(path, dpi=120)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seeds", type=int, default=5, help="seeds 0, 1, ... (default: %(default)s)")
    parser.add_argument("--num-rollouts", type=int, default=60, help="of every run (default: %(default)s)")
    parser.add_argument(
        "--num-warm-up-steps",
        type=int,
        default=250,
        help="of the quickstart, and as many with workings (default: %(default)s)",
    )
    parser.add_argument("--num-processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/ablation"), help="where to write (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    refuse_below_one(parser, args, "num_seeds", "num_rollouts", "num_warm_up_steps", "num_processes")
    return args


def main(argv=None):
    args = parse_args(argv)
    console = Console(width=140)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(args.output_dir, args.num_warm_up_steps)
    with tempfile.TemporaryDirectory() as folder:
        quiet()
        start = measure(checkpoint, Path(folder), SEED)
    seeds = range(args.num_seeds)
    results = climb(seeds, args.num_rollouts, checkpoint, args.output_dir, args.num_processes, console)
    write_csv(results, args.output_dir / "ladder.csv")
    print_table(results, seeds, start, console)
    plot(results, seeds, start, args.output_dir / "ladder.png")
    console.print(f"Written: {args.output_dir / 'ladder.csv'}, {args.output_dir / 'ladder.png'}")


if __name__ == "__main__":
    main()
