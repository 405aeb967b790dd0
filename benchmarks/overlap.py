# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
One rollout ahead beside taking turns: wall-clock seconds of a rollout, and what is learned.

    python benchmarks/overlap.py              # about 25 minutes on two cores
    python benchmarks/overlap.py --full       # 10 seeds

Both talk to a stand-in for vLLM's server in a process of its own, through TRL's engine in server mode.

Seconds: the stand-in answers every request after a set time and the update is held to a set time, as if both ran on
GPUs of their own: what is left is what the trainer does in between. Only the ratio r of the two times is changed. The
serial rest is what a rollout takes in turns beyond the two times, with the rewards, the hand-over, the push of the
weights and the log-probabilities of all rows.

Learning: the quickstart's model and problems as in `time_to_accuracy.py`, the same number of rollouts, in turns and
ahead; the stand-in samples with the weights that it was given. Accuracy is read off the logits on held-out problems,
so it has no sampling noise. The interval is Student's, of the differences of equal seeds.
"""

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from runs import file_name, quiet, run_all
from stand_in import Model, Script, server
from time_to_accuracy import CHECKPOINT_SEED, TASKS, accuracy, held_out, make_checkpoint, prompts
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import Problems, build_tokenizer, exact_answer_reward
from trl_dapo.settings.sampling_defaults import PAPER


RATIOS = (0.5, 1.0, 2.0, 4.0)
WAYS = ("in turns", "ahead")
STUDENT = {3: 4.303, 5: 2.776, 10: 2.262}  # 97.5 % quantile of its t, by the number of values
MOST_OVER_LONGER, LEAST_SPEED_UP = 1.10, 1.8  # promises


class Job(NamedTuple):
    """One run of the second part."""

    way: str
    seed: int
    num_rollouts: int

    @property
    def key(self):
        return self.way, self.seed

    @property
    def name(self):
        return file_name(self.way, self.seed, self.num_rollouts)


def config(folder, way, **settings):
    return DAPOConfig(
        str(folder),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        num_generations=8,
        max_completion_length=8,
        lr_scheduler_type="constant_with_warmup",
        use_vllm=True,
        vllm_mode="server",
        rollouts_ahead=0 if way == "in turns" else 1,
        **PAPER | {"dynamic_sampling_surplus": "carry"},
        dynamic_sampling_max_rounds=30,
        **settings,
    )


# ---- Seconds ----


class Timed(DAPOTrainer):
    """Notes when each rollout's update begins."""

    def _generate_and_score_completions(self, inputs):
        rollouts = super()._generate_and_score_completions(inputs)
        self.update_began = time.perf_counter()
        return rollouts


class HoldUpdate(TrainerCallback):
    """Lets every update take a set time, and notes when it has ended."""

    def __init__(self, trainer, seconds):
        self.trainer, self.seconds, self.ended, self.took = trainer, seconds, [], []

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(max(self.seconds - (time.perf_counter() - self.trainer.update_began), 0.0))
        self.ended.append(time.perf_counter())
        self.took.append(self.ended[-1] - self.trainer.update_began)


def rewarded(completions, **kwargs):
    return [float(completion[0]["content"] == "1") for completion in completions]


def time_rollouts(checkpoint, way, generate_seconds, update_seconds, num_rollouts):
    """Median seconds of a rollout once it is under way, of its update, and that the trainer waited."""
    problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    end = [tokenizer.eos_token_id]
    answers = {name: tokenizer(text)["input_ids"] + end for name, text in (("right", "1"), ("wrong", "2"))}
    with tempfile.TemporaryDirectory() as folder, server(Script, delay=generate_seconds, **answers):
        args = config(
            folder,
            way,
            max_steps=num_rollouts + 1,
            per_device_train_batch_size=32,
            steps_per_generation=4,
            gradient_accumulation_steps=4,
            logging_steps=1,
            batch_multiplier=1.0,
        )
        dataset = prompts(problems, TASKS["quickstart"].shares, 0)
        trainer = Timed(model, rewarded, args, train_dataset=dataset, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        hold = HoldUpdate(trainer, update_seconds)
        trainer.add_callback(hold)
        trainer.train()
    walls = [after - before for before, after in zip(hold.ended[:-1], hold.ended[1:], strict=True)]
    waits = [entry["timeline/wait_seconds"] for entry in trainer.state.log_history[1:-1]]
    return statistics.median(walls), statistics.median(hold.took), statistics.median(waits)


def report_seconds(console, checkpoint, update_seconds, num_rollouts):
    title = f"Seconds of a rollout, medians of {num_rollouts}; an update takes {update_seconds:g} s"
    table = Table("r", "in turns", "ahead", "longer of the two", "serial rest", title=title)
    for column in ("ahead over the longer and the rest", "times as fast"):
        table.add_column(column, justify="right")
    kept = True
    for ratio in RATIOS:
        settings = ratio * update_seconds, update_seconds, num_rollouts
        took = {way: time_rollouts(checkpoint, way, *settings) for way in WAYS}
        (turns, update, _), (ahead, _, _) = (took[way] for way in WAYS)
        longer = max(ratio * update_seconds, update)
        rest = turns - ratio * update_seconds - update
        over, speed_up = (ahead - rest) / longer, turns / ahead
        kept &= over <= MOST_OVER_LONGER and (ratio != 1.0 or speed_up >= LEAST_SPEED_UP)
        cells = (turns, ahead, longer, rest)
        table.add_row(f"{ratio:g}", *(f"{cell:.2f}" for cell in cells), f"{over:.3f}", f"{speed_up:.2f}")
    console.print(table)
    promise = f"at most {MOST_OVER_LONGER:g} times the longer plus the rest, {LEAST_SPEED_UP:g} times as fast at r = 1"
    console.print(f"Promise: {promise}: {'kept' if kept else 'NOT KEPT'}", highlight=False, soft_wrap=True)


# ---- Learning ----


def learn(job, checkpoint):
    """Accuracy at every tenth rollout; shares of rows by age, clipped tokens, tokens sampled."""
    problems, tokenizer = Problems(CHECKPOINT_SEED), build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    num_steps, curve = 4, []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % (10 * num_steps) == 0:
                curve.append(accuracy(model, tokenizer, held_out(problems)))

    with tempfile.TemporaryDirectory() as folder, server(Model, path=str(checkpoint), seed=job.seed):
        args = config(
            folder,
            job.way,
            seed=job.seed,
            max_steps=num_steps * job.num_rollouts,
            logging_steps=num_steps,
            per_device_train_batch_size=32,
            steps_per_generation=num_steps,
            learning_rate=TASKS["quickstart"].learning_rate,
            warmup_steps=2 * num_steps,
        )
        dataset = prompts(problems, TASKS["quickstart"].shares, job.seed)
        trainer = DAPOTrainer(model, exact_answer_reward, args, train_dataset=dataset, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Note())
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "dynamic_sampling/rounds" in entry]

    def mean(name):
        return statistics.mean(entry.get(name, 0.0) for entry in logs)

    ages = [mean(f"overlap/groups_by_age/{age}") for age in range(3)]
    return {
        "curve": curve,
        "clipped": mean("clip_ratio/region_mean"),
        "rounds": mean("dynamic_sampling/rounds"),
        "tokens": sum(entry["dynamic_sampling/tokens_generated"] for entry in logs),
        "ages": [count / max(sum(ages), 1e-9) for count in ages],
    }


def interval(differences):
    """Mean and its 95 % interval, by Student's t."""
    mean, n = statistics.mean(differences), len(differences)
    if n not in STUDENT:
        return mean, -math.inf, math.inf
    half = STUDENT[n] * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def report_learning(console, results, seeds, start, num_rollouts):
    title = f"Accuracy after {num_rollouts} rollouts from {start:.1%}, {len(seeds)} seeds"
    table = Table("", title=title)
    for column in ("mean (lowest to highest)", "clipped", "rounds", "tokens", "groups aged 0, 1, 2"):
        table.add_column(column, justify="right")
    ends = {way: [results[way, seed]["curve"][-1] for seed in seeds] for way in WAYS}
    for way in WAYS:
        runs = [results[way, seed] for seed in seeds]
        table.add_row(
            way,
            f"{statistics.mean(ends[way]):.1%} ({min(ends[way]):.1%} to {max(ends[way]):.1%})",
            f"{statistics.mean(run['clipped'] for run in runs):.1%}",
            f"{statistics.mean(run['rounds'] for run in runs):.2f}",
            f"{statistics.mean(run['tokens'] for run in runs):,.0f}",
            ", ".join(f"{statistics.mean(run['ages'][age] for run in runs):.0%}" for age in range(3)),
        )
    console.print(table)
    in_turns, ahead = (ends[way] for way in WAYS)
    mean, low, high = interval([mine - theirs for mine, theirs in zip(ahead, in_turns, strict=True)])
    console.print(
        f"ahead less in turns: {100 * mean:+.2f} points, 95 % interval {100 * low:+.2f} to {100 * high:+.2f}: "
        f"{'no worse' if high >= 0 else 'WORSE'}",
        highlight=False,
        soft_wrap=True,
    )


def describe(job, result):
    return f"{job.way}, seed {job.seed}: " + ", ".join(f"{value:.1%}" for value in result["curve"])


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10 seeds")
    parser.add_argument("--update-seconds", type=float, default=3.0, help="of an update (default: %(default)s)")
    parser.add_argument("--num-timed", type=int, default=5, help="rollouts that are timed (default: %(default)s)")
    parser.add_argument("--num-seeds", type=int, help="runs a way, seeds 0, 1, ... (default: 5)")
    parser.add_argument("--num-rollouts", type=int, default=30, help="of a run that learns (default: %(default)s)")
    parser.add_argument("--num-warm-up-steps", type=int, default=250, help="of the checkpoint (default: %(default)s)")
    parser.add_argument("--num-processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--part", choices=("seconds", "learning"), help="only this part (default: both)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/overlap"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    args.num_seeds = args.num_seeds or (10 if args.full else 5)
    return args


def main(argv=None):
    args = parse_args(argv)
    console = Console(width=110)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint, start = make_checkpoint(args.output_dir, args.num_warm_up_steps)
    quiet()
    if args.part != "learning":
        report_seconds(console, checkpoint, args.update_seconds, args.num_timed)
    if args.part != "seconds":
        seeds = range(args.num_seeds)
        jobs = [Job(way, seed, args.num_rollouts) for seed in seeds for way in WAYS]
        results = run_all(learn, jobs, checkpoint, args.output_dir, args.num_processes, console, describe)
        report_learning(console, results, seeds, start, args.num_rollouts)


if __name__ == "__main__":
    main()
