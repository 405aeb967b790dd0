# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Does a run that was stopped anywhere go on bit for bit? Run by hand, on two CPU cores:

    python tests/soak.py --num-kills 50 --seed 0  # of one process and of two in turn: 20 minutes
    python tests/soak.py --variant screened       # of one variant alone

It stops runs by SIGKILL at moments drawn evenly from the time they take, saving included, and starts them again with
`resume_from_checkpoint=True` until they end. Weights and logs, times apart, must be those of the undisturbed run.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from itertools import count
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
    "uneven windows": {"steps_per_generation": 6},  # an optimizer step is four: every third straddles two rollouts
    "batch scaling": {"scale_rewards": "batch"},
}
TIMEOUT = 1800  # seconds; the longest launch takes two minutes
# What is said where less than a whole checkpoint is resumed.
FRESH_START = "holds no complete checkpoint"
MISFITS = ("cannot be resumed as a whole", "written with other settings")


def reports(folder: Path, num_processes: int) -> list[str]:
    """What the processes reported of a run, as text: equal if and only if every bit is."""
    return [(folder / f"report-{num_processes}-{rank}.json").read_text() for rank in range(num_processes)]


def kills(model: str, folder: Path, num_kills: int, seed: int, variants: list[str]) -> bool:
    draw, counts = random.Random(seed), dict.fromkeys(("kills", "in a save", "resumed"), 0)
    for number in count():
        if counts["kills"] == num_kills:
            break
        num_processes, variant = 1 + number % 2, variants[number // 2 % len(variants)]
        whole = folder / f"{variant}, {num_processes}"
        if not whole.exists():
            run(model, whole, variant, num_processes)
        *_, summary = read_log(whole)
        seconds = summary["train_runtime"]
        moments = sorted(draw.uniform(0, seconds) for _ in range(min(KILLS_A_RUN, num_kills - counts["kills"])))
        num_killed = kill_at(model, folder / f"run {number}", variant, num_processes, moments, seconds, counts)
        is_equal = reports(folder / f"run {number}", num_processes) == reports(whole, num_processes)
        counts["resumed"] += num_killed if is_equal else 0
        outcome = f"{num_killed} kills, {'bitwise equal' if is_equal else 'DIFFERENT'}"
        print(f"run {number} ({variant}, {num_processes} process(es)): {outcome}; {counts}", flush=True)
    return counts["resumed"] == num_kills


def kill_at(model: str, folder: Path, variant: str, num_processes: int, moments, seconds, counts) -> int:
    """Kills a run at moments of its whole course, and starts it again after each; returns how many met it."""
    num_killed = 0
    for moment in [*moments, None]:
        began, done = time.time(), steps_done(folder)
        after = None if moment is None else max(moment - seconds * done / KILLED_STEPS, 0.0)
        if run(model, folder, variant, num_processes, kill_after=after):
            break
        num_killed += 1
        read_log(folder)  # every line can be read
        counts["kills"] += 1
        counts["in a save"] += is_torn(folder, began)
    report = json.loads(reports(folder, num_processes)[0])
    if [{k: v for k, v in log.items() if k != "max_steps"} for log in untimed(read_log(folder))] != report["logs"]:
        sys.exit(f"{folder}: {LOG_HISTORY_NAME} is not the log of the run.")
    return num_killed


def run(model: str, folder: Path, variant: str, num_processes: int, kill_after: float | None = None) -> bool:
    """Starts a run, or goes on with it; returns whether it came to its end. What is no kill ends the soak."""
    overrides = {"max_steps": KILLED_STEPS, **KILLED[variant], "resume_from": True, "kill_after": kill_after}
    is_new = steps_done(folder) == 0
    runs = json.dumps({folder.name: overrides})
    result = launch("sampled_runs", model, folder.parent, runs, num_processes=num_processes, timeout=TIMEOUT)
    # torchrun tells what became of its processes.
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
    return 0 if checkpoint is None else step_of(checkpoint)


def is_torn(folder: Path, began: float) -> bool:
    """Whether the newest checkpoint was not written to its end, by a run that began then."""
    newest = max((folder / "run").glob("checkpoint-*"), key=step_of, default=None)
    if newest is None or step_of(newest) == steps_done(folder):
        return False
    return max(path.stat().st_mtime for path in [newest, *newest.iterdir()]) > began


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-")[-1])


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=KILLED)
    args = parser.parse_args()
    folder, started = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    print(f"in {folder}, which is kept unless all is well", flush=True)
    model, variants = save_tiny_model(folder / "model"), [args.variant] if args.variant else list(KILLED)
    is_well = kills(model, folder, args.num_kills, args.seed, variants)
    print(f"{'all is well' if is_well else 'NOT all is well'}, after {(time.monotonic() - started) / 60:.0f} minutes")
    if is_well:
        shutil.rmtree(folder)
    return is_well


if __name__ == "__main__":
    sys.exit(not main())
