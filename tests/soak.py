# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Check that a run that is killed at any moment continues bit for bit. Run by hand, on two CPU cores:

    python tests/soak.py --num-kills 50 --seed 0  # runs of one process and of two in turn: 20 minutes
    python tests/soak.py --variant screened       # only one variant

Runs are killed with SIGKILL at random moments, also while they save, and started again with
`resume_from_checkpoint=True` until they end. Weights and logs, except times, must equal those of an undisturbed run.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from helpers import launch, untimed
from tiny_models import save_tiny_model

from trl_dapo.run.checkpoint import last_complete_checkpoint
from trl_dapo.run.log import LOG_HISTORY_NAME


CARRY = {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.0, "dynamic_sampling_memory": True}
SCREENED = {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "3", "dynamic_sampling_memory": True}
KILLED_STEPS = 12
KILLS_A_RUN = 5
KILLED = {
    "two checkpoints kept": {"save_total_limit": 2},
    "carry and memory": CARRY,
    "screened": SCREENED,
    "two rollouts ahead": {"rollouts_ahead": 2, **SCREENED},
    "reuse and evaluation": {
        "steps_per_generation": 8,
        "num_iterations": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "KL": {"beta": 0.01},
    # an optimizer step is four micro-steps, and every third one straddles two rollouts
    "uneven windows": {"steps_per_generation": 6},
    "batch scaling": {"scale_rewards": "batch"},
}
TIMEOUT = 1800  # seconds; the longest launch takes two minutes
# Words of the messages for a checkpoint that was only partly resumed.
FRESH_START = "contains no complete checkpoint"
MISFITS = ("can be resumed only in part", "was written with ")


def reports(folder: Path, num_processes: int) -> list[str]:
    """Return what the processes reported of a run as text, which is equal only if every bit is."""
    return [(folder / f"report-{num_processes}-{rank}.json").read_text() for rank in range(num_processes)]


def kill_and_resume(model: str, folder: Path, num_kills: int, seed: int, variants: list[str]) -> bool:
    draw, num_left = random.Random(seed), num_kills
    for number in itertools.count():
        num_processes, variant = 1 + number % 2, variants[number // 2 % len(variants)]
        whole, killed = folder / f"{variant}, {num_processes}", folder / f"run {number}"
        if not whole.exists():
            run(model, whole, variant, num_processes)
        seconds = read_log(whole)[-1]["train_runtime"]
        for moment in [*sorted(draw.uniform(0, seconds) for _ in range(min(KILLS_A_RUN, num_left))), None]:
            after = None if moment is None else max(moment - seconds * steps_done(killed) / KILLED_STEPS, 0.0)
            if run(model, killed, variant, num_processes, kill_after=after):
                break
            num_left -= 1
        found = reports(killed, num_processes)
        log = [{k: v for k, v in entry.items() if k != "max_steps"} for entry in untimed(read_log(killed))]
        is_equal = found == reports(whole, num_processes) and log == json.loads(found[0])["logs"]
        outcome = "bitwise equal" if is_equal else "DIFFERENT"
        print(f"run {number} ({variant}, {num_processes} process(es)): {outcome}, {num_left} kills left", flush=True)
        if not is_equal or num_left == 0:
            return is_equal


def run(model: str, folder: Path, variant: str, num_processes: int, kill_after: float | None = None) -> bool:
    """Start or continue a run. Return whether it reached its end. Any exit other than a kill ends the soak test."""
    overrides = {"max_steps": KILLED_STEPS, **KILLED[variant], "resume_from": True, "kill_after": kill_after}
    is_new = steps_done(folder) == 0
    runs = json.dumps({folder.name: overrides})
    result = launch("sampled_runs", model, folder.parent, runs, num_processes=num_processes, timeout=TIMEOUT)
    # torchrun reports how its processes ended.
    is_killed = result.returncode == -9 or (num_processes > 1 and "SIGKILL" in result.stderr)
    is_whole = (FRESH_START in result.stderr) == is_new and not any(words in result.stderr for words in MISFITS)
    if not is_whole or (result.returncode != 0 and (kill_after is None or not is_killed)):
        sys.exit(f"{folder}: exit code {result.returncode}\n{result.stderr[-5000:]}")
    return result.returncode == 0


def read_log(folder: Path) -> list[dict]:
    path = folder / "run" / LOG_HISTORY_NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(folder: Path) -> int:
    checkpoint = last_complete_checkpoint(folder / "run")
    return 0 if checkpoint is None else int(checkpoint.name.rsplit("-")[-1])


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=KILLED)
    args = parser.parse_args()
    folder, started = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    print(f"in {folder}, which is kept unless all is well", flush=True)
    model, variants = save_tiny_model(folder / "model"), [args.variant] if args.variant else list(KILLED)
    is_well = kill_and_resume(model, folder, args.num_kills, args.seed, variants)
    print(f"{'all is well' if is_well else 'NOT all is well'}, after {(time.monotonic() - started) / 60:.0f} minutes")
    if is_well:
        shutil.rmtree(folder)
    return is_well


if __name__ == "__main__":
    sys.exit(not main())
