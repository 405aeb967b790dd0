# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One run on Countdown, with probes on held-out problems during the run."""

import hashlib
import inspect
import json
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch

from trl_dapo.cli import quickstart
from trl_dapo.cli.quickstart import warm_up

from ..frame import trainers
from ..frame.measures import mean_of, mean_where
from ..frame.runs import quiet
from ..frame.tables import say
from ..frame.trainers import DAPO, Arm, load, rollouts_of
from ..mechanisms.training import sample
from . import task
from .task import GIVE_UP, MAX_LENGTH, SHARES, Problems, is_correct, make_tokenizer, score, to_dataset


NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS = 16, 8, 4  # of a rollout: prompts, completions per prompt, optimizer steps
NUM_TRAIN = 8192  # prompts
LEARNING_RATE = 1e-4
NUM_PROBED, NUM_HELD_OUT = 256, 1024  # held-out problems during the run, and at its end, with one completion each
CHUNK = 256  # completions sampled at a time
WARM_UP_SEED, HELD_OUT_SEED = 42, 7


# ---- Probes ----


def autocast():
    """A block in which matrix products are in bfloat16, as in training. This takes less than half the time."""
    return torch.autocast("cpu", torch.bfloat16)


def held_out(num_problems):
    """Return the first held-out problems."""
    return Problems(HELD_OUT_SEED, held_out=True).draw(num_problems)


def probe(model, tokenizer, problems):
    """
    Return figures of the policy on problems, with one completion each. A completion that is cut off is incorrect.
    """
    task = SimpleNamespace(solution=lambda problem: problem.text, is_correct=is_correct, room=MAX_LENGTH + 1)
    asked = [SimpleNamespace(text=problem) for problem in problems]
    with autocast():
        chunks = [sample(model, tokenizer, task, asked[i : i + CHUNK], 1) for i in range(0, len(asked), CHUNK)]
    correct, lengths, entropies = (np.concatenate([chunk[i] for chunk in chunks]) for i in range(3))
    truncated = lengths > MAX_LENGTH
    correct = correct & ~truncated
    figures = {
        "accuracy": correct.mean(),
        "length": np.minimum(lengths, MAX_LENGTH).mean(),
        "truncated": truncated.mean(),
        "entropy": np.average(entropies, weights=lengths),
    }
    sizes = np.array([problem.count(",") + 1 for problem in problems])
    figures |= {f"accuracy, {size} numbers": mean_where(correct, sizes == size) for size in SHARES}
    return {name: float(value) for name, value in figures.items()}


# ---- One run ----


def train(job, checkpoint, folder, arm):
    """Train from the checkpoint; return the curve, and the figures at the end, on more problems."""
    sizes = {"max_completion_length": MAX_LENGTH, "learning_rate": LEARNING_RATE}
    tokenizer, problems = make_tokenizer(), held_out(NUM_HELD_OUT)
    dataset = to_dataset(Problems(1000 + job.seed).draw(NUM_TRAIN))
    trainer, curve, log = trainers.train(
        *(job, arm, load(checkpoint), folder, score, dataset, tokenizer),
        probe_model=lambda model: probe(model, tokenizer, problems[:NUM_PROBED]),
        settings=rollouts_of(NUM_PROMPTS, NUM_GENERATIONS, NUM_STEPS, bf16=True, **sizes),
    )
    return {
        **probe(trainer.model, tokenizer, problems),
        "tokens": float(trainer.num_tokens),
        "cpu_seconds": curve[-1]["seconds"],
        "acceptance": 1 - mean_of(log, "frac_reward_zero_std"),
        "spread": 1 - mean_of(log, "frac_reward_zero_std"),
        "clip_ratio": mean_of(log, "clip_ratio/region_mean"),
        "curve": curve,
    }


def run(job, checkpoint, folder):
    return train(job, checkpoint, folder, Arm(DAPO, {}))


# ---- The checkpoint ----


def make_checkpoint(folder, num_steps):
    """Return the model after its warm-up and its figures, in the form of a run. It is kept for the next call."""
    made_by = "".join(inspect.getsource(module) for module in (task, quickstart))
    path = folder / f"checkpoint-{num_steps}-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}"
    if not path.exists():
        quiet()
        started = time.process_time()
        tokenizer, model = make_tokenizer(), task.make_model(WARM_UP_SEED)
        model.forward = autocast()(
            model.forward
        )  # in every call, otherwise the cast weights of the first step would be used for all steps
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
