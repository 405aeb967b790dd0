# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Countdown with a model of five million parameters: the ladder once more, with long completions.

    python -m benchmarks larger                  # an hour on two cores; an interrupted call resumes
    python -m benchmarks larger --from-kept      # predictions and picture from the kept runs

The task is described in task.py. An interrupted call resumes as long as this folder, the frame and trl_dapo have not
changed, so keep a checkout for it. Writes runs.csv, curves.csv, the picture, and the outcomes in EVIDENCE.md.
"""

from pathlib import Path

from .. import ladder
from ..frame.kept import IMAGES, Study
from ..frame.measures import late, of_run
from ..frame.pictures import draw_panels
from ..frame.predictions import Prediction, Quantity
from ..frame.runs import Job, run_all
from .training import make_checkpoint, run


LADDER = "ladder"
NUM_ROLLOUTS = 28
BUFFER = 32  # tokens before the limit that the soft punishment covers, as the paper's 4,096 of 20,480
FILTERING, CLIP, SOFT, TOKEN, DYNAMIC = list(ladder.run.RUNGS)[1:]
CONTROL = ladder.run.CONTROL

ACCURACY = Quantity("accuracy", of_run("accuracy"), "%")
TRUNCATED = Quantity("cut off", of_run("truncated"), "%")
PREDICTIONS = (
    Prediction(LADDER, FILTERING, "GRPO", TRUNCATED, 1, "no claim"),
    Prediction(LADDER, FILTERING, "GRPO", ACCURACY, 1, "table 1"),
    Prediction(LADDER, CLIP, FILTERING, Quantity("entropy", late("entropy")), 1, "figure 2"),
    Prediction(LADDER, CLIP, FILTERING, ACCURACY, 1, "table 1"),
    Prediction(LADDER, SOFT, CLIP, TRUNCATED, -1, "equation 13"),
    Prediction(LADDER, SOFT, CLIP, ACCURACY, 1, "table 1"),
    Prediction(LADDER, TOKEN, SOFT, ACCURACY, 1, "table 1"),
    Prediction(LADDER, DYNAMIC, TOKEN, ACCURACY, 1, "table 1"),
    Prediction(LADDER, DYNAMIC, CONTROL, ACCURACY, 1, "no claim"),
)


def job_of(rung, seed, **limit):
    """Return the settings of a rung of the ladder, with this task's length of the punishment."""
    settings = ladder.run.settings_of(rung)
    buffer = {"overlong_buffer_length": BUFFER} if "overlong_buffer_length" in settings else {}
    return Job(LADDER, rung, seed, {"dynamic_sampling_stop_after": 0} | settings | buffer, probe_every=4, **limit)


def whole_seeds(results):
    """Return the runs of the seeds of which all runs are there."""
    seeds = {seed for *_, seed in results}
    whole = [seed for seed in seeds if all((LADDER, rung, seed) in results for rung in ladder.run.ROWS)]
    return {key: run for key, run in results.items() if key[2] in whole}


STUDY = Study(Path(__file__).parent, ("part", "arm", "seed"), "## A larger task\n", PREDICTIONS, counted=whole_seeds)
fill_in = STUDY.fill_in


def main(from_kept=False, num_seeds=3, num_warm_up_steps=1000, num_processes=2, output_dir=Path("outputs/larger")):
    if not from_kept:
        checkpoint, _ = make_checkpoint(output_dir, num_warm_up_steps)
        how, seeds = (checkpoint, output_dir, num_processes), range(num_seeds)
        rungs = [job_of(rung, seed, num_rollouts=NUM_ROLLOUTS) for seed in seeds for rung in ladder.run.RUNGS]
        results = run_all(run, rungs, *how)
        # GRPO runs until it has generated as many tokens as the last rung with the same seed.
        tokens = {seed: results[LADDER, DYNAMIC, seed]["tokens"] for seed in seeds}
        results |= run_all(run, [job_of(CONTROL, seed, max_tokens=tokens[seed]) for seed in seeds], *how)
        STUDY.write(results)
    panels = [(LADDER, what, "rollouts", what) for what in ("accuracy", "entropy", "length", "truncated")]
    draw_panels(whole_seeds(STUDY.read()), panels, {LADDER: ladder.run.ROWS}, 2, (13, 7), IMAGES / "larger.png")
    STUDY.report()
