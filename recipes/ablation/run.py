# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The ladder of the paper's Table 1 on a CPU: what each technique adds to GRPO, on sums with a working.

    python recipes/ablation/run.py                      # 6 rungs x 5 seeds, 25 minutes on two cores
    python recipes/ablation/run.py --num-seeds 1 --num-rollouts 5

Every run starts from the same checkpoint, a small model after a warm-up on faulty examples, and takes the same number
of optimizer steps. A rung keeps what the rungs before it added. Dynamic sampling generates more tokens for its steps,
so GRPO then runs once more, until it has generated as many. The command writes ladder.csv, with a line per run, and
ladder.png. An interrupted ladder resumes where it stopped. The task is described in task.py. Intervals are Student's,
over seeds.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import task
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, PrinterCallback

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import Problems, build_model, build_tokenizer, exact_answer, warm_up
from trl_dapo.evaluation import evaluate


sys.path.append(str(Path(__file__).parents[2]))  # the folder of `benchmarks`

from benchmarks.frame.kept import write_rows
from benchmarks.frame.measures import mean_of
from benchmarks.frame.options import read_options
from benchmarks.frame.runs import Job, fingerprint, quiet, run_all
from benchmarks.frame.tables import print_table, say
from benchmarks.frame.trainers import PLAIN, rollouts_of
from benchmarks.frame.verdicts import interval


LADDER = "ladder"
SEED = 42  # of the checkpoint and of the held-out problems
NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS = 16, 8, 4  # of a rollout: prompts, completions per prompt, optimizer steps
LEARNING_RATE = 1e-4

# What each rung adds. `DAPOTrainer` leaves generation to `GRPOTrainer` without dynamic sampling, and the loss to it
# unless it is "dapo".
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
    "entropy": ("Entropy", "nats per token"),
    "completions/mean_length": ("Completion length", "tokens"),
    "reward": ("Reward, all sampled", "mean"),
}


def settings_of(rung):
    """Return what a rung and those before it add."""
    if rung == CONTROL:
        return RUNGS["GRPO"]
    names = list(RUNGS)
    merged = {}
    for name in names[: names.index(rung) + 1]:
        merged.update(RUNGS[name])
    return merged


# ---- One run ----


def make_checkpoint(folder, num_steps):
    """Return the quickstart's model after its warm-up. It is kept for the next call."""
    path = folder / f"checkpoint-{num_steps}-{fingerprint(make_checkpoint)[:8]}"
    if not path.exists():
        quiet()
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, SEED)
        warm_up(model, tokenizer, Problems(SEED), num_steps)
        # Learn the working after the answer, at a learning rate that does not change the answers.
        warm_up(model, tokenizer, task.WorkedProblems(SEED), num_steps, batch_size=64, learning_rate=7e-4)
        partial = folder / "checkpoint.partial"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(path)
    return path


def train(job, checkpoint, folder):
    """Train and save the model; return the log, with an entry per rollout, and the CPU seconds."""
    tokenizer = build_tokenizer()
    config = DAPOConfig(
        output_dir=str(folder),
        seed=job.seed,
        max_steps=job.num_rollouts * NUM_STEPS,
        dynamic_sampling_mode="paper",
        max_completion_length=task.MAX_LENGTH,
        learning_rate=LEARNING_RATE,
        **PLAIN,
        **rollouts_of(NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS),
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
    """
    Return accuracy, length and share of cut-off completions on held-out problems, 4 completions each at temperature 1.
    """
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


def run(job, checkpoint, folder):
    """Run a job and return its figures."""
    log, seconds = train(job, checkpoint, folder)
    held_out = measure(folder / "trained", folder, job.seed)
    num_rows = NUM_PROMPTS * NUM_GENERATIONS
    tokens = [
        entry["completions/mean_length"] * entry.get("dynamic_sampling/completions_generated", num_rows)
        for entry in log
    ]
    late = log[-max(1, len(log) // 5) :]
    return {
        **held_out,
        "entropy": mean_of(late, "entropy"),
        "clip_ratio": mean_of(log, "clip_ratio/region_mean"),
        "spread": 1 - mean_of(log, "frac_reward_zero_std"),
        "tokens": round(sum(tokens)),
        "cpu_seconds": seconds,
        "curves": {name: [entry.get(name, float("nan")) for entry in log] for name in CURVES},
    }


# ---- The ladder ----


def describe(job, result):
    return (
        f"{job.arm}, seed {job.seed}: {result['accuracy']:.1%} correct, {result['truncated']:.1%} cut off, "
        f"{result['cpu_seconds']:.0f} CPU seconds"
    )


def climb(seeds, num_rollouts, *how):
    """Run the ladder, and then GRPO until it has generated as many tokens as the last rung."""

    def climb_on(rungs, num):
        # All rungs of a seed before the next seed, so that an interrupted ladder has whole seeds.
        jobs = [Job(LADDER, rung, seed, settings_of(rung), num_rollouts=num) for seed in seeds for rung in rungs]
        return run_all(run, jobs, *how, describe=describe)

    results = climb_on(RUNGS, num_rollouts)
    first, *_, last = (statistics.mean(results[LADDER, rung, seed]["tokens"] for seed in seeds) for rung in RUNGS)
    return results | climb_on([CONTROL], round(num_rollouts * last / first))


def write_csv(results, path):
    keys = sorted(results, key=lambda key: (ROWS.index(key[1]), key[2]))
    rows = [[*key[1:], *(results[key][name] for name in FIGURES)] for key in keys]
    write_rows(path, ["rung", "seed", *FIGURES], rows)


def report(results, seeds, start):
    title = (
        f"Held-out problems, {len(seeds)} seeds, mean and 95% interval; spread: share of groups whose rewards differ"
    )
    columns = "rung", "accuracy", "step", "cut off", "length", "entropy", "clipped", "spread", "tokens"
    rows = [["warm-up", f"{start['accuracy']:.1%}", "", f"{start['truncated']:.1%}", f"{start['length']:.1f}"]]
    above = None
    for rung in ROWS:
        values = {name: [results[LADDER, rung, seed][name] for seed in seeds] for name in FIGURES}
        # Compared with the same seed in the row above: what the technique adds, and what the control lacks.
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
        rows.append([rung, *cells])
    print_table(title, columns, rows)


def plot(results, seeds, start, path):
    """Draw accuracy by rung with intervals, and the curves as means over seeds."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    ladder, *others = figure.subplots(2, 2).flat
    means, halves = zip(
        *(interval([results[LADDER, rung, seed]["accuracy"] for seed in seeds]) for rung in ROWS), strict=True
    )
    ladder.errorbar(means, range(len(ROWS)), xerr=np.nan_to_num(halves), fmt="o", capsize=4)
    ladder.axvline(start["accuracy"], color="black", linewidth=0.8, linestyle="--", label="warm-up")
    ladder.set(title="Held-out accuracy", xlabel="mean and 95% interval over seeds")
    ladder.set_yticks(range(len(ROWS)), ROWS)
    ladder.invert_yaxis()
    ladder.legend()
    for axes, (name, (title, unit)) in zip(others, CURVES.items(), strict=True):
        for rung in RUNGS:
            axes.plot(np.mean([results[LADDER, rung, seed]["curves"][name] for seed in seeds], axis=0), label=rung)
        axes.set(title=title, xlabel="rollout", ylabel=unit)
    for axes in (ladder, *others):
        axes.grid(alpha=0.3)
    figure.legend(*others[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RUNGS))
    figure.savefig(path, dpi=120)


def main(num_seeds=5, num_rollouts=60, num_warm_up_steps=250, num_processes=2, output_dir=Path("outputs/ablation")):
    checkpoint = make_checkpoint(output_dir, num_warm_up_steps)
    with tempfile.TemporaryDirectory() as folder:
        quiet()
        start = measure(checkpoint, Path(folder), SEED)
    seeds = range(num_seeds)
    results = climb(seeds, num_rollouts, checkpoint, output_dir, num_processes)
    write_csv(results, output_dir / "ladder.csv")
    report(results, seeds, start)
    plot(results, seeds, start, output_dir / "ladder.png")
    say(f"Written: {output_dir / 'ladder.csv'}, {output_dir / 'ladder.png'}")


if __name__ == "__main__":
    main(**read_options(main, "python recipes/ablation/run.py", __doc__))
