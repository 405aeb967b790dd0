# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison with ms-swift: what runs without it, and that the figures that are shown are those of its CSV."""

import itertools

import pytest
from trl.trainer.utils import RepeatSampler

from benchmarks.frame.kept import EVIDENCE, read_csv
from benchmarks.peers.ms_swift import study as peers


NAMES = [f"prompt {i}" for i in range(40)]


def batches(seed, repeat_count):
    """What ms-swift's data loaders give, batch after batch of 16 of 40 prompts."""
    sampler = RepeatSampler(NAMES, 1, batch_size=16, repeat_count=repeat_count, seed=seed)
    prompts = itertools.chain.from_iterable(itertools.repeat(sampler))
    while True:
        yield [NAMES[i] for i in itertools.islice(prompts, 16)]


def swift_run():
    """Three rollouts with at most two resamples: one falls back, one is full at once, one after a resample."""
    first, more = batches(7, 1), batches(8, 4)
    none, half, all_ = [False] * 16, [True] * 8 + [False] * 8, [True] * 16
    falls_back, full, later = next(first), next(first), next(first)
    again = [next(more) for _ in range(3)]
    assert again[0] == again[1] == again[2]  # a batch comes as often as it has optimizer steps
    names = ("asked", "judged", "trained", "useful", "fell_back")
    rollouts = [
        ([falls_back, again[0], again[1]], [half, none], falls_back, 8, True),
        ([full], [all_], full, 16, False),
        ([later, again[2]], [half, half], later[:8] + again[2][:8], 16, False),
    ]
    return [dict(zip(names, rollout, strict=True)) for rollout in rollouts]


@pytest.mark.parametrize(
    "change",
    [
        lambda rollout: rollout["asked"][1].reverse(),  # other prompts, or in another order
        lambda rollout: rollout.update(useful=15),
        lambda rollout: rollout.update(trained=rollout["trained"][:1] * 16),
    ],
)
def test_the_model_of_ms_swift_repeats_a_run_that_did_what_it_does_and_no_other(change):
    rollouts = swift_run()
    assert peers.replay(rollouts, NAMES, seed=7, num_resamples=2) == [True, True, True]
    change(rollouts[2])
    assert peers.replay(rollouts, NAMES, seed=7, num_resamples=2) == [True, True, False]


def test_ms_swift_did_what_its_model_does_in_every_rollout_and_the_page_says_so():
    results = read_csv(peers.HERE, peers.KEY)
    assert sorted({seed for *_, seed in results}) == [0, 1, 2]
    of_swift = [run for (_, method, _), run in results.items() if method in peers.PEERS]
    assert all(run["as_modelled"] == 1 for run in of_swift)
    assert f"all {sum(run['rollouts'] for run in of_swift):.0f} rollouts" in " ".join(EVIDENCE.read_text().split())
