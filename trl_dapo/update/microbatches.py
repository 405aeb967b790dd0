# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
The assignment of an optimizer step's rows to ranks and micro-batch.

Under a token mean the rows of one optimizer step may be grouped in any way without changing the gradient. They are cut
into a number of micro-batches, or into as many as keep a budget of tokens. Words used here:

- *tokens* of a micro-batch: its rows times the sum of its longest prompt and longest completion, padding included.
  They bound its memory, so the budget is in tokens.
- *cost* of a micro-batch: what its forward and backward pass take. A row padded to `w` tokens costs
  `w + attention * w**2`, where `attention` is what one pair of tokens costs (`attention_cost` in models.py).
- *plan*: for each rank, for each of its micro-batches, the numbers of its rows, counted over all ranks.
- *waited cost* of a plan: what it costs all ranks, waiting for the costliest included. Ranks in step (FSDP, ZeRO) wait
  at every micro-batch, other ranks (DDP) once an optimizer step.

Everything is arithmetic on lengths that all ranks know, without chance: every rank works out the same plan.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from math import ceil, inf, sqrt

from .rollout_tensors import widths


Lengths = Sequence[tuple[int, int]]  # of rows: prompt and completion
Plan = list[list[list[int]]]

# Under a budget a window gets more micro-batches than it needs while more than this share of their cost is padding ...
MAX_PADDING_SHARE = 0.10
# ... and up to this many times as many while more than that share is padding or waiting, if that helps ...
MAX_GROWTH = 1.5
# ... by this share at least, ...
LEAST_GAIN = 0.01
# ... and by more than each takes to gather all weights, on every rank, where ranks are in step: in tokens' worth of
# work. Two gathers move 4 bytes a weight in bfloat16 while a token takes 6 operations a weight: at 400 TFLOP/s that is
# 670 tokens over 400 GB/s inside a machine and 5,300 over 50 GB/s between machines, of which FSDP hides a part.
GATHER_COST = 1000.0


def largest_microbatch(
    longest: tuple[int, int], budget: int, most_rows: int, multiple_of: int | None = None
) -> tuple[int, tuple[int, int]]:
    """
    Return the number of rows, and the prompt and completion columns of each, of the micro-batch that takes the most
    tokens within a budget.

    Args:
        longest (`tuple[int, int]`):
            Prompt and completion columns of the longest row. A longer one than the budget is a micro-batch of its own.
        budget (`int`):
            Tokens of a micro-batch.
        most_rows (`int`):
            Rows that there are.
        multiple_of (`int`, *optional*):
            What columns are a multiple of.
    """
    prompt, completion = widths([longest], multiple_of)
    if budget <= prompt + completion:
        return 1, (prompt, completion)
    # Rows a little shorter than the longest may fill the budget where the longest leave a part of it empty.
    num_rows = min(ceil(budget / (prompt + completion)), most_rows)
    unit = multiple_of or 1
    width = min(prompt + completion, budget // num_rows // unit * unit)
    prompt = max(unit, width - completion)
    return num_rows, (prompt, max(unit, width - prompt))


def plan_window(
    lengths: Sequence[Lengths], num_microbatches: int, can_exchange: bool = True, multiple_of: int | None = None
) -> Plan:
    """A plan of `num_microbatches` on each rank, of equal padded cost; `lengths` are those of each rank's rows."""
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
    """A plan within a budget of tokens, with as many micro-batches on each rank; a longer row goes alone."""
    # Their number is that of `Rows.fewest`, or up to `MAX_GROWTH` times as many where that spares more padding and
    # waiting than the micro-batches cost (`LEAST_GAIN`, `GATHER_COST`).
    pools, num_ranks = _pools(lengths, can_exchange)
    rows = Rows([*chain.from_iterable(lengths)], budget, multiple_of, attention)
    fewest = max(ceil(rows.fewest(pool) / num_ranks) for pool in pools)
    most = max(fewest, min(ceil(MAX_GROWTH * fewest), max(ceil(len(pool) / num_ranks) for pool in pools)))
    least_cost = sum(map(rows.least_cost, pools))
    gather_cost = len(lengths) * GATHER_COST if in_step and len(lengths) > 1 else 0.0
    best: Plan = []
    best_cost = inf
    for num in range(fewest, most + 1, max(1, fewest // 8)):  # five of a large window, not fifty
        plan = rows.plan(pools, num_ranks, num, in_step)
        waited = rows.waited_cost(plan, in_step)
        cost = waited + num * gather_cost
        if cost < best_cost - LEAST_GAIN * least_cost:
            best, best_cost = plan, cost
        if least_cost >= (1 - MAX_PADDING_SHARE) * waited:
            break
    return best


def _pools(lengths: Sequence[Lengths], can_exchange: bool) -> tuple[list[range], int]:
    """The pools of rows, numbered over all ranks, that are cut, and how many ranks share a pool."""
    stops = list(accumulate(map(len, lengths)))
    if can_exchange:
        return [range(stops[-1])], len(lengths)
    return [range(stop - len(rank), stop) for rank, stop in zip(lengths, stops, strict=True)], 1


class Rows:
    """Rows by number, what a micro-batch of them costs, and how they are cut; columns are multiples of a number."""

    def __init__(
        self, lengths: Lengths, budget: int | None = None, multiple_of: int | None = None, attention: float = 0.0
    ) -> None:
        self.widths = [widths([row], multiple_of) for row in lengths]
        self.budget, self.attention = inf if budget is None else budget, attention

    # Costs

    def _cost(self, num_rows: int, width: int) -> float:
        return num_rows * width * (1.0 + self.attention * width)

    def cost(self, microbatch: Sequence[int]) -> float:
        if not microbatch:
            return 0.0
        return self._cost(len(microbatch), sum(widths([self.widths[row] for row in microbatch])))

    def least_cost(self, pool: Sequence[int]) -> float:
        """Cost of these rows without padding."""
        return sum(self._cost(1, sum(self.widths[row])) for row in pool)

    def waited_cost(self, plan: Sequence[Sequence[Sequence[int]]], in_step: bool) -> float:
        """Cost of a plan over all ranks, waiting for the costliest included, in tokens' worth of work."""
        costs = [list(map(self.cost, rank)) for rank in plan]
        if in_step:
            return len(plan) * sum(max(step) for step in zip(*costs, strict=True))
        return len(plan) * max(sum(of_rank) for of_rank in costs)

    # Micro-batches

    def orders(self, pool: Sequence[int]) -> list[list[int]]:
        """Two orders, longest row first: long prompts and long completions need not be the same rows."""
        by_completion = sorted(pool, key=lambda row: (-self.widths[row][1], -self.widths[row][0]))
        by_total = sorted(pool, key=lambda row: (-sum(self.widths[row]), -self.widths[row][1]))
        return [by_completion] if by_completion == by_total else [by_completion, by_total]

    def fill(self, order: Sequence[int], cap: float = inf) -> list[tuple[int, float]]:
        """Rows and cost of the fewest contiguous micro-batches within budget and `cap`; a row beyond them is alone."""
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
        """The caps, 0.1 % apart, between which `changes(filled)` turns from false to true."""
        low = min(self._cost(1, sum(self.widths[row])) for row in order) / 2
        high = max(cost for _, cost in self.fill(order))
        while high > 1.001 * low:
            cap = sqrt(low * high)
            low, high = (low, cap) if changes(self.fill(order, cap)) else (cap, high)
        return low, high

    def fewest(self, pool: Sequence[int] | None = None) -> int:
        """Fewest micro-batches within the budget, of whose cost about `MAX_PADDING_SHARE` at most is padding."""
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
        """Groups rows of like length so that the costliest micro-batch, the first, costs as little as possible."""
        # If there are fewer rows, the last micro-batches are empty. Sorted by completion length, and by total length.
        # Each order is filled into contiguous micro-batches up to the smallest cost, within 0.1 %, that needs no more
        # than `num`; if some micro-batches are left over, the costliest are halved. The better cut is taken: the one
        # with the cheaper costliest micro-batch, of equals the cheaper in all. The budget is kept by any number from
        # `fewest` on.
        cuts = []
        orders = self.orders(pool) if pool else []
        for order in orders:
            if len(self.fill(order)) <= num:
                cap = self.cap_where(order, lambda filled: len(filled) <= num)[1]
                cuts.append(self._halved(order, self.fill(order, cap), num))
        if pool and not cuts:
            raise ValueError(f"{len(pool)} rows need more than {num} micro-batches of {self.budget} tokens.")
        best = min(cuts, key=lambda cut: (cut[0][0], sum(cost for cost, _ in cut)), default=[])
        return [rows for _, rows in best] + [[] for _ in range(num - len(best))]

    def _halved(self, order: list[int], filled: list[tuple[int, float]], num: int) -> list[tuple[float, list[int]]]:
        """`(cost, rows)` by falling cost: the costliest in two until there are `num`, or only single rows."""
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

    # Ranks

    def plan(self, pools: Sequence[Sequence[int]], num_ranks: int, num: int, in_step: bool) -> Plan:
        """Each pool cut for its `num_ranks` ranks, `num` micro-batches each."""
        cuts = (self.cut(pool, num * num_ranks) for pool in pools)
        return [rank for cut in cuts for rank in self.assign_to_ranks(cut, num_ranks, in_step)]

    def assign_to_ranks(self, microbatches: list[list[int]], num_ranks: int, in_step: bool) -> Plan:
        """Micro-batches by falling cost, as many to each rank."""
        # Ranks in step get micro-batches of like cost at each micro-step; other ranks get sums that are alike: the
        # costliest first, each to the rank with the least so far.
        if in_step:
            steps = [microbatches[start : start + num_ranks] for start in range(0, len(microbatches), num_ranks)]
            # The first of a micro-step is the costliest: turn every other one, so that no rank always gets it.
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
