# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The ledger: what it says of a rollout, and that no death of the process tears or doubles it."""

import json

import jobs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from helpers import launch, make_trainer, number

from trl_dapo.rewards.task_reward import TaskReward
from trl_dapo.run import ledger
from trl_dapo.run.counts import num_accepted
from trl_dapo.run.ledger import Parts, as_text, choose, describe_groups, read_ledger, read_rollouts
from trl_dapo.sampling.groups import GenerationRequest
from trl_dapo.sampling.policies import Decisions
from trl_dapo.sampling.prompts import PromptStream
from trl_dapo.sampling.rounds import Completion, Round
from trl_dapo.sampling.sampler import Sampler
from trl_dapo.sampling.screen import Screen
from trl_dapo.settings.sampling_defaults import PAPER


def new_sampler(target, num_generations=2, **options):
    stream = PromptStream(Dataset.from_dict({"prompt": ["a"] * 50, "id": list(range(50))}), seed=0)
    sampler = Sampler(stream, target=target, num_generations=num_generations, **options)
    sampler.start_rollout()
    return sampler


def play(sampler, rewards_NF, lengths, reasons, sources=None, seconds=0.0, step=0, names=None):
    """Play a round of groups that are named by their number, with the policy after `step` optimizer steps."""
    rewards_BF = torch.tensor(rewards_NF).view(len(lengths), -1)
    size = len(lengths) // len(reasons)
    requests, completions = [], []
    for i in range(len(reasons)):
        example = {} if sources is None else {"source": sources[i]}
        group = sampler.queue.draw(names[i] if names else f"p{i}", example, (0, i))
        requests.append(GenerationRequest(group, size, weights_rollout=sampler.rollout.number, weights_step=step))
        mine = slice(i * size, (i + 1) * size)
        group.receive(requests[-1], [0] * size)
        group.rewards, group.lengths = rewards_BF[mine], lengths[mine]
        group.truncated = [length == 9 for length in group.lengths]
        completions += [Completion(group, index) for index in range(size)]
    sampler.queue.send(requests)
    round_ = Round(requests, completions, seconds=seconds)
    sampler.add(round_)
    sampler.record_decisions(Decisions(round_.groups, reasons, 0))
    return round_.groups


def rows_of(sampler, step=0):
    """End the sampler's rollout, and return its rows in the ledger."""
    task = TaskReward.choose(["right"], torch.ones(1), None)
    return describe_groups(sampler.rollout, sampler.finish_rollout(), step, task, ["right"], {})


def test_a_row_has_the_place_and_the_outcome_of_its_group():
    sampler = new_sampler(2, carries=True)
    verdicts, later_verdicts = ["all_wrong", None], ["all_correct", None, None]
    play(sampler, [0.0, 0.0, 1.0, 0.0], [3, 4, 5, 9], verdicts, ["aime", None], seconds=0.5, step=4)
    play(sampler, [1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1] * 6, later_verdicts, seconds=0.25, step=6)
    rows = rows_of(sampler, step=6).to_pydict()
    assert rows["round"] == [1, 1, 2, 2, 2]
    assert rows["seconds"] == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert rows["prompt_id"] == ["p0", "p1", "p0", "p1", "p2"]
    assert rows["source"] == ["aime", None, None, None, None]
    assert rows["outcome"] == ["dropped", "trained", "dropped", "trained", "carried"]  # the batch holds two
    assert rows["drop_reason"] == ["all_wrong", None, "all_correct", None, None]
    assert rows["correct"] == [0, 1, 2, 1, 1]
    assert rows["scored"] == [2] * 5
    assert rows["tokens"] == [7, 14, 2, 2, 2]
    assert rows["lengths"][:2] == [[3, 4], [5, 9]]
    assert rows["truncated"][:2] == [[False, False], [False, True]]
    assert rows["rewards/right"][:3] == [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    # Four or six optimizer steps stand behind the policies; the seventh is the first that the rollout trains.
    assert rows["policy_version"] == [4, 4, 6, 6, 6]
    assert set(rows["step"]) == {7}


def test_a_reward_that_equals_the_threshold_is_not_correct_in_the_ledger():
    """100.3 in float32 is 3e-6 above the threshold."""
    sampler = new_sampler(1)
    play(sampler, [100.3, 100.4], [1, 1], [None])
    task = TaskReward.choose(["right"], torch.ones(1), None, accuracy_threshold=100.3)
    rows = describe_groups(sampler.rollout, sampler.finish_rollout(), 0, task, ["right"], {})
    assert rows["correct"].to_pylist() == [1]


def test_the_ledger_has_every_rollout_even_if_the_log_has_averages(parts, tmp_path):
    """The first rollout has 4 groups, the second one. A partial group, which was not decided, is in neither."""
    sampler = new_sampler(4)
    play(sampler, [1.0, 0.0] * 3 + [0.5, torch.nan], [1] * 8, [None] * 3 + ["unscored"])
    task = TaskReward.choose(["right"], torch.ones(1), None)
    parts.append(describe_groups(sampler.rollout, sampler.finish_rollout(), 0, task, ["right"], {}))
    sampler.start_rollout()
    play(sampler, [1.0, 0.0] + [0.0] * 6, [1] * 8, [None] + ["all_wrong"] * 3)
    rows = describe_groups(sampler.rollout, sampler.finish_rollout(), 2, task, ["right"], {})
    parts.append(rows)
    parts.append(rows.slice(0, 1).set_column(rows.column_names.index("outcome"), "outcome", pa.array(["partial"])))
    sampling, dropped = "dynamic_sampling/groups_generated", "dynamic_sampling/dropped"
    trained = "dynamic_sampling/groups_trained"  # 3 of 4, and 1 of 4
    assert read_rollouts(tmp_path, last_step=5) == [
        {"step": 2, sampling: 4, trained: 3, f"{dropped}/unscored": 1, "rewards/right/mean": 3.5 / 7},
        {"step": 5, sampling: 4, trained: 1, f"{dropped}/all_wrong": 3, "rewards/right/mean": 1 / 8},
    ]
    assert read_rollouts(tmp_path / "elsewhere", last_step=5) == []
    assert num_accepted(read_rollouts(tmp_path, last_step=5)) == 4
    assert num_accepted([{sampling: 4}]) == 4  # none was dropped


def test_accepted_groups_beyond_the_batch_are_surplus_and_the_rollouts_are_numbered():
    sampler = new_sampler(1)
    for n in range(3):
        play(sampler, [1.0, 0.0] * 2, [1] * 4, [None, None])
        rows = rows_of(sampler).to_pydict()
        assert (rows["outcome"], rows["rollout"]) == (["trained", "surplus"], [n, n])
        sampler.start_rollout()


def test_a_partial_group_of_an_earlier_rollout_that_is_given_up_has_no_round():
    sampler = new_sampler(1, num_generations=4, carries=True, policies=[Screen(2)])
    play(sampler, [1.0, 0.0], [3, 4], [None], ["aime"], names=["asked before"])
    for _ in range(2):
        assert len(sampler.finish_rollout().partial) == 1
        sampler.start_rollout()
    play(sampler, [1.0, 0.0, 0.0, 0.0], [1] * 4, [None], names=["p"])
    rows = rows_of(sampler).to_pydict()
    assert rows["prompt_id"] == ["asked before", "p"]
    assert rows["outcome"] == ["partial", "trained"]  # it would be three rollouts old
    assert rows["source"] == ["aime", None]
    assert rows["round"] == [0, 1]
    assert rows["seconds"] == [None, 0.0]
    assert rows["lengths"] == [[3, 4], [1] * 4]


def test_carried_groups_have_only_one_row():
    sampler = new_sampler(1, carries=True)
    play(sampler, [1.0, 0.0] * 2, [1] * 4, [None, None])
    assert len(sampler.finish_rollout().carried_to_next) == 1
    sampler.target = 2
    sampler.start_rollout()
    play(sampler, [0.0, 0.0, 0.5, 0.0], [1, 1, 2, 2], ["all_wrong", None])
    rows = rows_of(sampler).to_pydict()
    assert rows["outcome"] == ["dropped", "trained"]
    assert rows["round"] == [1, 1]
    assert rows["rewards/right"] == [[0.0, 0.0], [0.5, 0.0]]


def test_missing_rewards_are_null_and_every_reward_function_has_a_column():
    nan, sampler = torch.nan, new_sampler(1)
    play(sampler, [[1.0, 0.5], [nan, 0.25], [nan, nan], [nan, 0.0]], [1] * 4, [None, "unscored"])
    batch = sampler.finish_rollout()

    def rows_of_both(chosen):
        task = TaskReward.choose(["right", "form"], torch.ones(2), chosen)
        return describe_groups(sampler.rollout, batch, 0, task, ["right", "right"], {}).to_pydict()

    rows = rows_of_both(["right"])
    assert rows["rewards/right"] == [[1.0, None], [None, None]]
    assert rows["rewards/right_2"] == [[0.5, 0.25], [None, 0.0]]
    assert (rows["scored"], rows["correct"]) == ([1, 0], [1, 0])
    # Without a name the sum of both decides, which does not say which completions are correct.
    rows = rows_of_both(None)
    assert (rows["scored"], rows["correct"]) == ([2, 1], [None, None])


def test_text_is_kept_of_every_verdict_before_a_second_of_any():
    verdicts = {"a": None, "b": None, "c": "all_wrong", "d": "all_wrong", "e": "masked"}
    chosen = {num: "".join(choose(verdicts, num)) for num in (0, 3, 4, 9)}
    assert chosen == {0: "", 3: "ace", 4: "abce", 9: "abcde"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "4"}], "4"),
        ([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": None}], "user: 2+2\n\nassistant: "),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], "[image]What?"),
        ([{"role": "assistant", "tool_calls": [{"name": "add"}]}], "[{'name': 'add'}]"),
        ([7, ["of another kind"]], "[7, ['of another kind']]"),
        ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
    ],
)
def test_prompts_and_completions_are_kept_as_text_that_a_file_can_hold(messages, text):
    assert as_text(messages) == text
    assert pa.array([as_text(messages)]).to_pylist() == [text]


def test_a_run_writes_down_every_group_with_its_true_rewards_and_some_text(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, log_groups=3)
    trainer.train()
    rows = read_ledger(tmp_path).to_pylist()
    assert [number(text) for text in trainer.sampled[::4]] == list(range(len(rows)))  # shuffle_dataset=False
    for i, row in enumerate(rows):
        assert row["rewards/right"] == ([1.0, 0.0, 0.0, 0.0] if i % 3 else [0.0] * 4)
        assert row["drop_reason"] == (None if i % 3 else "all_wrong")
        assert row["correct"] == (1 if i % 3 else 0)
    # Texts of groups 0 to 3: one dropped, one accepted and one more accepted. Then the same for 4 to 7.
    assert [row["outcome"] for row in rows[:6]] == ["dropped", "trained", "trained", "dropped", "trained", "trained"]
    texts = [(i, row["prompt"], row["completions"]) for i, row in enumerate(rows) if row["step"] == 1]
    one_right = ["right", "wrong", "wrong", "wrong"]
    first = [(0, "prompt 0:", ["wrong"] * 4), (1, "prompt 1:", one_right), (2, "prompt 2:", one_right)]
    assert [text for text in texts if text[1]] == first
    assert {(row["step"], row["rollout"]) for row in rows} == {(1, 0), (2, 1)}


def test_a_second_training_keeps_the_ledger_of_the_first(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, log_groups=0)
    trainer.train()
    first = read_ledger(tmp_path)
    trainer.train()
    assert pq.read_table(tmp_path / "rollouts-1" / "part-00001.parquet").equals(first)
    assert set(read_ledger(tmp_path)["step"].to_pylist()) == {1, 2}
    assert first["completions"].null_count == first.num_rows


def test_a_folder_that_cannot_be_written_ends_the_ledger_and_not_the_run(tiny_model, tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(ledger, "_replace", full)
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    (said,) = [record.message for record in caplog.records if "No space left" in record.message]
    assert "The run continues, but without its ledger" in said


def test_two_processes_write_the_ledger_of_one_with_groups_that_straddle_them(tiny_model, tmp_path):
    jobs.keeps_a_ledger(tiny_model, tmp_path)
    result = launch("keeps_a_ledger", tiny_model, tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-2000:]
    one, two = (untimed(read_ledger(tmp_path / f"run-{n}")) for n in (1, 2))
    assert two.equals(one)
    assert one["completions"].null_count == 0
    # What `script` says to the second group, rows 4 to 7 of twelve, of which each process has six.
    assert one["completions"][1].as_py() == [["wrong"[: 1 + (7 + i) % 5], "right"][i % 4 == 1] for i in range(4, 8)]


def part_of(*rollouts, **columns):
    return pa.table({"rollout": pa.array(rollouts, pa.int32()), **columns})


@pytest.fixture
def parts(tmp_path):
    """A ledger of which no rollout is written yet."""
    parts = Parts(tmp_path / "rollouts")
    parts.begin(0)
    return parts


def test_a_part_that_is_large_enough_does_not_change(parts, tmp_path, monkeypatch):
    for rollout in range(3):
        parts.append(part_of(rollout, rollout))
    assert [path.name for path in parts.folder.iterdir()] == ["part-00001.parquet"]
    monkeypatch.setattr(ledger, "PART_BYTES", 1)
    parts.append(part_of(3))
    parts.append(part_of(4))
    assert sorted(path.name for path in parts.folder.iterdir()) == ["part-00001.parquet", "part-00002.parquet"]
    assert read_ledger(tmp_path)["rollout"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 10**9], ids=["a part a rollout", "one part"])
def test_rollouts_after_the_checkpoint_are_taken_out_before_they_are_sampled_again(parts, tmp_path, monkeypatch, size):
    monkeypatch.setattr(ledger, "PART_BYTES", size)
    for rollout in range(6):
        parts.append(part_of(rollout, rollout))
    (parts.folder / "part-00007.tmp").touch()  # killed at it
    resumed = Parts(tmp_path / "rollouts")
    resumed.begin(4)
    assert {path.suffix for path in parts.folder.iterdir()} == {".parquet"}
    assert read_ledger(tmp_path)["rollout"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]
    resumed.append(part_of(4))
    assert read_ledger(tmp_path)["rollout"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    resumed.begin(0)  # a run of its own
    assert read_ledger(tmp_path) is None
    assert sum(pq.read_table(path).num_rows for path in (tmp_path / "rollouts-1").iterdir()) == 9


def test_other_reward_functions_begin_a_part_of_their_own(parts, tmp_path):
    parts.append(part_of(0, **{"rewards/a": pa.array([1.0])}))
    parts.append(part_of(1, **{"rewards/b": pa.array([2.0])}))
    rows = read_ledger(tmp_path)
    assert rows["rewards/a"].to_pylist() == [1.0, None]
    assert rows["rewards/b"].to_pylist() == [None, 2.0]


def test_a_part_that_lost_its_end_is_passed_over_with_a_note_and_never_in_the_way(parts, tmp_path, caplog):
    parts.append(part_of(0))
    torn = parts.folder / "part-00002.parquet"
    torn.write_bytes((parts.folder / "part-00001.parquet").read_bytes()[:-9])
    notes = []
    assert read_ledger(tmp_path, notes)["rollout"].to_pylist() == [0]
    assert notes == ["rollouts/part-00002.parquet cannot be read and is left out."]
    parts.begin(1)
    parts.append(part_of(1))
    assert read_ledger(tmp_path)["rollout"].to_pylist() == [0, 1]
    assert torn.with_suffix(".parquet.torn").exists()
    assert "It is renamed to part-00002.parquet.torn" in caplog.text


def untimed(rows):
    return rows.drop_columns("seconds")


def test_ten_kills_leave_whole_rollouts_and_the_resumed_run_the_ledger_of_one_that_lived(tiny_model, tmp_path):
    result = launch("killed_over_and_over", tiny_model, tmp_path, 10, num_processes=1)
    assert result.returncode == 0, result.stderr[-2000:]
    whole = untimed(read_ledger(tmp_path / "whole"))
    assert len(list((tmp_path / "whole" / "rollouts").iterdir())) > 1
    num_rows = []
    for n in range(11):
        notes = []
        rows = read_ledger(tmp_path / "copies" / str(n), notes)
        num_rows.append(0 if rows is None else rows.num_rows)
        if rows is not None:
            assert untimed(rows).equals(whole.slice(0, rows.num_rows))
            last = rows["rollout"][-1]
            if rows.num_rows < whole.num_rows:
                assert whole["rollout"][rows.num_rows] != last  # a rollout is there as a whole, or not at all
        assert notes == []
    assert num_rows[-1] == whole.num_rows
    assert len(set(num_rows)) > 4  # it did get on between the kills


def test_the_first_eight_sources_have_metrics_and_stay_the_same_after_a_resume():
    sampler = new_sampler(12)
    names = [f"s{i}" for i in range(9, -1, -1)]
    play(sampler, [1.0, 0.0] * 10, [1] * 20, [None] * 10, names)
    assert sampler.sources == names[:8]
    resumed = new_sampler(12)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())), None)
    assert resumed.sources == names[:8]
    assert resumed.num_rollouts == sampler.num_rollouts == 1


def test_the_table_of_completions_shows_the_rewards_that_were_given_and_the_reason(tiny_model, tmp_path):
    def script(text, i):
        return "right" if number(text) == 1 and i % 4 == 0 else "right" if number(text) == 2 else "wrong"

    settings = {"dynamic_sampling_max_gen_batches": 1, "log_completions": True, "num_completions_to_print": 0, **PAPER}
    make_trainer(tiny_model, tmp_path, script, num_prompts=8, max_steps=2, **settings).train()
    first, second = (pq.read_table(path).to_pandas() for path in sorted((tmp_path / "completions").iterdir()))
    verdicts = ["trained", "dropped: all_wrong", "dropped: all_correct", "dropped: all_wrong"]
    assert first["dynamic_sampling"].tolist() == [verdict for verdict in verdicts for _ in range(4)]
    assert first["right"].tolist() == [1.0, 0.0, 0.0, 0.0, *[0.0] * 4, *[1.0] * 4, *[0.0] * 4]
    # Nothing was accepted, just when the table is needed.
    assert second["right"].tolist() == [0.0] * 16
    assert set(second["dynamic_sampling"]) == {"dropped: all_wrong"}
    assert second["advantage"].tolist() == [0.0] * 16
