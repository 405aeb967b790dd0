# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""What is measured of a rollout, and said of it, by hand."""

import pytest
import torch
from datasets import Dataset

from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.report import advise, describe_mismatch, describe_shortfall, rollout_log, rollout_metrics
from trl_dapo.sampling.rounds import Round, Rows
from trl_dapo.sampling.sampler import Sampler


pytestmark = pytest.mark.fast


def round_of(rewards, lengths, truncated, sources, **metrics):
    """Groups of 0/1 rewards as text, `11 00`, with a source each."""
    rewards_BF = torch.tensor([[float(digit)] for digit in rewards.replace(" ", "")])
    facts = torch.tensor(lengths), torch.tensor([digit == "1" for digit in truncated])
    metrics = {name: [value] for name, value in metrics.items()}
    return Round(rewards.split(), Rows.empty(), rewards_BF, *facts, {}, metrics, sources=sources)


@pytest.fixture
def sampler():
    """Two groups of two that agree and are dropped, then a whole one of four that trains; two are needed."""
    prompts = PromptStream(Dataset.from_dict({"prompt": list("abcd")}), seed=0)
    sampler = Sampler(prompts, target=2, num_generations=4, screen=2)
    sampler.begin()
    few = round_of("11 00", [3, 4, 5, 6], "0001", ["x", "y"], step_time=2.0, **{"completions/min_words": 9.0})
    sampler.add_round(few, ["all_correct", "all_wrong"])
    whole = round_of("0101", [7, 8, 9, 10], "0001", ["x"], step_time=5.0, **{"completions/min_words": 1.0})
    sampler.add_round(whole, [None])
    return sampler


def test_a_rollout_is_measured_over_all_that_it_sampled(sampler):
    log = rollout_log(sampler, sampler.batch(), ["right"], torch.tensor([2.0]), {"tokens_trained": 30})
    expected = {
        "reward": 1.0,  # 4 right of 8, of weight 2
        "rewards/right/mean": 0.5,
        "step_time": (4 * 2.0 + 4 * 5.0) / 8,
        "completions/min_words": 1.0,
        "completions/clipped_ratio": 2 / 8,
        "completions/mean_length": (3 + 4 + 5 + 6 + 7 + 8 + 9 + 10) / 8,
        "completions/mean_terminated_length": (3 + 4 + 5 + 7 + 8 + 9) / 6,
        "completions/max_terminated_length": 9,
        "frac_reward_zero_std": 2 / 3,  # the group of four has two values
        "dynamic_sampling/acceptance_rate/x": 1 / 2,
        "dynamic_sampling/acceptance_rate/y": 0.0,
        "reward/x": 2 * 4 / 6,
        "reward/y": 0.0,
        "dynamic_sampling/rounds": 2,
        "dynamic_sampling/groups_generated": 3,
        "dynamic_sampling/groups_trained": 1,
        "dynamic_sampling/completions_generated": 8,
        "dynamic_sampling/completions_trained": 4,
        "dynamic_sampling/tokens_generated": 52,
        "dynamic_sampling/tokens_trained": 30,
        "dynamic_sampling/surplus": 0,
        "dynamic_sampling/shortfall": 1,
        "dynamic_sampling/acceptance_rate": 1 / 3,
        "dynamic_sampling/dropped/all_wrong": 1,
        "dynamic_sampling/dropped/constant": 0,
        "dynamic_sampling/partial_groups": 0,
    }
    assert {name: log[name] for name in expected} == pytest.approx(expected)


def test_groups_whose_totals_differ_by_rounding_alone_have_equal_rewards():
    """700.1 + 300.2 and 500.15 + 500.15 are 3e-5 apart as TRL holds them, in float32; 700.1 + 300.3 is another sum."""
    prompts = PromptStream(Dataset.from_dict({"prompt": list("abcd")}), seed=0)
    sampler = Sampler(prompts, target=2, num_generations=2)
    sampler.begin()
    rewards_BF = torch.tensor([[700.1, 300.2], [500.15, 500.15], [700.1, 300.2], [700.1, 300.3]])
    facts = torch.ones(4).long(), torch.zeros(4).bool()
    metrics = {"frac_reward_zero_std": [0.0]}  # by a standard deviation, as in TRL
    sampler.add_round(Round(["a", "b"], Rows.empty(), rewards_BF, *facts, {}, metrics), ["constant", None])
    log = rollout_log(sampler, sampler.batch(), ["one", "other"], torch.ones(2), {})
    assert log["frac_reward_zero_std"] == 1 / 2


def test_where_all_were_cut_off_the_lengths_of_those_that_ended_are_zero():
    metrics = rollout_metrics([round_of("0101", [5, 6, 7, 8], "1111", ["x"])], ["right"], torch.ones(1))
    assert metrics["completions/mean_terminated_length"] == metrics["completions/max_terminated_length"] == 0


def test_a_batch_that_is_not_full_is_told_of_with_advice_and_what_to_raise(sampler):
    said = describe_shortfall(sampler.rollout, 1, num_short=2, num_trained=1)
    assert said.startswith(
        "The batch is not full at the limit of 1 batch of completions, for 2 rollouts in a row: 1 of 3 sampled groups "
        "were accepted; the batch takes 2 (dropped: all_correct 1, all_wrong 1). This rollout trains on 1 group. "
        "Raise `dynamic_sampling_max_gen_batches` (1)."
    )  # no reason dropped most of the groups
    assert describe_shortfall(sampler.rollout, 0, 1, 0).endswith(" Raise `dynamic_sampling_stop_after`.")
    sampler.rollout.drop_reasons = dict.fromkeys(sampler.rollout.drop_reasons, "all_wrong")
    said = describe_shortfall(sampler.rollout, 1, num_short=1, num_trained=1)
    assert "Most prompts are too hard for the model: " in said  # two of three
    assert said.endswith(" Or raise `dynamic_sampling_max_gen_batches` (1).")
    sampler.rollout.drop_reasons = dict.fromkeys(sampler.rollout.drop_reasons, "too long for me")
    assert advise(sampler.rollout) == ""  # of a reason of a user's own


def test_a_checkpoint_without_dynamic_sampling_has_no_place_among_the_prompts():
    resumed = "The weights and the optimizer are resumed"
    assert describe_mismatch("at-2", {"use_dynamic_sampling": (False, True)}, has_rows=False, resumed=resumed) == (
        "at-2 was written with other settings: `use_dynamic_sampling` (False there, True here). The weights and the "
        "optimizer are resumed; the prompts start a fresh pass."
    )
    assert describe_mismatch("at-2", {"use_dynamic_sampling": (True, False)}, has_rows=False, resumed=resumed) is None
    assert "rows it holds" in describe_mismatch("at-2", {"beta": (0.0, 0.1)}, has_rows=True, resumed=resumed)
