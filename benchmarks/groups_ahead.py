# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""
Two rollouts ahead compared with one: seconds of a rollout if a few completions take eight times as long as the mean.

    python -m benchmarks groups_ahead    # about 20 minutes, most of them spent waiting

The sampler, the requests and the way groups are taken in are the package's. The server is scripted: a completion
occupies one of 256 slots for its time, which is lognormal. An update takes a set share of the seconds that the
sampling of a rollout takes in turns. "Limit" is a server that is never idle, or the update if that takes longer.
"Trained length" is the mean time of the groups that train, divided by that of all accepted groups.
"""

import heapq
import math
import random
import statistics
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

from accelerate import Accelerator
from datasets import Dataset

from trl_dapo.engines.ahead import GroupsAhead
from trl_dapo.run.stopwatch import Stopwatch
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Round, RoundRecording, receive_rows
from trl_dapo.sampling.rows import dummy_row
from trl_dapo.sampling.sampler import Sampler

from .frame.tables import print_table


TARGET, NUM_GENERATIONS, SLOTS, LONGEST, SIGMA = 32, 8, 256, 8.0, 1.0
TOKENS = 20  # of a completion of mean length
WAYS = ("in turns", "one ahead", "two ahead")
WARM_UP = 6  # rollouts that are not timed


class Load(NamedTuple):
    """
    A case: the share of accepted groups, whether long groups are accepted more often, and the time of an update
    divided by that of sampling in turns.
    """

    rate: float
    favours_long: bool
    update: float


LOADS = [Load(rate, False, update) for rate in (0.6, 0.3, 0.1) for update in (0.2, 0.5, 1.0)]
LOADS += [Load(rate, True, 0.5) for rate in (0.6, 0.3)]


class Prompt(NamedTuple):
    """Return the times of the completions of a prompt, relative to the mean, and whether their group is accepted."""

    times: list[float]
    is_accepted: bool


def make_prompts(number, load, seed):
    draw, mean, prompts = random.Random(seed), math.exp(SIGMA**2 / 2), []
    for _ in range(number):
        scale, times = draw.choice((0.5, 1.5)), []
        while len(times) < NUM_GENERATIONS:
            value = draw.lognormvariate(0, SIGMA) / mean * scale
            times += [value] * (value <= LONGEST)
        rate = load.rate * ((1.5 if scale > 1 else 0.5) if load.favours_long else 1.0)
        prompts.append(Prompt(times, draw.random() < rate))
    return prompts


class Server:
    """A replacement for TRL's client: each completion waits for a slot, and occupies it for its time."""

    def __init__(self, prompts, mean):
        self.prompts, self.mean, self.busy = prompts, mean, 0.0
        self._free, self._lock, self._closed = [0.0] * SLOTS, threading.Lock(), threading.Event()
        self.session = SimpleNamespace(close=self._closed.set)

    def submit_request(self, call, **asked):
        return call(lambda: Server.generate(self, **asked))

    def generate(self, prompts, n, **sampling):
        end, now = 0.0, time.perf_counter()
        with self._lock:
            for seconds in (self.mean * value for (i,) in prompts for value in self.prompts[i].times):
                begin = max(heapq.heappop(self._free), now)
                heapq.heappush(self._free, begin + seconds)
                self.busy, end = self.busy + seconds, max(end, begin + seconds)
        self._closed.wait(max(end - time.perf_counter(), 0.0))
        tokens = [[0] * math.ceil(TOKENS * value) for (i,) in prompts for value in self.prompts[i].times]
        logprobs = [[[0.0]] * len(ids) for ids in tokens]
        return {"prompt_ids": prompts, "completion_ids": tokens, "logprobs": logprobs}


class Run(NamedTuple):
    """Figures that were measured over the rollouts after the first few."""

    seconds: float  # of a rollout
    busy: float  # of all slots, in seconds per rollout
    staleness: list[int]  # of the groups that trained, in rollouts
    length: float  # of what trains, divided by that of all accepted groups that were requested
    overflow: float  # groups divided by those that trained


def run(load, way, update_seconds, num_rollouts, mean, seed=0):
    """The loop of the trainer over rollouts, with an update that takes a set time."""
    num_ahead = WAYS.index(way)
    number = math.ceil((num_rollouts + 6) * TARGET / load.rate)
    prompts = make_prompts(number, load, seed)
    server, accelerator = Server(prompts, mean), Accelerator(cpu=True)
    stream = PromptStream(Dataset.from_dict({"prompt": [*map(str, range(number))]}), seed=0, shuffle=False)
    settings = {"target": TARGET, "num_generations": NUM_GENERATIONS, "max_gen_batches": 0.0, "carries": True}
    sampler = Sampler(stream, rollouts_ahead=num_ahead, **settings)
    pool = GroupsAhead(
        client=server,
        tokenize=None,
        generate=lambda texts, n: server.generate(prompts=[[int(text)] for text in texts], n=n),
        naming_lost_server=nullcontext,
        keeping_weights=nullcontext,
        waits_for_all=num_ahead == 1,
        stopwatch=Stopwatch(),
    )

    def submit_ahead():
        sampler.request_ahead()
        pool.submit(sampler.queue.requests_in_flight)

    def sample(requests):
        with pool.answering(requests):
            ids = [[int(request.group.example["prompt"])] for request in requests]
            lengths = [len(row) for row in server.generate(prompts=ids, n=NUM_GENERATIONS)["completion_ids"]]
        rows = [dummy_row(0)] * len(lengths)
        recording = RoundRecording(rows=rows, lengths=lengths, truncated=[False] * len(lengths))
        return Round(requests, receive_rows(requests, recording, accelerator))

    ended, staleness, trained, overflow, busy = [], [], [], 0, 0.0
    for step in range(num_rollouts + WARM_UP):
        busy = server.busy if step == WARM_UP else busy
        sampler.start_rollout(step)
        while True:
            submit_ahead()
            requests = sampler.next_requests()
            if not requests:
                break
            round_ = sample(requests)
            verdicts = [prompts[int(group.example["prompt"])].is_accepted for group in round_.groups]
            reasons = [None if is_accepted else "all_wrong" for is_accepted in verdicts]
            sampler.add(round_)
            sampler.record_decisions(Decisions(round_.groups, reasons, 0))
        batch = sampler.finish_rollout()
        trained += [int(group.example["prompt"]) for group in batch.train]
        overflow += len(batch.discarded)
        staleness += [group.staleness(sampler.rollout.number) for group in batch.train]
        submit_ahead()
        time.sleep(update_seconds)
        ended.append(time.perf_counter())
    pool.cancel()
    accepted = [i for i in range(max(trained) + 1) if prompts[i].is_accepted]
    length = mean_time(prompts, trained) / mean_time(prompts, accepted)
    seconds = (ended[-1] - ended[WARM_UP - 1]) / num_rollouts
    busy_seconds = (server.busy - busy) / SLOTS / num_rollouts
    return Run(seconds, busy_seconds, staleness, length, overflow / len(trained))


def mean_time(prompts, indices):
    return statistics.mean(sum(prompts[i].times) for i in indices)


def main(num_rollouts=20, mean_seconds=0.2):
    turns, rows = {}, []
    for load in LOADS:
        kind = load._replace(update=0.0)
        turns[kind] = turns.get(kind) or run(load, "in turns", 0.0, num_rollouts, mean_seconds)
        update = load.update * turns[kind].seconds
        one, two = (run(load, way, update, num_rollouts, mean_seconds) for way in WAYS[1:])
        seconds = turns[kind].seconds + update, one.seconds, two.seconds, max(update, one.busy)
        rows.append(
            [
                f"{load.rate:.0%}{', long ones more often' * load.favours_long}",
                f"{load.update:.0%}",
                *(f"{value:.2f}" for value in (*seconds, one.seconds / two.seconds)),
                f"{two.length:.3f}",
                f"{statistics.mean(two.staleness):.2f}, {max(two.staleness)}",
                f"{two.overflow:.1%}",
            ]
        )
    measured = ("limit", "one ahead / two ahead", "trained length", "staleness", "overflow")
    columns = ("accepted", "update", *WAYS, *measured)
    title = f"Seconds per rollout, mean of {num_rollouts}; a completion of mean length takes {mean_seconds:g} s"
    print_table(title, columns, rows, left=2)
