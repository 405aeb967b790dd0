# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The output of a run on a terminal of 80 columns and in a file."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import launch, mixed_unless_multiple_of_3, prompts, right, tiny_config
from terminals import lines_of, run_in_terminal
from transformers import PrinterCallback, ProgressCallback

from trl_dapo.run import terminal
from trl_dapo.run.counts import add_num_rollouts, total
from trl_dapo.run.terminal import HEADER, TerminalCallback, format_evaluation, format_row
from trl_dapo.sampling.rollout import Totals


JOBS = Path(__file__).parents[1] / "jobs.py"


def test_a_line_shows_the_means_of_its_entries_and_a_dash_for_missing_metrics():
    logs = [
        {"reward": 0.25, "dynamic_sampling/acceptance_rate": 0.5, "completions/clipped_ratio": 0.125},
        {"reward": 0.75, "dynamic_sampling/acceptance_rate": 0.25, "task_accuracy": None, "step_time": 1.5},
    ]
    row = format_row(logs, 12, 3725.4)
    assert row.split() == ["12", "0.500", "-", "37.5%", "-", "12.5%", "-", "-", "1.50", "1:02:05"]
    assert len(row) == len(HEADER) == 79
    assert format_row([{"reward": -0.0004}], 1, None).split()[1] == "0.000"  # zero has no sign


@pytest.mark.parametrize(("numbers", "shown"), [((16, 16), "16/16"), ((16, 15), "15/16"), ((3,), "3/16")])
def test_a_line_says_that_batches_were_full_only_if_all_of_them_were(numbers, shown):
    logs = [{"dynamic_sampling/groups_trained": number} for number in numbers]
    assert format_row(logs, 1, None, target=16).split()[4] == shown


@pytest.mark.parametrize("use_dynamic_sampling", [True, False])
def test_the_share_of_correct_completions_is_shown_if_other_rewards_shape_the_total(
    made, capsys, use_dynamic_sampling
):
    def shaping(completions, **kwargs):
        return [-1.0] * len(completions)

    settings = {"use_dynamic_sampling": use_dynamic_sampling, "dynamic_sampling_rewards": ["right"]}
    trainer = made([right, shaping], script=lambda text, i: "wrong" if i % 4 else "right", **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["reward"], log["task_accuracy"]) == (-0.75, 0.25)  # 1/4 - 1
    assert " -0.750   25.0% " in capsys.readouterr().out


def test_a_run_without_output_for_15_seconds_prints_what_it_is_doing(made):
    trainer = made()
    printer, watch = trainer._terminal, trainer.stopwatch
    printer.file = file = io.StringIO()
    printer._sampler = SimpleNamespace(rollout=SimpleNamespace(target=8, shortfall=6, num_rounds=1))
    said_at = printer._started = printer._said_at

    def say(seconds):
        printer._said_at = said_at
        printer.break_silence(said_at + seconds)

    with watch.timing("engine"):
        say(14.9)
        say(15.0)
    with watch.timing("evaluation", "24 prompts x 4 in 2 batches"):
        printer.on_prediction_step(None, None, None)
        say(16.0)
    say(75.0)
    assert file.getvalue().splitlines() == [
        "       sampling 2 of 8 groups after 1 rounds (0:00:15)",
        "       evaluating 24 prompts x 4 in 2 batches, 1 done (0:00:16)",
        "       updating (0:01:15)",
    ]
    assert 0 <= printer._said_at - said_at < 60  # and what was said ends the silence


def test_a_run_has_somebody_listen_for_silence_while_it_trains_and_nobody_afterwards(made, monkeypatch):
    heard = threading.Event()
    monkeypatch.setattr(TerminalCallback, "break_silence", lambda self, now: heard.set())

    def slow(completions, **kwargs):
        assert heard.wait(60)
        return right(completions=completions, **kwargs)

    made(slow, dataset=prompts(4)).train()
    assert [thread.name for thread in threading.enumerate() if "watch" in thread.name] == []


def test_a_line_with_large_numbers_is_not_wider():
    sampling = {"acceptance_rate": 1.0, "groups_trained": 512.0}
    log = {f"dynamic_sampling/{name}": value for name, value in sampling.items()}
    log |= {"completions/mean_length": 20480.0, "entropy": 11.93, "step_time": 3599.9}
    log |= {"reward": -123.456, "task_accuracy": 1.0, "completions/clipped_ratio": 1.0}
    row = format_row([log], 100_000, 8_640_000, target=512)
    assert row.split() == "100000 -123.5 100.0% 100.0% 512/512 100.0% 20.5k 11.930 3600 100d 00h".split()
    assert len(row) == 79


@pytest.mark.parametrize(
    "settings", [{"logging_steps": 10}, {"logging_strategy": "no"}, {"logging_steps": 2}], ids=str
)
def test_steps_that_no_line_was_logged_for_are_counted_too(made, capsys, settings):
    made(script=lambda text, i: "wrong", max_steps=3, dynamic_sampling_max_gen_batches=1, **settings).train()
    assert "step 3 of 3" in (said := capsys.readouterr().out)
    assert "No step changed the weights, because no group was accepted (dropped: all_wrong 12)." in said


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (359_999, "99:59:59"), (360_000, "4d 04h")]
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert terminal.format_duration(seconds) == text


def timed(name="eval"):
    """Return the entries that transformers adds to the log of an evaluation of this name."""
    return {f"{name}_runtime": 1.0, f"{name}_samples_per_second": 8.0, f"{name}_steps_per_second": 2.0}


def test_an_evaluation_is_one_line_with_its_scores_or_its_reward():
    scores = {"eval_aime_avg@4": 0.416, "eval_aime_pass@4": 0.6, "eval_aime_avg@4/geometry": 0.1}
    entry = {"step": 10, **timed("eval_aime"), "eval_reward": 0.2, **scores}
    assert format_evaluation(entry) == "    10 eval aime: avg@4 41.6%, pass@4 60.0%"
    assert format_evaluation({"step": 10, **timed(), "eval_reward": 0.2}) == "    10 eval: reward 0.200"
    assert format_evaluation({"step": 10, **timed("train")}) is None
    assert format_evaluation({"step": 10, "loss": 0.0}) is None


def test_times_of_a_reward_function_or_a_callback_are_not_an_evaluation():
    judged = {"judge_runtime": 3.0, "judge_samples_per_second": 1.0}
    assert format_evaluation({"step": 10, "loss": 0.0, **judged}) is None
    assert format_evaluation({"step": 10, **timed("train"), **judged}) is None
    assert format_evaluation({"step": 10, "judge_runtime": 3.0}) is None
    # In an evaluation the figures of the reward function have `eval_` in front, and may come first.
    entry = {"step": 10, "eval_judge_runtime": 3.0, **timed(), "eval_reward": 0.2}
    assert format_evaluation(entry) == "    10 eval: reward 0.200"


def test_a_reward_function_that_times_itself_changes_no_line_of_a_run(made, capsys):
    def judge(completions, log_metric, **kwargs):
        log_metric("judge_runtime", 3.0)
        return right(completions=completions, **kwargs)

    made(judge, max_steps=2, logging_steps=2).train()
    assert "judge:" not in (said := capsys.readouterr().out)
    assert [line.split()[0] for line in said.splitlines() if line[:6].strip().isdigit()] == ["2"]
    assert "Judge:" not in said


def test_empty_steps_are_counted_over_the_steps_of_each_entry():
    history = [
        {"step": 5, "loss": 0.0, "frac_empty_steps": 0.4},  # 2 of 5
        {"step": 5, "eval_reward": 1.0},
        {"step": 8, "loss": 0.0, "frac_empty_steps": 1 / 3},  # 1 of 3
        {"step": 9, "loss": 0.0},
    ]
    assert terminal.count_empty_steps(history) == 3


def summed_up(history, totals=None, step=None, seconds=1, max_steps=None, output_dir="out", **settings) -> list[str]:
    """The summary of a run of as many steps as it has entries."""
    step = step or len(history)
    settings |= {"max_steps": max_steps or step, "seconds": seconds, "output_dir": output_dir}
    return terminal.summarize(history, totals, step=step, **settings)


def test_a_summary_has_steps_groups_tokens_rewards_and_evaluations():
    history = [
        {"step": 0, **timed(), "eval_avg@4": 0.416, "eval_pass@4": 0.7},
        {"step": 2, "loss": 0.1, "frac_empty_steps": 0.5, "reward": 0.5, "rewards/right/mean": 0.25},
        {"step": 2, **timed(), "eval_avg@4": 0.5, "eval_pass@4": 0.7},
        {"step": 4, "loss": 0.1, "frac_empty_steps": 0.0, "reward": 0.5, "rewards/right/mean": 0.75},
        {"step": 4, **timed(), "eval_avg@4": 0.646, "eval_pass@4": 0.8},
    ]
    first, second = {"sampling": 2.0, "rewards": 1.0}, {"sampling": 4.0, "update": 2.0, "other": 1.0}
    history[1] |= {f"timeline/{name}_seconds": value for name, value in first.items()}
    history[3] |= {f"timeline/{name}_seconds": value for name, value in second.items()}
    history[1]["dynamic_sampling/acceptance_rate"], history[3]["dynamic_sampling/acceptance_rate"] = 0.654, 0.381
    totals = Totals(1234, 800, 56789)
    rest = {"timeline/update_seconds": 3.0, "timeline/other_seconds": 7.0}  # since the last rollout
    assert summed_up(history, totals, step=4, max_steps=9, seconds=83, rest=rest) == [
        "Ended:     step 4 of 9, after 0:01:23. 1 of them did not change the weights.",
        "Groups:    800 trained of 1,234 sampled; accepted 65.4% -> 38.1% (mean of steps 1-2 -> mean of steps 3-4).",
        "Tokens:    56,789 generated.",
        "Time:      30% sampling, 5% rewards, 25% updates, 40% evaluations and checkpoints.",
        "Rewards:   right 0.250 -> 0.750 (mean of steps 1-2 -> mean of steps 3-4).",
        "Eval:      avg@4 41.6% -> 64.6%, pass@4 70.0% -> 80.0% (steps 0 -> 4).",
        "Next:      trl-dapo report out (each step: log_history.jsonl)",
    ]


def test_a_summary_compares_tenths_of_a_run_and_not_single_steps():
    rewards = [0.2, 0.4, *[0.9] * 16, 0.6, 0.3]
    history = [
        {"step": step, "loss": 0.1, "rewards/right/mean": value, "dynamic_sampling/acceptance_rate": value}
        for step, value in enumerate(rewards, start=1)
    ]
    history[1]["rewards/seldom/mean"], history[18]["rewards/seldom/mean"] = 1.0, 2.0
    lines = summed_up(history, Totals(9, 8, 7))
    steps = "(mean of steps 1-2 -> mean of steps 19-20)."
    assert f"Groups:    8 trained of 9 sampled; accepted 30.0% -> 45.0% {steps}" in lines
    assert f"Rewards:   right 0.300 -> 0.450, seldom 1.000 -> 2.000 {steps}" in lines


def test_a_summary_compares_steps_that_rollouts_were_sampled_for():
    """With `num_iterations=2` every other step knows of no reward, the last one too, which is on the same rollout."""
    rollouts = [{"reward": value, "rewards/right/mean": value} for value in (0.25, 0.5, 0.75)]
    history = [entry | {"loss": 0.1} for rollout in rollouts for entry in (rollout, {})]
    history = [entry | {"step": step} for step, entry in enumerate(history, start=1)]
    assert "Rewards:   right 0.250 -> 0.750 (step 1 -> mean of steps 4-6)." in summed_up(history)


def test_a_summary_compares_the_cost_and_the_informative_groups_of_steps_with_grpo():
    sampled = {"acceptance_rate": 0.5, "groups_generated": 8, "completions_generated": 40}
    sampled |= {"groups_trained": 4, "completions_trained": 32, "shortfall": 1}
    # What is carried is all that trains in the second step.
    carried = {"groups_generated": 0, "completions_generated": 0, "groups_trained": 5, "completions_trained": 40}
    history = [
        {"step": step, "loss": 0.1} | {f"dynamic_sampling/{name}": value for name, value in each.items()}
        for step, each in enumerate((sampled, carried, sampled), start=1)
    ]
    lines = summed_up(history, Totals(16, 8, 640, num_skipped=4, skipped_accepted=0.0))
    # 80 completions where GRPO has 3 x 40; of its groups 8 of 20 would be informative, and here 13 of 15 train.
    times = "0.7 times as many per step as GRPOTrainer, for about 2.2 times as many informative groups"
    assert f"Tokens:    640 generated: {times}." in lines
    # If two of the four skipped prompts would have been accepted, 10 of 20 groups of GRPO would be informative.
    others = summed_up(history, Totals(16, 8, 640, num_skipped=4, skipped_accepted=2.0))
    assert f"Tokens:    640 generated: {times.replace('2.2', '1.7')}." in others
    assert not any(line.startswith("Advice:") for line in lines)


def of_rollouts(*accepted, num_sampled=8, **others):
    """Return log entries of rollouts with these numbers of accepted groups, logged after each rollout."""
    return [
        {"dynamic_sampling/groups_generated": num_sampled, "dynamic_sampling/dropped/all_wrong": num_sampled - number}
        | {"dynamic_sampling/acceptance_rate": number / num_sampled, "step": step, "loss": 0.1, "reward": 0.5}
        | others
        for step, number in enumerate(accepted, start=1)
    ]


def logged_every(entries, number):
    """Return the same log with `number` entries averaged in each, and the rest in the entry at the end of the run."""
    windows = [entries[i : i + number] for i in range(0, len(entries), number)]
    logged = []
    for window in windows:
        names = dict.fromkeys(name for each in window for name in each if name not in ("step", "loss"))
        values = {name: [each[name] for each in window if name in each] for name in names}
        values["timeline/update_seconds"] = [1.0] * len(window)
        add_num_rollouts(values)
        averaged = {name: sum(found) / len(found) for name, found in values.items()}
        is_whole = len(window) == number
        logged.append(
            averaged | {"step": window[-1]["step"]} | ({"loss": 0.1} if is_whole else {"train_runtime": 9.0})
        )
    return logged


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
def test_the_comparison_with_grpo_does_not_depend_on_logging_steps(number):
    """
    4, 4, 8 and 4 of 8, 16, 8 and 24 groups are accepted, which is 20 of 56. A user's rule drops some in two rollouts.
    With the 8 skipped prompts, 20 of 64 groups of GRPO would be informative, and here 20 of 20: 3.2 times as many.
    """
    entries = [
        each
        for accepted, sampled in ((4, 8), (4, 16), (8, 8), (4, 24))
        for each in of_rollouts(accepted, num_sampled=sampled, **trained_on(accepted, sampled))
    ]
    for step, entry in enumerate(entries, start=1):
        entry["step"] = step
    entries[1] |= {"dynamic_sampling/dropped/late": 2.0, "dynamic_sampling/dropped/all_wrong": 10}
    lines = summed_up(logged_every(entries, number), Totals(56, 20, 640, num_skipped=8), step=4)
    times = "2.8 times as many per step as GRPOTrainer, for about 3.2 times as many informative groups"  # 56 / 20
    assert f"Tokens:    640 generated: {times}." in lines
    assert "Time:      0% sampling, 0% rewards, 100% updates, 0% evaluations and checkpoints." in lines


def trained_on(accepted, sampled):
    return {
        "dynamic_sampling/groups_trained": accepted,
        "dynamic_sampling/shortfall": 0,
        "dynamic_sampling/completions_generated": 4 * sampled,
        "dynamic_sampling/completions_trained": 4 * accepted,
    }


def test_a_summary_names_the_steps_of_its_means_and_covers_all_steps():
    """Rollouts of 6, 2, 8 and 2, and then 8 and 0 of 8 groups accepted: 18 of 32 in steps 1 to 4, then 8 of 16."""
    entries = of_rollouts(6, 2, 8, 2, 8, 0)
    said = [line for line in summed_up(logged_every(entries, 4), Totals(48, 26, 7), step=6) if line[:3] == "Gro"]
    steps = "mean of steps 1-4 -> mean of steps 5-6"
    assert said == [f"Groups:    26 trained of 48 sampled; accepted 56.2% -> 50.0% ({steps})."]
    said = [line for line in summed_up(logged_every(entries, 6), Totals(48, 26, 7), step=6) if line[:3] == "Gro"]
    assert said == ["Groups:    26 trained of 48 sampled; accepted 54.2% (mean of steps 1-6)."]
    # If the ledger has every rollout, the first is compared with the last, whatever was logged.
    rollouts = [{name: value for name, value in entry.items() if name != "loss"} for entry in entries]
    for number in (1, 4, 6):
        lines = summed_up(logged_every(entries, number), Totals(48, 26, 7), step=6, rollouts=rollouts)
        assert "Groups:    26 trained of 48 sampled; accepted 75.0% -> 0.0% (step 1 -> step 6)." in lines


def test_a_row_weighs_windows_by_their_rollouts():
    """Three rollouts with 6 of 24 groups accepted, and one with 8 of 8: 14 of 32."""
    first, last = logged_every(of_rollouts(2, 2, 2), 3) + logged_every(of_rollouts(8, reward=1.0), 1)
    assert format_row([first, last], 4, None).split()[1:4:2] == ["0.625", "43.8%"]  # 3 x 0.5 and 1.0 over 4


@pytest.mark.parametrize("logging_steps", [1, 2, 3, 4])
def test_a_run_is_summed_up_alike_however_often_it_logs(made, capsys, logging_steps):
    """
    Prompts 0, 3, 6, ... of 16 are never solved. One of 4 completions of the others is correct. Four groups are sampled
    at a time until four are accepted: 5 of 8 at first, one of which is carried, then 3 of 4, 4 of 8 and 6 of 8. So 18
    of 28 groups of GRPO would be informative, and 28 groups are sampled for 16.
    """
    made(script=mixed_unless_multiple_of_3, max_steps=4, logging_steps=logging_steps, shuffle_dataset=False).train()
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("Groups:", "Tokens:", "Reward"))
    ]
    assert lines == [
        "Groups:    16 trained of 28 sampled; accepted 62.5% -> 75.0% (step 1 -> step 4).",
        "Tokens:    672 generated: 1.8 times as many per step as GRPOTrainer, for about 1.6 times as many informative "
        "groups.",
        "Rewards:   right 0.156 -> 0.188 (step 1 -> step 4).",  # 5 of 32, and 6 of 32
    ]


@pytest.mark.parametrize("logging_steps", [1, 3, 10])
def test_an_evaluation_after_the_last_step_does_not_change_the_summary(made, capsys, logging_steps):
    """TRL logs by the mode of the model, and an evaluation leaves it in that of evaluation, as the run ends."""
    evaluated = {"eval_dataset": prompts(4), "eval_strategy": "steps", "eval_steps": 1}
    settings = {"max_steps": 4, "logging_steps": logging_steps, "shuffle_dataset": False, **evaluated}
    trainer = made(script=mixed_unless_multiple_of_3, **settings)
    trainer.train()
    said = "Tokens:    672 generated: 1.8 times as many per step as GRPOTrainer, for about 1.6 times as many"
    assert said in capsys.readouterr().out  # as without evaluations
    trained = [log for log in trainer.state.log_history if "loss" in log or "train_runtime" in log]
    assert total(trained, "dynamic_sampling/groups_generated") == 28


@pytest.mark.parametrize("logging_steps", [2, 10])
def test_empty_steps_are_counted_that_an_evaluation_follows(made, capsys, logging_steps):
    evaluated = {"eval_dataset": prompts(4), "eval_strategy": "steps", "eval_steps": 1}
    settings = {"max_steps": 3, "logging_steps": logging_steps, "dynamic_sampling_max_gen_batches": 1, **evaluated}
    made(script=lambda text, i: "wrong", **settings).train()
    assert "No step changed the weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_short", "said"),
    [
        (0, []),
        (1, ["Not full:  1 batch had fewer accepted groups than the 16 of a full batch."]),
        (1200, ["Not full:  1,200 batches had fewer accepted groups than the 16 of a full batch."]),
    ],
)
def test_a_summary_says_how_many_batches_were_not_full(num_short, said):
    lines = summed_up([], Totals(9, 8, 7, short_rollouts=num_short), num_prompts=16)
    assert [line for line in lines if line.startswith("Not full:")] == said


def test_copies_of_a_group_do_not_count_as_trained_groups():
    """4 of 12 sampled groups are accepted. Each is in a batch of 16 four times."""
    lines = summed_up([], Totals(12, 16, 7), num_different=4, fills_batches=False)
    assert lines[1] == "Groups:    4 trained of 12 sampled (with copies 16 in the batches)."


@pytest.mark.parametrize("why", ["`max_steps=3` is reached", "a callback stopped it"])
def test_a_summary_says_why_the_run_ended(why):
    lines = summed_up([], step=3, seconds=60, why=why)
    assert lines[0] == f"Ended:     step 3 of 3, after 0:01:00, because {why}. Every step changed the weights."


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"learning_rate": 0.0}, "because `learning_rate` is 0."),
        (
            {"use_dynamic_sampling": False, "script": lambda text, i: "wrong"},
            "because in every group all rewards were equal, so that all advantages were 0.",
        ),
        (
            {
                "use_dynamic_sampling": False,
                "mask_truncated_completions": True,
                "script": lambda text, i: "right..." if i % 2 else "wrong...",
            },
            "because every completion was cut off, and completions that are cut off are left out of the loss.",
        ),
    ],
    ids=["learning rate", "rewards", "cut off"],
)
def test_a_summary_says_why_no_step_changed_the_weights(made, capsys, settings, why):
    trainer = made(max_steps=2, **settings)
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.train()
    assert all(torch.equal(weight, one) for weight, one in zip(trainer.model.parameters(), before, strict=True))
    assert f"No step changed the weights, {why}" in " ".join(capsys.readouterr().out.split())


def test_a_summary_lists_the_drop_reasons_of_a_run_that_accepted_nothing_the_most_frequent_first():
    entries = of_rollouts(0, 0, **{"frac_empty_steps": 1.0, "dynamic_sampling/dropped/all_correct": 2})
    for entry in entries:
        entry["dynamic_sampling/dropped/all_wrong"] = 6
    ended = summed_up(entries, Totals(16, 0, 640))[0]
    assert ended.endswith(
        "No step changed the weights, because no group was accepted (dropped: all_wrong 12, all_correct 4)."
    )


@pytest.mark.parametrize("use_dynamic_sampling", [True, False])
def test_a_summary_names_the_reward_functions_that_never_scored(made, capsys, use_dynamic_sampling):
    def judge(completions, **kwargs):
        return [None] * len(completions)

    made([right, judge], dynamic_sampling_rewards=["right"], use_dynamic_sampling=use_dynamic_sampling).train()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Rewards:"))
    assert line == "Rewards:   right 0.500 (step 1); never scored: judge."


@pytest.mark.parametrize(
    ("num_empty", "num_without_rate", "resumed_at", "said"),
    [
        (0, 1, 0, "1 of them did not change the weights, because its learning rate was 0"),
        (0, 2, 0, "2 of them did not change the weights, because their learning rate was 0"),
        (2, 1, 0, "3 of them did not change the weights (1 because its learning rate was 0)"),
        (0, 4, 0, "No step changed the weights, because the learning rate was 0"),
        (1, 0, 0, "1 of them did not change the weights"),
        (0, 0, 0, "Every step changed the weights"),
        (0, 1, 3, "No step since step 3 changed the weights, because the learning rate was 0"),
        (0, 1, 2, "1 of the 2 steps since step 2 did not change the weights, because its learning rate was 0"),
        (1, 0, 2, "Every step since step 2 changed the weights"),  # the first of the four did not
        (3, 0, 2, "1 of the 2 steps since step 2 did not change the weights"),
    ],
)
def test_a_summary_counts_the_steps_without_a_learning_rate(num_empty, num_without_rate, resumed_at, said):
    history = [{"step": i, "loss": 0.1, "frac_empty_steps": float(i <= num_empty)} for i in range(1, 5)]
    lines = summed_up(history, num_without_rate=num_without_rate, resumed_at=resumed_at)
    (ended,) = (line for line in lines if line.startswith("Ended:"))
    assert ended.endswith(f". {said}.")


@pytest.mark.parametrize(("settings", "number"), [({"warmup_steps": 2}, 1), ({}, 0)])
def test_the_first_step_of_a_warm_up_does_not_change_the_weights(made, capsys, settings, number):
    made(max_steps=3, **settings).train()
    said = "1 of them did not change the weights, because its learning rate was 0."
    assert (said in " ".join(capsys.readouterr().out.split())) == bool(number)


def test_a_finished_run_that_is_resumed_for_longer_says_that_its_next_step_has_no_learning_rate(made, capsys):
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    made(max_steps=2, **settings).train()
    capsys.readouterr()
    longer = made(max_steps=4, **settings)
    longer.train(resume_from_checkpoint=True)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Resumed at step 2 of 4. The learning rate of the next step is 0, as in the checkpoint, whose schedule had "
        "ended. So this step does not change the weights. Later steps follow the schedule of the new `max_steps`."
    ) in said
    assert "1 of the 2 steps since step 2 did not change the weights, because its learning rate was 0." in said


def test_a_summary_names_the_rewards_of_a_run_that_was_resumed_with_another_function():
    history = [
        {"step": 1, "loss": 0.1, "rewards/first/mean": 0.5},
        {"step": 2, "loss": 0.1, "rewards/second/mean": 0.25},
    ]
    lines = summed_up(history, reward_names=["second"])
    assert [line for line in lines if line.startswith("Rewards:")] == ["Rewards:   second 0.250 (step 2)."]


def test_a_summary_whose_counts_began_at_a_resume_compares_no_earlier_steps_with_grpo():
    # Before step 2 all four groups of a step were accepted and two of them trained, as often as with GRPOTrainer. From
    # then on half of eight groups were accepted, and four groups of four completions trained.
    def entry(step, accepted, dropped, trained):
        counts = {"accepted": accepted, "dropped/all_wrong": dropped, "groups_generated": accepted + dropped}
        counts |= {"groups_trained": trained, "shortfall": 0}
        counts |= {"completions_generated": 4 * (accepted + dropped), "completions_trained": 4 * trained}
        named = {f"dynamic_sampling/{name}": float(value) for name, value in counts.items()}
        return {
            "step": step,
            "loss": 0.1,
            "dynamic_sampling/acceptance_rate": accepted / (accepted + dropped),
            **named,
        }

    history = [entry(1, 4, 0, 4), entry(2, 4, 0, 4), entry(3, 4, 4, 4)]
    lines = summed_up(history, Totals(8, 4, 320, first_step=2), num_prompts=4)
    assert [line for line in lines if line.startswith(("Groups:", "Tokens:"))] == [
        "Groups:    4 trained of 8 sampled since step 2; accepted 100.0% -> 50.0% (step 1 -> step 3).",
        "Tokens:    320 generated: 2.0 times as many per step as GRPOTrainer, for about 2.0 times as many informative "
        "groups.",
    ]


@pytest.mark.parametrize(
    ("accepted", "trained", "advice"),
    # 8 of 16 groups of GRPO would be informative. Here 8 of 16 are trained on, then 4 of 16, and so on.
    [
        (0.5, 8, "batches were on average only 50% full, so a step trained on about 1.0 times as many informative gr"),
        (0.5, 4, "batches were on average only 25% full, so a step trained on about 0.5 times as many informative gr"),
        (0.5, 16, None),
        (1.0, 16, "nearly every sampled group was informative"),
    ],
)
def test_a_summary_gives_advice_if_steps_trained_on_no_more_than_grpos(accepted, trained, advice):
    sampled = {"acceptance_rate": accepted, "groups_generated": 16, "completions_generated": 128}
    sampled |= {"groups_trained": trained, "completions_trained": 8 * trained, "shortfall": 16 - trained}
    entry = {"step": 1, "loss": 0.1} | {f"dynamic_sampling/{name}": value for name, value in sampled.items()}
    said = [line for line in summed_up([entry], Totals(16, trained, 640)) if line.startswith("Advice:")]
    assert len(said) == (advice is not None)
    assert advice is None or advice in said[0]
    # With "mask" a batch is not meant to be full, and with "replace" copies fill it.
    others = summed_up([entry], Totals(16, trained, 640, short_rollouts=1), fills_batches=False)
    assert not any(line.startswith(("Advice:", "Not full:")) or "GRPOTrainer" in line for line in others)


@pytest.mark.parametrize(
    ("sampled", "num_prompts", "advice"),
    # 16 of 32 groups are accepted and trained on, and 8 of 16 groups of GRPO would be informative. Without the screen
    # a step costs 256 / 128 = 2 times as much as one of GRPO, so with 8 prompts it would cost the same, for 8
    # informative groups: no more than GRPO's. With the screen it may cost 192 / 128 = 1.5 times as much. Then
    # 16 / 1.5 = 10.7, and 2 / 1.5 = 1.3 times as many groups. With 240 completions they are 2 / 1.875 = 1.07 times as
    # many, which is too few.
    [
        (192, 16, "with 11 prompts per rollout instead of 16, a step would have cost about as much as one of"),
        (192, 16, "for about 1.3 times as many informative groups."),
        (192, 3, "with 2 prompts per rollout instead of 3"),
        (192, 2, None),  # 1.3 prompts
        (256, 16, None),
        (240, 16, None),
        (128, 16, None),
        (256, 1, None),
        (256, None, None),
    ],
)
def test_a_summary_advises_a_number_of_prompts_with_the_cost_of_grpo(sampled, num_prompts, advice):
    metrics = {"acceptance_rate": 0.5, "groups_generated": 32, "completions_generated": sampled, "shortfall": 0}
    metrics |= {"groups_trained": 16, "completions_trained": 128}
    entry = {"step": 1, "loss": 0.1} | {f"dynamic_sampling/{name}": value for name, value in metrics.items()}
    lines = summed_up([entry], Totals(32, 16, 640), num_prompts=num_prompts)
    said = [line for line in lines if line.startswith("Advice:")]
    assert len(said) == (advice is not None)
    assert advice is None or advice in said[0]


def test_if_the_steps_before_a_resume_are_not_known_the_means_begin_after_it():
    """The damaged record of steps 1 to 3 was set aside, so the figure of step 4 is not that of steps 1 to 4."""
    entry = {"step": 4, "reward": 0.5}
    assert terminal._ends([entry], 4, resumed_at=3)[2] == "step 4"
    assert terminal._ends([entry], 4, resumed_at=0)[2] == "mean of steps 1-4"
    assert terminal._ends([{"step": 2}, {"step": 4}], 4, resumed_at=3)[2] == "mean of steps 1-2 -> mean of steps 3-4"


def test_a_summary_of_one_step_has_no_comparison_and_a_resumed_run_counts_its_own_seconds():
    lines = summed_up([], step=60, seconds=860, resumed_at=30)
    ended = "Ended:     step 60 of 60, after 0:14:20 from step 30. Every step since step 30 changed the weights."
    assert lines[0] == ended
    lines = summed_up([{"step": 1, "loss": 0.1, "rewards/right/mean": 0.5}], Totals(9, 8, 7))
    assert lines[1:3] == ["Groups:    8 trained of 9 sampled.", "Tokens:    7 generated."]
    assert "Rewards:   right 0.500 (step 1)." in lines


def test_the_start_says_how_epochs_are_counted_if_dropped_groups_are_replaced(tmp_path):
    line = terminal.describe_passes(tiny_config(tmp_path, max_steps=-1, num_train_epochs=2), 1500)
    assert line.startswith("`num_train_epochs=2` means 1,500 optimizer steps.")
    assert "may take more passes over the dataset" in line
    assert "Set `max_steps` or `max_tokens_generated`" in line
    for settings in ({"max_steps": 7}, {"use_dynamic_sampling": False}, {"dynamic_sampling_mode": "mask"}):
        assert terminal.describe_passes(tiny_config(tmp_path, **{"max_steps": -1, **settings}), 7) is None


@pytest.mark.parametrize(("disable_tqdm", "removed"), [(True, PrinterCallback), (False, ProgressCallback)])
def test_a_script_that_removes_transformers_callback_silences_the_table(made, disable_tqdm, removed):
    trainer = made(disable_tqdm=disable_tqdm)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(TerminalCallback) == 1
    assert not {PrinterCallback, ProgressCallback} & set(kinds)
    trainer.remove_callback(removed)
    assert TerminalCallback not in [type(callback) for callback in trainer.callback_handler.callbacks]


def test_the_last_update_and_what_follows_it_are_in_the_summarys_time(made, capsys, monkeypatch):
    """The only rollout is sampled 2 s after the start of the first block, and the run ends 6 s later."""
    trainer = made()
    intervals = iter([{"engine": 2.0, "total": 2.0}, {"checkpoint": 2.0, "total": 6.0}])
    monkeypatch.setattr(trainer.stopwatch, "flush_seconds", lambda: next(intervals))
    trainer.train()
    said = " ".join(capsys.readouterr().out.split())
    assert "Time: 25% sampling, 0% rewards, 50% updates, 25% evaluations and checkpoints." in said


def test_lines_over_several_steps_are_written_to_the_given_file(made):
    trainer, file = made(max_steps=5), io.StringIO()
    (printer,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, TerminalCallback))
    printer.every, printer.file = 2, file
    trainer.train()
    rows = [line.split() for line in file.getvalue().splitlines()[1:4]]
    assert [row[0] for row in rows] == ["2", "4", "5"]
    assert [row[1] for row in rows] == ["0.500"] * 3  # one completion in two is correct
    assert rows[2][9] == "0:00:00"


def test_trackers_do_not_receive_metrics_without_a_value(made):
    def unsure(completions, **kwargs):
        return [None] * len(completions)

    trainer = made(unsure, dynamic_sampling_max_gen_batches=1, dynamic_sampling_screen="off")
    trainer.train()
    (entry, _) = trainer.state.log_history
    assert [name for name, value in entry.items() if value is None] == []
    assert "reward" not in entry
    assert entry["dynamic_sampling/dropped/unscored"] == 4


def test_on_a_terminal_of_80_columns_each_step_is_one_line_of_the_table(tiny_model, tmp_path):
    status, written = run_in_terminal(JOBS, "printed", tiny_model, tmp_path, "{}", timeout=200)
    assert status == 0, written
    lines = lines_of(written)
    rows = [line for line in lines[lines.index(HEADER) + 1 :] if line[:6].strip().isdigit()]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert all(len(row) == 79 for row in rows)
    ended = next(i for i, line in enumerate(lines) if line.startswith("Ended:"))
    assert lines[ended].startswith("Ended:     step 2 of 2, after 0:00:")
    assert lines[ended + 2].startswith("Groups:    8 trained of ")  # the line before is broken
    # Lines are broken between words.
    text = " ".join(line.strip() for line in lines)
    assert "A completion is correct if 'right' is above 0. If this reward takes more than two values," in text


def test_in_a_pipe_there_are_lines_and_no_control_character(tiny_model, tmp_path):
    command = [sys.executable, str(JOBS), "printed", tiny_model, str(tmp_path), "{}"]
    result = subprocess.run(command, timeout=200, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    assert [character for character in result.stdout if not character.isprintable() and character != "\n"] == []
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[lines.index(HEADER) + 1 :][:2]] == ["1", "2"]
    assert not any("it/s" in line or "FutureWarning" in line for line in lines)


SAVED = {"save_strategy": "steps", "save_steps": 1}


def test_a_resumed_run_names_its_step_and_has_no_summary_if_no_step_is_left(made, capsys):
    made(**SAVED).train()
    made(max_steps=3, **SAVED).train(resume_from_checkpoint=True)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Resumed at step 1 of 3. The learning rate of the next step is 0") for line in lines)
    # The summary is that of the whole run: 4 groups per step, all of which are trained on.
    said = "Groups:    12 trained of 12 sampled; accepted 100.0% -> 100.0% (step 1 -> step 3)"
    assert any(line.startswith(said) for line in lines)
    made(max_steps=3, **SAVED).train(resume_from_checkpoint=True)
    lines = capsys.readouterr().out.splitlines()
    said = "Resumed at step 3 of 3. No step is left. Raise `max_steps`."
    assert [line for line in lines[lines.index(said) + 1 :] if not line.startswith("Next: ")] == []


def test_groups_that_never_reached_the_loss_do_not_count_as_trained(made, capsys):
    """A rollout of 16 groups of 2 trains in two steps, to which its rows come at random, and the run makes one."""
    settings = {"num_generations": 2, "steps_per_generation": 8, **SAVED}
    trainer = made(**settings)
    trained = set()

    def spy(model, inputs, compute_loss=trainer._compute_loss):
        trained.update(map(tuple, inputs["prompt_ids"].tolist()))
        return compute_loss(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    assert 8 <= len(trained) < 16
    num_left = 16 - len(trained)
    said = f"Groups:    {len(trained)} trained of 16 sampled, {num_left} not trained because the run ended; accepted"
    assert said in capsys.readouterr().out
    # These groups are trained on when the run is resumed.
    made(max_steps=2, **settings).train(resume_from_checkpoint=True)
    assert "Groups:    16 trained of 16 sampled; accepted" in capsys.readouterr().out


def test_all_groups_count_as_trained_when_the_second_pass_over_a_rollout_begins(made, capsys):
    made(num_generations=2, steps_per_generation=8, num_iterations=2, max_steps=3).train()
    assert "Groups:    16 trained of 16 sampled; accepted" in capsys.readouterr().out


def train(folder: Path, *options: str) -> list[str]:
    """Words of `trl-dapo train` of a random model on sums, in a folder with a recipe of its own."""
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(16)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    smoke = str(Path(__file__).parents[2] / "recipes" / "smoke_cpu.yaml")
    words = ["train", "--config", smoke, "--dataset_name", "problems.jsonl", "--output_dir", "out", *options]
    return [*words, "--reward_funcs", "dapo_math"]  # of which a random model earns none


def test_ctrl_c_ends_a_run_with_one_line_that_says_what_to_resume(tmp_path):
    words, is_second_row = json.dumps(train(tmp_path, "--max_steps", "500")), re.compile(r"     2 +-?\d").search
    status, written = run_in_terminal(JOBS, "says", tmp_path, words, timeout=200, interrupt_at=is_second_row)
    assert status == 130, written
    assert "Traceback" not in written
    text = " ".join(line.strip() for line in lines_of(written))
    said = "trl-dapo train: stopped. The same command with `--resume_from_checkpoint true` continues from out/checkpoi"
    assert said in text
    assert "%|" not in text.partition(said)[2]  # no bar is drawn behind it


def test_a_launch_of_two_processes_ends_with_their_status_and_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    options = ["--num_processes", "2", "--dynamic_sampling_stop_after", "1"]
    result = launch("says", tmp_path, json.dumps(train(tmp_path, *options)), num_processes=1)
    assert result.returncode == 3, result.stderr[-3000:]
    assert "= 2 processes x 4 rows x 2 micro-batches" in result.stdout
    assert "Training stops: no group was accepted in the last rollout" in result.stderr
    assert "Saved to" not in result.stdout
    assert "Traceback" not in result.stderr


def test_the_next_command_can_be_copied_if_the_folder_has_a_space_in_its_name():
    *_, last = summed_up([{"step": 1, "loss": 0.0}], output_dir="two rewards")
    assert last == "Next:      trl-dapo report 'two rewards' (each step: log_history.jsonl)"
