# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Countdown with a model of five million parameters: time to accuracy and the ladder once more, where answers are long.

    python -m benchmarks larger                  # both parts, two hours on two cores, in pieces that resume
    python -m benchmarks larger --from-kept      # predictions and picture from the runs that are kept

The task is described in task.py; the predictions were written before the first run that counts. A call that was
interrupted goes on, as long as neither this folder, the frame nor trl_dapo has changed: keep a checkout for it. Writes
runs.csv, a line a run, curves.csv, a line a probe, every 4 rollouts, the picture, and EVIDENCE.md's outcomes.
"""

from pathlib import Path

from .. import ladder, time_to_accuracy
from ..frame.kept import IMAGES, Study
from ..frame.measures import late, of_run, spent_to
from ..frame.pictures import draw_panels
from ..frame.predictions import Prediction, Quantity
from ..frame.runs import Job, run_all
from .training import WARM_UP_SEED, make_checkpoint, run


TIME, LADDER = "Countdown", "ladder"
WARM_UP = "warm-up"  # the part of the checkpoint, whose arm is its name
GAIN = 0.10  # the target, above the checkpoint's accuracy
MOST_TOKENS = 600_000  # generated; a run that has not reached the target by then never does
NUM_ROLLOUTS = 28
BUFFER = 32  # tokens before the limit that the soft punishment covers, as the paper's 4,096 of 20,480

ARMS = ("GRPO", "full batch again", "ours", "ours, carry, memory")  # of time_to_accuracy.py
FILTERING, CLIP, SOFT, TOKEN, DYNAMIC = list(ladder.run.RUNGS)[1:]
CONTROL = ladder.run.CONTROL
ROWS_OF = {TIME: ARMS, LADDER: ladder.run.ROWS}

TOKENS, SECONDS = (Quantity(f"{what} to the target", spent_to(GAIN, what)) for what in ("tokens", "seconds"))
ACCURACY = Quantity("accuracy", of_run("accuracy"), "%")
TRUNCATED = Quantity("cut off", of_run("truncated"), "%")
MEMORY = "ours, carry, memory"
PREDICTIONS = (
    Prediction(TIME, "ours", "full batch again", TOKENS, -1, "this package's own"),
    Prediction(TIME, MEMORY, "full batch again", TOKENS, -1, "this package's own"),
    Prediction(TIME, MEMORY, "GRPO", TOKENS, -1, "this package's own"),
    Prediction(TIME, "ours", "GRPO", SECONDS, -1, "section 3.2"),
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


# ---- Runs: whole seeds first ----


def time_jobs(seeds, start):
    """`start` is the checkpoint's accuracy on the problems that are asked on the way."""
    limits = {"target": start + GAIN, "max_tokens": MOST_TOKENS}
    return [job_of(TIME, arm, seed, time_to_accuracy.ARMS[arm], **limits) for seed in seeds for arm in ARMS]


def ladder_jobs(seeds):
    """Without the control, whose length is the last rung's."""
    rungs = list(ladder.run.RUNGS)
    return [job_of(LADDER, rung, seed, rung_of(rung), num_rollouts=NUM_ROLLOUTS) for seed in seeds for rung in rungs]


def control_jobs(seeds, results):
    """GRPO until it has generated as much as the last rung with the same seed."""
    tokens = {seed: results[LADDER, DYNAMIC, seed]["tokens"] for seed in seeds}
    return [job_of(LADDER, CONTROL, seed, rung_of(CONTROL), max_tokens=tokens[seed]) for seed in seeds]


def rung_of(rung):
    """The ladder's, but for the punishment's length."""
    settings = ladder.run.settings_of(rung)
    buffer = {"overlong_buffer_length": BUFFER} if "overlong_buffer_length" in settings else {}
    return time_to_accuracy.Arm(time_to_accuracy.DAPO, settings | buffer)


def job_of(part, arm, seed, how, **limits):
    own = {"dynamic_sampling_stop_after": 0} if how.trainer is time_to_accuracy.DAPO else {}
    trainer = {"trainer": how.trainer.__name__}
    return Job(part, arm, seed, own | how.settings, others=trainer, **{"probe_every": 4, **limits})


def train(part, num_seeds, num_warm_up_steps, num_processes, output_dir):
    """Runs what no earlier call has finished; results by part, arm and seed."""
    checkpoint, start = make_checkpoint(output_dir, num_warm_up_steps)
    how = checkpoint, output_dir, num_processes
    seeds, results = range(num_seeds), {(WARM_UP, checkpoint.name, WARM_UP_SEED): start}
    if part == TIME:
        results |= run_all(run, time_jobs(seeds, start["curve"][0]["accuracy"]), *how)
    if part == LADDER:
        results |= run_all(run, ladder_jobs(seeds), *how)
        results |= run_all(run, control_jobs(seeds, results), *how)
    return results


def keep(results, study):
    """Writes the runs, beside those of other parts that are kept and came from the same checkpoint."""
    kept, parts = study.read(), {part for part, *_ in results}
    if any(key in kept for key in results if key[0] == WARM_UP):
        results = {key: run for key, run in kept.items() if key[0] not in parts} | results
    study.write(results)


# ---- Picture ----


def whole_seeds(results, part):
    """Seeds of which every run of a part is there."""
    seeds = sorted({seed for name, _, seed in results if name == part})
    return [seed for seed in seeds if all((part, arm, seed) in results for arm in ROWS_OF[part])]


def of_whole_seeds(results):
    """The runs of those seeds of each part of which all are there."""
    return {key: run for key, run in results.items() if key[0] in ROWS_OF and key[2] in whole_seeds(results, key[0])}


STUDY = Study(
    Path(__file__).parent, ("part", "arm", "seed"), "## A larger task\n", PREDICTIONS, counted=of_whole_seeds
)
fill_in = STUDY.fill_in
PANELS = (  # part, what is drawn, against what
    (TIME, "accuracy", "tokens"),
    (TIME, "accuracy", "seconds"),
    (LADDER, "accuracy", "rollouts"),
    (LADDER, "entropy", "rollouts"),
    (LADDER, "length", "rollouts"),
    (LADDER, "truncated", "rollouts"),
)


def draw(results):
    """The picture of the parts that have a whole seed."""
    counted = of_whole_seeds(results)
    panels = [(*panel, f"{panel[0]}: {panel[1]}") for panel in PANELS if panel[0] in {part for part, *_ in counted}]
    draw_panels(counted, panels, ROWS_OF, 2, (13, 3.5 * (len(panels) // 2)), IMAGES / "larger.png")


def main(
    part=(TIME, LADDER),
    from_kept=False,
    num_seeds=3,
    num_warm_up_steps=1000,
    num_processes=2,
    output_dir=Path("outputs/larger"),
):
    for name in () if from_kept else part:
        keep(train(name, num_seeds, num_warm_up_steps, num_processes, output_dir), STUDY)
    if results := STUDY.read():
        draw(results)
        STUDY.report()
