# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is run for each mechanism, and what was predicted of it before the first run that counts."""

from typing import NamedTuple

from trl_dapo.settings.sampling_defaults import PAPER

from .quantities import at_equal, during, late, of_run, roughness_of, tokens_for_one
from .training import Job


# GRPO's settings, from which an arm differs in what its mechanism names.
PLAIN = {"loss_type": "dapo", "epsilon_high": 0.28, "use_dynamic_sampling": False}
FOUR_STEPS = {"steps_per_generation": 4, "learning_rate": 1e-4}
REFILL = {"use_dynamic_sampling": True, **PAPER}
CARRY = {**REFILL, "dynamic_sampling_surplus": "carry"}


class Mechanism(NamedTuple):
    title: str
    task: str
    arms: dict[str, dict]  # settings of each
    common: dict
    num_rollouts: int
    probe_every: int
    trainers: dict[str, str] = {}  # noqa: RUF012 (of the arms that are not `Watched`)
    max_tokens: int | None = None

    def jobs(self, name, seed):
        return [
            Job(
                name,
                arm,
                seed,
                self.task,
                self.num_rollouts,
                self.probe_every,
                {**PLAIN, **self.common, **settings},
                self.trainers.get(arm, "Watched"),
                self.max_tokens,
            )
            for arm, settings in self.arms.items()
        ]


MECHANISMS = {
    "clip": Mechanism(
        "Clip-Higher",
        "unlikely",
        {"0.2": {"epsilon_high": 0.2}, "0.28": {}, "0.5": {"epsilon_high": 0.5}},
        {"steps_per_generation": 16, "learning_rate": 1e-4, "num_prompts": 32},
        num_rollouts=24,
        probe_every=2,
    ),
    "token mean": Mechanism(
        "Token-level loss",
        "workings",
        {"sequence mean": {"loss_type": "grpo"}, "token mean": {}},
        FOUR_STEPS,
        num_rollouts=20,
        probe_every=2,
    ),
    "overlong": Mechanism(
        "Overlong filtering and soft punishment",
        "any length",
        {"neither": {}, "filtering": {"overlong_filtering": True}, "soft punishment": {"overlong_buffer_length": 5}},
        FOUR_STEPS,
        num_rollouts=26,
        probe_every=2,
    ),
    "gradient": Mechanism(
        "Dynamic sampling: the gradient of a step",
        "few teach",
        {"off": {}, "on": REFILL},
        {"learning_rate": 1e-4},
        num_rollouts=24,
        probe_every=24,
        trainers={"off": "Frozen", "on": "Frozen"},
    ),
    "sampling": Mechanism(
        "Dynamic sampling, carry and memory",
        "few teach",
        {"off": {}, "on": REFILL, "carry": CARRY, "carry, memory": {**CARRY, "dynamic_sampling_memory": True}},
        {"learning_rate": 2e-4},
        num_rollouts=10_000,
        probe_every=4,
        max_tokens=80_000,
    ),
    "penalties": Mechanism(
        "Length penalties of dropped groups",
        "workings cut off",
        {"dropped with them": {}, "still count": {}},
        {**FOUR_STEPS, **REFILL, "overlong_buffer_length": 5},
        num_rollouts=20,
        probe_every=2,
        trainers={"still count": "PenaltiesCount"},
    ),
}


class Prediction(NamedTuple):
    """
    `quantity` is above (`direction` 1) or below (-1) in `arm` what it is in the arm `against`, or that number.
    `by_construction`: it could not have come out otherwise, so that it shows nothing.
    """

    mechanism: str
    arm: str
    against: str | float
    quantity: "Quantity"
    direction: int
    paper: str  # where it claims this
    by_construction: bool = False


class Quantity(NamedTuple):
    """`measure` takes the runs of both arms with one seed, that of the arm first, and returns a value for each."""

    title: str
    measure: object
    unit: str = ""


CLIP, TOKEN, OVERLONG, SAMPLING, PENALTIES = "clip", "token mean", "overlong", "sampling", "penalties"

PREDICTIONS = (
    Prediction(CLIP, "0.28", "0.2", Quantity("entropy", late("entropy")), 1, "figure 2"),
    Prediction(CLIP, "0.28", "0.2", Quantity("pass@8", late("pass at 8"), "%"), 1, "section 3.1"),
    Prediction(CLIP, "0.5", "0.28", Quantity("entropy", late("entropy")), 1, "section 3.1"),
    Prediction(
        CLIP,
        "0.2",
        0.2,
        Quantity("probability of what the upper clip stops", of_run("probability of the up-clipped")),
        -1,
        "figure 3a",
    ),
    Prediction(
        TOKEN, "token mean", "sequence mean", Quantity("length of the wrong", during("wrong length")), -1, "figure 4b"
    ),
    Prediction(
        TOKEN,
        "token mean",
        "sequence mean",
        Quantity("wrong and too long", during("wrong and too long"), "%"),
        -1,
        "section 3.3",
    ),
    Prediction(
        TOKEN,
        "token mean",
        "sequence mean",
        Quantity("entropy of the wrong and too long", during("entropy of wrong and too long")),
        -1,
        "figure 4a",
    ),
    Prediction(
        OVERLONG,
        "filtering",
        "neither",
        Quantity("right but cut off that are punished", during("of these punished"), "%"),
        -1,
        "section 3.4",
        by_construction=True,  # what is cut off has no weight in the loss
    ),
    Prediction(
        OVERLONG,
        "filtering",
        "neither",
        Quantity("right, if they may end", late("right with room"), "%"),
        1,
        "figure 5a",
    ),
    Prediction(
        OVERLONG,
        "filtering",
        "neither",
        Quantity("roughness of the entropy", roughness_of("entropy")),
        -1,
        "figure 5b",
    ),
    Prediction(
        OVERLONG,
        "soft punishment",
        "neither",
        Quantity("right but cut off", late("right but cut off"), "%"),
        -1,
        "equation 13",
    ),
    Prediction(
        OVERLONG, "soft punishment", "neither", Quantity("accuracy", late("accuracy"), "%"), 1, "equation 13, table 1"
    ),
    Prediction(
        "gradient",
        "on",
        "off",
        Quantity("variance of a step's gradient, over its squared mean", of_run("relative variance")),
        -1,
        "section 3.2",
    ),
    Prediction(
        SAMPLING,
        "on",
        "off",
        Quantity("accuracy at equal steps", at_equal("rollouts", "accuracy"), "%"),
        1,
        "figure 6",
    ),
    Prediction(
        SAMPLING,
        "on",
        "off",
        Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%"),
        -1,
        "no claim",
    ),
    Prediction(
        SAMPLING,
        "on",
        "off",
        Quantity("accuracy at equal CPU seconds", at_equal("seconds", "accuracy"), "%"),
        1,
        "section 3.2",
    ),
    Prediction(
        SAMPLING,
        "carry",
        "on",
        Quantity("tokens generated for one that trains", tokens_for_one),
        -1,
        "this package's own",
        by_construction=True,  # what is left over trains in place of being thrown away
    ),
    Prediction(
        SAMPLING,
        "carry, memory",
        "on",
        Quantity("tokens generated for one that trains", tokens_for_one),
        -1,
        "this package's own",
    ),
    Prediction(
        SAMPLING,
        "carry",
        "on",
        Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%"),
        1,
        "this package's own",
    ),
    Prediction(
        SAMPLING,
        "carry, memory",
        "on",
        Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%"),
        1,
        "this package's own",
    ),
    Prediction(
        PENALTIES,
        "still count",
        "dropped with them",
        Quantity("cut off", during("cut off"), "%"),
        -1,
        "an experiment",
    ),
    Prediction(
        PENALTIES,
        "still count",
        "dropped with them",
        Quantity("accuracy", late("accuracy"), "%"),
        1,
        "an experiment",
    ),
)

# Below this share of tokens at the upper clip, the runs say nothing about Clip-Higher.
LEAST_UPPER_CLIP = 0.01
