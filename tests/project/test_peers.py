# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison with ms-swift: what runs without it, and that the figures that are shown are those of its CSV."""

import copy
import itertools
import json
import math

import pytest
from trl.trainer.utils import RepeatSampler

from benchmarks.frame.kept import EVIDENCE, read_csv
from benchmarks.peers.ms_swift import study as peers
from trl_dapo.cli.quickstart import build_model, build_tokenizer


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
    return [
        {
            "asked": [falls_back, again[0], again[1]],
            "judged": [half, none],
            "trained": falls_back,
            "useful": 8,
            "fell_back": True,
        },
        {"asked": [full], "judged": [all_], "trained": full, "useful": 16, "fell_back": False},
        {
            "asked": [later, again[2]],
            "judged": [half, half],
            "trained": later[:8] + again[2][:8],
            "useful": 16,
            "fell_back": False,
        },
    ]


def test_the_model_of_ms_swift_repeats_a_run_that_did_what_it_does():
    assert peers.replay(swift_run(), NAMES, seed=7, num_resamples=2) == [True, True, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda rollout: rollout["asked"][1].reverse(),  # other prompts, or in another order
        lambda rollout: rollout["asked"].append(rollout["asked"][0]),  # a round more
        lambda rollout: rollout.update(useful=15),
        lambda rollout: rollout.update(fell_back=True),
        lambda rollout: rollout.update(trained=rollout["trained"][:1] * 16),
    ],
)
def test_the_model_of_ms_swift_is_held_to_what_a_run_did(change):
    rollouts = copy.deepcopy(swift_run())
    change(rollouts[2])
    assert peers.replay(rollouts, NAMES, seed=7, num_resamples=2) == [True, True, False]


def group(rollout, round_, prompt, outcome):
    return {"rollout": rollout, "round": round_, "prompt_id": prompt, "outcome": outcome}


def test_a_carried_group_trains_in_the_rollout_after_the_one_that_sampled_it(monkeypatch):
    monkeypatch.setattr(peers, "NUM_PROMPTS", 2)
    rollouts = peers.rollouts_of(
        [
            group(0, 1, "a", "trained"),
            group(0, 1, "b", "dropped"),
            group(0, 2, "c", "trained"),
            group(0, 2, "d", "carried"),
            group(1, 1, "e", "dropped"),
            group(2, 1, "f", "trained"),
            group(2, 1, "g", "trained"),
        ]
    )
    assert [rollout["asked"] for rollout in rollouts] == [[["a", "b"], ["c", "d"]], [["e"]], [["f", "g"]]]
    assert [rollout["trained"] for rollout in rollouts] == [["a", "c"], ["d"], ["f", "g"]]
    assert [rollout["fell_back"] for rollout in rollouts] == [False, True, False]


def test_different_prompts_are_counted_in_full_batches_alone():
    rollouts = swift_run()
    rollouts[2]["trained"] = rollouts[2]["trained"][:8] * 2
    point = {"rollouts": 3, "tokens": 700, "seconds": 2.0, "accuracy": 0.5}
    result = {"curve": [{**point, "accuracy": 0.4}, point], "rollouts": rollouts, "grad_norms": [1.0, 2.0]}
    figures = peers.figures_of(result)
    assert figures["distinct_prompts"] == (16 + 8) / 2
    assert figures["fewest_distinct"] == 8
    assert (figures["rounds"], figures["fallbacks"], figures["useful_groups"]) == (6, 1, 40 / 3)
    assert (figures["before"], figures["accuracy"], figures["grad_norm"]) == (0.4, 0.5, 1.5)
    never_full = peers.figures_of({**result, "rollouts": rollouts[:1]})
    assert math.isnan(never_full["distinct_prompts"])
    assert math.isnan(never_full["fewest_distinct"])


def test_without_ms_swift_our_own_methods_run_and_leave_their_figures(tmp_path):
    tokenizer = build_tokenizer()
    checkpoint = tmp_path / "checkpoint"
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
    build_model(tokenizer, 0, **tiny).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    jobs = peers.jobs_of(range(1), {"quickstart": 1, "one in ten": 1})
    assert {job.arm for job in jobs} == set(peers.OURS)
    job = jobs[0]
    result = peers.run(job, checkpoint)
    assert json.loads(json.dumps(result)) == result  # it is kept in a file
    figures = peers.figures_of(result)
    assert figures["rollouts"] == 1
    # A model with random weights: all rounds that it may take.
    assert (figures["rounds"], figures["fallbacks"]) == (30, 1)
    assert 30 * 128 <= figures["tokens"] <= 30 * 128 * 8
    assert peers.table_of({job.key: figures})[2].startswith("| quickstart, full batch again | ")


def test_ms_swift_did_what_its_model_does_in_every_rollout_and_the_page_says_so():
    results = read_csv(peers.HERE, peers.KEY)
    assert sorted({seed for *_, seed in results}) == [0, 1, 2]
    of_swift = [run for (_, method, _), run in results.items() if method in peers.PEERS]
    assert all(run["as_modelled"] == 1 for run in of_swift)
    assert f"all {sum(run['rollouts'] for run in of_swift):.0f} rollouts" in " ".join(EVIDENCE.read_text().split())
