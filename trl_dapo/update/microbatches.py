# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Assignment of the rows of an optimizer step to processes and micro-batches.

With a mean over tokens, the rows of an optimizer step can be grouped in any way without changing the gradient. They
are
divided into a given number of micro-batches, or into as many as a budget of tokens requires. Terms used here:

- *tokens* of a micro-batch: its number of rows times the sum of its longest prompt and its longest completion, so
  padding is included. They determine the memory it needs, so the budget is in tokens.
- *cost* of a micro-batch: the work of its forward and backward pass. A row padded to `w` tokens costs
  `w + attention * w**2`, where `attention` is the cost of one pair of tokens (`attention_cost` in models.py).
- *plan*: a list with an entry for each rank, which lists its micro-batches, which list the numbers of their rows. Rows
  are numbered over all ranks.
- *waited cost* of a plan: its cost over all ranks, including the time that they wait for the slowest one. Ranks that
  run in step (FSDP, ZeRO) wait at every micro-batch, other ranks (DDP) once per optimizer step.

Everything is computed without randomness from lengths that all ranks know, so every rank computes the same plan.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from math import ceil, inf, sqrt

from .rollout_tensors import widths


Lengths = Sequence[tuple[int, int]]  # prompt and completion length of each row
Plan = list[list[list[int]]]

# With a budget, a window gets more micro-batches than it needs as long as padding is more than this share of their
# cost.
MAX_PADDING_SHARE = 0.10
# It gets up to this factor more if padding and waiting still exceed that share, and if more micro-batches lower the
# cost.
MAX_GROWTH = 1.5
# They must lower it by at least this share.
MIN_GAIN = 0.01
# If the ranks run in step, each further micro-batch also costs this much on every rank, in tokens, because all weights
# must be gathered for it. Two gathers move 4 bytes per weight in bfloat16, and a token takes 6 operations per weight.
# At 400 TFLOP/s, the gathers take the time of 670 tokens at 400 GB/s within a machine, and of 5,300 tokens at 50 GB/s
# between machines. FSDP hides part of this.
GATHER_COST = 1000.0


def largest_microbatch(
    longest: tuple[int, int], budget: int, max_rows: int, multiple_of: int | None = None
) -> tuple[int, tuple[int, int]]:
    """
    Return the number of rows and the prompt and completion columns of the largest micro-batch within a budget.

    Args:
        longest (`tuple[int, int]`):
            Prompt and completion columns of the longest row. A row that is longer than the budget is a micro-batch of
            its own.
        budget (`int`):
            Maximum number of tokens in a micro-batch.
        max_rows (`int`):
            Number of rows that there are.
        multiple_of (`int`, *optional*):
            The numbers of columns are multiples of this.
    """
    prompt, completion = widths([longest], multiple_of)
    if budget <= prompt + completion:
        return 1, (prompt, completion)
    # If the longest rows leave a part of the budget unused, one more row may fit if all are a little shorter.
    num_rows = min(ceil(budget / (prompt + completion)), max_rows)
    unit = multiple_of or 1
    width = min(prompt + completion, budget // num_rows // unit * unit)
    prompt = max(unit, width - completion)
    return num_rows, (prompt, max(unit, width - prompt))


def plan_window(
    lengths: Sequence[Lengths], num_microbatches: int, can_exchange: bool = True, multiple_of: int | None = None
) -> Plan:
    """
    Return a plan with `num_microbatches` micro-batches of equal cost on each rank. `lengths` are those of the rows
    that each rank holds.
    """
    pools, ranks_per_pool = _pools(lengths, can_exchange)
    rows = Rows([*chain.from_iterable(lengths)], multiple_of=multiple_of)
    return rows.plan(pools, ranks_per_pool, num_microbatches, in_step=True)


def plan_window_within_budget(
    lengths: Sequence[Lengths],
    budget: int,
    in_step: bool,
    can_exchange: bool = True,
    multiple_of: int | None = None,
    attention: float = 0.0,
) -> Plan:
    """
    Return a plan within a budget of tokens, with equally many micro-batches on each rank. A row that is longer than
    the budget is a micro-batch of its own.
    """
    # The number of micro-batches is that of `Rows.fewest`, or up to `MAX_GROWTH` times as many if this saves more
    # padding and waiting than further micro-batches cost (`MIN_GAIN`, `GATHER_COST`).
    pools, num_ranks = _pools(lengths, can_exchange)
    rows = Rows([*chain.from_iterable(lengths)], budget, multiple_of, attention)
    fewest = max(ceil(rows.fewest(pool) / num_ranks) for pool in pools)
    most = max(fewest, min(ceil(MAX_GROWTH * fewest), max(ceil(len(pool) / num_ranks) for pool in pools)))
    least_cost = sum(map(rows.least_cost, pools))
    gather_cost = len(lengths) * GATHER_COST if in_step and len(lengths) > 1 else 0.0
    best: Plan = []
    best_cost = inf
    for num in range(fewest, most + 1, max(1, fewest // 8)):  # tries only five numbers for a large window
        plan = rows.plan(pools, num_ranks, num, in_step)
        waited = rows.waited_cost(plan, in_step)
        cost = waited + num * gather_cost
        if cost < best_cost - MIN_GAIN * least_cost:
            best, best_cost = plan, cost
        if least_cost >= (1 - MAX_PADDING_SHARE) * waited:
            break
    return best


def _pools(lengths: Sequence[Lengths], can_exchange: bool) -> tuple[list[range], int]:
    """Return the pools of rows that are divided separately, and how many ranks share a pool."""
    stops = list(accumulate(map(len, lengths)))
    if can_exchange:
        return [range(stops[-1])], len(lengths)
    return [range(stop - len(rank), stop) for rank, stop in zip(lengths, stops, strict=True)], 1


class Rows:
    """Lengths of rows, by which it divides rows into micro-batches and computes the cost of these."""

    def __init__(
        self, lengths: Lengths, budget: int | None = None, multiple_of: int | None = None, attention: float = 0.0
    ) -> None:
        self.widths = [widths([row], multiple_of) for row in lengths]
        self.budget, self.attention = inf if budget is None else budget, attention

    # ---- Costs ----

    def _cost(self, num_rows: int, width: int) -> float:
        return num_rows * width * (1.0 + self.attention * width)

    def cost(self, microbatch: Sequence[int]) -> float:
        if not microbatch:
            return 0.0
        return self._cost(len(microbatch), sum(widths([self.widths[row] for row in microbatch])))

    def least_cost(self, pool: Sequence[int]) -> float:
        """Return the cost of these rows without padding."""
        return sum(self._cost(1, sum(self.widths[row])) for row in pool)

    def waited_cost(self, plan: Sequence[Sequence[Sequence[int]]], in_step: bool) -> float:
        """Return the cost of a plan over all ranks, in tokens, including the time they wait for the slowest one."""
        costs = [list(map(self.cost, rank)) for rank in plan]
        if in_step:
            return len(plan) * sum(max(step) for step in zip(*costs, strict=True))
        return len(plan) * max(sum(of_rank) for of_rank in costs)

    # ---- Micro-batches ----

    def orders(self, pool: Sequence[int]) -> list[list[int]]:
        """
        Return the rows sorted by completion length and by total length, longest first. There is only one order if both
        are the same.
        """
        # Two orders are tried because long prompts and long completions may be in different rows.
        by_completion = sorted(pool, key=lambda row: (-self.widths[row][1], -self.widths[row][0]))
        by_total = sorted(pool, key=lambda row: (-sum(self.widths[row]), -self.widths[row][1]))
        return [by_completion] if by_completion == by_total else [by_completion, by_total]

    def fill(self, order: Sequence[int], cap: float = inf) -> list[tuple[int, float]]:
        """
        Divide the order into the fewest contiguous micro-batches within the budget, each of which costs at most `cap`.
        Return the number of rows and the cost of each. A row that exceeds these bounds is a micro-batch of its own.
        """
        filled, num_rows, prompt, completion = [], 0, 0, 0
        for row in order:
            row_prompt, row_completion = self.widths[row]
            longest_prompt = row_prompt if row_prompt > prompt else prompt
            longest_completion = row_completion if row_completion > completion else completion
            width = longest_prompt + longest_completion
            tokens = (num_rows + 1) * width
            if num_rows and (tokens > self.budget or tokens * (1.0 + self.attention * width) > cap):
                filled.append((num_rows, self._cost(num_rows, prompt + completion)))
                num_rows, longest_prompt, longest_completion = 0, row_prompt, row_completion
            num_rows, prompt, completion = num_rows + 1, longest_prompt, longest_completion
        return [*filled, (num_rows, self._cost(num_rows, prompt + completion))]

    def cap_where(
        self, order: Sequence[int], changes: Callable[[list[tuple[int, float]]], bool]
    ) -> tuple[float, float]:
        """
        Return two values of `cap`, 0.1% apart, between which `changes(fill(order, cap))` turns from false to true.
        """
        low = min(self._cost(1, sum(self.widths[row])) for row in order) / 2
        high = max(cost for _, cost in self.fill(order))
        while high > 1.001 * low:
            cap = sqrt(low * high)
            low, high = (low, cap) if changes(self.fill(order, cap)) else (cap, high)
        return low, high

    def fewest(self, pool: Sequence[int] | None = None) -> int:
        """
        Return the fewest micro-batches within the budget for which padding is at most about `MAX_PADDING_SHARE` of the
        cost.
        """
        pool = range(len(self.widths)) if pool is None else pool
        if not pool:
            return 1
        allowed = self.least_cost(pool) / (1 - MAX_PADDING_SHARE)

        def is_padded(filled: list[tuple[int, float]]) -> bool:
            return sum(cost for _, cost in filled) > allowed

        nums = []
        for order in self.orders(pool):
            filled = self.fill(order)
            if is_padded(filled):
                filled = self.fill(order, self.cap_where(order, is_padded)[0])
            nums.append(len(filled))
        return min(nums)

    def cut(self, pool: Sequence[int], num: int) -> list[list[int]]:
        """
        Divide rows into `num` micro-batches so that the costliest one, which comes first, costs as little as possible.
        If there are fewer rows than micro-batches, the last ones are empty.
        """
        # For each of the two orders, the rows are divided into contiguous micro-batches that cost at most a cap. The
        # cap is the smallest one, within 0.1%, for which `num` micro-batches are enough. If fewer than `num` are
        # needed, the costliest ones are halved. From the two results, the one whose costliest micro-batch is cheaper
        # is taken, or the one that is cheaper in total if these are equal. Any `num` from `fewest` on keeps the
        # budget.
        cuts = []
        orders = self.orders(pool) if pool else []
        for order in orders:
            if len(self.fill(order)) <= num:
                cap = self.cap_where(order, lambda filled: len(filled) <= num)[1]
                cuts.append(self._halved(order, self.fill(order, cap), num))
        if pool and not cuts:
            raise ValueError(
                f"{len(pool)} rows do not fit into {num} micro-batches of {self.budget} tokens. Divide them into at "
                f"least {min(len(self.fill(order)) for order in orders)}."
            )
        best = min(cuts, key=lambda cut: (cut[0][0], sum(cost for cost, _ in cut)), default=[])
        return [rows for _, rows in best] + [[] for _ in range(num - len(best))]

    def _halved(self, order: list[int], filled: list[tuple[int, float]], num: int) -> list[tuple[float, list[int]]]:
        """
        Halve the costliest micro-batch until there are `num`, or until each has only one row. Return `(cost, rows)` of
        each, costliest first.
        """
        stops = accumulate(num_rows for num_rows, _ in filled)
        heap: list[tuple[float, list[int]]] = []
        done: list[tuple[float, list[int]]] = []

        def add(cost: float, rows: list[int]) -> None:
            if len(rows) > 1:
                heapq.heappush(heap, (-cost, rows))
            else:  # one row cannot be halved
                done.append((-cost, rows))

        for (num_rows, cost), stop in zip(filled, stops, strict=True):
            add(cost, order[stop - num_rows : stop])
        while heap and len(heap) + len(done) < num:
            _, rows = heapq.heappop(heap)
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                add(self.cost(half), half)
        return [(-cost, rows) for cost, rows in sorted(heap + done)]

    # ---- Ranks ----

    def plan(self, pools: Sequence[Sequence[int]], num_ranks: int, num: int, in_step: bool) -> Plan:
        """Return a plan with `num` micro-batches for each of the `num_ranks` ranks of each pool."""
        cuts = (self.cut(pool, num * num_ranks) for pool in pools)
        return [rank for cut in cuts for rank in self.assign_to_ranks(cut, num_ranks, in_step)]

    def assign_to_ranks(self, microbatches: list[list[int]], num_ranks: int, in_step: bool) -> Plan:
        """Assign micro-batches, which are sorted from costliest to cheapest, to ranks: equally many to each."""
        # Ranks that run in step get micro-batches of similar cost at each micro-step. For other ranks only the sums
        # should be similar: each micro-batch, costliest first, goes to the rank with the lowest sum so far.
        if in_step:
            steps = [microbatches[start : start + num_ranks] for start in range(0, len(microbatches), num_ranks)]
            # The first micro-batch of a micro-step is the costliest. Every other micro-step is reversed, so that it
            # does not always go to the same rank.
            steps = [step if turn % 2 == 0 else step[::-1] for turn, step in enumerate(steps)]
            return [list(rank) for rank in zip(*steps, strict=True)]
        ranks: Plan = [[] for _ in range(num_ranks)]
        heap = [(0.0, rank) for rank in range(num_ranks)]
        for microbatch in microbatches:
            cost, rank = heapq.heappop(heap)
            ranks[rank].append(microbatch)
            if len(ranks[rank]) < len(microbatches) // num_ranks:
                heapq.heappush(heap, (cost + self.cost(microbatch), rank))
        return ranks
