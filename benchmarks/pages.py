# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Writes the tables of README.md and docs/benchmarks.md that several benchmarks make, from what these have left.

    python benchmarks/pages.py

Tokens and seconds to an accuracy are RESULTS.md's and those of larger/curves.csv; what each technique added on the
ladder is that of recipes/ablation/ladder.csv and larger/runs.csv; the rest is RESULTS.md's. Every method that
was run has a row.
"""

import csv
import re
import statistics
from pathlib import Path

from runs import interval


HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
START, END = "<!-- {}: python benchmarks/pages.py -->", "<!-- end of {} -->"
TASKS = ("quickstart", "one in ten")
GAIN = 0.10  # of the larger task, as in larger/parts.py
METHODS = {
    "GRPO, one step": "`GRPOTrainer`, one step a rollout (TRL's default)",
    "GRPO": "`GRPOTrainer`, four steps, as all below",
    "GRPO, Clip-Higher": "`GRPOTrainer`, Clip-Higher",
    "full batch again": "full batch again",
    "ours": "`DAPOTrainer`, sampling as the paper",
    "ours, carry": "... with carry",
    "ours, carry, memory": "... with carry and memory",
    "ours, screened": "`DAPOTrainer`, three completions first",
    "ours, auto": '`DAPOTrainer`, `dynamic_sampling_screen="auto"`',
    "ours, carry, memory, screened": "... with carry and memory, three first",
    "ours, carry, memory, auto": "... with carry, memory and `auto`, as left alone",
    "ours, carry, server": "... with carry, beside a stand-in for a server",
    "ours, carry, ahead": "... the same, one rollout ahead",
}

# Those of README's table.
SHOWN = {
    "GRPO": "`GRPOTrainer`: once, whatever comes",
    "full batch again": "a full batch in every round, as SkyRL and ms-swift do",
    "ours": '`DAPOTrainer`, `dynamic_sampling_mode="paper"`: rounds alone',
    "ours, carry, memory": '`DAPOTrainer`, `dynamic_sampling_screen="off"`: groups are sampled whole',
    "ours, carry, memory, auto": "`DAPOTrainer` as it is",
}


def of_results():
    """Median tokens and seconds by task and method, as they stand in RESULTS.md, in its order."""
    text = (HERE / "RESULTS.md").read_text()
    found = {}
    for task in TASKS:
        table = re.search(rf"^ *{task}: to \S+ held out.*?└", text, flags=re.DOTALL | re.MULTILINE)[0]
        for row in re.findall(r"^│(.*)│$", table, flags=re.MULTILINE):
            method, _, tokens, seconds, *_ = (cell.strip() for cell in row.split("│"))
            found[task, method] = tokens.split()[0], seconds.split()[0]
    return found


def of_larger():
    """The same of the larger task, from its runs' curves; seconds are the CPU's."""
    curves = {}
    for row in read(HERE / "larger" / "curves.csv"):
        if row["part"] == "Countdown":
            curves.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(row)
    found = {}
    for arm, seeds in curves.items():
        ends = [next(p for p in curve if at(p) >= at(curve[0]) + GAIN) for curve in seeds.values()]
        tokens, seconds = (statistics.median(float(end[what]) for end in ends) for what in ("tokens", "seconds"))
        found[arm] = f"{tokens:,.0f}", f"{seconds:.0f}"
    return found


def at(point):
    return float(point["accuracy"])


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def time_table():
    """What each method took to each task's accuracy."""
    results, larger = of_results(), of_larger()
    lines = [
        "| tokens (CPU seconds) to the same accuracy | quickstart, +10 points | one prompt in ten can be learnt, +5 | "
        "Countdown, larger, +10 |",
        "|---|---|---|---|",
    ]
    for method in dict.fromkeys(method for _, method in results):
        cells = [results[task, method] for task in TASKS] + [larger.get(method)]
        lines.append(row_of(METHODS[method], *("{} ({})".format(*cell) if cell else "not run" for cell in cells)))
    return lines


def real_model_table():
    """What a real language model learnt in sixteen rollouts, by how these were sampled."""
    lines = [
        "| held out, 16 rollouts | right before | right after | least gain | tokens | CPU seconds | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    methods = METHODS | {"GRPO": "`GRPOTrainer`", "all weights": "... with carry and memory, all weights"}
    arms = {}
    for row in read(HERE / "real_model" / "runs.csv"):
        if row["part"] in ("products", "sums"):  # the others are of other sizes
            runs = arms.setdefault((row["part"], row["arm"]), [])
            runs.append({name: float(row[name]) for name in ("start", "accuracy", "tokens", "cpu_seconds")})
    for (part, arm), runs in sorted(arms.items(), key=lambda found: (found[0][0], list(methods).index(found[0][1]))):
        before, after = ([100 * run[name] for run in runs] for name in ("start", "accuracy"))
        cells = [f"{statistics.median(before):.1f} %"]
        cells.append(f"{statistics.median(after):.1f} % ({min(after):.1f} to {max(after):.1f})")
        cells.append(f"{min(end - start for start, end in zip(before, after, strict=True)):+.1f}")
        cells += [f"{statistics.median(run[name] for run in runs):,.0f}" for name in ("tokens", "cpu_seconds")]
        lines.append(row_of(f"{part}, {methods[arm].replace('...', '`DAPOTrainer`')}", *cells, len(runs)))
    return lines


def results_table():
    """What README shows: each way to sample on four tasks."""
    results, larger = of_results(), of_larger()
    lines = [
        "| how a batch is sampled | one prompt in ten can be learnt: tokens to 5 points more | Countdown: tokens to "
        "10 points more | SmolLM2: products right | SmolLM2: sums right |",
        "|---|---|---|---|---|",
    ]
    for method, name in SHOWN.items():
        tokens = [results["one in ten", method][0], larger.get(method, ["not run"])[0]]
        lines.append(row_of(name, *tokens, *(learnt(part, method) for part in ("products", "sums"))))
    return lines


def learnt(part, arm):
    """Medians before and after of the real model's runs, and their number."""
    runs = [row for row in read(HERE / "real_model" / "runs.csv") if (row["part"], row["arm"]) == (part, arm)]
    if not runs:
        return "not run"
    before, after = (100 * statistics.median(float(run[name]) for run in runs) for name in ("start", "accuracy"))
    return f"{before:.1f} -> {after:.1f} % ({len(runs)} seeds)"


def row_of(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def rows_of_results(title):
    """Cells of the first table of RESULTS.md whose title begins so."""
    text = (HERE / "RESULTS.md").read_text()
    table = re.search(rf"^ *{re.escape(title)}.*?└", text, flags=re.DOTALL | re.MULTILINE)[0]
    return [[cell.strip() for cell in row.split("│")] for row in re.findall(r"^│(.*)│$", table, flags=re.MULTILINE)]


def policies_table():
    """What each framework's policy samples to fill a batch, and how often it leaves one short."""
    lines = [
        "| policy | groups generated per group trained | over the least possible | rounds | batch left short |",
        "|---|---|---|---|---|",
    ]
    for policy, *costs, short in rows_of_results("512 prompts, acceptance 0.33, stationary"):
        lines.append(row_of(policy, *costs, "" if short == "0.0%" else short.replace("%", " %")))
    return lines


def overlap_table():
    """Seconds of a rollout where sampling takes r times an update."""
    lines = ["| r | in turns | ahead | longer of the two | times as fast |", "|---|---|---|---|---|"]
    rows = rows_of_results("Seconds of a rollout, medians of 5")
    return lines + [row_of(*row[:4], row[-1]) for row in rows if re.match(r"[\d.]", row[0])]


def ladders():
    """Accuracy in percent by rung, a value a seed: of the smaller model, and of the larger."""
    smaller, larger = {}, {}
    for row in read(ROOT / "recipes" / "ablation" / "ladder.csv"):
        smaller.setdefault(row["rung"], []).append(100 * at(row))
    for row in read(HERE / "larger" / "runs.csv"):
        if row["part"] == "ladder":
            larger.setdefault(row["arm"], []).append(100 * at(row))
    return [{rung: ladder[rung] for rung in smaller} for ladder in (smaller, larger)]


def steps(ladder):
    """What each rung has over the one before, seed by seed; the last is all of them over GRPO with as many tokens."""
    (_, *rungs, control), above = ladder, list(ladder)
    pairs = {rung.removeprefix("+ "): (rung, above[i]) for i, rung in enumerate(rungs)}
    pairs["all of them, over GRPO with as many tokens"] = rungs[-1], control
    return {
        name: [mine - others for mine, others in zip(ladder[rung], ladder[other], strict=True)]
        for name, (rung, other) in pairs.items()
    }


def ladder_table():
    """What each technique added."""
    found = [steps(ladder) for ladder in ladders()]
    lines = [
        "| accuracy on the paper's ladder: points over the rung above, ± 95 % | 0.8 million parameters | 5 million |",
        "|---|---|---|",
    ]
    for name in found[0]:
        lines.append(row_of(name, *("{:+.1f} ± {:.1f}".format(*interval(steps[name])) for steps in found)))
    return lines


def rungs_table():
    """What the smaller model's runs came to, rung by rung."""
    rungs, above = {}, None
    for row in read(ROOT / "recipes" / "ablation" / "ladder.csv"):
        rungs.setdefault(row["rung"], []).append(row)
    lines = [
        "| rung | accuracy | over the row above | cut off | length | entropy | tokens generated |",
        "|---|---|---|---|---|---|---|",
    ]
    for rung, rows in rungs.items():
        accuracy = [100 * at(row) for row in rows]
        gain = [mine - theirs for mine, theirs in zip(accuracy, above or accuracy, strict=True)]
        cells = ["{:.1f} % ± {:.1f} %".format(*interval(accuracy))]
        cells.append("{:+.1f} % ± {:.1f} %".format(*interval(gain)) if above else "")
        cells.append(f"{100 * mean_of(rows, 'truncated'):.1f} %")
        cells += [
            f"{mean_of(rows, 'length'):.1f}",
            f"{mean_of(rows, 'entropy'):.2f}",
            f"{mean_of(rows, 'tokens'):,.0f}",
        ]
        lines.append(row_of(rung, *cells))
        above = accuracy
    return lines


def mean_of(rows, name):
    return statistics.mean(float(row[name]) for row in rows)


TABLES = {
    "results": results_table,
    "real model": real_model_table,
    "time to accuracy": time_table,
    "ladder": ladder_table,
    "policies": policies_table,
    "overlap": overlap_table,
    "rungs": rungs_table,
}


def fill_in(page):
    """A page with its tables as they are now."""
    for name, table in TABLES.items():
        start, end = START.format(name), END.format(name)
        block = "\n".join([start, "", *table(), "", end])
        page = re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _, block=block: block, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fill_in(path.read_text()))
