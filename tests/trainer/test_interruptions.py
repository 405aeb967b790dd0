# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The life of one trainer: steps that are interrupted, checkpoints within a step, and several runs in one process."""

import itertools

import pandas as pd
import pytest
import torch
from helpers import (
    ScriptedTrainer,
    is_dummy,
    make_trainer,
    mixed_unless_multiple_of_3,
    number,
    prompts,
    right,
    spy_on_training,
    tiny_config,
    untimed,
    weights,
)
from peft import LoraConfig
from tiny_models import make_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback

from trl_dapo.run.checkpoint import last_complete_checkpoint


SAVED = {"save_strategy": "steps", "save_steps": 1}


# ---- Interrupted steps ----


def interrupt_at(trainer, num, error):
    """Let the loss of this micro-batch, counted from 1, fail once."""
    compute_loss, counted = trainer._compute_loss, itertools.count(1)

    def failing_once(*args):
        if next(counted) == num:
            raise error
        return compute_loss(*args)

    trainer._compute_loss = failing_once


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory")])
def test_after_an_interrupted_update_each_step_has_a_rollout_of_its_own_and_limits_are_kept(
    tiny_model, tmp_path, error
):
    # A rollout is four micro-steps, which are one optimizer step. The second of the second step fails.
    trainer = make_trainer(tiny_model, tmp_path, max_steps=9, max_tokens_generated=900)
    assert trainer._generate_every == trainer.args.gradient_accumulation_steps == 4
    interrupt_at(trainer, 6, error)
    with pytest.raises(type(error)):
        trainer.train()
    assert trainer._step == 5
    trainer.train()
    assert trainer._step % 4 == 0
    # The run ends with the first rollout that reaches the limit.
    last = trainer.state.log_history[-2]["dynamic_sampling/tokens_generated"]
    assert trainer._sampler.totals.tokens_generated - last < 900 <= trainer._sampler.totals.tokens_generated
    assert trainer.state.global_step < 9


def test_an_update_that_was_interrupted_within_a_rollout_starts_over_with_the_same_rows(tiny_model, tmp_path):
    # Two optimizer steps of two micro-steps with four rows each train on a rollout. The last micro-step fails.
    trainer = make_trainer(tiny_model, tmp_path, max_steps=3, gradient_accumulation_steps=2, steps_per_generation=4)
    interrupt_at(trainer, 4, KeyboardInterrupt())
    seen = spy_on_training(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert sorted(seen[16:24]) == sorted(seen[8:16])
    # One step on the rest of the first rollout, then two steps on the second.
    assert trainer._sampler.num_rollouts == 2


def test_a_step_that_fails_after_it_has_changed_the_weights_is_not_repeated(tiny_model, tmp_path):
    class FailsAfterFirstStep(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 0:
                trainer.remove_callback(self)
                raise RuntimeError("the tracker is not reachable")

    # Two optimizer steps of two micro-steps with four rows each train on a rollout.
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, gradient_accumulation_steps=2, steps_per_generation=4)
    trainer.add_callback(FailsAfterFirstStep())
    seen = spy_on_training(trainer)
    with pytest.raises(RuntimeError, match="not reachable"):
        trainer.train()
    trainer.train()
    # The step of the second run trains on the other half of the rollout.
    assert len(seen) == 16
    assert trainer._sampler.num_rollouts == 1
    assert trainer._step == 4


def test_a_checkpoint_that_is_saved_within_an_optimizer_step_starts_this_step_over(tiny_model, tmp_path):
    # A rollout is four micro-steps, which are one optimizer step. The second of the second step fails.
    trainer = make_trainer(tiny_model, tmp_path, max_steps=3)
    interrupt_at(trainer, 6, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer._save_checkpoint(trainer.model, None)
    resumed = make_trainer(tiny_model, tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed._step % 4 == 0
    assert resumed.state.global_step == 3


class SaveBeforeStep(TrainerCallback):
    """Save a checkpoint before the weights change, as transformers' `enable_jit_checkpoint` does, and stop."""

    def __init__(self, trainer, global_step, place="on_pre_optimizer_step"):
        self.trainer, self.global_step = trainer, global_step
        setattr(self, place, self.save_and_stop)

    def save_and_stop(self, args, state, control, **kwargs):
        if state.global_step == self.global_step:
            self.trainer._save_checkpoint(self.trainer.model, None)
            raise KeyboardInterrupt


def resumed_within_step(make, step):
    """
    Return a trainer that has resumed from a checkpoint within the step after `step`. `make` makes a new trainer in the
    same folder with each call.
    """
    trainer = make()
    trainer.add_callback(SaveBeforeStep(trainer, step))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    resumed = make()
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-{step}")
    return resumed


# The coefficient changes in every step.
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0}
CUTS = {
    "a rollout per step": {},
    "two steps per rollout": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "two rollouts per step": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "two passes": {"num_iterations": 2},
    "a step that begins within a rollout and ends within the next": {"steps_per_generation": 6},
}


def test_a_step_that_is_interrupted_after_its_last_micro_step_starts_over_with_the_same_rows(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2, **CUTS["two steps per rollout"])
    trainer.add_callback(SaveBeforeStep(trainer, 1))
    seen = spy_on_training(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(seen) == 2 * 8
    trainer.remove_callback(SaveBeforeStep)
    trainer.train()
    assert seen[16:24] == seen[8:16]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("logging_steps", [1, 3])
def test_a_run_that_is_resumed_within_a_step_equals_one_that_was_not_interrupted(
    tiny_model, tmp_path, cut, logging_steps
):
    settings = {"max_steps": 3, "logging_steps": logging_steps, **ADAPTIVE, **CUTS[cut]}
    whole = make_trainer(tiny_model, tmp_path / "whole", **settings)
    whole.train()
    resumed = resumed_within_step(lambda: make_trainer(tiny_model, tmp_path / "interrupted", **settings), 1)
    assert torch.equal(weights(resumed), weights(whole))
    logs, expected = untimed(resumed.state.log_history), untimed(whole.state.log_history)
    if logging_steps > 1:  # a resumed run of transformers forgets the losses that were not logged yet
        assert logs[0].pop("loss") != expected[0].pop("loss")
    assert logs == expected
    assert resumed._sampler.totals == whole._sampler.totals


@pytest.mark.parametrize(
    ("before", "after", "parts", "loss_type"),
    [(2, 4, 4, "dapo"), (1, 4, 2, "dapo"), (3, 8, 4, "dapo"), (1, 4, 2, "grpo")],
)
def test_a_rollout_ends_early_if_another_gradient_accumulation_would_not_end_with_it(
    tiny_model, tmp_path, before, after, parts, loss_type
):
    settings = {"gradient_accumulation_steps": before, "steps_per_generation": parts, "loss_type": loss_type}
    trainer = make_trainer(tiny_model, tmp_path, max_steps=1, **settings)
    trainer.train()
    assert trainer._step == before
    trainer.args.gradient_accumulation_steps = after
    trainer.train()
    assert trainer._step == after
    assert trainer._step % trainer._generate_every == 0


# ---- Several runs in one process ----


def test_a_checkpoint_without_a_state_of_dapo_starts_from_the_first_prompt_in_the_same_process_too(
    tiny_model, tmp_path
):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    trainer.train()
    (tmp_path / "checkpoint-1" / "dapo_state.json").unlink()
    num_sampled = len(trainer.sampled)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert number(trainer.sampled[num_sampled]) == 0
    assert trainer._sampler.totals.first_step == 1
    assert trainer._sampler.num_rollouts == 2  # of steps 2 and 3


def test_a_run_that_is_resumed_in_the_same_process_logs_what_it_would_in_a_new_one(tiny_model, tmp_path):
    # The metrics of steps 3 and 4 are logged together. The run is interrupted in step 3, after its rollout.
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2}
    trainer = make_trainer(tiny_model, tmp_path, **settings)
    interrupt_at(trainer, 10, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    logs = []
    for resumed in (trainer, make_trainer(tiny_model, tmp_path, **settings)):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        logs.append(untimed(resumed.state.log_history))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_second_run_of_a_trainer_counts_from_zero(tiny_model, tmp_path, is_interrupted):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=2)
    if is_interrupted:
        interrupt_at(trainer, 6, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        trainer.train()
    trainer.train()
    sampled = [entry["dynamic_sampling/groups_generated"] for entry in trainer.state.log_history[:-1]]
    assert len(sampled) == 2
    assert trainer._sampler.totals.groups_sampled == sum(sampled)


def test_a_checkpoint_is_not_continued_with_a_rollout_that_the_same_process_sampled_later(tiny_model, tmp_path):
    # Two optimizer steps train on each rollout. The run ends after the first step on its second rollout.
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tiny_model, tmp_path, max_steps=3, **settings)
    trainer.train()
    (tmp_path / "checkpoint-2" / "dapo_state.json").unlink()
    assert trainer._sampler.num_rollouts == 2
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer._sampler.num_rollouts == 1
    assert trainer._step % 4 == 2


def test_values_logged_by_a_reward_function_before_another_one_failed_are_not_logged_later(tiny_model, tmp_path):
    calls = itertools.count(1)

    def logging_reward(completions, log_extra, log_metric, **kwargs):
        log_extra("said", list(completions))
        log_metric("mine", float(next(calls)))
        return right(completions)

    def failing_once(completions, **kwargs):
        if not any(map(is_dummy, completions)) and next(failures) == 1:
            raise ConnectionError("the judge does not answer")
        return [0.0] * len(completions)

    failures = itertools.count(1)
    trainer = make_trainer(
        tiny_model, tmp_path, reward_funcs=[logging_reward, failing_once], max_steps=1, log_completions=True
    )
    with pytest.raises(ConnectionError):
        trainer.train()
    last = next(calls)
    trainer.train()
    assert None not in trainer._logs["extra"]["said"]
    (logged,) = (entry["mine"] for entry in trainer.state.log_history if "mine" in entry)
    assert logged > last


def test_a_reward_that_took_three_values_later_in_the_process_takes_two_again_after_a_resume(tiny_model, tmp_path):
    # From prompt 8 on the correct completions have half the reward. The first batch ends with prompt 5.
    def partly(prompts, completions, **kwargs):
        halves = [number(prompt) > 7 for prompt in prompts]
        return [0.5 * value if half else value for half, value in zip(halves, right(completions), strict=True)]

    trainer = make_trainer(tiny_model, tmp_path, reward_funcs=partly, max_steps=3, **SAVED)
    trainer.train()
    assert trainer._task.is_graded
    trainer.args.max_steps = 1
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not trainer._task.is_graded


def test_a_run_that_found_nothing_continues_in_the_same_process_after_its_reward_is_mended(tiny_model, tmp_path):
    # From the third rollout on, no group is accepted. Without a limit, the run stops after one batch without a group.
    settings = {"dynamic_sampling_max_gen_batches": 0, "dynamic_sampling_stop_after": 1, **SAVED}
    trainer = make_trainer(tiny_model, tmp_path, max_steps=6, **CUTS["two steps per rollout"], **settings)
    script, is_broken = trainer.script, True
    trainer.script = lambda text, i: "wrong" if is_broken and trainer.state.global_step >= 4 else script(text, i)
    trainer.train()
    assert trainer.state.global_step < 6
    is_broken = False
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 6


def test_the_optimizer_starts_over_in_the_same_process_if_a_checkpoint_has_none(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, max_steps=4, save_only_model=True, **SAVED)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    steps = {state["step"].item() for state in trainer.optimizer.state.values()}
    assert steps == {2}  # steps 3 and 4


def test_a_checkpoint_of_the_model_alone_does_not_keep_the_optimizer_and_rows_of_an_earlier_run(tiny_model, tmp_path):
    checkpoint, cut = tmp_path / "checkpoint-1", CUTS["two steps per rollout"]
    make_trainer(tiny_model, tmp_path, max_steps=1, **cut, **SAVED).train()
    in_whole = {path.name for path in checkpoint.iterdir()}
    (checkpoint / "my_notes.txt").write_text("a file of the user")
    # FSDP and DeepSpeed keep the optimizer in folders.
    (checkpoint / "optimizer_0").mkdir()
    (checkpoint / "global_step1").mkdir()
    (checkpoint / "global_step1" / "mp_rank_00_model_states.pt").write_text("")
    make_trainer(tiny_model, tmp_path, max_steps=1, save_only_model=True, **cut, **SAVED).train()
    left_out = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "dapo_state.json", "dapo_state_rank0.pt"}
    left_out.add("dapo_memory.parquet")
    assert left_out <= in_whole
    assert {path.name for path in checkpoint.iterdir()} == in_whole - left_out | {"my_notes.txt"}


def test_completions_of_an_abandoned_run_are_not_in_the_table_of_a_resumed_one(tiny_model, tmp_path):
    settings = {"max_steps": 3, "log_completions": True, **CUTS["two steps per rollout"], **SAVED}
    trainer = make_trainer(tiny_model, tmp_path, **settings)
    trainer.train()
    assert len(trainer._logs["completion"]) > 0
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(trainer._logs["completion"]) == 0  # step 2 trains on the rest of a rollout


# ---- Checkpoints within a step ----


@pytest.mark.parametrize("place", ["on_pre_optimizer_step", "on_step_begin"])
def test_a_run_that_is_interrupted_again_before_its_resumed_step_equals_one_that_was_not(tiny_model, tmp_path, place):
    settings = {"max_steps": 3, **ADAPTIVE}
    whole = make_trainer(tiny_model, tmp_path / "whole", **settings)
    whole.train()
    for moment in ("on_pre_optimizer_step", place):
        trainer = make_trainer(tiny_model, tmp_path / "interrupted", **settings)
        trainer.add_callback(SaveBeforeStep(trainer, 1, moment))
        with pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=last_complete_checkpoint(tmp_path / "interrupted"))
    resumed = make_trainer(tiny_model, tmp_path / "interrupted", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "interrupted" / "checkpoint-1"))
    assert torch.equal(weights(resumed), weights(whole))
    assert untimed(resumed.state.log_history) == untimed(whole.state.log_history)


def test_a_rollout_that_reaches_the_limit_of_tokens_trains_after_a_resume_too(tiny_model, tmp_path):
    settings = {"max_steps": 9, "max_tokens_generated": 300}
    whole = make_trainer(tiny_model, tmp_path / "whole", **settings)
    whole.train()
    last = whole.state.global_step
    assert last < 9
    resumed = resumed_within_step(lambda: make_trainer(tiny_model, tmp_path / "interrupted", **settings), last - 1)
    assert resumed.state.global_step == last
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("step", [0, 1])
def test_dropout_draws_the_same_random_numbers_after_a_resume_within_a_step(tiny_model, tmp_path, step):
    def make(folder):
        args = tiny_config(tmp_path / folder, max_steps=3, shuffle_dataset=False)
        adapter = LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear")
        torch.manual_seed(0)  # of the adapter
        return ScriptedTrainer(
            tiny_model, right, args, prompts(24), peft_config=adapter, script=mixed_unless_multiple_of_3
        )

    whole = make("whole")
    whole.train()
    resumed = resumed_within_step(lambda: make("interrupted"), step)
    assert torch.equal(weights(resumed), weights(whole))
    assert untimed(resumed.state.log_history) == untimed(whole.state.log_history)
    ledgers = [
        pd.read_parquet(tmp_path / folder / "rollouts").drop(columns="seconds") for folder in ("whole", "interrupted")
    ]
    pd.testing.assert_frame_equal(*ledgers)


def test_a_table_of_completions_is_not_replaced_by_an_empty_one(tiny_model, tmp_path):
    settings = {"max_steps": 2, "log_completions": True, **CUTS["two steps per rollout"], **SAVED}
    make_trainer(tiny_model, tmp_path, **settings).train()
    table = tmp_path / "completions" / "completions_00002.parquet"
    before = pd.read_parquet(table)
    assert len(before) == 16
    make_trainer(tiny_model, tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    pd.testing.assert_frame_equal(pd.read_parquet(table), before)


# ---- Weights that transformers saves under other names ----


def make_mixture(tokenizer):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(
        **sizes,
        num_key_value_heads=1,
        num_local_experts=2,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("best", [True, False])
def test_experts_are_resumed_although_transformers_saves_them_under_other_names(tmp_path, best, caplog):
    tokenizer = make_tokenizer()
    make_mixture(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = make_trainer(str(tmp_path / "model"), tmp_path / "run", max_steps=1, **SAVED)
    trainer.train()
    trained = weights(trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    if best:
        trainer.state.best_model_checkpoint = checkpoint
        trainer._load_best_model()
    else:
        trainer._load_from_checkpoint(checkpoint)
    assert torch.equal(weights(trainer), trained)
    assert "All weights of" in caplog.text
