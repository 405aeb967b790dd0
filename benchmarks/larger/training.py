# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One run on Countdown that goes on where it was interrupted, probed on held-out problems on the way."""

import hashlib
import inspect
import json
import shutil
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch

from trl_dapo.cli import quickstart
from trl_dapo.cli.quickstart import warm_up
from trl_dapo.run.checkpoint import last_complete_checkpoint

from ..frame.curves import Curve
from ..frame.measures import mean_of, mean_where
from ..frame.runs import quiet, unfinished_folder
from ..frame.tables import say
from ..frame.trainers import DAPO, GRPO, PLAIN, Arm, load, rollouts_of, train_quietly
from ..mechanisms.training import sample
from . import task
from .task import GIVE_UP, MAX_LENGTH, SHARES, Problems, is_right, make_tokenizer, score, to_dataset


NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS = 16, 8, 4  # a rollout: prompts, completions a prompt, optimizer steps
NUM_TRAIN = 8192  # prompts
LEARNING_RATE = 1e-4
NUM_PROBED, NUM_HELD_OUT = 256, 1024  # held-out problems on the way, and at the end; a completion of each
CHUNK = 256  # completions sampled at a time
WARM_UP_SEED, HELD_OUT_SEED = 42, 7
TRAINERS = {"GRPO": GRPO, "DAPO": DAPO}


# ---- Probes ----


def autocast():
    """bfloat16 in matrix products, as in training: it takes less than half the time."""
    return torch.autocast("cpu", torch.bfloat16)


def held_out(num_problems):
    """The first held-out problems."""
    return Problems(HELD_OUT_SEED, held_out=True).draw(num_problems)


def probe(model, tokenizer, problems):
    """What the policy does with problems, a completion of each; one that needs more room than it has is wrong."""
    look = SimpleNamespace(solution=lambda problem: problem.text, is_right=is_right, room=MAX_LENGTH + 1)
    asked = [SimpleNamespace(text=problem) for problem in problems]
    with autocast():
        chunks = [sample(model, tokenizer, look, asked[i : i + CHUNK], 1) for i in range(0, len(asked), CHUNK)]
    right, lengths, entropies = (np.concatenate([chunk[i] for chunk in chunks]) for i in range(3))
    truncated = lengths > MAX_LENGTH
    right = right & ~truncated
    figures = {
        "accuracy": right.mean(),
        "length": np.minimum(lengths, MAX_LENGTH).mean(),
        "truncated": truncated.mean(),
        "entropy": np.average(entropies, weights=lengths),
    }
    sizes = np.array([problem.count(",") + 1 for problem in problems])
    figures |= {f"accuracy, {size} numbers": mean_where(right, sizes == size) for size in SHARES}
    return {name: float(value) for name, value in figures.items()}


# ---- One run ----


class LastingCurve(Curve):
    """A curve that is kept in the log, hence in every checkpoint, and goes on from there."""

    def __init__(self, job, look, look_at_all, trainer):
        super().__init__(job, look, lambda: trainer.num_tokens)
        self.look_at_all, self.trainer = look_at_all, trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.log = state.log_history
        self.points = [entry["probe"] for entry in self.log if "probe" in entry]
        if not self.points:
            super().on_train_begin(args, state, control, **kwargs)
        else:  # resumed
            self.start = time.process_time() - self.points[-1]["seconds"]
            self.trainer.num_tokens = self.points[-1]["tokens"]

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if self.points[-1]["accuracy"] >= self.job.target:
            control.should_training_stop = True  # of a run that was resumed at its end, too
        if control.should_training_stop or state.global_step == state.max_steps:
            # Before the last checkpoint: a run that is killed here must not go on from behind its end.
            self.end = self.look_at_all()

    def _note(self, num_rollouts, control):
        super()._note(num_rollouts, control)
        self.log.append({"probe": self.points[-1]})


def sized(num_prompts, num_steps, learning_rate):
    """Settings of rollouts with so many prompts and optimizer steps."""
    lasting = {"max_completion_length": MAX_LENGTH, "learning_rate": learning_rate}
    return rollouts_of(num_prompts, NUM_GENERATIONS, num_steps, **lasting)


def config_of(job, folder, arm):
    """Settings of a run: the job's, the arm's, and what all runs share."""
    settings = PLAIN | sized(NUM_PROMPTS, NUM_STEPS, LEARNING_RATE) | job.settings | arm.settings
    num_steps = settings["steps_per_generation"]
    saved = {"save_strategy": "steps", "save_steps": job.probe_every * num_steps, "save_total_limit": 2, "bf16": True}
    return arm.trainer.config_class(
        output_dir=str(folder), seed=job.seed, max_steps=job.num_rollouts * num_steps, **settings | saved
    )


def train(job, checkpoint, folder, arm):
    """Trains from the checkpoint, or from where the same run was interrupted; returns its curve and its figures."""
    model, tokenizer, problems = load(checkpoint), make_tokenizer(), held_out(NUM_HELD_OUT)
    trainer = arm.trainer(
        model,
        score,
        config_of(job, folder, arm),
        train_dataset=to_dataset(Problems(1000 + job.seed).draw(NUM_TRAIN)),
        processing_class=tokenizer,
    )
    few, all_of_them = (lambda num=num: probe(model, tokenizer, problems[:num]) for num in (NUM_PROBED, NUM_HELD_OUT))
    curve = LastingCurve(job, few, all_of_them, trainer)
    log = train_quietly(trainer, curve, resume_from=last_complete_checkpoint(folder))
    return {
        **curve.end,
        "tokens": float(trainer.num_tokens),
        "cpu_seconds": curve.points[-1]["seconds"],
        "acceptance": 1 - mean_of(log, "frac_reward_zero_std"),
        "spread": 1 - mean_of(log, "frac_reward_zero_std"),
        "clip_ratio": mean_of(log, "clip_ratio/region_mean"),
        "curve": curve.points,
    }


def run(job, checkpoint):
    """`train` in a folder that lasts until the run has ended."""
    folder = unfinished_folder(run, job, checkpoint)
    result = train(job, checkpoint, folder, Arm(TRAINERS[job.others["trainer"]], {}))
    shutil.rmtree(folder)
    return result


# ---- The checkpoint ----


def make_checkpoint(folder, num_steps):
    """The model after its warm-up and what it does, as the result of a run; kept for the next time."""
    made_by = "".join(inspect.getsource(module) for module in (task, quickstart))
    path = folder / f"checkpoint-{num_steps}-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}"
    if not path.exists():
        quiet()
        started = time.process_time()
        tokenizer, model = make_tokenizer(), task.make_model(WARM_UP_SEED)
        model.forward = autocast()(model.forward)  # call by call, else the first step's weights are cast for all
        losses, steps = [], (num_steps, num_steps // 8)

        def on_step(loss):
            losses.append(loss)
            if len(losses) % 25 == 0:
                say(f"warm-up, step {len(losses)} of {sum(steps)}: loss {statistics.mean(losses[-25:]):.3f}")

        for give_up, num, rate in zip(GIVE_UP, steps, (1e-3, 3e-4), strict=True):
            problems = Problems(WARM_UP_SEED, give_up=give_up)
            warm_up(model, tokenizer, problems, num, batch_size=64, learning_rate=rate, on_step=on_step)
        del model.forward
        seconds, problems = time.process_time() - started, held_out(NUM_HELD_OUT)
        point = {"rollouts": 0, "tokens": 0, "seconds": 0.0, **probe(model, tokenizer, problems[:NUM_PROBED])}
        start = {**probe(model, tokenizer, problems), "cpu_seconds": seconds, "curve": [point]}
        partial = path.with_suffix(".partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "start.json").write_text(json.dumps(start) + "\n")
        partial.rename(path)
    return path, json.loads((path / "start.json").read_text())
