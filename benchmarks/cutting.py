# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
How an optimizer step's rows are cut into micro-batches: with a fixed number of micro-batches, and with a token budget.

Lengths are drawn, nothing is trained: it is arithmetic, under a minute on one core. Prompts are lognormal around 150
tokens, as those of DAPO-Math-17k. Completions are cut off at 8,192 tokens: lognormal (sigma 0.8, an average of about
2,200), bimodal (three of four around 800, the fourth around 7,000) or all of 2,200 tokens. The fixed number gives
every rank micro-batches of 8 rows. "Real" is the tokens of all rows of the step, without padding, over the tokens of
all ranks' passes, where a rank waits for the costliest one: at every micro-batch if ranks are in step (FSDP, ZeRO),
else once a step (DDP). Figures are means over windows, peaks the highest.

    python benchmarks/cutting.py [--budget 9216] [--windows 20]
"""

import argparse
import math
import random
import time
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from trl_dapo.models import ModelShape
from trl_dapo.update.microbatches import Rows, plan_window, plan_window_within_budget
from trl_dapo.update.rows import padded_cost


LONGEST = 8192
FIXED_ROWS = 8
NUM_ROWS = (16, 64, 512)
NUM_RANKS = (1, 2, 8)
QWEN3_4B = ModelShape(
    hidden_size=2560,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    intermediate_size=9728,
).attention_cost


def lognormal(draw):
    return draw.lognormvariate(math.log(2200) - 0.8**2 / 2, 0.8)


def bimodal(draw):
    return draw.gauss(800, 160) if draw.random() < 0.75 else draw.gauss(7000, 800)


def equal(draw):
    return 2200


LENGTHS = {"lognormal": lognormal, "bimodal": bimodal, "equal": equal}


def window(kind, num_rows, seed):
    """Prompt and completion length of each row of an optimizer step."""
    draw = random.Random(seed)
    prompts = [150 if kind == "equal" else int(draw.lognormvariate(math.log(150), 0.3)) for _ in range(num_rows)]
    return [(prompt, max(1, min(LONGEST, int(LENGTHS[kind](draw))))) for prompt in prompts]


def split(lengths, num_ranks):
    """As many rows to each rank."""
    share = len(lengths) // num_ranks
    return [lengths[start : start + share] for start in range(0, len(lengths), share)]


def fixed(lengths, num_ranks):
    """The plan without a budget: micro-batches of 8 rows on average."""
    num = max(1, len(lengths) // num_ranks // FIXED_ROWS)
    return plan_window(split(lengths, num_ranks), num)


class Figures(NamedTuple):
    num_microbatches: float
    real: float
    peak: int


def measure(windows, plans, in_step):
    """Means over windows, and the highest peak."""
    return Figures(
        mean(len(plan[0]) for plan in plans),
        mean(
            sum(map(sum, lengths)) / Rows(lengths).waited_cost(plan, in_step)
            for lengths, plan in zip(windows, plans, strict=True)
        ),
        max(
            padded_cost([lengths[row] for row in rows])
            for lengths, plan in zip(windows, plans, strict=True)
            for rank in plan
            for rows in rank
            if rows
        ),
    )


def compare(console, kind, budget, num_windows):
    """One table for a kind of lengths; returns the figures under the budget and the milliseconds of a plan."""
    figures, milliseconds = {}, {}
    table = Table("rows", "ranks", title=f"{kind} lengths, budget {budget:,}")
    for passes in ("8 rows: passes a rank", "budget: passes a rank"):
        for column in (passes, "peak", "real, in step", "real, once"):
            table.add_column(column, justify="right")
    for num_rows in NUM_ROWS:
        windows = [window(kind, num_rows, seed) for seed in range(num_windows)]
        for num_ranks in NUM_RANKS:
            before = [fixed(lengths, num_ranks) for lengths in windows]
            before = {in_step: measure(windows, before, in_step) for in_step in (True, False)}
            after = {}
            for in_step in (True, False):
                started = time.process_time()
                plans = [plan_window_within_budget(split(lengths, num_ranks), budget, in_step) for lengths in windows]
                milliseconds[num_rows, num_ranks, in_step] = 1000 * (time.process_time() - started) / num_windows
                after[in_step] = figures[num_rows, num_ranks, in_step] = measure(windows, plans, in_step)
            table.add_row(
                str(num_rows),
                str(num_ranks),
                f"{before[True].num_microbatches:.0f}",
                f"{before[True].peak:,}",
                f"{before[True].real:.2f}",
                f"{before[False].real:.2f}",
                f"{after[True].num_microbatches:.1f}",
                f"{max(after[True].peak, after[False].peak):,}",
                f"{after[True].real:.2f}",
                f"{after[False].real:.2f}",
            )
    console.print(table)
    return figures, milliseconds


def compare_budgets(console, num_windows):
    """Passes and real tokens under other budgets."""
    table = Table("rows", "ranks", title="lognormal lengths under other budgets: passes a rank, real in step")
    budgets = (9_216, 16_384, 32_768, 131_072)
    for budget in budgets:
        table.add_column(f"{budget:,}", justify="right")
    for num_rows in NUM_ROWS:
        windows = [window("lognormal", num_rows, seed) for seed in range(num_windows)]
        for num_ranks in NUM_RANKS:
            cells = []
            for budget in budgets:
                plans = [plan_window_within_budget(split(lengths, num_ranks), budget, True) for lengths in windows]
                figures = measure(windows, plans, True)
                cells.append(f"{figures.num_microbatches:.1f}, {figures.real:.2f}")
            table.add_row(str(num_rows), str(num_ranks), *cells)
    console.print(table)


def compare_attention(console, budget, num_windows):
    """What a plan loses that takes cost for tokens, where attention counts as in Qwen3-4B."""
    table = Table("rows", "ranks", "wait", title="lognormal lengths, work of Qwen3-4B with attention: share not lost")
    for column in ("planned by tokens", "planned by cost"):
        table.add_column(column, justify="right")
    for num_rows, num_ranks in ((64, 2), (64, 8), (512, 8)):
        windows = [window("lognormal", num_rows, seed) for seed in range(num_windows)]
        for in_step in (True, False):
            cells = []
            for known in (0.0, QWEN3_4B):
                shares = []
                for lengths in windows:
                    plan = plan_window_within_budget(split(lengths, num_ranks), budget, in_step, attention=known)
                    work = Rows(lengths, attention=QWEN3_4B).waited_cost([[[row] for row in range(num_rows)]], in_step)
                    shares.append(work / Rows(lengths, attention=QWEN3_4B).waited_cost(plan, in_step))
                cells.append(f"{mean(shares):.2f}")
            table.add_row(str(num_rows), str(num_ranks), "in step" if in_step else "once a step", *cells)
    console.print(table)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--budget", type=int, default=9216, help="tokens a micro-batch (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=20, help="windows a figure (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.windows < 1:
        parser.error(f"--windows must be at least 1, got {args.windows}")
    if args.budget < 1:
        parser.error(f"--budget must be at least 1, got {args.budget}")
    return args


def main():
    args = parse_args()
    console = Console(width=110)
    figures, milliseconds = {}, {}
    for kind in LENGTHS:
        figures[kind], milliseconds[kind] = compare(console, kind, args.budget, args.windows)
    compare_budgets(console, args.windows)
    compare_attention(console, args.budget, args.windows)

    tail = figures["lognormal"]
    over = max(max(f.peak for f in each.values()) for each in figures.values()) / args.budget
    rows_a_pass = 64 / tail[64, 1, True].num_microbatches
    slowest = max(each[512, 8, in_step] for each in milliseconds.values() for in_step in (True, False))
    table = Table("promise", "measured", "kept", title=f"Promises, budget {args.budget:,}")
    for promise, measured, kept in (
        ("highest peak over the budget, at most 1", over, over <= 1),
        *(
            (f"{text}, lognormal: real, at least {bound:.2f}", tail[key].real, tail[key].real >= bound)
            for text, key, bound in (
                ("16 rows, one rank", (16, 1, True), 0.82),
                ("64 rows, one rank", (64, 1, True), 0.90),
                ("512 rows, one rank", (512, 1, True), 0.95),
                ("512 rows, 8 ranks in step", (512, 8, True), 0.95),
                ("64 rows, 8 ranks that wait once a step", (64, 8, False), 0.88),
            )
        ),
        ("64 rows, one rank, lognormal: rows a pass, at least 3", rows_a_pass, rows_a_pass >= 3),
        ("512 rows, 8 ranks: milliseconds to plan, at most 50", slowest, slowest <= 50),
    ):
        table.add_row(promise, f"{measured:.2f}", "yes" if kept else "NO")
    console.print(table)


if __name__ == "__main__":
    main()
