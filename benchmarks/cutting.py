# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
How an optimizer step's rows are cut into micro-batches: with a fixed number of micro-batches, and with a token budget.

    python -m benchmarks cutting    # under a minute

Lengths are drawn, nothing is trained. Prompts are lognormal around 150 tokens, as those of DAPO-Math-17k. Completions
are cut off at 8,192 tokens: lognormal (sigma 0.8, an average of about 2,200), bimodal (three of four around 800, the
fourth around 7,000) or all of 2,200 tokens. The fixed number gives every rank micro-batches of 8 rows. "Real" is the
tokens of all rows of the step, without padding, over the tokens of all ranks' passes, where a rank waits for the
costliest one: at every micro-batch if ranks are in step (FSDP, ZeRO), else once a step (DDP). Figures are means over
windows, peaks the highest.
"""

import itertools
import math
import random
import time
from statistics import mean
from typing import NamedTuple

from trl_dapo.models import ModelShape
from trl_dapo.update.microbatches import Rows, plan_window, plan_window_within_budget
from trl_dapo.update.rows import widths

from .frame.tables import print_promises, print_table


LONGEST = 8192
FIXED_ROWS = 8
NUM_ROWS = (16, 64, 512)
NUM_RANKS = (1, 2, 8)
BUDGETS = (9_216, 16_384, 32_768, 131_072)
WAITS = {"in step": True, "once a step": False}
QWEN3_4B = ModelShape(
    hidden_size=2560,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    intermediate_size=9728,
).attention_cost
LENGTHS = {
    "lognormal": lambda draw: draw.lognormvariate(math.log(2200) - 0.8**2 / 2, 0.8),
    "bimodal": lambda draw: draw.gauss(800, 160) if draw.random() < 0.75 else draw.gauss(7000, 800),
    "equal": lambda draw: 2200,
}


def draw_windows(kind, num_rows, num_windows):
    """Prompt and completion length of each row of some optimizer steps."""

    def window(draw):
        prompts = [150 if kind == "equal" else int(draw.lognormvariate(math.log(150), 0.3)) for _ in range(num_rows)]
        return [(prompt, max(1, min(LONGEST, int(LENGTHS[kind](draw))))) for prompt in prompts]

    return [window(random.Random(seed)) for seed in range(num_windows)]


def split(lengths, num_ranks):
    """As many rows to each rank."""
    share = len(lengths) // num_ranks
    return [lengths[start : start + share] for start in range(0, len(lengths), share)]


class Figures(NamedTuple):
    num_microbatches: float
    real: float
    peak: int


def measure(windows, plans, in_step):
    """Means over windows, and the highest peak."""
    cut = list(zip(windows, plans, strict=True))
    real = mean(sum(map(sum, lengths)) / Rows(lengths).waited_cost(plan, in_step) for lengths, plan in cut)
    batches = ([lengths[row] for row in rows] for lengths, plan in cut for rank in plan for rows in rank if rows)
    return Figures(mean(len(plan[0]) for plan in plans), real, max(len(rows) * sum(widths(rows)) for rows in batches))


def within_budget(windows, num_ranks, budget, in_step):
    """The figures under a budget, and the milliseconds of a plan."""
    started = time.process_time()
    plans = [plan_window_within_budget(split(lengths, num_ranks), budget, in_step) for lengths in windows]
    milliseconds = 1000 * (time.process_time() - started) / len(windows)
    return measure(windows, plans, in_step), milliseconds


def compare(kind, budget, num_windows):
    """One table for a kind of lengths; returns the figures under the budget and the milliseconds of a plan."""
    figures, milliseconds = {}, {}
    columns = [
        column
        for passes in ("8 rows: passes a rank", "budget: passes a rank")
        for column in (passes, "peak", "real, in step", "real, once")
    ]
    rows = []
    for num_rows, num_ranks in itertools.product(NUM_ROWS, NUM_RANKS):
        windows = draw_windows(kind, num_rows, num_windows)
        fixed = max(1, num_rows // num_ranks // FIXED_ROWS)
        plans = [plan_window(split(lengths, num_ranks), fixed) for lengths in windows]
        before, after = [measure(windows, plans, in_step) for in_step in WAITS.values()], []
        for in_step in WAITS.values():
            key = num_rows, num_ranks, in_step
            figures[key], milliseconds[key] = within_budget(windows, num_ranks, budget, in_step)
            after.append(figures[key])
        cells = [f"{before[0].num_microbatches:.0f}", f"{before[0].peak:,}", *(f"{each.real:.2f}" for each in before)]
        cells += [f"{after[0].num_microbatches:.1f}", f"{max(each.peak for each in after):,}"]
        rows.append([str(num_rows), str(num_ranks), *cells, *(f"{each.real:.2f}" for each in after)])
    print_table(f"{kind} lengths, budget {budget:,}", ("rows", "ranks", *columns), rows, left=2)
    return figures, milliseconds


def compare_budgets(num_windows):
    """Passes and real tokens under other budgets."""
    rows = []
    for num_rows, num_ranks in itertools.product(NUM_ROWS, NUM_RANKS):
        windows = draw_windows("lognormal", num_rows, num_windows)
        found = [within_budget(windows, num_ranks, budget, True)[0] for budget in BUDGETS]
        cells = (f"{figures.num_microbatches:.1f}, {figures.real:.2f}" for figures in found)
        rows.append([str(num_rows), str(num_ranks), *cells])
    title = "lognormal lengths under other budgets: passes a rank, real in step"
    print_table(title, ("rows", "ranks", *(f"{budget:,}" for budget in BUDGETS)), rows, left=2)


def compare_attention(budget, num_windows):
    """What a plan loses that takes cost for tokens, where attention counts as in Qwen3-4B."""

    def share(lengths, num_ranks, in_step, known):
        plan = plan_window_within_budget(split(lengths, num_ranks), budget, in_step, attention=known)
        costs = Rows(lengths, attention=QWEN3_4B)
        work = costs.waited_cost([[[row] for row in range(len(lengths))]], in_step)
        return work / costs.waited_cost(plan, in_step)

    rows = []
    for num_rows, num_ranks in ((64, 2), (64, 8), (512, 8)):
        windows = draw_windows("lognormal", num_rows, num_windows)
        for wait, in_step in WAITS.items():
            shares = [[share(lengths, num_ranks, in_step, known) for lengths in windows] for known in (0.0, QWEN3_4B)]
            rows.append([str(num_rows), str(num_ranks), wait, *(f"{mean(found):.2f}" for found in shares)])
    title = "lognormal lengths, work of Qwen3-4B with attention: share not lost"
    print_table(title, ("rows", "ranks", "wait", "planned by tokens", "planned by cost"), rows, left=3)


def main(budget=9216, windows=20):
    found = {kind: compare(kind, budget, windows) for kind in LENGTHS}
    compare_budgets(windows)
    compare_attention(budget, windows)

    tail, _ = found["lognormal"]
    over = max(each.peak for figures, _ in found.values() for each in figures.values()) / budget
    rows_a_pass = 64 / tail[64, 1, True].num_microbatches
    slowest = max(milliseconds[512, 8, in_step] for _, milliseconds in found.values() for in_step in (True, False))
    promises = [("highest peak over the budget, at most 1", f"{over:.2f}", over <= 1)]
    for text, key, bound in (
        ("16 rows, one rank", (16, 1, True), 0.82),
        ("64 rows, one rank", (64, 1, True), 0.90),
        ("512 rows, one rank", (512, 1, True), 0.95),
        ("512 rows, 8 ranks in step", (512, 8, True), 0.95),
        ("64 rows, 8 ranks that wait once a step", (64, 8, False), 0.88),
    ):
        real = tail[key].real
        promises.append((f"{text}, lognormal: real, at least {bound:.2f}", f"{real:.2f}", real >= bound))
    promises += [
        ("64 rows, one rank, lognormal: rows a pass, at least 3", f"{rows_a_pass:.2f}", rows_a_pass >= 3),
        ("512 rows, 8 ranks: milliseconds to plan, at most 50", f"{slowest:.2f}", slowest <= 50),
    ]
    print_promises(promises, f"Promises, budget {budget:,}")
