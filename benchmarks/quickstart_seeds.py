# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
What the quickstart gains, and its time, over five seeds: the command's own and the four that follow it.

    python -m benchmarks quickstart_seeds    # one seed after another, a quarter of an hour

Runs `trl-dapo quickstart --seed S` with one thread; writes quickstart_seeds.csv, a row a seed: accuracy before and
after, their paired difference with its 95 % interval over problems, and the CPU seconds of the whole command.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

from trl_dapo.evaluation import compare

from .frame.kept import write_rows


SEEDS = range(42, 47)
CSV = Path(__file__).with_suffix(".csv")


def run(seed, folder):
    """One quickstart, kept in the folder; returns its row."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "trl_dapo.cli", "quickstart", "--seed", str(seed), "--output_dir", str(folder)]
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command[1:])}` ended with {done.returncode}:\n{done.stderr}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    (folder / "printed.txt").write_text(done.stdout)
    change = compare(folder / "eval_warm_up", folder / "eval_trained")["metrics"]["avg@4"]
    return {
        "seed": seed,
        "before": change["base"],
        "after": change["trained"],
        "gain": change["difference"]["mean"],
        "gain_low": round(change["difference"]["low"], 6),
        "gain_high": round(change["difference"]["high"], 6),
        "cpu_seconds": round(seconds, 1),
    }


def main(output_dir=Path("outputs/quickstart_seeds")):
    rows = []
    for seed in SEEDS:
        rows.append(run(seed, output_dir / str(seed)))
        print(" ".join(f"{name}={value:.4g}" for name, value in rows[-1].items()), flush=True)
        write_rows(CSV, rows[0], [row.values() for row in rows])
