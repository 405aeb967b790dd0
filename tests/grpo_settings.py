# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Check that every setting of `GRPOConfig` has the same effect as in `GRPOTrainer`. Run by hand:

    python tests/grpo_settings.py         # about three minutes; exit status 1 if a setting differs
    python tests/grpo_settings.py beta    # only this setting

Each case trains the same tiny model with both trainers for three optimizer steps, without dynamic sampling and with
TRL's clips and loss, and compares losses, gradient norms, rewards and weights. The cases are in
grpo_settings.yaml, which also lists the settings without a case, with the reason. If a new release of TRL or
transformers adds a field, it is in neither list, and `tests/trainer/test_grpo_settings.py` reports it.
"""

import argparse
import contextlib
import dataclasses
import io
import logging
import sys
import tempfile
import warnings
from fnmatch import fnmatch
from pathlib import Path

import torch
import transformers
import yaml
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.cli.quickstart import build_model, build_tokenizer


NUM_STEPS = 3
TOLERANCE = 1e-4  # relative tolerance, for float32 sums in another order
# For bfloat16, and for an entropy bonus that TRL averages per micro-batch and DAPOTrainer over the tokens of a step.
LOOSER = {"bf16": 5e-2, "cast_lm_head_to_fp32": 1e-2, "entropy_coef": 5e-3, "use_adaptive_entropy": 5e-3}
TRLS = {"epsilon_high": None, "beta": 0.0, "loss_type": "dapo"}

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CASES: dict[str, list[dict]] = {
    field: cases if isinstance(cases, list) else [cases] for field, cases in TABLE["cases"].items()
}
ELSEWHERE: dict[str, str] = {
    field.name: why
    for why, patterns in TABLE["elsewhere"].items()
    for field in dataclasses.fields(GRPOConfig)
    if any(fnmatch(field.name, pattern) for pattern in patterns.split())
}


def variety(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def train(trainer_class: type, config_class: type, folder: Path, settings: dict) -> tuple[list[dict], torch.Tensor]:
    """Return the log of a run, and its final weights."""
    tokenizer = build_tokenizer()
    base = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
    base |= {"max_completion_length": 8, "max_steps": NUM_STEPS, "learning_rate": 1e-2, "logging_steps": 1}
    base |= {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    base |= {"disable_tqdm": True, "save_strategy": "no"}
    settings = {**base, **TRLS, **settings}
    own = {"use_dynamic_sampling": False} if config_class is DAPOConfig else {}
    args = config_class(output_dir=str(folder / trainer_class.__name__), **settings, **own)
    model = build_model(tokenizer, seed=0, num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    model.save_pretrained(folder / "model")  # a reference model is loaded from the same folder
    tokenizer.save_pretrained(folder / "model")
    problems = [f"{i}+{i}=" for i in range(64)]
    dataset = Dataset.from_dict({"prompt": problems, "solution": [str(2 * i) for i in range(64)]})
    trainer = trainer_class(
        str(folder / "model"), [variety, length], args, train_dataset=dataset, processing_class=tokenizer
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    weights = torch.cat([parameter.detach().float().flatten() for parameter in trainer.model.parameters()])
    return [entry for entry in trainer.state.log_history if "loss" in entry], weights


def compare(settings: dict, tolerance: float = TOLERANCE) -> str | None:
    """Return the differences between the two trainers as text, or `None` if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = []
        for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (DAPOTrainer, DAPOConfig)):
            try:
                outcomes.append(train(trainer_class, config_class, Path(folder), settings))
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    theirs, ours = outcomes
    if isinstance(theirs, str) or isinstance(ours, str):
        if isinstance(theirs, str) and isinstance(ours, str):
            return f"neither trains: {theirs}"  # nothing was compared
        return f"GRPOTrainer {theirs if isinstance(theirs, str) else 'trains'}, DAPOTrainer " + (
            ours if isinstance(ours, str) else "trains"
        )
    if len(theirs[0]) != len(ours[0]):
        return f"{len(theirs[0])} logged steps, and {len(ours[0])}"
    for step, (their, our) in enumerate(zip(theirs[0], ours[0], strict=True), start=1):
        for name in ("loss", "grad_norm", "reward", "learning_rate", "completions/mean_length"):
            if name in their and abs(their[name] - our[name]) > tolerance * max(abs(their[name]), 1e-3):
                return f"{name} of step {step}: {their[name]:g}, and {our[name]:g}"
    if (distance := ((theirs[1] - ours[1]).norm() / theirs[1].norm()).item()) > tolerance:
        return f"weights apart by {distance:g} of their length"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("field", nargs="*", help="default: all that have a case")
    fields = parser.parse_args().field or list(CASES)
    if unknown := [name for name in fields if name not in CASES]:
        parser.error(f"no case of {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    differing = 0
    for name in fields:
        for settings in CASES[name]:
            outcome = compare(settings, LOOSER.get(name, TOLERANCE))
            differing += outcome is not None
            print(f"{name:34s} {settings}  {'same' if outcome is None else outcome}", flush=True)
    print(f"{sum(len(CASES[name]) for name in fields)} cases, {differing} of which differ.")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
