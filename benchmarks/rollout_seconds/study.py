# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Completions and seconds that each setting of dynamic sampling takes, by engine, batch and acceptance rate.

    python -m benchmarks rollout_seconds            # half an hour on one core
    python -m benchmarks rollout_seconds --check    # compare real runs with their simulation, a quarter of an hour

The `Sampler` that the trainer uses samples prompts with constant pass rates. Only the engine is simulated: a
completion takes a slot as soon as one is free, and occupies it for its length. Lengths are lognormal (sigma 1) and end
at 8 times the mean. A round ends with its longest completion, and prompts cost nothing. transformers without
continuous batching pads all completions of a round to the longest, and samples at most a batch of prompts per round.
The memory is measured from the second pass over the dataset on; before that, it knows no prompt.

Seconds are in units of the time of a completion of mean length that is sampled alone. A saving is what whole groups
with discarded surplus take, divided by what a setting takes: 2.0 means half. All settings except discard carry
surplus. `--check` trains the quickstart's model, reads pass rates and lengths from the ledger of the run, simulates
it, and says by how much rounds, completions and tokens differ.
"""

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trl_dapo.sampling.prompt_memory import PromptMemory

from ..frame.tables import print_table, say
from ..sampling_policies import Ours, Trace, World, decide
from ..time_to_accuracy import make_checkpoint
from . import replay
from .engines import ENGINES, assign, draw_lengths, round_seconds
from .screen_formula import acceptance_at_saving, saving_of_screen


ACCEPTANCES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8)
BATCHES = (32, 128, 512)
SHOWN_SAVINGS = (1.1, 1.25, 1.5, 2.0)


# ---- The sampler's rollouts ----


class Rollout(NamedTuple):
    """Rounds and completions of one rollout."""

    rounds: list  # the lengths of each round's completions
    num_trained: int
    passes: float  # passes over the dataset when the rollout ended


class WithLengths(Ours):
    """The package's `Sampler`, and the lengths of the completions that it samples."""

    def __init__(self, world, target, **settings):
        super().__init__(world, target, **settings)
        self._rng = np.random.default_rng([world.trace.seed, 4])

    def _sample(self, requests):
        self.rounds.append(draw_lengths(self._rng, sum(request.num_completions for request in requests)))
        return super()._sample(requests)

    def play(self):
        """Simulate one rollout."""
        self.rounds = []
        step = next(self)
        return Rollout(self.rounds, step.num_trained, self.sampler.passes)


DISCARD, CARRY, SCREEN, MEMORY, BOTH = SETTINGS = "discard", "carry", "screen", "memory", "both"
SAVINGS = {
    DISCARD: {},
    CARRY: {"carries": True},
    SCREEN: {"carries": True, "screen": "auto"},
    MEMORY: {"carries": True, "memory": PromptMemory},
    BOTH: {"carries": True, "memory": PromptMemory, "screen": "auto"},
}
MIN_PASSES, WARM_UP = 3.0, 4


def num_prompts_of(target):
    """Return how many prompts the dataset has."""
    return min(max(16 * target, 1024), 4096)


def min_rollouts_of(target):
    """Return the minimum number of measured rollouts. Large batches vary less."""
    return 12 if target < 512 else 6


def play(acceptance, target, num_generations, setting, max_round_size=None, seed=0):
    """Return rollouts of a setting, without those of the first pass and without the first few."""
    world = World(Trace(acceptance, num_prompts_of(target), num_generations, seed))
    policy = WithLengths(world, target, max_round_size=max_round_size, **SAVINGS[setting])
    rollouts = []
    while len(rollouts) < WARM_UP + min_rollouts_of(target) or rollouts[-1].passes < MIN_PASSES:
        rollouts.append(policy.play())
        world.step += 1
    return [one for one in rollouts[WARM_UP:] if one.passes >= 1.0]


class Cost(NamedTuple):
    """The mean cost of a rollout."""

    completions: float  # per trained completion
    rounds: float
    seconds: dict  # by engine


def cost_of(rollouts, num_generations, engines):
    num_trained = sum(one.num_trained for one in rollouts) * num_generations
    seconds = {
        name: statistics.mean(sum(round_seconds(engine, lengths) for lengths in one.rounds) for one in rollouts)
        for name, engine in engines.items()
    }
    num_sampled = sum(len(lengths) for one in rollouts for lengths in one.rounds)
    return Cost(num_sampled / num_trained, statistics.mean(len(one.rounds) for one in rollouts), seconds)


def costs(acceptance, target, num_generations):
    """Return the cost of each setting, by engine and setting."""
    found = {}
    for schedules in (True, False):
        engines = {name: engine for name, engine in ENGINES.items() if engine.schedules is schedules}
        # Without a scheduler a round runs as one batch, and must not be larger than the rollout's batch.
        most = None if schedules else target
        for setting in SETTINGS:
            cost = cost_of(play(acceptance, target, num_generations, setting, most), num_generations, engines)
            for name in engines:
                found[name, setting] = cost
    return found


# ---- Rollouts ahead ----


class Ahead(WithLengths):
    """The same with a clock: vLLM samples what is requested ahead during an update."""

    def __init__(self, world, target, engine, **settings):
        super().__init__(world, target, **settings)
        self._free = [0.0] * int(engine.slots)
        self._ends = {}  # of requests in flight, by the number of the group
        self.now = 0.0

    def _submit(self, requests):
        for request in requests:
            if request.group.number not in self._ends:
                _, ends = assign(draw_lengths(self._rng, request.num_completions), self._free, self.now)
                self._ends[request.group.number] = max(ends)

    def _submit_ahead(self):
        self.sampler.request_ahead()
        self._submit(self.sampler.queue.requests_in_flight)

    def play_until_trained(self, update_seconds):
        """Simulate one rollout, as the trainer does it, and its update."""
        sampler = self.sampler
        sampler.start_rollout(self._world.step)
        while True:
            self._submit_ahead()
            requests = sampler.next_requests()
            if not requests:
                break
            self._submit(requests)
            self.now = max([self.now, *(self._ends.pop(request.group.number) for request in requests)])
            self.rounds = []
            round_ = self._sample(requests)
            sampler.add(round_)
            for decisions in decide(round_, self._world.step):
                sampler.record_decisions(decisions)
        sampler.finish_rollout()
        self._submit_ahead()
        self.now += update_seconds


def seconds_with_update(acceptance, target, num_generations, setting, engine, ahead, update_seconds, num_rollouts=40):
    """Return the seconds of a rollout and its update, from the second pass on."""
    world = World(Trace(acceptance, num_prompts_of(target), num_generations))
    policy = Ahead(world, target, engine, rollouts_ahead=ahead, **SAVINGS[setting])
    times = []
    while len(times) < num_rollouts or policy.sampler.passes < MIN_PASSES:
        policy.play_until_trained(update_seconds)
        times.append((policy.now, policy.sampler.passes))
        world.step += 1
    first = next(i for i, (_, passes) in enumerate(times) if i >= WARM_UP and passes >= 1.0)
    return (times[-1][0] - times[first][0]) / (len(times) - 1 - first)


# ---- Tables ----


def crossing(savings, wanted):
    """
    Return the highest acceptance rate at which a setting saves at least `factor`, interpolated between the simulated
    rates.

    `savings` are by acceptance rate. Return `None` if it never saves that much, and 1 if it does at the highest
    simulated rate.
    """
    points = sorted(savings.items(), reverse=True)
    if points[0][1] >= wanted:
        return 1.0
    for (high, less), (low, more) in itertools.pairwise(points):
        if more >= wanted:
            return low + (high - low) * (more - wanted) / (more - less)
    return None


def seconds_of(found, engine, setting):
    return found[engine, setting].seconds[engine]


def print_costs(found, target, num_generations):
    """
    Print what each setting saves compared with whole groups and discarded surplus, by engine and acceptance rate.
    """
    rows = []
    for engine, acceptance in itertools.product(ENGINES, ACCEPTANCES):
        costs_here = found[acceptance]
        base, base_seconds = costs_here[engine, DISCARD], seconds_of(costs_here, engine, DISCARD)
        cells = []
        for setting in SETTINGS[1:]:
            cost = costs_here[engine, setting]
            saved = base_seconds / cost.seconds[engine], base.completions / cost.completions
            cells.append("{:.2f} / {:.2f}".format(*saved))
        rows.append([engine, f"{acceptance:.0%}", f"{base_seconds:,.0f}", f"{base.completions:.2f}", *cells])
    title = f"{target} prompts x {num_generations}: times fewer seconds / times fewer completions"
    print_table(title, ("engine", "accepted", "time", "sampled / trained", *SETTINGS[1:]), rows)


COMPARED = {
    SCREEN: CARRY,
    MEMORY: CARRY,
    BOTH: MEMORY,
}  # the setting that is turned on, and the settings that were on before
COMPARED_SAVINGS = (1.1, 1.25, 1.5)


def savings_of_seconds(here, engine, setting, other):
    """Return the seconds of another setting divided by those of a setting, by acceptance rate."""
    return {rate: seconds_of(here[rate], engine, other) / seconds_of(here[rate], engine, setting) for rate in here}


def savings_of_completions(here, engine, setting, other):
    """Return the completions of another setting divided by those of a setting, by acceptance rate."""
    return {rate: here[rate][engine, other].completions / here[rate][engine, setting].completions for rate in here}


def print_crossings(found):
    """Print up to which acceptance rate the screen and the memory save given factors of completions and seconds."""
    rows = []
    for (target, num_generations), here in found.items():
        compared = [("completions", savings_of_completions, list(ENGINES)[-1])]
        compared += [(f"seconds, {engine}", savings_of_seconds, engine) for engine in ENGINES]
        for name, savings_of, engine in compared:
            cells = []
            for setting, other in COMPARED.items():
                rates = [crossing(savings_of(here, engine, setting, other), wanted) for wanted in COMPARED_SAVINGS]
                cells.append(", ".join(map(show_crossing, rates)))
            rows.append([f"{target} x {num_generations}", name, *cells])
    columns = [f"{setting}, compared with {other}" for setting, other in COMPARED.items()]
    title = f"Highest acceptance rate at which a setting saves {', '.join(map(str, COMPARED_SAVINGS))} times"
    print_table(title, ("batch", "saving of", *columns), rows, left=2)


def show_crossing(rate):
    if rate is None:
        return "never"
    return f"over {max(ACCEPTANCES):.0%}" if rate == 1.0 else f"{rate:.0%}"


def print_formula():
    """Print what the screen saves in completions by acceptance rate, and below which rates it saves given factors."""
    rows = []
    for num_generations, acceptance in itertools.product((8, 16), ACCEPTANCES):
        by_first = [saving_of_screen(acceptance, num_generations, first) for first in (2, 3, 4)]
        hard = saving_of_screen(acceptance, num_generations, mean=0.25)
        cells = [*by_first, saving_of_screen(acceptance, num_generations), hard]
        rows.append([f"{num_generations}", f"{acceptance:.0%}", *(f"{value:.2f}" for value in cells)])
    columns = ("group", "accepted", "2 first", "3 first", "4 first", "cheapest", "cheapest, mean 0.25")
    title = "Times fewer completions with the screen; pass rates are Beta-distributed with mean 0.5"
    print_table(title, columns, rows, left=2)
    for num_generations in (8, 16):
        found = [(saving, acceptance_at_saving(saving, num_generations)) for saving in SHOWN_SAVINGS]
        told = ", ".join(f"{saving:g} times {'never' if at is None else f'below {at:.0%}'}" for saving, at in found)
        say(
            f"The cheapest screen takes fewer completions below these acceptance rates, with groups of "
            f"{num_generations}: {told}"
        )


def print_ahead(target=32, num_generations=16, engine=ENGINES["vLLM, 256 slots"]):
    """Print the seconds of a rollout and its update, in turns and with rollouts ahead."""
    rows = []
    for acceptance in (0.1, 0.35, 0.65):
        where = acceptance, target, num_generations
        update = seconds_with_update(*where, CARRY, engine, 0, 0.0) / 2
        base = None
        for setting in SETTINGS[1:]:
            cells = [seconds_with_update(*where, setting, engine, ahead, update) for ahead in (0, 1, 2)]
            base = base or cells[0]
            rows.append([f"{acceptance:.0%}", setting, f"{update:.0f}", *(f"{base / cell:.2f}" for cell in cells)])
    columns = "accepted", "setting", "update", "in turns", "one ahead", "two ahead"
    title = (
        f"{target} x {num_generations}, vLLM with 256 slots: times fewer seconds, update included, than carry in turns"
    )
    print_table(title, columns, rows, left=2)


# ---- The check ----

SETTINGS_OF_RUNS = {
    DISCARD: {},
    CARRY: {"dynamic_sampling_surplus": "carry"},
    SCREEN: {"dynamic_sampling_surplus": "carry", "dynamic_sampling_screen": "auto"},
    MEMORY: {"dynamic_sampling_surplus": "carry", "dynamic_sampling_memory": True},
    BOTH: {
        "dynamic_sampling_surplus": "carry",
        "dynamic_sampling_memory": True,
        "dynamic_sampling_screen": "auto",
    },
}
ROLLOUTS_OF_RUNS = {"quickstart": 60, "one in ten": 30}


def differences(real, simulated):
    """
    Return the table cells of what a run spent, what its simulations spent, and by how much they differ; and the
    largest difference.
    """
    cells, offs = [], []
    for what, in_runs in zip(real, zip(*simulated, strict=True), strict=True):
        mean, scatter = statistics.mean(in_runs), statistics.stdev(in_runs)
        offs.append(mean / what - 1)
        cells += [f"{what:,.0f}", f"{mean:,.0f}", f"{offs[-1]:+.1%} ± {scatter / what:.1%}"]
    return cells, max(map(abs, offs))


def check_against_runs(folder):
    """Print what real runs sampled and what their simulations sample; return the largest difference of a total."""
    checkpoint, _ = make_checkpoint(folder)
    rows, largest = [], []
    for (task, num_rollouts), setting in itertools.product(ROLLOUTS_OF_RUNS.items(), SETTINGS):
        with tempfile.TemporaryDirectory() as run:
            what = SETTINGS_OF_RUNS[setting], SAVINGS[setting], num_rollouts
            cells, most = differences(*replay.compare(checkpoint, run, task, *what))
        rows.append([task, setting, *cells])
        largest.append(most)
    print_check(rows, largest)
    return max(largest)


def print_check(rows, largest):
    columns = itertools.chain.from_iterable((what, "simulated", "off by") for what in replay.Spent._fields)
    title = "Real runs and their simulation: totals, and how far the mean of 5 simulations is off (± deviation of one)"
    print_table(title, ("task", "setting", *columns), rows, left=2)
    say(f"largest difference: {max(largest):.1%}")


def main(check=False, output_dir=Path("outputs/time_to_accuracy")):
    if check:
        return check_against_runs(output_dir) > 0.05
    print_formula()
    found = {}
    for target, num_generations in [*((target, 16) for target in BATCHES), (128, 8)]:
        here = {acceptance: costs(acceptance, target, num_generations) for acceptance in ACCEPTANCES}
        print_costs(here, target, num_generations)
        found[target, num_generations] = here
    print_crossings(found)
    print_ahead()
