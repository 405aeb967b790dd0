# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The first completions of a prompt are sampled first, and the rest only if their rewards differ."""

import random
from collections import Counter, defaultdict

import pytest
import torch
from helpers import ScriptedTrainer, is_dummy, number, prompts, right, spy_on_training, tiny_config

from trl_dapo.run.ledger import read_ledger
from trl_dapo.sampling.prompt_memory import PromptMemory


SCREENED = {"dynamic_sampling_screen": "2", "shuffle_dataset": False, "max_steps": 1}


def first_is_right_unless_multiple_of_3():
    """Prompts 0, 3, 6, ... are never solved. For the others, the first completion is correct."""
    seen = Counter()

    def script(text, i):
        seen[text] += 1
        return "right" if number(text) % 3 and seen[text] == 1 else f"wrong{seen[text]}"

    return script


def make(tiny_model, tmp_path, reward=right, script=None, **settings):
    args = tiny_config(tmp_path, **{**SCREENED, **settings})
    script = script or first_is_right_unless_multiple_of_3()
    return ScriptedTrainer(tiny_model, reward, args, train_dataset=prompts(400), script=script)


def test_of_prompts_whose_first_few_agree_the_rest_is_not_asked_for(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    seen = spy_on_training(trainer)
    trainer.train()
    asked = Counter(map(number, trainer.sampled))
    assert {asked[i] for i in asked if i % 3 == 0} == {2}
    # 0 1 2 3, then the rest of 1 and 2 together with 4 5 6 7, of which 4 5 7 differ, then the rest of 4 and 5. The
    # batch is full.
    assert [number(text) for text in trainer.sampled] == [
        *(0, 0, 1, 1, 2, 2, 3, 3),
        *(1, 1, 2, 2, 4, 4, 5, 5, 6, 6, 7, 7),
        *(4, 4, 5, 5),
    ]
    assert {number(text) for text, *_ in seen} == {1, 2, 4, 5}
    # One of four is correct: the advantages are in the ratio of (1 - 1/4) to (0 - 1/4).
    of_one = {completion: advantage for text, completion, advantage, _ in seen if number(text) == 1}
    assert set(of_one) == {"right", "wrong2", "wrong3", "wrong4"}
    assert of_one["right"] == pytest.approx(-3 * of_one["wrong4"])
    log = trainer.state.log_history[0]
    assert log["dynamic_sampling/completions_generated"] == 8 + 12 + 4
    assert log["dynamic_sampling/completions_trained"] == 16
    assert log["dynamic_sampling/rounds"] == 3
    # of 7 prompts decided on, 1 2 4 5 have one correct completion of 4
    assert log["task_accuracy"] == pytest.approx(1 / 7)
    assert log["dynamic_sampling/acceptance_rate"] == 4 / 7  # no decision was made on prompt 7


def test_partial_groups_that_fill_a_batch_are_named_so_and_their_old_log_probabilities_are_those_of_masked_tokens(
    tiny_model, tmp_path, monkeypatch
):
    """
    The first completion of every prompt is correct, so no group is dropped. The first rollout ends after one round,
    and the second without any: partial groups alone fill both batches, and those of the second one are stale.
    """
    by_prompt = Counter()

    def first_is_right(text, i):
        by_prompt[text] += 1
        return "right" if by_prompt[text] == 1 else "wrong"

    trainer = make(tiny_model, tmp_path, script=first_is_right, max_steps=2, dynamic_sampling_surplus="carry")
    sampler, build, built, outcomes = trainer._sampler, trainer._build_training_batch, [], []
    next_requests = sampler.next_requests
    is_first_round = lambda: sampler.rollout.number == 0 and not sampler.rollout.rounds  # noqa: E731
    monkeypatch.setattr(sampler, "next_requests", lambda: next_requests() if is_first_round() else [])

    def spy(*args):
        built.append(build(*args))
        outcomes.append(list(trainer._logs["extra"]["dynamic_sampling"])[-16:])
        return built[-1]

    monkeypatch.setattr(trainer, "_build_training_batch", spy)
    trainer.train()
    assert outcomes == [["partial"] * 16] * 2
    # The log-probability of a masked token is 0. With an old one of -4.6 the ratio would be exp(4.6).
    assert "old_per_token_logps" in built[1]
    assert built[1]["old_per_token_logps"].tolist() == [[0.0]] * 16
    assert built[1]["completion_mask"].sum() == 0


def test_the_ledger_has_every_token_once_where_a_run_ends_with_partial_groups(tiny_model, tmp_path):
    settings = {"dynamic_sampling_surplus": "carry", "save_strategy": "steps", "save_steps": 1, "log_groups": 100}
    trainer = make(tiny_model, tmp_path, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["dynamic_sampling/partial_groups"] == 1
    rows = read_ledger(tmp_path).to_pylist()
    assert sum(len(row["lengths"]) for row in rows) == 8 + 12 + 4
    (half,) = [row for row in rows if row["rollout"] == 1]  # prompt 7, which the next rollout would have completed
    columns = ("step", "round", "outcome", "scored", "correct", "policy_version", "seconds")
    assert [half[column] for column in columns] == [1, 0, "partial", 2, 1, None, None]
    trainer = make(tiny_model, tmp_path, **settings | {"max_steps": 2})
    trainer.train(resume_from_checkpoint=True)
    rows = [row for row in read_ledger(tmp_path).to_pylist() if row["rollout"] == 1]
    assert sum(len(row["lengths"]) for row in rows) == len(trainer.sampled) + 2
    # Its rest comes first, and its first two are not sampled again: two of each.
    assert [number(text) for text in trainer.sampled[::2]] == [7, *(8, 9, 10, 11), *(8, 10, 11)]
    # The rest of prompt 7 is sampled by the present policy, like everything else in this rollout.
    assert {row["policy_version"] for row in rows} == {1}
    assert [row["outcome"] for row in rows if row["prompt_id"] == half["prompt_id"]] == ["trained"]


def test_a_group_that_was_dropped_by_its_first_completions_can_fill_a_batch_that_fell_short(tiny_model, tmp_path):
    settings = {"dynamic_sampling_max_gen_batches": 1, "dynamic_sampling_stop_after": 0}
    trainer = make(tiny_model, tmp_path, script=lambda text, i: "wrong", **settings)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    log = trainer.state.log_history[0]
    # Two of 16 are left, which is not enough for a group of four.
    assert (log["dynamic_sampling/groups_trained"], log["dynamic_sampling/completions_generated"]) == (0, 14)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_a_band_of_accuracy_judges_whole_groups(tiny_model, tmp_path):
    # One of the first two is correct, and one of four in the end. A band above 0.3 accepts no group, but requests the
    # rest.
    settings = {"dynamic_sampling_max_gen_batches": 3, "dynamic_sampling_stop_after": 0}
    trainer = make(tiny_model, tmp_path, dynamic_sampling_min_accuracy=0.3, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["dynamic_sampling/dropped/outside_band"] >= 2
    assert log["dynamic_sampling/groups_trained"] == 0
    asked = Counter(map(number, trainer.sampled))
    assert asked[1] == asked[2] == 4


def test_the_ledger_has_the_text_of_all_completions_of_a_group_that_a_band_drops_in_the_end(tiny_model, tmp_path):
    # One of the first two is correct, which is outside of the band. But the band only applies to whole groups.
    settings = {"dynamic_sampling_max_gen_batches": 3, "dynamic_sampling_stop_after": 0, "log_groups": 100}
    make(tiny_model, tmp_path, dynamic_sampling_min_accuracy=0.55, **settings).train()
    dropped = [row for row in read_ledger(tmp_path).to_pylist() if row["drop_reason"] == "outside_band"]
    assert dropped
    assert [len(row["completions"]) for row in dropped] == [4] * len(dropped)


def test_the_memory_hears_of_each_completion_once(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, dynamic_sampling_memory=True)
    trainer.train()
    known = sorted(
        (r.num_scored, r.num_correct) for r in trainer._sampler.selection.find(PromptMemory)._records.values()
    )
    # Prompts 0 3 6 and a part of 7; whole groups of 1 2 4 5.
    assert known == [(2, 0)] * 3 + [(2, 1)] + [(4, 1)] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic_sampling_screen": "4"}, "a number of at least 2 and less than `num_generations` .4., got '4'"),
        ({"dynamic_sampling_screen": 1}, "got '1'"),
        ({"dynamic_sampling_screen": "few"}, "got 'few'"),
        ({"dynamic_sampling_mode": "mask"}, "`dynamic_sampling_screen='2'` has no effect with .*'mask'"),
    ],
)
def test_what_cannot_be_screened_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **{**SCREENED, **settings})


def test_a_group_filter_judges_whole_groups_and_is_not_screened(tiny_model, tmp_path):
    data = {"train_dataset": prompts(40), "script": print, "group_filter": lambda rewards, rows: None}
    with pytest.raises(ValueError, match="`dynamic_sampling_screen='2'` does not support a `group_filter`"):
        ScriptedTrainer(tiny_model, right, tiny_config(tmp_path, **SCREENED), **data)


@pytest.mark.parametrize("screen", ["auto", "on"])
def test_choosing_the_number_needs_to_know_what_is_right(tiny_model, tmp_path, screen):
    def other(completions, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=f"`dynamic_sampling_screen='{screen}'` needs to know which completions"):
        make(tiny_model, tmp_path, reward=[right, other], dynamic_sampling_screen=screen)


# ---- A group is scored when it is whole ----


CARRIED = {"dynamic_sampling_surplus": "carry", "max_steps": 3, "learning_rate": 1e-2}


def one_right_and_equal_wrongs():
    """Like `first_is_right_unless_multiple_of_3`, but all incorrect completions of a prompt have the same text."""
    seen = Counter()

    def script(text, i):
        seen[text] += 1
        return "right" if number(text) % 3 and seen[text] == 1 else "wrong"

    return script


def advantages_of(seen):
    """
    Return the advantages of the completions of each prompt: one value per text if equal completions have equal
    advantages.
    """
    found = defaultdict(set)
    for text, completion, advantage, _ in seen:
        found[text, completion].add(round(advantage, 5))
    return found


def test_a_reward_of_the_step_gives_equal_completions_of_a_group_equal_advantages(tiny_model, tmp_path):
    """A group whose first completions wait during an optimizer step."""

    def grows(completions, trainer_state, **kwargs):
        return [float("right" in completion) + 10 * trainer_state.global_step for completion in completions]

    trainer = make(tiny_model, tmp_path, reward=grows, script=one_right_and_equal_wrongs(), **CARRIED)
    seen = spy_on_training(trainer)
    trainer.train()
    assert all(len(advantages) == 1 for advantages in advantages_of(seen).values())
    assert {completion for _, completion in advantages_of(seen)} > {"right"}
    # Some groups were completed after a step, with a value that their first completions did not have.
    assert sum(log["dynamic_sampling/partial_groups"] for log in trainer.state.log_history[:-1]) > 0


def test_a_reward_that_ranks_the_completions_of_a_group_ranks_all_of_it(tiny_model, tmp_path):
    sizes = []

    def rank(prompts, completions, **kwargs):
        values = []
        for prompt, one in zip(prompts, completions, strict=True):
            others = [other for its, other in zip(prompts, completions, strict=True) if its == prompt]
            values.append(float(sum(len(other) < len(one) for other in others)))
        sizes.extend(Counter(prompts).values())
        return values

    seen_so_far = Counter()

    def four_lengths(text, i):
        seen_so_far[text] += 1
        return "x" * seen_so_far[text]

    trainer = make(tiny_model, tmp_path, reward=rank, script=four_lengths, **CARRIED)
    seen = spy_on_training(trainer)
    trainer.train()
    by_prompt = defaultdict(dict)
    for text, completion, advantage, _ in seen:
        by_prompt[text][len(completion)] = advantage
    # The rewards 0, 1, 2, 3 have the mean 1.5 and the standard deviation 1.29: advantages of -1.16, -0.39, 0.39, 1.16.
    for advantages in by_prompt.values():
        assert [advantages[length] for length in (1, 2, 3, 4)] == pytest.approx(
            [-1.162, -0.387, 0.387, 1.162], abs=1e-3
        )
    assert set(sizes) == {2, 4}  # first completions, and whole groups


def test_a_reward_that_draws_at_random_is_drawn_once_for_all_completions_of_a_group(tiny_model, tmp_path):
    """
    The reward values of a group that trains come from one call. Within a call, equal completions get equal values.
    """
    dice = random.Random(0)

    def drawn(prompts, completions, **kwargs):
        value = {text: dice.random() for text in sorted(set(completions))}
        return [value[text] for text in completions]

    settings = CARRIED | {"dynamic_sampling_memory": False}
    trainer = make(tiny_model, tmp_path, reward=drawn, script=one_right_and_equal_wrongs(), **settings)
    seen = spy_on_training(trainer)
    trainer.train()
    assert {completion for _, completion in advantages_of(seen)} > {"right"}
    assert all(len(advantages) == 1 for advantages in advantages_of(seen).values())


def test_first_completions_are_scored_twice_and_those_of_dropped_groups_once(tiny_model, tmp_path):
    """Prompts 0 3 6 are dropped after 2 completions. 1 2 4 5 are completed: first 2 completions, and then all 4."""
    scored = Counter()

    def counted(prompts, completions, **kwargs):
        for prompt, completion in zip(prompts, completions, strict=True):
            scored[number(prompt)] += not is_dummy(completion)
        return right(completions)

    trainer = make(tiny_model, tmp_path, reward=counted)
    trainer.train()
    assert scored == {0: 2, 1: 6, 2: 6, 3: 2, 4: 6, 5: 6, 6: 2, 7: 2}
