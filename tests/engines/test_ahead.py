# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead, with a scripted engine: when completions are requested, with which weights, and what happens to
them.

The first rollout makes one request, for which the main thread waits. After that each group has a request of its own.
"""

import datetime
import threading
from collections import Counter

import pytest
import torch
from helpers import errors_of_old_logps, is_dummy, number, prompts, right, untimed, watch_training, weights
from scripted_server import StandIn, ahead_config, stand_ins
from transformers import TrainerCallback

from trl_dapo import DAPOConfig, DAPOTrainer
from trl_dapo.settings.rules import check_rules


@pytest.fixture
def make(tiny_model, tmp_path):
    """Return a function that creates a trainer with a stand-in for vLLM, which is its `client`."""
    with stand_ins(tiny_model) as clients:

        def make(folder="run", reward=right, num_prompts=200, eval_dataset=None, **overrides):
            args = ahead_config(tmp_path / folder, **overrides)
            dates = [datetime.date(2026, 1, 1 + i % 31) for i in range(num_prompts)]  # JSON cannot store it
            data = prompts(num_prompts, on=dates, id=range(num_prompts))
            trainer = DAPOTrainer(tiny_model, reward, args, train_dataset=data, eval_dataset=eval_dataset)
            if clients:
                trainer.client = clients[-1]
            return trainer

        yield make


class OnStep(TrainerCallback):
    """Calls a function at the end of every optimizer step."""

    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **kwargs):
        self.function(state.global_step)


SAVES = {"save_strategy": "steps", "save_steps": 2}


def resume(make, folder, step=2, change=None, **settings):
    """Continue from the checkpoint of another run, optionally with other settings, to the end."""
    resumed = make(f"from {folder.name} {step}", **settings)
    if change is not None:
        change(resumed)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == resumed.args.max_steps
    return resumed


@pytest.fixture
def saved(make, tmp_path):
    """Folder of a run whose checkpoint of its second step has a round in flight."""
    make("ahead", **SAVES).train()
    return tmp_path / "ahead"


def after_training(trainer):
    trainer.train()
    return trainer


def asked_for(trainer):
    """Return the prompts of the first request."""
    return [number(trainer.client.tokenizer.decode(ids)) for ids in trainer.client.requests[0]["prompts"]]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---- Which policy sampled a row ----


def test_every_rows_old_log_probabilities_are_those_of_the_weights_at_its_launch(make, tiny_model):
    trainer = make(batch_multiplier=1.75)
    errors, distance = errors_of_old_logps(trainer, tiny_model), []

    def look(inputs):
        mask = inputs["completion_mask"].bool() & (inputs["staleness"][:, None] > 0)
        distance.extend((inputs["importance_sampling_ratio"][mask] - 1).abs().tolist())

    watch_training(trainer, look)
    trainer.train()
    # 7 prompts per round, of which 4 or 5 are solved and 4 train. The first rollout samples its own round, the others
    # are sampled ahead. Surplus that was sampled ahead trains two rollouts after it was sampled.
    assert {age for step, age in errors if step == 0} == {0}
    assert {age for step, age in errors if step > 0} == {1, 2}
    assert max(error for found in errors.values() for error in found) < 1e-4
    assert distance
    assert max(distance) < 1e-4  # from the engine, when they were sampled, although the policy has changed since


def test_what_is_asked_for_ahead_is_what_would_have_been_asked_for(make):
    """The same prompts in the same order with the same parameters; only the weights are staler."""
    both = [after_training(make(f"{num} ahead", temperature=0.9, rollouts_ahead=num)) for num in (1, 0)]
    ahead, in_turns = (trainer.client.requests[0] for trainer in both)
    assert ahead == in_turns
    for trainer in both:
        asked = trainer.client.asked
        assert sorted(asked) == list(range(len(asked)))  # those of one round are sent at once
        assert {(request["n"], request["temperature"]) for request in trainer.client.requests} == {(4, 0.9)}


# ---- When completions are requested ----


def hold_back(trainer):
    """From now on, requests ahead are only answered once the stand-in's gate is opened."""
    submitted = trainer._ahead.submit

    def submit(requests):
        if {request.group.number for request in requests} - trainer._ahead._requested.keys():
            trainer.client.gate.clear()
            trainer.client.begun.clear()
            submitted(requests)
            assert trainer.client.begun.wait(30)

    trainer._ahead.submit = submit


def test_optimizer_steps_run_while_the_request_is_under_way(make):
    """The answer is held back until a step has been made. A run that waited for it before would never end."""
    trainer, under_way = make(), []

    def open_gate(step):
        under_way.append(trainer.client.in_flight > 0)
        trainer.client.gate.set()

    hold_back(trainer)
    trainer.add_callback(OnStep(open_gate))
    trainer.train()
    assert under_way == [True, True, True, False]  # nothing is requested after the last


def test_weights_are_pushed_once_a_rollout_and_only_while_nothing_is_under_way(make):
    scored_in = set()

    def reward(completions, **kwargs):
        scored_in.add(threading.current_thread())
        return right(completions)

    trainer = after_training(make(reward=reward, max_steps=5))  # the stand-in refuses a push during a request
    # Before the first round and before each round ahead except the first, for which the weights are there.
    assert trainer.client.kinds == ["push", "generate"] * 4
    assert trainer.client.threads == [True] + [False] * 4 * 6
    assert scored_in == {threading.main_thread()}


def test_a_round_beyond_the_first_is_of_todays_weights_and_pushes_them_once(make):
    trainer = after_training(make(batch_multiplier=1.0, max_steps=3))
    # Two of prompts 0 to 3 are solved, and three of 4 to 7, of which one is carried. With it, three of 8 to 11 are
    # enough. Two of 12 to 15 are solved: the third rollout samples one more round, with a push of its own.
    assert logged(trainer, "dynamic_sampling/rounds") == [2.0, 1.0, 2.0]
    assert trainer.client.kinds == ["push", "generate"] * 3
    # Two rounds of the first rollout, four groups ahead for each of the others, and the third's second round.
    assert trainer.client.threads == [True, True] + [False] * 8 + [True]


TWO_STEPS = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}  # per rollout


@pytest.mark.parametrize(
    ("settings", "num_ahead"), [({"max_steps": 1}, 0), ({**TWO_STEPS, "max_steps": 6}, 2)], ids=["one", "three"]
)
def test_the_last_rollout_asks_for_nothing(make, settings, num_ahead):
    assert after_training(make(**settings)).client.threads == [True] + [False] * num_ahead * 6


@pytest.mark.parametrize(("limit", "num_rollouts"), [(200, 2), (280, 3)])
def test_a_limit_counts_what_has_trained_and_asks_for_nothing_that_would_not(make, tmp_path, limit, num_rollouts):
    """Each rollout draws 6 of 12 prompts, which are answered with 136 tokens. Completions ahead do not count yet."""
    settings = {"num_prompts": 12, **SAVES, "save_steps": 1, "max_steps": 9, "dynamic_sampling_memory": False}
    settings["max_tokens_generated"] = limit
    trainer = after_training(make(**settings))
    assert trainer.state.global_step == num_rollouts
    assert logged(trainer, "dynamic_sampling/passes") == [0.5 * (i + 1) for i in range(num_rollouts)]
    assert len(trainer.client.requests) == 1 + 6 * (num_rollouts - 1)
    resumed = make("resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert resumed.state.global_step == num_rollouts
    assert torch.equal(weights(resumed), weights(trainer))


# ---- Evaluation, saving, the end ----


def test_an_evaluation_waits_for_the_round_and_is_of_todays_weights(make):
    trainer = make(eval_dataset=prompts(5), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    pushed = []

    def spy(metadata, named, push=trainer.client.update_named_params):
        pushed.append(trainer.state.global_step)
        push(metadata, named)

    def join(join=trainer._ahead.join):
        trainer.client.gate.set()  # not before: the round is in flight until the run waits for it
        join()

    trainer.client.update_named_params, trainer._ahead.join = spy, join
    hold_back(trainer)
    trainer.train()
    assert pushed == [0, 1, 2, 3, 4]  # before the first round, and once at every evaluation
    assert len(logged(trainer, "eval_reward")) == 4
    assert logged(trainer, "rollouts_ahead/groups_by_staleness/1") == [
        0.0,
        4.0,
        4.0,
        4.0,
    ]  # the round is still the one that trains


def test_an_evaluation_of_the_best_model_is_of_its_weights_and_not_of_the_last(make):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_of_step"}
    trainer = make(eval_dataset=prompts(5), per_device_eval_batch_size=4, max_steps=3, **settings)
    evaluate = trainer.evaluation_loop

    def first_is_best(*args, **kwargs):
        output = evaluate(*args, **kwargs)
        output.metrics["eval_of_step"] = -trainer.state.global_step
        return output

    trainer.evaluation_loop = first_is_best
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    trainer.evaluate()
    assert torch.equal(torch.cat([w.flatten() for w in trainer.client.engine.parameters()]), weights(trainer))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"dynamic_sampling_memory": True, "num_prompts": 9, "max_steps": 8},
        {"batch_multiplier": 1.75},
        {"batch_multiplier": None, "dynamic_sampling_screen": "2"},
    ],
)
def test_a_run_that_is_resumed_with_a_round_in_flight_goes_on_bit_by_bit(make, tmp_path, overrides):
    settings = {**SAVES, "max_steps": 6, **overrides}
    straight = after_training(make("straight", **settings))
    state = torch.load(tmp_path / "straight/checkpoint-2/dapo_state_rank0.pt", weights_only=True)
    in_flight = [group for group in state["queue"]["groups"] if group["request"] is not None]
    assert {*state["ahead"]["answers"]} == {group["number"] for group in in_flight}
    assert in_flight
    resumed = resume(make, tmp_path / "straight", **settings)
    assert torch.equal(weights(resumed), weights(straight))
    assert untimed(resumed.state.log_history) == untimed(straight.state.log_history)
    # The answer is the checkpoint's: it was not requested again.
    assert sorted(resumed.client.asked) == sorted(straight.client.asked[-len(resumed.client.asked) :])
    assert resumed.client.kinds[0] == "push"


def test_a_checkpoint_inside_a_rollout_holds_the_round_too(make, tmp_path):
    settings = {**TWO_STEPS, **SAVES, "save_steps": 1, "max_steps": 6}
    straight = after_training(make("straight", **settings))
    for step in (1, 2, 3):
        assert torch.equal(weights(resume(make, tmp_path / "straight", step, **settings)), weights(straight))


def test_a_round_sampled_at_another_temperature_is_left_behind_with_one_warning(make, saved, caplog):
    resumed = resume(make, saved, temperature=1.5)
    assert caplog.text.count("other settings: `temperature` (1.0 there, 1.5 here)") == 1
    assert resumed.client.threads[0]  # its first round is its own
    assert logged(resumed, "rollouts_ahead/groups_by_staleness/1")[2:] == [0.0, 4.0]
    # Two rounds of 6 prompts were drawn for two rollouts, and one ahead, which is not lost.
    assert asked_for(resumed) == [12, 13, 14, 15, 16, 17]


def test_a_round_in_flight_is_left_behind_where_prompts_start_afresh(make, saved, caplog):
    # With the memory prompts 3 and 6 would be skipped: none of their completions was correct.
    resumed = resume(make, saved, ignore_data_skip=True, dynamic_sampling_memory=False)
    assert "sampled again" not in caplog.text  # the tokenizer is the same
    assert "other settings" not in caplog.text
    assert asked_for(resumed) == [0, 1, 2, 3, 4, 5]


def test_a_round_is_sampled_anew_where_its_prompts_are_other_tokens_now(make, saved, caplog):
    def change_the_tokenizer(trainer, tokenize=DAPOTrainer._tokenize_prompts):
        def with_one_more(prompts):
            prompt_ids, *rest = tokenize(trainer, prompts)
            return [[3, *ids] for ids in prompt_ids], *rest

        trainer._tokenize_prompts = with_one_more

    resumed = resume(make, saved, change=change_the_tokenizer)
    assert sorted(resumed.client.asked[:6]) == [12, 13, 14, 15, 16, 17]
    assert logged(resumed, "rollouts_ahead/groups_by_staleness/0")[2:] == [4.0, 0.0]  # of the present policy
    assert caplog.text.count("The tokenizer, the chat template or the dataset must have changed") == 1


def answer_when_interrupted(trainer, attempt=1):
    """Hold the answer back until the request has been interrupted this many times. Return the calls made meanwhile."""
    calls = []

    def interrupt():
        calls.append(trainer.client.in_flight > 0)
        if len(calls) < attempt:
            return
        trainer.client.error = ConnectionError("the request was interrupted")
        trainer.client.gate.set()

    trainer._ahead._close = interrupt
    hold_back(trainer)
    return calls


def fail_at(step_to_fail, error):
    def fail(step):
        if step == step_to_fail:
            raise error

    return OnStep(fail)


@pytest.mark.parametrize(
    ("error", "attempt"),
    [(KeyboardInterrupt(), 1), (ValueError("a callback's own"), 1), (KeyboardInterrupt(), 3)],
    ids=["Ctrl-C", "exception", "goes out after its session was closed"],
)
def test_an_exception_and_ctrl_c_end_the_request_under_way(make, error, attempt):
    trainer, before = make(), {*threading.enumerate()}  # another test's may wait for it
    calls = answer_when_interrupted(trainer, attempt)
    trainer.add_callback(fail_at(1, error))
    with pytest.raises(type(error)):
        trainer.train()  # the answer would have been held back forever
    assert calls[:attempt] == [True] * attempt
    assert trainer.client.in_flight == 0
    assert "vllm-request" not in [thread.name for thread in {*threading.enumerate()} - before]


def test_the_prompts_of_a_round_that_was_cancelled_are_asked_for_again(make):
    trainer, stop = make(), fail_at(1, ValueError("stop"))
    trainer.add_callback(stop)
    with pytest.raises(ValueError, match="stop"):
        trainer.train()
    cancelled = sorted(trainer.client.asked[6:])  # after those of the first rollout
    assert cancelled == [6, 7, 8, 9, 10, 11]
    trainer.remove_callback(stop)
    trainer.train()
    assert trainer.client.kinds == ["push", "generate"] * 4  # the second run begins with one
    assert sorted(trainer.client.asked[12:18]) == cancelled
    # the present policy samples them
    assert logged(trainer, "rollouts_ahead/groups_by_staleness/0")[-4:] == [4.0, 0.0, 0.0, 0.0]


def test_a_server_that_is_lost_with_a_round_in_flight_is_named_with_the_checkpoint(make, tmp_path):
    """
    The checkpoint includes the step that trained while the server was lost. The fourth rollout's round is due then.
    """
    settings = {**SAVES, "save_steps": 3, "max_steps": 6, "vllm_server_base_url": "http://gpu-7:8000"}
    trainer = make(**settings)
    lose = OnStep(lambda step: step == 2 and setattr(trainer.client, "error", ConnectionError("connection refused")))
    trainer.add_callback(lose)
    with pytest.raises(RuntimeError, match=r"vLLM server at http://gpu-7:8000 is gone.*checkpoint-3"):
        trainer.train()
    assert not trainer._ahead._requested
    lost = sorted(trainer.client.asked[-6:])
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert sorted(resumed.client.asked[:6]) == lost  # sampled again, when it was due


def test_a_server_that_does_not_answer_in_time_is_named_with_the_setting(make, tmp_path):
    trainer = make(vllm_request_timeout=7, vllm_server_base_url="http://gpu-7:8000")
    ReadTimeout = type("ReadTimeout", (ConnectionError,), {})
    trainer.add_callback(OnStep(lambda step: setattr(trainer.client, "error", ReadTimeout("read timed out"))))
    with pytest.raises(RuntimeError, match=r"gpu-7:8000 has not answered for 7 s.*`vllm_request_timeout`"):
        trainer.train()


# ---- What is logged ----


def test_groups_are_counted_by_age_and_clipping_too(make):
    trainer = after_training(make(batch_multiplier=1.75, max_steps=5))
    # 7 prompts per round: 0 to 6 have 4 that are solved, 7 to 13 five, 14 to 20 five, 21 to 27 four, 28 to 34 five.
    # The rollout of the third round trains on one carried group and 4 of 5, and so does each after it.
    assert logged(trainer, "rollouts_ahead/groups_by_staleness/0") == [4.0, 0.0, 0.0, 0.0, 0.0]
    assert logged(trainer, "rollouts_ahead/groups_by_staleness/1") == [0.0, 4.0, 3.0, 2.0, 2.0]
    assert logged(trainer, "rollouts_ahead/groups_by_staleness/2") == [0.0, 0.0, 1.0, 2.0, 2.0]
    shares = logged(trainer, "rollouts_ahead/clip_ratio/staleness_1")
    assert len(shares) == 4
    assert max(shares) > 0
    assert logged(trainer, "rollouts_ahead/clip_ratio/staleness_0") == [0.0]


# ---- What is refused ----


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rollouts_ahead": 2}, r"`batch_multiplier=1.5` has no effect with `rollouts_ahead=2`.*`rollouts_ahead=1`"),
        (
            {"rollouts_ahead": 2, "batch_multiplier": None, "dynamic_sampling_max_round_size": 4},
            "`dynamic_sampling_max_round_size=4` has no effect with `rollouts_ahead=2`",
        ),
        (
            {"dynamic_sampling_mode": "replace", "dynamic_sampling_surplus": "discard"},
            "`dynamic_sampling_mode='filter'`, got 'replace'",
        ),
        ({"vllm_request_timeout": 0}, "`vllm_request_timeout` must be above 0"),
    ],
)
def test_settings_that_could_not_be_honoured_are_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        ahead_config(tmp_path, **overrides)


def test_a_server_with_log_probabilities_of_another_temperature_is_refused(make, monkeypatch):
    monkeypatch.setattr(StandIn, "logprobs_mode", "raw_logprobs")
    make(rollouts_ahead=0)  # TRL warns that the correction is biased
    with pytest.raises(ValueError, match=r"--logprobs-mode raw_logprobs.*Start it with `--logprobs-mode proc"):
        make()


def test_the_request_timeout_is_shorter_than_the_other_processes_patience(tmp_path):
    assert ahead_config(tmp_path, ddp_timeout=1000).vllm_request_seconds == 900
    assert ahead_config(tmp_path, vllm_request_timeout=30).vllm_request_seconds == 30
    assert DAPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True).vllm_request_seconds == 1620


@pytest.mark.parametrize(
    ("attribute", "value", "what"),
    [
        ("rollout_func", print, "rollout_func"),
        ("tools", [print], "tools"),
        ("environment_factories", {"": object}, "environments"),
        ("_is_vlm", True, "images"),
    ],
)
def test_what_takes_more_than_one_request_is_refused(make, attribute, value, what):
    trainer = make(dynamic_sampling_screen="off")
    setattr(trainer, attribute, value)
    with pytest.raises(ValueError, match=rf"`rollouts_ahead=1` does not support .*{what}.*`rollouts_ahead=0`"):
        check_rules(trainer.args, **trainer._facts)


# ---- An engine that sleeps ----

SLEEPS = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "rollouts_ahead": 0}


def test_an_engine_that_sleeps_is_awake_from_a_rollouts_first_round_to_its_last(make):
    trainer = after_training(make(**SLEEPS, dynamic_sampling_surplus="discard", batch_multiplier=1.0, max_steps=2))
    calls = trainer.vllm_generation.llm.calls
    # Two of prompts 0 to 3 are solved, and three of 4 to 7: two rounds per rollout, one push.
    rollout = ["wake weights", "push", "wake kv_cache", "generate", "generate", "sleep"]
    assert calls == ["sleep", *rollout, *rollout]
    assert trainer.vllm_generation._llm_weights_sleeping  # TRL's own next call would push
    assert logged(trainer, "dynamic_sampling/rounds") == [2.0, 2.0]


def test_an_engine_sleeps_after_a_reward_function_failed(make):
    def fails(completions, **kwargs):
        if is_dummy(completions[0]):
            return right(completions)
        raise ValueError("no reward")

    trainer = make(reward=fails, **SLEEPS)
    with pytest.raises(ValueError, match="no reward"):
        trainer.train()
    assert trainer.vllm_generation.llm.calls[-2:] == ["generate", "sleep"]
    assert trainer.vllm_generation.enable_sleep_mode


# ---- First completions ----


def test_what_is_asked_ahead_has_the_rest_of_partial_groups_and_the_first_completions_of_the_next(make, tiny_model):
    trainer = make(batch_multiplier=None, dynamic_sampling_screen="2", max_steps=5)
    errors = errors_of_old_logps(trainer, tiny_model)
    trainer.train()
    # Each row by the policy that sampled it, although the first completions of a group and its rest may have two.
    assert max(error for found in errors.values() for error in found) < 1e-4
    assert {age for _, age in errors} == {0, 1, 2}
    assert logged(trainer, "dynamic_sampling/groups_trained") == [4.0] * 5
    assert all(request["n"] == 2 for request in trainer.client.requests)
    # Two completions are requested of prompts 0, 3, 6, ..., and at most four of the others.
    decode = trainer.client.tokenizer.decode
    asked = Counter(number(decode(ids)) for request in trainer.client.requests for ids in request["prompts"])
    assert {asked[i] for i in asked if i % 3 == 0} == {1}
    assert max(asked.values()) == 2
