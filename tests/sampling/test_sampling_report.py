# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a rollout and messages about it, with examples computed by hand."""

import pytest
import torch
from datasets import Dataset

from trl_dapo.sampling.groups import GenerationRequest
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.report import advise, describe_mismatch, describe_shortfall, rollout_log, rollout_metrics
from trl_dapo.sampling.rounds import Completion, Round
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screen import Screen


pytestmark = pytest.mark.fast


def new_sampler(num_generations, **options):
    prompts = PromptStream(Dataset.from_dict({"prompt": list("abcd")}), seed=0)
    sampler = Sampler(prompts, target=2, num_generations=num_generations, **options)
    sampler.start_rollout()
    return sampler


def sample(sampler, rewards_BF, num_completions, lengths, truncated, sources=None, **metrics):
    """A round of groups that were never drawn from the stream, with these completions."""
    completions, requests = [], []
    for i in range(len(rewards_BF) // num_completions):
        example = {"source": sources[i]} if sources else {}
        group = sampler.queue.draw(f"p{i}", example, (0, i))
        requests.append(GenerationRequest(group, num_completions))
        mine = slice(i * num_completions, (i + 1) * num_completions)
        group.receive(requests[-1], [0] * num_completions)
        group.rewards, group.lengths, group.truncated = rewards_BF[mine], lengths[mine], truncated[mine]
        completions += [Completion(group, index) for index in range(num_completions)]
    sampler.queue.send(requests)
    round_ = Round(requests, completions, {name: [value] for name, value in metrics.items()})
    sampler.add(round_)
    return round_


def sample_text(sampler, rewards, lengths, truncated, sources, **metrics):
    """Groups of 0/1 rewards as text, `11 00`, with a source each."""
    rewards_BF = torch.tensor([[float(digit)] for digit in rewards.replace(" ", "")])
    num_completions = len(rewards.split()[0])
    is_cut = [digit == "1" for digit in truncated]
    return sample(sampler, rewards_BF, num_completions, lengths, is_cut, sources, **metrics)


@pytest.fixture
def sampler():
    """Two groups of two that agree and are dropped, then a whole one of four that trains. Two groups are needed."""
    sampler = new_sampler(4, policies=[Screen(2)])
    few = {"step_time": 2.0, "completions/min_words": 9.0}
    round_ = sample_text(sampler, "11 00", [3, 4, 5, 6], "0001", ["x", "y"], **few)
    sampler.record_decisions(Decisions(round_.groups, ["all_correct", "all_wrong"], 0))
    whole = {"step_time": 5.0, "completions/min_words": 1.0}
    round_ = sample_text(sampler, "0101", [7, 8, 9, 10], "0001", ["x"], **whole)
    sampler.record_decisions(Decisions(round_.groups, [None], 0))
    return sampler


def test_surplus_that_is_discarded_counts_as_accepted_in_the_acceptance_rate_of_its_source():
    sampler = new_sampler(4)
    round_ = sample_text(sampler, "0101 0101 0101 1111", [1] * 16, "0" * 16, ["x"] * 4)
    sampler.record_decisions(Decisions(round_.groups, [None, None, None, "all_correct"], 0))
    batch = sampler.finish_rollout()
    assert (len(batch.train), len(batch.discarded)) == (2, 1)
    log = rollout_log(sampler, batch, ["right"], torch.tensor([1.0]), {"tokens_trained": 8})
    assert log["dynamic_sampling/acceptance_rate/x"] == 3 / 4


def test_a_rollout_is_measured_over_all_that_it_sampled(sampler):
    log = rollout_log(sampler, sampler.finish_rollout(), ["right"], torch.tensor([2.0]), {"tokens_trained": 30})
    expected = {
        "reward": 1.0,  # 4 correct of 8, with weight 2
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
    """700.1 + 300.2 and 500.15 + 500.15 differ by 3e-5 in TRL's float32. 700.1 + 300.3 is a different sum."""
    sampler = new_sampler(2)
    rewards_BF = torch.tensor([[700.1, 300.2], [500.15, 500.15], [700.1, 300.2], [700.1, 300.3]])
    metrics = {"frac_reward_zero_std": 0.0}  # by a standard deviation, as in TRL
    round_ = sample(sampler, rewards_BF, 2, [1] * 4, [False] * 4, **metrics)
    sampler.record_decisions(Decisions(round_.groups, ["constant", None], 0))
    log = rollout_log(sampler, sampler.finish_rollout(), ["one", "other"], torch.ones(2), {})
    assert log["frac_reward_zero_std"] == 1 / 2


def test_where_all_were_cut_off_the_lengths_of_those_that_ended_are_zero():
    round_ = sample_text(new_sampler(4), "0101", [5, 6, 7, 8], "1111", ["x"])
    metrics = rollout_metrics([round_], ["right"], torch.ones(1))
    assert metrics["completions/mean_terminated_length"] == metrics["completions/max_terminated_length"] == 0


def test_a_batch_that_is_not_full_is_told_of_with_advice_and_what_to_raise(sampler):
    said = describe_shortfall(sampler.rollout, 1, num_short=2, num_trained=1)
    assert said.startswith(
        "The batch is not full at the limit of 1 batch of completions, for 2 rollouts in a row: 1 of 3 sampled groups "
        "were accepted (dropped: all_correct 1, all_wrong 1); a full batch has 2. This rollout trains on 1 "
        "group. Raise `dynamic_sampling_max_gen_batches` (1)."
    )  # no reason applies to most of the dropped groups
    assert describe_shortfall(sampler.rollout, 0, 1, 0).endswith(" Raise `dynamic_sampling_stop_after`.")
    for group in sampler.rollout.dropped:
        group.drop_reason = "all_wrong"
    said = describe_shortfall(sampler.rollout, 1, num_short=1, num_trained=1)
    assert "Most prompts are too hard for the model: " in said  # two of three
    assert said.endswith(" Or raise `dynamic_sampling_max_gen_batches` (1).")
    for group in sampler.rollout.dropped:
        group.drop_reason = "too long for me"
    assert advise(sampler.rollout) == ""  # for a reason of the user's own


@pytest.mark.parametrize(
    ("reasons", "said", "purpose"),
    [
        (
            ["all_wrong", "all_correct"],
            "No group was accepted, so a higher `dynamic_sampling_max_gen_batches` (3) would probably not fill the "
            "batch either.",
            "continue with the next rollout",
        ),
        (
            ["unscored", "unscored", None],
            "The reward functions that decide return `None` or NaN for most completions: check their inputs. A higher "
            "`dynamic_sampling_max_gen_batches` (3) does not help, since groups without scores are never accepted.",
            "train on what was accepted",
        ),
    ],
    ids=["none accepted", "no scores"],
)
def test_a_higher_limit_is_not_advised_where_it_would_not_help(reasons, said, purpose):
    sampler = new_sampler(2)
    round_ = sample_text(sampler, " ".join(["01"] * len(reasons)), [1] * 6, "0" * 6, None)
    sampler.record_decisions(Decisions(round_.groups, reasons, 0))
    assert describe_shortfall(sampler.rollout, 3, 1, 0).endswith(f" {said}")
    way_out = f"Or set `dynamic_sampling_on_exhausted='top_up'` to {purpose}."
    assert describe_shortfall(sampler.rollout, 3).endswith(f" {said} {way_out}")


def test_a_higher_limit_is_advised_where_no_group_is_whole_yet():
    sampler = new_sampler(4, policies=[Screen(2)])
    round_ = sample_text(sampler, "01 01", [1] * 4, "0000", None)
    sampler.record_decisions(Decisions(round_.groups, [None, None], 0))
    assert describe_shortfall(sampler.rollout, 1, 1, 0).endswith(" Raise `dynamic_sampling_max_gen_batches` (1).")


def test_a_checkpoint_without_dynamic_sampling_has_no_place_among_the_prompts():
    resumed = "The weights and the optimizer are resumed"
    assert describe_mismatch("at-2", {"use_dynamic_sampling": (False, True)}, has_rows=False, resumed=resumed) == (
        "at-2 was written with other settings: `use_dynamic_sampling` (False there, True here). The weights and the "
        "optimizer are resumed, but a new pass over the prompts begins. To use all of the "
        "checkpoint, resume with its settings. If you meant to change them, there is nothing to do."
    )
    assert describe_mismatch("at-2", {"use_dynamic_sampling": (True, False)}, has_rows=False, resumed=resumed) is None
    assert "its completions of an unfinished rollout" in describe_mismatch(
        "at-2", {"beta": (0.0, 0.1)}, has_rows=True, resumed=resumed
    )
    assert describe_mismatch("at-2", {"dataset": (None, 1200)}, has_rows=False, resumed=resumed) == (
        "at-2 was written with another dataset (streamed there, 1,200 rows here). The weights and the optimizer are "
        "resumed, but a new pass over the prompts begins. To use all of the checkpoint, resume with "
        "its dataset. If you meant to change the dataset, there is nothing to do."
    )
