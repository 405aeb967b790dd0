# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Two rollouts ahead, with a scripted engine that serves LoRA adapters. Groups arrive one by one, in any order."""

import math
import threading
from collections import Counter

import pytest
import torch
from helpers import errors_of_old_logps, number, prompts, right, untimed, weights
from peft import PeftModel
from scripted_server import StandIn, ahead_config, stand_ins, with_adapter
from test_ahead import OnStep, after_training, logged
from transformers import TrainerCallback

from trl_dapo import DAPOTrainer
from trl_dapo.engines import call
from trl_dapo.engines.call import Calls
from trl_dapo.engines.server import ServerFault


@pytest.fixture
def make(tiny_model, tmp_path):
    """
    Return a function that creates a trainer of an adapter, with a stand-in for vLLM's server, which is its `client`.
    """
    with stand_ins(tiny_model) as clients:

        def make(folder="run", num_prompts=200, **overrides):
            settings = {"rollouts_ahead": 2, "batch_multiplier": None, "learning_rate": 3e-2, **overrides}
            args = ahead_config(tmp_path / folder, vllm_server_base_url="http://gpu-7:8000", **settings)
            data = prompts(num_prompts, id=range(num_prompts))
            trainer = DAPOTrainer(with_adapter(tiny_model), right, args, train_dataset=data)
            trainer.client = clients[-1]
            trainer.trained = trained_prompts(trainer)
            return trainer

        yield make


def trained_prompts(trainer):
    """Return the numbers of the prompts whose groups train, for each rollout."""
    trained, build = [], trainer._build_training_batch

    def spy(sampler, batch):
        trained.append([number(group.rows[0].prompt) for group in batch.train])
        return build(sampler, batch)

    trainer._build_training_batch = spy
    return trained


def in_one(rollouts):
    return [prompt for rollout in rollouts for prompt in rollout]


def solved(num):
    """Return the first `num` prompts that can be solved: all except 0, 3, 6, ..."""
    return [i for i in range(2 * num) if i % 3][:num]


def hold(trainer, *numbers):
    """Hold back the answers for these prompts until the returned event is set."""
    event = threading.Event()
    trainer.client.hold |= dict.fromkeys(numbers, event)
    return event


def wait_for_the_others(trainer, num_held=1):
    """Return once all requests except this number have ended."""
    while len(trainer._ahead._calls._threads) > num_held:
        threading.Event().wait(0.001)


# ---- Which policy sampled a row, and in which order groups train ----


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling_memory": True}, {"steps_per_generation": 8}], ids=str)
def test_every_rows_old_log_probabilities_are_those_of_the_adapter_that_sampled_it(make, tiny_model, settings):
    trainer, takes_two_steps = make(max_steps=8, **settings), "steps_per_generation" in settings
    errors = {} if takes_two_steps else errors_of_old_logps(trainer, tiny_model)
    trainer.train()
    assert all(error < 1e-4 for found in errors.values() for error in found)
    assert takes_two_steps or {age for step, age in errors if 2 <= step < 5} == {1, 2}
    num_rollouts, target = (4, 8) if takes_two_steps else (8, 4)
    assert in_one(trainer.trained) == solved(num_rollouts * target)  # all solved prompts, in the order of the requests
    by_age = [logged(trainer, f"rollouts_ahead/groups_by_staleness/{age}") for age in range(3)]
    # no group is staler than two rollouts
    assert [sum(ages) for ages in zip(*by_age, strict=True)] == [target] * num_rollouts


def test_groups_train_in_the_order_in_which_they_were_asked_for_whichever_answer_comes_first(make):
    """Prompt 10 belongs to the second rollout, which has received four groups before. Its answer is the last of 21."""
    early, late = after_training(make("early", max_steps=4)), make("late", max_steps=4)
    held, submit, came_first = hold(late, 10), late._ahead.submit, []

    def submit_and_let_all_others_come_first(requests):
        submit(requests)
        if not held.is_set():
            wait_for_the_others(late)
            came_first[:] = [number(request.group.example["prompt"]) for request in requests]
            if len(late.trained) == 1 and late._sampler.rollout.accepted:
                held.set()

    late._ahead.submit = submit_and_let_all_others_come_first
    late.train()
    assert came_first == list(range(10, 21))
    assert late.trained == early.trained
    assert in_one(late.trained) == solved(16)
    assert torch.equal(weights(late), weights(early))


def test_more_is_asked_for_at_a_rollouts_start_than_it_takes_and_nothing_behind_the_last(make):
    trainer = after_training(make(max_steps=4))
    # One group in three is dropped: twelve prompts give the eight groups of two rollouts, and nine groups are never
    # too many.
    assert logged(trainer, "rollouts_ahead/in_flight") == [9.0, 9.0, 3.0, 0.0]
    assert logged(trainer, "rollouts_ahead/discarded") == [0.0] * 4
    assert logged(trainer, "dynamic_sampling/rounds")[:3] == [2.0, 1.0, 1.0]


def test_a_group_that_is_not_due_is_not_waited_for_and_the_server_has_its_adapter_until_it_comes(make):
    """
    Prompt 14 is requested with the first rollout and trains in the third. A run that waited before would never end.
    """
    trainer, under_way, served = make(max_steps=5), [], []
    held = hold(trainer, 14)

    def look(step):
        under_way.append(trainer.client.in_flight > 0)
        wait_for_the_others(trainer, 0 if held.is_set() else 1)
        served.append([int(name.rpartition("v")[2]) for name in trainer.client.adapters])
        if step == 2:
            held.set()

    trainer.add_callback(OnStep(look))
    trainer.train()
    assert under_way[:2] == [True, True]
    assert in_one(trainer.trained) == solved(20)
    # The first adapter exists since the trainer was created. The second samples prompt 14, which is held until two
    # steps are made.
    assert served == [[2], [2, 3], [4], [5], [6]]


# ---- First completions ----


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling_memory": True, "num_prompts": 24}], ids=str)
def test_parts_of_groups_that_are_screened_come_within_a_rollout_each(make, tiny_model, settings):
    trainer = make(max_steps=6, dynamic_sampling_screen="2", **settings)
    errors = errors_of_old_logps(trainer, tiny_model)
    trainer.train()
    assert max(error for found in errors.values() for error in found) < 1e-4
    assert max(age for _, age in errors) == 2
    assert logged(trainer, "dynamic_sampling/groups_trained") == [4.0] * 6
    asked = Counter(trainer.client.asked)
    if not settings:
        assert {asked[i] for i in asked if i % 3 == 0} == {1}
        assert max(asked.values()) == 2
        assert len({*in_one(trainer.trained)}) == 24  # no group twice


# ---- Checkpoints ----


SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}


class OnSave(TrainerCallback):
    """Interrupts a run once it has saved a step."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "settings", [{}, {"dynamic_sampling_memory": True, "dynamic_sampling_screen": "2"}], ids=["whole", "screened"]
)
def test_a_run_whose_answers_are_in_its_checkpoint_goes_on_bit_by_bit(make, tmp_path, settings):
    straight = make("straight", **SAVES, **settings)
    straight.add_callback(OnStep(lambda step: wait_for_the_others(straight, 0)))
    straight.train()
    resumed = make("resumed", **SAVES, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-2"))
    assert torch.equal(weights(resumed), weights(straight))
    assert untimed(resumed.state.log_history) == untimed(straight.state.log_history)
    assert resumed.trained == straight.trained[2:]


def test_a_checkpoint_does_not_wait_and_what_it_lacks_is_asked_again(make, tiny_model, tmp_path):
    first = make("first", **SAVES)
    held = hold(first, 13, 16)
    first.add_callback(OnStep(lambda step: wait_for_the_others(first, step)))
    first.add_callback(OnSave(2))
    first._ahead._close = held.set
    with pytest.raises(KeyboardInterrupt):
        first.train()  # a checkpoint was written although two answers had not arrived
    state = torch.load(tmp_path / "first/checkpoint-2/dapo_state_rank0.pt", weights_only=True)
    in_flight = [group["number"] for group in state["queue"]["groups"] if group["request"] is not None]
    answered = {*state["ahead"]["answers"]}
    assert {*in_flight} - answered == {13, 16}
    resumed = make("resumed", **SAVES)
    earlier = PeftModel.from_pretrained(with_adapter(tiny_model).unload(), str(tmp_path / "first/checkpoint-1"))
    snapshots = {0: with_adapter(tiny_model).eval(), 1: earlier.eval()}
    errors = errors_of_old_logps(resumed, tiny_model, snapshots=snapshots)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first/checkpoint-2"))
    assert Counter(resumed.client.asked)[13] == Counter(resumed.client.asked)[16] == 1
    assert not {*resumed.client.asked} & answered
    # no group trains twice or is lost
    assert in_one(map(sorted, first.trained[:2] + resumed.trained)) == solved(20)
    assert max(error for found in errors.values() for error in found) < 1e-4
    assert logged(resumed, "rollouts_ahead/groups_by_staleness/0")[2] == 2.0  # prompts 13 and 16


def test_a_run_that_takes_turns_again_trains_first_on_what_the_checkpoint_holds(make, tmp_path):
    first = make("ahead", **SAVES)
    first.add_callback(OnStep(lambda step: wait_for_the_others(first, 0)))
    first.train()
    for num_rollouts in (0, 1):
        resumed = make(f"{num_rollouts} ahead", **{**SAVES, "rollouts_ahead": num_rollouts})
        resumed.train(resume_from_checkpoint=str(tmp_path / "ahead/checkpoint-2"))
        assert resumed.state.global_step == 5
        assert in_one(resumed.trained)[:6] == [13, 14, 16, 17, 19, 20]
        assert len({*in_one(resumed.trained)}) == 12


# ---- Faults ----


def answers_rubbish(trainer, num_times, to=10, says_nan=False):
    """The first answers for a prompt cannot be trained on. Return its requests."""
    generate, requests = trainer.client.generate, []

    def fail(prompts, **asked):
        if number(trainer.client.tokenizer.decode(prompts[0])) != to:
            return generate(prompts, **asked)
        requests.append(asked)
        if (is_rubbish := len(requests) <= num_times) and not says_nan:
            raise ServerFault("answered 3 completions where 4 were requested")
        answer = generate(prompts, **asked)
        if is_rubbish:
            answer["logprobs"][1][-1] = [math.nan]
        return answer

    trainer.client.generate = fail
    return requests


@pytest.mark.parametrize("says_nan", [False, True])
def test_what_cannot_be_trained_on_is_asked_for_once_more_by_the_same_adapter(make, says_nan):
    straight, trainer = after_training(make("straight", max_steps=3)), make("rubbish", max_steps=3)
    requests = answers_rubbish(trainer, 1, says_nan=says_nan)
    trainer.train()
    assert len(requests) == 2
    assert requests[0] == requests[1]
    assert torch.equal(weights(trainer), weights(straight))


def test_what_cannot_be_trained_on_twice_ends_the_run_with_checkpoint_and_server_named(make):
    trainer = make(max_steps=5, save_strategy="steps", save_steps=1)
    requests = answers_rubbish(trainer, 2)
    with pytest.raises(RuntimeError, match=r"gpu-7:8000 answered 3 completions where 4 .*resume from .*checkpoint-1"):
        trainer.train()
    assert len(requests) == 2


def test_a_request_that_ends_when_it_is_interrupted_is_interrupted_once(monkeypatch):
    monkeypatch.setattr(call, "PATIENCE", 60.0)
    monkeypatch.setattr(call, "GRACE", 600.0)
    calls, begun, over, interrupts = Calls(), threading.Event(), threading.Event(), []
    calls.add(lambda: begun.set() or over.wait(), then=bool)
    assert begun.wait(60)
    calls.cancel(lambda: interrupts.append(over.set()))
    assert len(interrupts) == 1


def test_ctrl_c_with_hundreds_of_requests_open_ends_them_all():
    calls, gate, order = Calls(max_calls=200), threading.Event(), []

    def request(i):
        order.append(i)
        gate.wait()
        raise ConnectionError("interrupted")

    before = {*threading.enumerate()}
    futures = [calls.add(lambda i=i: request(i), then=list) for i in range(500)]
    while len(order) < 200:
        threading.Event().wait(0.001)
    assert calls.flush_seconds() > 0
    calls.cancel(gate.set)
    assert sorted(order) == list(range(200))  # no more at the same time, and in the order in which they were added
    assert [future.cancelled() for future in futures] == [False] * 200 + [True] * 300
    assert all(isinstance(future.exception(), ConnectionError) for future in futures[:200])
    assert {*threading.enumerate()} == before


def test_calls_begin_in_the_order_in_which_they_were_added_and_one_that_fails_holds_none_up():
    calls, order = Calls(max_calls=1), []

    def request(i):
        order.append(i)
        if i == 3:
            raise ValueError("3")
        return i

    futures = [calls.add(lambda i=i: request(i), then=str) for i in range(6)]
    assert [future.result() for future in futures if future is not futures[3]] == ["0", "1", "2", "4", "5"]
    with pytest.raises(ValueError, match="3"):
        futures[3].result()
    assert order == list(range(6))


# ---- What is refused ----


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (str, {}, "the model has no adapter"),
        (with_adapter, {"vllm_lora_sync": "merge"}, "`vllm_lora_sync='merge'` is set"),
    ],
    ids=["full", "merged"],
)
def test_weights_that_are_pushed_are_refused_with_the_reason(tiny_model, tmp_path, kind, settings, why):
    args = ahead_config(tmp_path, rollouts_ahead=2, batch_multiplier=None, **settings)
    message = f"`rollouts_ahead=2` needs a LoRA adapter.*, because {why}. Change that.*, or set `rollouts_ahead=1`"
    with stand_ins(tiny_model), pytest.raises(ValueError, match=message):
        DAPOTrainer(kind(tiny_model), right, args, train_dataset=prompts(40))


def test_a_server_that_samples_with_fewer_adapters_at_a_time_is_refused(make, monkeypatch):
    monkeypatch.setattr(StandIn, "max_loras", 1)
    with pytest.raises(
        ValueError, match=r"three adapters at the same time.*`--max-loras 1`.*Start it with `--max-loras 3`"
    ):
        make()
    make("one", rollouts_ahead=1)
