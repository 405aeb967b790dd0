# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
ms-swift, run for real, compared with this package: the same checkpoint, prompts, sizes and seeds, on the CPU.

    python3 -m venv swift && swift/bin/pip install -r benchmarks/peers/ms_swift/requirements.txt
    python -m benchmarks peers --swift-python swift/bin/python
    python -m benchmarks peers --from-kept    # runs nothing

Without `--swift-python` only this package's own methods run. These differences cannot be removed: ms-swift's loss
divides by the tokens of the rollout, not of the optimizer step, and is four times smaller here; its optimizer steps
each take four whole groups, while TRL distributes the rows of a rollout at random; the order of prompts, random
numbers, versions. A batch is full if 16 groups whose rewards differ train. A fallback is a rollout that trains on
fewer. CPU seconds are of one thread, without the start of the process. The prompts, rounds and batches that ms-swift
chooses are replayed by its model in sampling_policies.py: `as modelled` is the share of rollouts in which the two
agree about every prompt that is sampled and trained on.
"""

import itertools
import json
import math
import re
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import yaml

from trl_dapo.cli.quickstart import Problems
from trl_dapo.run.ledger import read_ledger
from trl_dapo.run.log import LOG_HISTORY_NAME

from ... import time_to_accuracy
from ...frame.kept import EVIDENCE, RUNS, read_csv, write_csv
from ...frame.measures import mean_of
from ...frame.predictions import seeds_of
from ...frame.runs import Job, fingerprint, run_all
from ...frame.tables import markdown, say
from ...frame.verdicts import LEVEL, holm, interval, p_value
from ...sampling_policies import swift as modelled_swift
from ...time_to_accuracy import ARMS, CHECKPOINT_SEED, NUM_PROMPTS, NUM_STEPS, TASKS


HERE = Path(__file__).parent
KEY = "task", "method", "seed"

SWIFT = yaml.load((HERE / "dapo.yaml").read_text(), yaml.BaseLoader)  # as text
PEERS = {
    "ms-swift, 3 resamples": {"max_resample_times": 3},
    "ms-swift, 30 resamples": {"max_resample_times": 30},
    "ms-swift, 30, clip equalised": {"max_resample_times": 30, "max_grad_norm": 0.25, "adam_epsilon": 2.5e-9},
}
REFERENCE = "ms-swift, 30 resamples"
OURS = ("full batch again", "paper", "carry, memory")
METHODS = (*PEERS, *OURS)


# ---- One run ----


def run(job, checkpoint, folder):
    return (run_peer if job.others["swift"] else run_ours)(job, checkpoint, folder)


def run_ours(job, checkpoint, folder):
    result = time_to_accuracy.train(job, checkpoint, folder, ARMS[job.arm])
    entries = map(json.loads, (folder / LOG_HISTORY_NAME).read_text().splitlines())
    return {
        "curve": result["curve"],
        "rollouts": rollouts_of(read_ledger(folder).to_pylist()),
        "grad_norms": [entry["grad_norm"] for entry in entries if "grad_norm" in entry],
    }


def rollouts_of(groups):
    """Return what `swift_run.Watch` notes, from the rows of the ledger."""
    rollouts, carried = [], []
    for number in sorted({group["rollout"] for group in groups}):
        rows = [group for group in groups if group["rollout"] == number]
        asked = [[] for _ in range(max(group["round"] for group in rows))]
        for group in rows:
            asked[group["round"] - 1].append(group["prompt_id"])
        trained = carried + [group["prompt_id"] for group in rows if group["outcome"] == "trained"]
        carried = [group["prompt_id"] for group in rows if group["outcome"] == "carried"]
        fell_back = len(trained) < NUM_PROMPTS
        rollouts.append({"asked": asked, "trained": trained, "useful": len(trained), "fell_back": fell_back})
    return rollouts


def run_peer(job, checkpoint, folder):
    problems, swift = Problems(CHECKPOINT_SEED), job.others["swift"]
    data = time_to_accuracy.prompts(problems, TASKS[job.task].shares, job.seed)
    rows = [{"messages": row["prompt"], "solution": row["solution"]} for row in data]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": checkpoint.resolve(),
        "dataset": folder / "prompts.jsonl",
        "output_dir": folder / "out",
        "seed": job.seed,
        "data_seed": job.seed,
        "max_steps": job.num_rollouts * NUM_STEPS,
        **SWIFT,
        **job.settings,
    }
    task = {"options": options, "held_out": time_to_accuracy.held_out(problems), "num_rollouts": job.num_rollouts}
    (folder / "job.json").write_text(json.dumps(task, default=str))
    command = [swift["python"], HERE / "swift_run.py", folder / "job.json", folder / "result.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ms-swift ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    result = json.loads((folder / "result.json").read_text())
    modelled = replay(result["rollouts"], result["order"], job.seed, job.settings["max_resample_times"])
    return {**result, "as_modelled": statistics.mean(modelled)}


def replay(rollouts, names, seed, num_resamples):
    """
    Return whether `sampling_policies.swift` does in each rollout what ms-swift did, given the groups whose rewards
    differed. `names` are the prompts of the dataset, in the order into which ms-swift has shuffled them before it
    trains.
    """

    class World:
        trace = SimpleNamespace(num_prompts=len(names), seed=seed)

        def begin(self, judged):
            self.asked, self._judged = [], iter(judged)

        def accepted(self, prompts):
            self.asked.append([names[i] for i in prompts])
            # ms-swift never uses the last resample, so it does not count here either.
            return np.array(next(self._judged, [False] * len(prompts)))

    world = World()
    model = modelled_swift(world, NUM_PROMPTS, num_resamples, steps_per_generation=NUM_STEPS)
    agree = []
    for rollout in rollouts:
        world.begin(rollout["judged"])
        step = next(model)
        full = step.num_distinct is not None
        agree.append(
            world.asked[: step.num_rounds] == rollout["asked"]
            and step.num_trained == rollout["useful"]
            and full != rollout["fell_back"]
            and (not full or step.num_distinct == len(set(rollout["trained"])))
        )
    return agree


def figures_of(result):
    """Return the figures of a run for the CSV; NaN if there is nothing to count."""
    last, rollouts = result["curve"][-1], result["rollouts"]
    distinct = [len(set(rollout["trained"])) for rollout in rollouts if not rollout["fell_back"]]
    figures = {
        "rollouts": last["rollouts"],
        "tokens": last["tokens"],
        "rounds": sum(len(rollout["asked"]) for rollout in rollouts),
        "fallbacks": sum(rollout["fell_back"] for rollout in rollouts),
        "useful_groups": statistics.mean(rollout["useful"] for rollout in rollouts),  # per rollout that trains
        "distinct_prompts": statistics.mean(distinct) if distinct else math.nan,  # in a full batch
        "fewest_distinct": min(distinct, default=math.nan),
        "grad_norm": statistics.mean(result["grad_norms"]),
        "cpu_seconds": last["seconds"],
        "before": result["curve"][0]["accuracy"],
        "accuracy": last["accuracy"],
        "as_modelled": result.get("as_modelled", math.nan),
    }
    return {name: float(value) for name, value in figures.items()} | {"curve": result["curve"]}


# ---- The table ----


COLUMNS = (
    *("task, method", "accuracy", "minus ms-swift's", "tokens", "compared with ms-swift's", "rounds"),
    *("groups that train", "different prompts (fewest)", "fallbacks", "gradient norm", "CPU seconds"),
)


def differences(results):
    """
    Return the differences from ms-swift with as many rounds, seed by seed, by task, method and figure: points of
    accuracy, and the share of tokens above ms-swift's.
    """
    found = {}
    for task, method in itertools.product(TASKS, METHODS):
        seeds = seeds_of(results, task, method)
        if method != REFERENCE and (task, REFERENCE, 0) in results:
            pairs = [(results[task, method, seed], results[task, REFERENCE, seed]) for seed in seeds]
            found[task, method, "accuracy"] = [100 * (mine["accuracy"] - theirs["accuracy"]) for mine, theirs in pairs]
            found[task, method, "tokens"] = [mine["tokens"] / theirs["tokens"] - 1 for mine, theirs in pairs]
    return found


def judge(found):
    """
    Return what is written after each difference: whether it holds. An arm that made the very same runs is not tested.
    """
    same = {(task, method) for task, method, _ in found} - {key[:2] for key, values in found.items() if any(values)}
    tested = {key: p_value(values) for key, values in found.items() if key[:2] not in same and len(values) > 1}
    said = {key: ", the same runs" if key[:2] in same else "" for key in found}
    for (key, p), adjusted in zip(tested.items(), holm(list(tested.values())), strict=True):
        if p <= LEVEL:
            said[key] = ": differs, also by Holm" if adjusted <= LEVEL else ": differs, but not by Holm"
    return said


def table_of(results):
    """
    Return the lines of the table of the runs.

    Figures are means over seeds. Accuracy has an interval, and so has its difference from ms-swift with as many
    rounds, seed by seed. Tokens also have a ratio to ms-swift's. After each difference, the table says whether it
    holds by itself, and by Holm's test of all differences of the table.
    """
    found = differences(results)
    said, rows = judge(found), []
    for task, method in itertools.product(TASKS, METHODS):
        runs = [results[task, method, seed] for seed in seeds_of(results, task, method)]
        if not runs:
            continue
        less, over = (found.get((task, method, name)) for name in ("accuracy", "tokens"))
        mean, fewest = mean_of(runs, "distinct_prompts"), min(run["fewest_distinct"] for run in runs)
        if less:
            less = "{:+.1f} ± {:.1f}".format(*interval(less)) + said[task, method, "accuracy"]
            share, half = interval(over)
            over = f"{1 + share:.2f}x ± {half:.2f}" + said[task, method, "tokens"]
        rows.append(
            (
                f"{task}, {method}",
                "{:.1f}% ± {:.1f}".format(*interval([100 * run["accuracy"] for run in runs])),
                less or "",
                f"{mean_of(runs, 'tokens'):,.0f}",
                over or "",
                f"{mean_of(runs, 'rounds'):.0f}",
                f"{mean_of(runs, 'useful_groups'):.1f}",
                "never full" if math.isnan(mean) else f"{mean:.2f} ({fewest:.0f})",
                f"{sum(run['fallbacks'] for run in runs):.0f} of {sum(run['rollouts'] for run in runs):.0f}",
                f"{mean_of(runs, 'grad_norm'):.2f}",
                f"{mean_of(runs, 'cpu_seconds'):.1f}",
            )
        )
    return markdown(COLUMNS, rows)


def filled_in(page):
    """Return the page with the table of the kept runs."""
    table = table_of(read_csv(HERE, KEY))
    return re.sub(f"^{re.escape(table[0])}\n(\\|.*\n)*", "\n".join([*table, ""]), page, flags=re.MULTILINE)


def fill_in():
    EVIDENCE.write_text(filled_in(EVIDENCE.read_text()))


# ---- All runs ----


def swift_environment(python):
    """Return the Python and the versions of an environment that has ms-swift."""
    ask = "from importlib.metadata import version; print(version('ms_swift'), version('trl'), version('torch'))"
    versions = subprocess.run([python, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    # The path is not resolved: the Python of a virtual environment is a link, and the Python that it links to has no
    # ms-swift.
    return {"python": str(Path(python).absolute()), "versions": versions}


def jobs_of(seeds, num_rollouts, swift=None):
    others, jobs = {"swift": {}, "code": fingerprint(time_to_accuracy.run)}, []
    for task, num in num_rollouts.items():
        settings = time_to_accuracy.settings_of("paper", TASKS[task].learning_rate)
        how = {"num_rollouts": num, "probe_every": num}
        for seed in seeds:
            for name, options in PEERS.items() if swift else ():
                jobs.append(Job(task, name, seed, settings | options, others=others | {"swift": swift}, **how))
            jobs += [Job(task, name, seed, settings, others=others, **how) for name in OURS]
    return jobs


def main(
    swift_python: str | None = None,
    from_kept=False,
    num_seeds=3,
    quickstart_rollouts=30,
    one_in_ten_rollouts=15,
    num_warm_up_steps=250,
    num_processes=2,
    output_dir=Path("outputs/peers_ms_swift"),
):
    if from_kept:
        fill_in()
        return
    swift = swift_environment(swift_python) if swift_python else None
    checkpoint, start = time_to_accuracy.make_checkpoint(output_dir, num_warm_up_steps)
    versions = "ms-swift {}, TRL {}, torch {}".format(*swift["versions"]) if swift else "ms-swift does not run"
    say(f"{versions}. The checkpoint has an accuracy of {start:.1%}.")
    jobs = jobs_of(range(num_seeds), dict(zip(TASKS, (quickstart_rollouts, one_in_ten_rollouts), strict=True)), swift)
    found = run_all(run, jobs, checkpoint, output_dir, num_processes)
    results = {key: figures_of(result) for key, result in found.items()}
    write_csv(results, output_dir, KEY)
    print("\n".join(table_of(results)))
    modelled = mean_of(results.values(), "as_modelled")
    print(f"As modelled in sampling_policies.py: {modelled:.1%} of ms-swift's rollouts. Written: {output_dir / RUNS}")
