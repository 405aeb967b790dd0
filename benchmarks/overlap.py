# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
One and two rollouts ahead compared with taking turns: wall-clock seconds of a rollout, and what is learned.

    python -m benchmarks overlap    # about 25 minutes on two cores

All arms talk to a stand-in for vLLM's server in its own process, through TRL's engine in server mode. For the seconds,
the stand-in answers after a set time and the update takes a set time, as if both ran on GPUs of their own; only the
ratio r of the two is varied. For the learning, the model and problems are the quickstart's, as in
`time_to_accuracy.py`. With two rollouts ahead an adapter of rank 16 trains, at `--adapter-rate` times the learning
rate. The interval is Student's, of the differences between equal seeds.
"""

import statistics
import tempfile
import time
from pathlib import Path

from peft import LoraConfig
from transformers import TrainerCallback

from trl_dapo.cli.quickstart import Problems, build_tokenizer

from .frame.runs import Job, quiet, run_all
from .frame.stand_in import Script, server
from .frame.tables import print_table, say
from .frame.trainers import DAPO, Arm, load, make_trainer, rollouts_of, train_quietly
from .frame.verdicts import interval
from .time_to_accuracy import CHECKPOINT_SEED, SERVER, TASKS, make_checkpoint, prompts, settings_of, train_on


TASK = "quickstart"
RATIOS = (0.5, 1.0, 2.0, 4.0)
WAYS, OF_ADAPTERS = ("in turns", "ahead"), ("adapter, in turns", "adapter, two ahead")
AHEAD = dict(zip(WAYS + OF_ADAPTERS, (0, 1, 0, 2), strict=True))  # rollouts


# ---- Seconds ----


class Timed(DAPO):
    """Note when the update of each rollout begins."""

    def _generate_and_score_completions(self, inputs):
        rollouts = super()._generate_and_score_completions(inputs)
        self.update_began = time.perf_counter()
        return rollouts


class HoldUpdate(TrainerCallback):
    """Let every update take a set time, and note when it has ended."""

    def __init__(self, trainer, seconds):
        self.trainer, self.seconds, self.ended, self.took = trainer, seconds, [], []

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(max(self.seconds - (time.perf_counter() - self.trainer.update_began), 0.0))
        self.ended.append(time.perf_counter())
        self.took.append(self.ended[-1] - self.trainer.update_began)


def rewarded(completions, **kwargs):
    return [float(completion[0]["content"] == "1") for completion in completions]


def time_rollouts(checkpoint, way, generate_seconds, update_seconds, num_rollouts):
    """Return the median seconds of a rollout, after the first ones, and of its update."""
    problems, tokenizer, model = Problems(CHECKPOINT_SEED), build_tokenizer(), load(checkpoint)
    end = [tokenizer.eos_token_id]
    answers = {name: tokenizer(text)["input_ids"] + end for name, text in (("correct", "1"), ("incorrect", "2"))}
    with tempfile.TemporaryDirectory() as folder, server(Script, delay=generate_seconds, **answers):
        # One optimizer step per rollout, of four micro-batches.
        steps = {"gradient_accumulation_steps": 4, "logging_steps": 1, "max_steps": num_rollouts + 1}
        how = rollouts_of(16, 8, 4, max_completion_length=8, batch_multiplier=1.0) | steps | {"warmup_steps": 0}
        arm, dataset = Arm(Timed, {**SERVER, "rollouts_ahead": AHEAD[way]}), prompts(problems, TASKS[TASK].shares, 0)
        trainer = make_trainer(arm, model, folder, rewarded, dataset, tokenizer, how)
        hold = HoldUpdate(trainer, update_seconds)
        train_quietly(trainer, hold)
    walls = [after - before for before, after in zip(hold.ended[:-1], hold.ended[1:], strict=True)]
    return statistics.median(walls), statistics.median(hold.took)


def report_seconds(checkpoint, update_seconds, num_rollouts):
    title = f"Seconds of a rollout, medians of {num_rollouts}; an update takes {update_seconds:g} s"
    rows = []
    for ratio in RATIOS:
        settings = ratio * update_seconds, update_seconds, num_rollouts
        (turns, update), (ahead, _) = (time_rollouts(checkpoint, way, *settings) for way in WAYS)
        cells = turns, ahead, max(ratio * update_seconds, update), turns / ahead
        rows.append([f"{ratio:g}", *(f"{cell:.2f}" for cell in cells)])
    print_table(title, ("r", "in turns", "ahead", "longer of the two", "times as fast"), rows)


# ---- Learning ----


def learn(job, checkpoint, folder):
    """
    Return the accuracy at every tenth rollout, the shares of rows by staleness, the share of clipped tokens, and the
    number of sampled tokens.
    """
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if job.arm in OF_ADAPTERS else None
    arm = Arm(DAPO, {**SERVER, "rollouts_ahead": AHEAD[job.arm]})
    curve, logs = train_on(job, checkpoint, folder, arm, peft_config=lora)

    def mean(name):
        return statistics.mean(entry.get(name, 0.0) for entry in logs)

    ages = [mean(f"rollouts_ahead/groups_by_staleness/{age}") for age in range(3)]
    return {
        "curve": curve,
        "clipped": mean("clip_ratio/region_mean"),
        "rounds": mean("dynamic_sampling/rounds"),
        "tokens": sum(entry["dynamic_sampling/tokens_generated"] for entry in logs),
        "ages": [count / max(sum(ages), 1e-9) for count in ages],
    }


def report_learning(results, seeds, start, num_rollouts):
    title = f"Accuracy after {num_rollouts} rollouts from {start:.1%}, {len(seeds)} seeds"
    columns, rows = ("", "mean (lowest to highest)", "clipped", "rounds", "tokens", "staleness 0, 1, 2"), []
    runs_of = {way: [results[TASK, way, seed] for seed in seeds] for way in AHEAD}
    ends = {way: [run["curve"][-1]["accuracy"] for run in runs] for way, runs in runs_of.items()}
    for way, runs in runs_of.items():
        mean = {name: statistics.mean(run[name] for run in runs) for name in ("clipped", "rounds", "tokens")}
        ends_of = f"{statistics.mean(ends[way]):.1%} ({min(ends[way]):.1%} to {max(ends[way]):.1%})"
        ages = ", ".join(f"{statistics.mean(run['ages'][age] for run in runs):.0%}" for age in range(3))
        cells = f"{mean['clipped']:.1%}", f"{mean['rounds']:.2f}", f"{mean['tokens']:,.0f}"
        rows.append([way, ends_of, *cells, ages if AHEAD[way] else "not logged"])
    print_table(title, columns, rows)
    for turns, ahead in (WAYS, OF_ADAPTERS):
        mean, half = interval([100 * (b - a) for a, b in zip(ends[turns], ends[ahead], strict=True)])
        compared = " minus ".join(f"({name})" if "," in name else name for name in (ahead, turns))
        say(
            f"{compared}: {mean:+.2f} points, 95 % interval {mean - half:+.2f} to {mean + half:+.2f}: "
            f"{'worse' if mean + half < 0 else 'better' if mean - half > 0 else 'no difference shown'}"
        )


def describe(job, result):
    return f"{job.arm}, seed {job.seed}: " + ", ".join(f"{point['accuracy']:.1%}" for point in result["curve"][1:])


def main(
    part=("seconds", "learning"),
    update_seconds=3.0,
    num_timed=5,
    num_seeds=5,
    num_rollouts=30,
    num_warm_up_steps=250,
    adapter_rate=10.0,
    num_processes=2,
    output_dir=Path("outputs/overlap"),
):
    checkpoint, start = make_checkpoint(output_dir, num_warm_up_steps)
    quiet()
    if "seconds" in part:
        report_seconds(checkpoint, update_seconds, num_timed)
    if "learning" in part:
        seeds = range(num_seeds)
        rates = {way: TASKS[TASK].learning_rate * (adapter_rate if way in OF_ADAPTERS else 1) for way in AHEAD}
        jobs = [
            Job(TASK, way, seed, settings_of("paper", rate), num_rollouts=num_rollouts, probe_every=10)
            for seed in seeds
            for way, rate in rates.items()
        ]
        results = run_all(learn, jobs, checkpoint, output_dir, num_processes, describe=describe)
        report_learning(results, seeds, start, num_rollouts)
