# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
DAPO's techniques by their mechanisms: the claimed effect of each, on a task in which it can be seen.

    python -m benchmarks mechanisms                # 5 seeds, 45 minutes on one core
    python -m benchmarks mechanisms --from-kept    # predictions and picture from the kept runs

The tasks are described in tasks.py. Predictions were written before the first run. An interrupted call resumes where
it stopped. Writes runs.csv with a line per run, curves.csv with a line per probe, the picture, and the outcomes in
EVIDENCE.md.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trl_dapo.settings.sampling_defaults import PAPER

from ..frame.kept import IMAGES, Study
from ..frame.measures import at_equal, during, late, mean_known, of_run
from ..frame.pictures import draw_panels
from ..frame.predictions import Prediction, Quantity, seeds_of
from ..frame.runs import Job, run_all
from ..frame.tables import say
from .tasks import make_checkpoints
from .training import train


# The settings of GRPO. An arm changes what its mechanism names.
PLAIN = {"loss_type": "dapo", "epsilon_high": 0.28, "use_dynamic_sampling": False}
FOUR_STEPS = {"steps_per_generation": 4, "learning_rate": 1e-4}
REFILL = {"use_dynamic_sampling": True, **PAPER}
CARRY = {**REFILL, "dynamic_sampling_surplus": "carry"}


class Mechanism(NamedTuple):
    title: str
    task: str
    arms: dict[str, dict]  # settings of each
    common: dict
    limits: dict  # of a `Job`
    trainers: dict[str, str] = {}  # noqa: RUF012 (of the arms that are not `Watched`)


MECHANISMS = {
    "clip": Mechanism(
        "Clip-Higher",
        "unlikely",
        {"0.2": {"epsilon_high": 0.2}, "0.28": {}, "0.5": {"epsilon_high": 0.5}},
        {"steps_per_generation": 16, "learning_rate": 1e-4, "num_prompts": 32},
        {"num_rollouts": 24, "probe_every": 2},
    ),
    "token mean": Mechanism(
        "Token-level loss",
        "workings",
        {"sequence mean": {"loss_type": "grpo"}, "token mean": {}},
        FOUR_STEPS,
        {"num_rollouts": 20, "probe_every": 2},
    ),
    "overlong": Mechanism(
        "Overlong filtering and soft punishment",
        "any length",
        {"neither": {}, "filtering": {"overlong_filtering": True}, "soft punishment": {"overlong_buffer_length": 5}},
        FOUR_STEPS,
        {"num_rollouts": 26, "probe_every": 2},
    ),
    "gradient": Mechanism(
        "Dynamic sampling: the gradient of a step",
        "few informative",
        {"off": {}, "on": REFILL},
        {"learning_rate": 1e-4},
        {"num_rollouts": 24, "probe_every": 24},
        trainers={"off": "Frozen", "on": "Frozen"},
    ),
    "sampling": Mechanism(
        "Dynamic sampling, carry and memory",
        "few informative",
        {"off": {}, "on": REFILL, "carry": CARRY, "carry, memory": {**CARRY, "dynamic_sampling_memory": True}},
        {"learning_rate": 2e-4},
        {"max_tokens": 80_000, "probe_every": 4},
    ),
    "penalties": Mechanism(
        "Length penalties of dropped groups",
        "workings cut off",
        {"dropped with them": {}, "still count": {}},
        {**FOUR_STEPS, **REFILL, "overlong_buffer_length": 5},
        {"num_rollouts": 20, "probe_every": 2},
        trainers={"still count": "PenaltiesCount"},
    ),
}


def jobs_of(name, seed):
    found = MECHANISMS[name]
    return [
        Job(
            name,
            arm,
            seed,
            {**PLAIN, **found.common, **settings},
            others={"task": found.task, "trainer": found.trainers.get(arm, "Watched")},
            **found.limits,
        )
        for arm, settings in found.arms.items()
    ]


# ---- Predictions ----


def roughness_of(name):
    """Return a measure of how much a curve jumps: the standard deviation of its steps from one probe to the next."""
    return lambda *runs: [float(np.std(np.diff([point[name] for point in run["curve"]]), ddof=1)) for run in runs]


def tokens_per_trained(*runs):
    """Return the generated tokens per token that trains."""
    return [run["curve"][-1]["tokens"] / run["tokens that train"] for run in runs]


ENTROPY = Quantity("entropy", late("entropy"))
ACCURACY = Quantity("accuracy", late("accuracy"), "%")
PASS_AT_8 = Quantity("pass@8", late("pass at 8"), "%")
STOPPED = Quantity("probability of tokens that the upper clip stops", of_run("probability of the up-clipped"))
INCORRECT_LENGTH = Quantity("length of incorrect completions", during("incorrect length"))
TOO_LONG = Quantity("incorrect and too long", during("incorrect and too long"), "%")
THEIR_ENTROPY = Quantity(
    "entropy of completions that are incorrect and too long", during("entropy of incorrect and too long")
)
PUNISHED = Quantity("correct but cut-off completions that are punished", during("of these punished"), "%")
WITH_ROOM = Quantity("correct, if they may end", late("correct with room"), "%")
ROUGHNESS = Quantity("roughness of the entropy", roughness_of("entropy"))
CORRECT_CUT_OFF = Quantity("correct but cut off", late("correct but cut off"), "%")
CUT_OFF = Quantity("cut off", during("cut off"), "%")
VARIANCE = Quantity("variance of a step's gradient divided by its squared mean", of_run("relative variance"))
AT_STEPS = Quantity("accuracy at equal steps", at_equal("rollouts", "accuracy"), "%")
AT_TOKENS = Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%")
AT_SECONDS = Quantity("accuracy at equal CPU seconds", at_equal("seconds", "accuracy"), "%")
PER_TRAINED = Quantity("generated tokens per token that trains", tokens_per_trained)

CLIP, TOKEN, OVERLONG, SAMPLING, PENALTIES = "clip", "token mean", "overlong", "sampling", "penalties"
MEAN, FILTERING, SOFT, COUNT = "token mean", "filtering", "soft punishment", "still count"
OWN = "this package's own"

PREDICTIONS = (
    Prediction(CLIP, "0.28", "0.2", ENTROPY, 1, "figure 2"),
    Prediction(CLIP, "0.28", "0.2", PASS_AT_8, 1, "section 3.1"),
    Prediction(CLIP, "0.5", "0.28", ENTROPY, 1, "section 3.1"),
    Prediction(CLIP, "0.2", 0.2, STOPPED, -1, "figure 3a"),
    Prediction(TOKEN, MEAN, "sequence mean", INCORRECT_LENGTH, -1, "figure 4b"),
    Prediction(TOKEN, MEAN, "sequence mean", TOO_LONG, -1, "section 3.3"),
    Prediction(TOKEN, MEAN, "sequence mean", THEIR_ENTROPY, -1, "figure 4a"),
    # Completions that are cut off have no weight in the loss.
    Prediction(OVERLONG, FILTERING, "neither", PUNISHED, -1, "section 3.4", by_construction=True),
    Prediction(OVERLONG, FILTERING, "neither", WITH_ROOM, 1, "figure 5a"),
    Prediction(OVERLONG, FILTERING, "neither", ROUGHNESS, -1, "figure 5b"),
    Prediction(OVERLONG, SOFT, "neither", CORRECT_CUT_OFF, -1, "equation 13"),
    Prediction(OVERLONG, SOFT, "neither", ACCURACY, 1, "equation 13, table 1"),
    Prediction("gradient", "on", "off", VARIANCE, -1, "section 3.2"),
    Prediction(SAMPLING, "on", "off", AT_STEPS, 1, "figure 6"),
    Prediction(SAMPLING, "on", "off", AT_TOKENS, -1, "no claim"),
    Prediction(SAMPLING, "on", "off", AT_SECONDS, 1, "section 3.2"),
    # Surplus trains instead of being thrown away.
    Prediction(SAMPLING, "carry", "on", PER_TRAINED, -1, OWN, by_construction=True),
    Prediction(SAMPLING, "carry, memory", "on", PER_TRAINED, -1, OWN),
    Prediction(SAMPLING, "carry", "on", AT_TOKENS, 1, OWN),
    Prediction(SAMPLING, "carry, memory", "on", AT_TOKENS, 1, OWN),
    Prediction(PENALTIES, COUNT, "dropped with them", CUT_OFF, -1, "an experiment"),
    Prediction(PENALTIES, COUNT, "dropped with them", ACCURACY, 1, "an experiment"),
)

STUDY = Study(Path(__file__).parent, ("mechanism", "arm", "seed"), "## The mechanisms\n", PREDICTIONS)
fill_in = STUDY.fill_in


# ---- Facts and picture ----

PANELS = (  # mechanism, what is drawn, and against what
    ("clip", "entropy", "rollouts"),
    ("clip", "pass at 8", "rollouts"),
    ("token mean", "incorrect length", "rollouts"),
    ("token mean", "incorrect and too long", "rollouts"),
    ("overlong", "correct with room", "rollouts"),
    ("overlong", "correct but cut off", "rollouts"),
    ("sampling", "accuracy", "rollouts"),
    ("sampling", "accuracy", "tokens"),
    ("penalties", "cut off", "rollouts"),
)


def mean_of_runs(results, name, arm, figure):
    return mean_known(results[name, arm, seed][figure] for seed in seeds_of(results, name, arm))


def describe_facts(results):
    """Return the facts on which the outcomes depend, as text for the page."""
    clipped = [mean_of_runs(results, CLIP, arm, "upper-clip share") for arm in MECHANISMS[CLIP].arms]
    informative = mean_of_runs(results, SAMPLING, "off", "informative groups")
    shares = [f"{100 * share:.1f}% at {clip}" for clip, share in zip(MECHANISMS[CLIP].arms, clipped, strict=True)]
    return (
        f"There are {len({seed for *_, seed in results})} seeds. Without dynamic sampling {100 * informative:.0f}% of "
        f"the groups are informative. The upper clip stopped this share of the tokens: {', '.join(shares)}."
    )


def main(from_kept=False, num_seeds=5, num_warm_up_steps=250, num_processes=1, output_dir=Path("outputs/mechanisms")):
    if not from_kept:
        checkpoints = make_checkpoints(output_dir, num_warm_up_steps)
        jobs = [job for seed in range(num_seeds) for name in MECHANISMS for job in jobs_of(name, seed)]
        STUDY.write(run_all(train, jobs, checkpoints, output_dir, num_processes, runs_per_process=len(jobs)))
    results = STUDY.read()
    say(describe_facts(results))
    STUDY.report()
    panels = [(name, what, against, f"{MECHANISMS[name].title}\n{what}") for name, what, against in PANELS]
    arms = {name: found.arms for name, found in MECHANISMS.items()}
    draw_panels(results, panels, arms, 3, (13, 10), IMAGES / "mechanisms.png")
