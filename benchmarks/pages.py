# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Write the tables of README.md, docs/ and EVIDENCE.md from the kept results of several studies.

README.md's table comes from savings/. Tokens and seconds to an accuracy come from RESULTS.md, and from two_names/ if
each arm has its own best learning rate. Accuracies after the same steps and time come from same_budget/ and savings/.
What each technique added on the ladder comes from recipes/ablation/ladder.csv and larger/runs.csv. All other figures
come from RESULTS.md. Every method that was run has a row.
"""

import itertools
import math
import re
import statistics
from functools import partial
from pathlib import Path

from .frame.kept import read_csv, read_rows
from .frame.measures import cost, spread
from .frame.tables import fill_block, markdown
from .frame.verdicts import interval
from .same_budget import study as same_budget
from .sampling_policies import CARRY, MEMORY, OURS
from .savings import study as savings
from .two_names import study as two_names


HERE = Path(__file__).parent
ROOT = HERE.parent
DOCS = ROOT / "docs"
PAGES = ROOT / "README.md", DOCS / "benchmarks.md", DOCS / "dynamic_sampling.md", HERE / "EVIDENCE.md"
LADDER = ROOT / "recipes" / "ablation" / "ladder.csv"
TASKS = ("quickstart", "one in ten")
RATED = (*TASKS, "Countdown")
TITLES = {"one in ten": "one prompt in ten can be learned"}
KEY = "part", "arm", "seed"  # of the runs of larger/ and real_model/
METHODS = {
    "GRPO, one step": "`GRPOTrainer`, one step per rollout (TRL's default)",
    "GRPO": "`GRPOTrainer`, four steps per rollout, as in all rows below",
    "GRPO, Clip-Higher": "`GRPOTrainer`, Clip-Higher",
    "full batch again": "a full batch in every round",
    "paper": "`DAPOTrainer`, the paper's sampling",
    "carry": "`DAPOTrainer`, carry",
    "carry, memory": "`DAPOTrainer`, carry and memory",
    "screen 3": "`DAPOTrainer`, the paper's sampling and a screen of 3",
    "screen": "`DAPOTrainer`, the paper's sampling and the screen",
    "carry, memory, screen 3": '`DAPOTrainer`, carry, memory and `dynamic_sampling_screen="3"`',
    "carry, memory, screen": '`DAPOTrainer`, carry, memory and `dynamic_sampling_screen="on"`',
    "carry, server": "`DAPOTrainer`, carry, sampled by a stand-in for a server",
    "carry, ahead": "`DAPOTrainer`, carry, sampled by the stand-in one rollout ahead",
}

# The rows of the table of tokens to a target, with the arms of two_names/.
SHOWN = {
    "`GRPOTrainer`": (two_names.ONE, two_names.FOUR),
    '`DAPOTrainer`, `dynamic_sampling_mode="paper"`': (two_names.PAPER,),
    "`DAPOTrainer`, former default": (two_names.DEFAULT,),
    '... former default, `dynamic_sampling_rewards=["correct"]`': (two_names.NAMED,),
    "... former default, fewer prompts per rollout": (two_names.FEWER,),
}
# The tables of savings/, by their names on the page.
SAVINGS = dict(
    zip(("steps", "tokens", "seconds", "hardest", "gradient", "spent", "acceptance"), savings.TABLES, strict=True)
)
WITH_TWO_REWARDS = "two rewards"
ARMS = {
    two_names.FOUR: "`GRPOTrainer`, four steps per rollout",
    same_budget.AT_SAME_RATE: "`GRPOTrainer`, four steps, at the best learning rate of the last row",
    two_names.ONE: "`GRPOTrainer`, one step per rollout",
    two_names.PAPER: '`DAPOTrainer`, `dynamic_sampling_mode="paper"`',
    two_names.DEFAULT: "`DAPOTrainer`, former default",
}
ARMS_OF_TWO_REWARDS = {
    two_names.FOUR: "`GRPOTrainer`",
    same_budget.AT_SAME_RATE: '`GRPOTrainer`, at the best learning rate of "no reward named"',
    two_names.ALONE: "`GRPOTrainer`, trained with `correct` alone",
    two_names.PAPER: ARMS[two_names.PAPER],
    two_names.DEFAULT: "`DAPOTrainer`, no reward named",  # without a name there is neither screen nor memory
    two_names.NAMED: '... with `dynamic_sampling_rewards=["correct"]`',
    two_names.FEWER: "... no reward named, 9 prompts per rollout instead of 16",
}


# ---- Reading kept results ----


def rows_of_results(title):
    """Return the cells of the first table of RESULTS.md whose title begins with `title`."""
    text = (HERE / "RESULTS.md").read_text()
    table = re.search(rf"^ *{re.escape(title)}.*?└", text, flags=re.DOTALL | re.MULTILINE)[0]
    return [[cell.strip() for cell in row.split("│")] for row in re.findall(r"^│(.*)│$", table, flags=re.MULTILINE)]


def of_results():
    """Return median tokens and seconds by task and method, in the order of RESULTS.md."""
    return {
        (task, method): (tokens.split()[0], seconds.split()[0])
        for task in TASKS
        for method, _, tokens, seconds, *_ in rows_of_results(f"{task}: until ")
    }


def of_real_model():
    """Return the runs of real_model/ with the sizes of the recipe by part and arm, accuracies in percent."""
    arms = {}
    for (part, arm, _), run in read_csv(HERE / "real_model", KEY).items():
        if part in ("products", "sums"):
            run = run | {"before": 100 * run["start"], "after": 100 * run["accuracy"]}
            arms.setdefault((part, arm), []).append(run)
    return arms


def ladders():
    """Return the runs of the smaller and of the larger model, by rung."""
    smaller, larger = {}, {}
    for row in read_rows(LADDER):
        smaller.setdefault(row.pop("rung"), []).append({name: float(text) for name, text in row.items()})
    for (part, arm, _), run in read_csv(HERE / "larger", KEY).items():
        if part == "ladder":
            larger.setdefault(arm, []).append(run)
    return [{rung: ladder[rung] for rung in smaller} for ladder in (smaller, larger)]


# ---- Tables ----


def time_table():
    """Return the table of tokens and seconds that each method took to the accuracy of each task."""
    results, rows = of_results(), []
    for method in dict.fromkeys(method for _, method in results):
        rows.append([METHODS[method], *("{} ({})".format(*results[task, method]) for task in TASKS)])
    columns = "tokens (CPU seconds) to the same accuracy", "quickstart, +10 points"
    return markdown([*columns, "one prompt in ten can be learned, +5"], rows)


def real_model_table():
    """Return the table of what a real language model learned in sixteen rollouts, by sampling method."""
    columns = ["held-out problems, 16 rollouts", "accuracy before", "after (lowest to highest)"]
    columns += ["smallest gain in points", "generated tokens", "CPU seconds", "seeds"]
    methods = METHODS | {"GRPO": "`GRPOTrainer`", "all weights": "... with carry and memory, all weights"}
    found, rows = of_real_model(), []
    for part, arm in (key for key in itertools.product(("products", "sums"), methods) if key in found):
        runs = found[part, arm]
        after = [run["after"] for run in runs]
        rows.append(
            [
                f"{part}, {methods[arm].replace('...', '`DAPOTrainer`')}",
                f"{statistics.median(run['before'] for run in runs):.1f}%",
                f"{statistics.median(after):.1f}% ({min(after):.1f}% to {max(after):.1f}%)",
                f"{min(run['after'] - run['before'] for run in runs):+.1f}",
                *(f"{statistics.median(run[name] for run in runs):,.0f}" for name in ("tokens", "cpu_seconds")),
                len(runs),
            ]
        )
    return markdown(columns, rows)


def results_table():
    """Return the table of tokens to the target by arm and task, and their ratio to GRPOTrainer's."""
    columns = (f"{TITLES.get(task, task)}: +{100 * of.gain:.0f}" for task, of in two_names.TASKS.items())
    counted = two_names.at_best(two_names.STUDY.read())
    grpo, *_ = SHOWN.values()
    rows = []
    for name, arms in SHOWN.items():
        cells = [name]
        for task in two_names.TASKS:
            has_arm = set(arms) & set(two_names.arms_of(task))
            cells.append(least_tokens(counted, task, arms, grpo) if has_arm else "one reward")
        rows.append(cells)
    return markdown(["generated tokens until accuracy has risen by, in points", *columns], rows)


def medians_table():
    """Return the table of tokens to the target by task and arm: median, range, and the ratio to GRPOTrainer's."""
    counted = two_names.at_best(two_names.STUDY.read())
    rows = []
    for task in two_names.TASKS:
        of_grpo, _ = median_tokens(counted, task, (two_names.ONE, two_names.FOUR))
        for arm in (*two_names.ARMS, *two_names.FORMER):
            runs = [run for (part, of, _), run in counted.items() if (part, of) == (task, arm)]
            if runs:
                tokens = [two_names.tokens_to_target(run, task) for run in runs]
                ratio = statistics.median(tokens) / of_grpo
                rows.append([task, arm, spread(tokens), f"{ratio:.2f}x" if math.isfinite(ratio) else ""])
    return markdown(["task", "arm", "tokens to the target", "compared with the better GRPO"], rows)


def rates_table():
    """Return the table of tokens to the target at each learning rate, of the tasks for which all rates were run."""
    counted = two_names.at_best(results := two_names.STUDY.read())
    keys = [*itertools.product(RATED, (two_names.FOUR, two_names.ONE_BATCH))]
    names = {two_names.FOUR: "GRPO", two_names.ONE_BATCH: "DAPO with GRPO's budget"}
    cells = zip(*(two_names.tokens_by_rate(results, counted, *key) for key in keys), strict=True)
    rows = [[f"{factor:g}", *row] for factor, row in zip(sorted(two_names.FACTORS), cells, strict=True)]
    return markdown(["times GRPO's rate", *(f"{task}, {names[arm]}" for task, arm in keys)], rows)


def median_tokens(counted, task, arms):
    """Return the median tokens to the target of the best of the arms and its number of seeds; `None` if not run."""
    tokens = {arm: [] for arm in arms}
    for (part, arm, _), run in counted.items():
        if part == task and arm in tokens:
            tokens[arm].append(two_names.tokens_to_target(run, task))
    return min(((statistics.median(found), len(found)) for found in tokens.values() if found), default=None)


def least_tokens(counted, task, arms, grpo):
    """Return the median tokens to the target of the best of the arms as text, with the ratio to GRPOTrainer's."""
    found, of_grpo = median_tokens(counted, task, arms), median_tokens(counted, task, grpo)
    if found is None:
        return "not run"
    least, num = found
    text = "never" if math.isinf(least) else f"{least:,.0f}"
    if arms != grpo and math.isfinite(least) and of_grpo and math.isfinite(of_grpo[0]):
        text += f" ({least / of_grpo[0]:.2f}x)"
    return text + (f", {num} seeds" if num < len(two_names.SEEDS) else "")


def steps_table():
    """Return the table of optimizer steps to the target by task, from the same runs as the tokens."""
    counted = two_names.at_best(two_names.STUDY.read())
    tasks = [task for task in two_names.TASKS if task != WITH_TWO_REWARDS]
    rows = []
    for arm, name in ARMS.items():
        if arm == same_budget.AT_SAME_RATE:
            continue
        cells = [name]
        for task in tasks:
            runs = [run for (part, of, _), run in counted.items() if (part, of) == (task, arm)]
            num = two_names.ARMS[arm].num_steps or two_names.TASKS[task].num_steps
            target = two_names.TASKS[task].gain
            steps = [num * cost(run, run["curve"][0]["accuracy"] + target, "rollouts") for run in runs]
            cells.append(spread(steps))
        rows.append(cells)
    columns = (f"{TITLES.get(task, task)}: +{100 * two_names.TASKS[task].gain:.0f}" for task in tasks)
    return markdown(["optimizer steps until accuracy has risen by, in points", *columns], rows)


def same_budget_table():
    """Return the table of accuracies after the same number of steps and after the same CPU time."""
    results = same_budget.STUDY.read()
    tasks = [task for task in same_budget.BUDGETS if task != WITH_TWO_REWARDS]
    columns, rows = ["accuracy on held-out problems"], []
    for task in tasks:
        of_steps, _, of_seconds = same_budget.columns_of(task)[1:]
        columns += [f"{TITLES.get(task, task)}: {of_steps}", of_seconds]
    found = [{row[0]: row[1:] for row in same_budget.rows_of(results, task)} for task in tasks]
    for arm, name in ARMS.items():
        cells = [name]
        for of_task in found:
            after_steps, _, after_seconds = of_task[arm]
            cells += [after_steps or "not compared", after_seconds or "not compared"]
        rows.append(cells)
    return markdown(columns, rows)


def two_rewards_table():
    """Return the table for two rewards: tokens to the target, and accuracy after the same steps and time."""
    of_steps, of_tokens, of_seconds = same_budget.columns_of(WITH_TWO_REWARDS)[1:]
    counted = same_budget.counted(same_budget.STUDY.read())
    gain = 100 * two_names.TASKS[WITH_TWO_REWARDS].gain
    found = {row[0]: row[1:] for row in same_budget.rows_of(same_budget.STUDY.read(), WITH_TWO_REWARDS)}
    rows = []
    for arm, name in ARMS_OF_TWO_REWARDS.items():
        runs = [run for (task, of, _), run in counted.items() if (task, of) == (WITH_TWO_REWARDS, arm)]
        tokens = spread([two_names.tokens_to_target(run, WITH_TWO_REWARDS) for run in runs]) if runs else "not run"
        rows.append([name, tokens, *found[arm]])
    return markdown(["two reward functions", f"tokens to +{gain:.0f} points", of_steps, of_tokens, of_seconds], rows)


# The columns of README.md's table, with the arms of savings/.
SUMMARY = {
    savings.GRPO: "`GRPOTrainer`",
    savings.PAPER: '`dynamic_sampling_mode="paper"`',
    savings.AUTO: "`DAPOTrainer`, defaults",
}


def summary_table():
    """Return README.md's table: accuracy after the same optimizer steps by task and trainer, and the tokens taken."""
    counted = savings.counted_runs(savings.STUDY.read())
    rows = []
    for task in savings.TASKS:
        runs = {
            arm: [counted[task, arm, seed] for seed in savings.SEEDS if (task, arm, seed) in counted]
            for arm in SUMMARY
        }
        if min(map(len, runs.values())) < len(savings.SEEDS):
            continue
        accuracy, tokens = (savings.after(task, savings.STEPS, name) for name in ("accuracy", "tokens"))
        of_grpo = tokens(*runs[savings.GRPO])
        informative = statistics.median(run["acceptance"] for run in runs[savings.GRPO])
        cells = [f"{task}, {savings.describe_budget(task, savings.STEPS)}", f"{informative:.0%}"]
        for arm, found in runs.items():
            text = savings.describe(accuracy(*found))
            if arm != savings.GRPO:
                ratios = sorted(mine / other for mine, other in zip(tokens(*found), of_grpo, strict=True))
                text += f"; {statistics.median(ratios):.2f}x ({ratios[0]:.2f}x to {ratios[-1]:.2f}x)"
            cells.append(text)
        rows.append(cells)
    return markdown(["task, after", "informative groups", *SUMMARY.values()], rows)


def gains_table():
    """Return the table of the gains of `DAPOTrainer` with its defaults over `GRPOTrainer`, seed by seed."""
    counted, rows = savings.counted_runs(savings.STUDY.read()), []
    for task in savings.TASKS:
        cells = [task]
        for spent in savings.SPENT:
            accuracy = savings.after(task, spent, "accuracy")
            gains = []
            for seed in savings.SEEDS:
                if (task, savings.AUTO, seed) in counted and (task, savings.GRPO, seed) in counted:
                    mine, others = accuracy(counted[task, savings.AUTO, seed], counted[task, savings.GRPO, seed])
                    gains.append(100 * (mine - others))
            cells.append(
                "{:+.1f} ± {:.1f}".format(*interval(gains)) if len(gains) == len(savings.SEEDS) else "not run"
            )
        rows.append(cells)
    columns = [f"points after the same {what}" for what in ("optimizer steps", "generated tokens", "CPU seconds")]
    return markdown(["task", *columns], rows)


def rates_of_savings_table():
    """Return the table of the accuracy that each arm reached at each learning rate with the seed of the trials."""
    results, rows = savings.STUDY.read(), []
    for task in savings.TASKS:
        accuracy = savings.after(task, savings.STEPS, "accuracy")
        trials = {}
        for (of, arm, rate, seed), run in results.items():
            if (of, seed) == (task, savings.TRIAL):
                trials[arm, float(rate)] = run
        for factor in sorted({factor for _, factor in trials}):
            cells = [
                f"{accuracy(trials[arm, factor])[0]:.1%}" if (arm, factor) in trials else "not run"
                for arm in savings.COLUMNS
            ]
            rows.append([task, f"{factor:g}", *cells])
    return markdown(["task", "times GRPO's rate", *savings.COLUMNS], rows)


def savings_table(title):
    """Return one of the tables of savings/: a row per task, a column per arm."""
    return markdown(*savings.table(savings.STUDY.read(), title))


def policies_table():
    """Return the table of what the policy of each framework samples to fill a batch, and how often it falls short."""
    columns = (
        "policy",
        "groups generated per accepted group that trains",
        "compared with 1 / acceptance rate",
        "rounds",
        "missing groups",
    )
    rows = []
    for policy, generated, ratio, rounds, short in rows_of_results("512 prompts, acceptance 0.33"):
        name = f"this package, {policy}" if policy in (OURS, CARRY, MEMORY) else policy
        rows.append([name, generated, f"{ratio}x", rounds, "" if short == "0.0%" else short])
    return markdown(columns, rows)


def rollout_seconds_table():
    """
    Return the table of what each setting saves compared with whole groups and discarded surplus: completions and
    seconds, by engine and batch.
    """
    rates, settings = ("10%", "35%", "65%"), ("carry", "screen", "memory", "both")
    rows = []
    for batch in (32, 512):
        savings = {}  # of seconds and of completions, a pair for each setting
        for engine, accepted, _, _, *cells in rows_of_results(f"{batch} prompts x 16: times fewer"):
            savings[engine, accepted] = [[float(value) for value in cell.split(" / ")] for cell in cells]
        engines = list(dict.fromkeys(engine for engine, _ in savings))
        # The number of completions does not depend on an engine's slots, so it is read off the last engine.
        shown = [("completions", engines[-1], 1), *((f"seconds, {engine}", engine, 0) for engine in engines)]
        for name, engine, which in shown:
            by_setting = zip(*(savings[engine, rate] for rate in rates), strict=True)
            cells = [", ".join(f"{pair[which]:.1f}" for pair in pairs) for pairs in by_setting]
            rows.append([f"{batch}", name, *cells])
    return markdown(["prompts per batch", "what is counted", *settings], rows)


def overlap_table():
    """Return the table of the seconds of a rollout if sampling takes r times as long as an update."""
    columns = "r", "taking turns", "one ahead", "longer of sampling and update", "speedup"
    rows = rows_of_results("Seconds of a rollout, medians of 5")
    return markdown(columns, [[*seconds, f"{speedup}x"] for *seconds, speedup in rows])


def steps(ladder):
    """
    Return the gain of each rung over the one before, seed by seed, and at last the gain of all techniques over GRPO
    with as many tokens.
    """
    (_, *rungs, control), above = ladder, list(ladder)
    pairs = {rung.removeprefix("+ "): (rung, above[i]) for i, rung in enumerate(rungs)}
    pairs["all techniques, compared with GRPO with as many tokens"] = rungs[-1], control
    return {name: differences(ladder[rung], ladder[other]) for name, (rung, other) in pairs.items()}


def differences(mine, others):
    """Return differences in points of accuracy, seed by seed."""
    return [100 * a["accuracy"] - 100 * b["accuracy"] for a, b in zip(mine, others, strict=True)]


def ladder_table():
    """Return the table of what each technique added."""
    found = [steps(ladder) for ladder in ladders()]
    title = "gain in accuracy over the rung above, in points ± 95% interval"
    rows = [[name, *("{:+.1f} ± {:.1f}".format(*interval(steps[name])) for steps in found)] for name in found[0]]
    return markdown([title, "0.8 million parameters, arithmetic", "5 million parameters, Countdown"], rows)


def rungs_table():
    """Return the table of what the runs of the smaller model reached, rung by rung."""
    above, rows = None, []
    for rung, runs in ladders()[0].items():
        gain = "{:+.1f} ± {:.1f} points".format(*interval(differences(runs, above))) if above else ""
        mean = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        cells = f"{100 * mean['truncated']:.1f}%", f"{mean['length']:.1f}", f"{mean['entropy']:.2f}"
        accuracy = "{:.1f}% ± {:.1f}%".format(*interval([100 * run["accuracy"] for run in runs]))
        rows.append([rung, accuracy, gain, *cells, f"{mean['tokens']:,.0f}"])
        above = runs
    columns = "rung", "accuracy", "gain over the row above", "cut off", "length", "entropy", "generated tokens"
    return markdown(columns, rows)


def quickstart_table():
    """Return the table of the quickstart over its seeds: accuracy, and what both trainers took."""
    runs = [{name: float(text) for name, text in row.items()} for row in read_rows(HERE / "quickstart_seeds.csv")]

    def spread(name, form):
        values = [run[name] for run in runs]
        median, lowest, highest = map(form.format, (statistics.median(values), min(values), max(values)))
        return median if lowest == highest else f"{median} ({lowest} to {highest})"

    for run in runs:
        run["points"] = 100 * run["difference"]
    rows = [["after the warm-up", spread("before", "{:.1%}"), "", ""]]
    for name in ("grpo", "dapo"):
        cost = [spread(f"{name}_{what}", "{:,.0f}") for what in ("steps", "tokens")]
        rows.append([f"after `{name.upper()}Trainer`", spread(name, "{:.1%}"), *cost])
    rows.append(["difference between the two, same seed", f"{spread('points', '{:+.1f}')} points", "", ""])
    columns = f"median of {len(runs)} seeds (lowest to highest)", "accuracy on 1,000 held-out problems"
    return markdown([*columns, "optimizer steps", "generated tokens"], rows)


TABLES = {
    "quickstart": quickstart_table,
    "summary": summary_table,
    "results": results_table,
    "two names medians": medians_table,
    "rates": rates_table,
    "steps": steps_table,
    "same budget": same_budget_table,
    "two rewards": two_rewards_table,
    "savings gains": gains_table,
    "savings rates": rates_of_savings_table,
    "savings budgets": lambda: markdown(*savings.budgets()),
    **{f"savings {name}": partial(savings_table, title) for name, title in SAVINGS.items()},
    "real model": real_model_table,
    "time to accuracy": time_table,
    "ladder": ladder_table,
    "policies": policies_table,
    "rollout seconds": rollout_seconds_table,
    "overlap": overlap_table,
    "rungs": rungs_table,
}


def filled_in(page):
    """Return a page with its tables written anew."""
    for name, table in TABLES.items():
        page = fill_block(
            page, f"<!-- {name}: python -m benchmarks --from-kept -->", f"<!-- end of {name} -->", table()
        )
    return page


def fill_in():
    for path in PAGES:
        path.write_text(filled_in(path.read_text()))
