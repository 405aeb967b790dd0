# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Accuracy, cost and time of the quickstart over five seeds: the command's own seed and the next four.

    python -m benchmarks quickstart_seeds    # two seeds at once, a quarter of an hour

Runs `trl-dapo quickstart --seed S` with one thread and writes quickstart_seeds.csv, a row per seed: accuracy after the
warm-up, after `GRPOTrainer` and after `DAPOTrainer`; the difference of the last two, paired problem by problem, with
its 95% interval over problems; the optimizer steps and generated tokens of both; the share of `GRPOTrainer`'s groups
whose rewards differ; and the CPU seconds of the whole command.
"""

import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trl_dapo.cli.quickstart import count_generated_tokens
from trl_dapo.evaluation import compare
from trl_dapo.report import load_log_history, series

from .frame.kept import write_rows


SEEDS = range(42, 47)
CSV = Path(__file__).with_suffix(".csv")


def run(seed, folder):
    """Run one quickstart in the folder; return its row."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trl_dapo.cli", "quickstart", "--seed", str(seed), "--output_dir", str(folder)]
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "printed.txt").open("w") as printed:
        process = subprocess.Popen(command, env={**os.environ, **threads}, stdout=printed, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # the time of this process alone
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"`{' '.join(command[1:])}` ended with {process.returncode}: see {printed.name}")
    gained = compare(folder / "warm_up" / "eval", folder / "dapo" / "eval")["metrics"]["avg@4"]
    compared = compare(folder / "grpo" / "eval", folder / "dapo" / "eval")["metrics"]["avg@4"]
    logs = {name: load_log_history(folder / name) for name in ("grpo", "dapo")}
    return {
        "seed": seed,
        "before": gained["base"],
        "grpo": compared["base"],
        "dapo": compared["trained"],
        "difference": compared["difference"]["mean"],
        "difference_low": round(compared["difference"]["low"], 6),
        "difference_high": round(compared["difference"]["high"], 6),
        **{f"{name}_steps": log[-1]["step"] for name, log in logs.items()},
        **{f"{name}_tokens": count_generated_tokens(log) for name, log in logs.items()},
        "grpo_informative": round(1 - statistics.mean(series(logs["grpo"], "frac_reward_zero_std")[1]), 4),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }


def main(num_processes=2, output_dir=Path("outputs/quickstart_seeds")):
    rows = []
    with ThreadPoolExecutor(num_processes) as pool:
        for row in pool.map(run, SEEDS, [output_dir / str(seed) for seed in SEEDS]):
            rows.append(row)
            print(" ".join(f"{name}={value:.5g}" for name, value in row.items()), flush=True)
    write_rows(CSV, rows[0], [row.values() for row in rows])
