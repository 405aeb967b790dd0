# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A trial before a run: it measures each phase, names the one that runs out of memory, and leaves no trace."""

import copy
import json
import os
import random
import sys
from collections import Counter

import jobs
import numpy as np
import pytest
import torch
from datasets import IterableDataset
from helpers import ScriptedTrainer, is_dummy, launch, letters, prompts, right, tiny_config, untimed, weights
from jobs import script
from peft import LoraConfig
from transformers import TrainerCallback

from trl_dapo import DAPOTrainer
from trl_dapo import trainer as trainer_module
from trl_dapo.engines import trial_phases
from trl_dapo.run.preflight import SetupError


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
SAVES = {"save_strategy": "steps", "save_steps": 2}
EVERYTHING = {**EVALUATES, **SAVES}
# With what a run keeps from one rollout to the next: memory, a screen, carried groups.
SAVING = {"dynamic_sampling_memory": True, "dynamic_sampling_screen": "2", "dynamic_sampling_surplus": "carry"}
ADAPTER = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)


def make(model, folder, reward=letters, cls=DAPOTrainer, peft_config=None, **settings):
    """A trainer that samples by itself, with a random model."""
    args = tiny_config(folder, **{**EVERYTHING, "max_steps": 3, **settings})
    options = {"train_dataset": prompts(24), "eval_dataset": prompts(6), "peft_config": peft_config}
    if cls is ScriptedTrainer:
        options["script"] = script
    torch.manual_seed(0)
    return cls(model, reward, args, **options)


def random_states():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cls": ScriptedTrainer, "reward": right, **SAVING},
        {"peft_config": ADAPTER, "beta": 0.1},
        {"max_tokens_per_microbatch": 64, "gradient_checkpointing": True},
        {"steps_per_generation": 8, "num_iterations": 2},
        {"use_dynamic_sampling": False, "loss_type": "grpo"},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "log_completions": True},
    ],
    ids=["defaults", "saving", "adapter", "budget", "reused", "grpo", "entropy"],
)
def test_a_run_is_the_same_to_the_last_bit_whether_or_not_it_was_tried_out(tiny_model, tmp_path, settings):
    runs = []
    for is_tried in (False, True):
        trainer = make(tiny_model, tmp_path / str(is_tried), **settings)
        before = dict(vars(trainer))
        if is_tried:
            trainer.trial()
            assert dict(vars(trainer)) == before  # the same objects
        trainer.train()
        sampler = trainer._sampler
        kept = None if sampler is None else (sampler.state_dict(), len(sampler.queue.held))
        optimizer = [state["exp_avg"].sum().item() for state in trainer.optimizer.state.values()]
        runs.append((untimed(trainer.state.log_history), kept, optimizer, random_states(), weights(trainer)))
    (*told, moved), (*told_after_trial, moved_after_trial) = runs
    assert told_after_trial == told
    assert torch.equal(moved_after_trial, moved)


def test_what_a_run_knows_when_it_is_tried_out_again_stays(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, cls=ScriptedTrainer, reward=right, **SAVING)
    trainer.train()
    state, moved = copy.deepcopy(trainer._sampler.state_dict()), weights(trainer)
    optimizer = copy.deepcopy(trainer.optimizer.state_dict())
    log, metrics = list(trainer.state.log_history), copy.deepcopy(trainer._metrics)
    trainer.trial()
    assert trainer._sampler.state_dict() == state
    assert torch.equal(weights(trainer), moved)
    assert str(trainer.optimizer.state_dict()) == str(optimizer)
    assert (trainer.state.log_history, trainer._metrics) == (log, metrics)


def test_a_trial_leaves_random_states_modes_and_gradients_as_they_were(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer.model.eval()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    trainer.trial()
    after = random_states()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert random_states() == after
    assert not any(module.training for module in trainer.model.modules())
    assert all(weight.grad is None for weight in trainer.model.parameters())


@pytest.mark.parametrize("peft_config", [None, ADAPTER], ids=["all weights", "adapter"])
def test_a_trial_leaves_no_hook_on_the_model(tiny_model, tmp_path, peft_config):
    trainer = make(tiny_model, tmp_path, gradient_checkpointing=True, peft_config=peft_config)

    def count_hooks():
        return [
            (name, kind, len(getattr(module, kind)))
            for name, module in trainer.model.named_modules()
            for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
        ]

    before = count_hooks()
    trainer.trial()
    assert count_hooks() == before


def test_two_processes_train_the_same_after_a_trial(tiny_model, tmp_path):
    result = launch("tried_out_first", tiny_model, tmp_path, num_processes=2)
    assert result.returncode == 0, result.stderr[-5000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"report-2-{rank}.json").read_text())
        assert report["tried"] == report["untried"]
        assert report["phases"] == ["sampling", "update", "update of this rollout", "evaluation", "checkpoint"]


def test_one_process_trains_the_same_after_a_trial_of_the_same_job(tiny_model, tmp_path):
    jobs.tried_out_first(tiny_model, tmp_path)
    report = json.loads((tmp_path / "report-1-0.json").read_text())
    assert report["tried"] == report["untried"]


def test_nothing_is_written_and_no_callback_or_tracker_is_called(tiny_model, tmp_path, monkeypatch):
    called = []

    class Tracker(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            called.append("begin")

        def on_log(self, *args, **kwargs):
            called.append("log")

    folder = tmp_path / "run"
    trainer = make(tiny_model, folder, log_completions=True)
    trainer.add_callback(Tracker())
    trainer.args.report_to = ["wandb"]
    before = sorted(tmp_path.rglob("*"))
    trainer.trial()
    assert sorted(tmp_path.rglob("*")) == before
    assert called == []
    assert trainer.args.report_to == ["wandb"]


# ---- What is measured ----


@pytest.fixture
def ticking(monkeypatch):
    """A clock that is a second later each time somebody looks."""
    ticks = iter(range(1000))
    monkeypatch.setattr(trial_phases, "clock", lambda: float(next(ticks)))


def test_every_phase_is_measured_and_the_run_is_expected_to_be_their_sum(tiny_model, tmp_path, ticking):
    report = make(tiny_model, tmp_path, max_steps=6, eval_on_start=True).trial()
    names = ["sampling", "update", "update of this rollout", "evaluation", "checkpoint"]
    assert [phase.name for phase in report.phases] == names
    assert [phase.measured.seconds for phase in report.phases] == [1.0] * 5
    # A rollout trains in one step, of 1 s each for sampling and update. Before it and after steps 2, 4 and 6: 6
    # prompts x 4 completions in 3 batches of 8. Checkpoints after steps 2, 4 and 6.
    schedule = report.schedule
    assert (schedule.num_steps, schedule.num_evaluations, schedule.batches_per_evaluation) == (6, 4, 3)
    assert schedule.num_checkpoints == 3
    assert report.checkpoint_bytes > 2 * sum(weight.nbytes for weight in [torch.zeros(1000)])
    assert report.fits
    assert "Fits: peak" in str(report)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 5, "eval_delay": 3},
        # 6 steps are an epoch. A second one that is not complete ends with an evaluation too.
        {"max_steps": 7, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"max_steps": -1, "num_train_epochs": 1.5, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"eval_dataset": "a stream"},
    ],
    ids=str,
)
def test_a_run_evaluates_and_saves_as_often_as_a_trial_expects(tiny_model, tmp_path, settings):
    stream = settings.get("eval_dataset")
    trainer = make(tiny_model, tmp_path, **{name: settings[name] for name in settings if name != "eval_dataset"})
    if stream is not None:
        trainer.eval_dataset = IterableDataset.from_generator(lambda: iter(prompts(6)))
    called = Counter()

    class Counting(TrainerCallback):
        def on_evaluate(self, *args, **kwargs):
            called["evaluations"] += 1

        def on_prediction_step(self, *args, **kwargs):
            called["batches"] += 1

        def on_save(self, *args, **kwargs):
            called["checkpoints"] += 1

    trainer.add_callback(Counting())
    schedule = trainer.trial().schedule
    trainer.train()
    assert called == {
        "evaluations": schedule.num_evaluations,
        "batches": schedule.num_evaluations * schedule.batches_per_evaluation,
        "checkpoints": schedule.num_checkpoints,
    }


def test_if_only_the_best_model_is_saved_a_trial_expects_a_checkpoint_after_each_evaluation(tiny_model, tmp_path):
    report = make(tiny_model, tmp_path, save_strategy="best", metric_for_best_model="reward", max_steps=4).trial()
    assert (report.schedule.num_evaluations, report.schedule.num_checkpoints) == (2, 2)
    assert "every evaluation is the best so far, and so saves a checkpoint" in " ".join(str(report).split())


def test_without_evaluations_and_checkpoints_neither_is_tried(tiny_model, tmp_path):
    report = make(tiny_model, tmp_path, eval_strategy="no", save_strategy="no").trial()
    assert [phase.name for phase in report.phases] == ["sampling", "update", "update of this rollout"]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        # The longest prompt is "prompt 10:", of 10 characters that are tokens, and completions have at most 8. A
        # micro-batch has 4 rows.
        ({}, [(4, 10, 8)] * 2),
        # 3 rows of 18 are 54 tokens of the 64; 4 rows of 16 are all of them.
        ({"max_tokens_per_microbatch": 64}, [(4, 8, 8)] * 2),
        # A row that is longer than the budget goes alone.
        ({"max_tokens_per_microbatch": 16}, [(1, 10, 8)] * 2),
        ({"loss_type": "grpo", "use_dynamic_sampling": False}, [(4, 10, 8)] * 2),
    ],
    ids=str,
)
def test_the_largest_update_is_of_two_micro_batches_without_padding(tiny_model, tmp_path, settings, sizes):
    trainer = make(tiny_model, tmp_path, eval_strategy="no", save_strategy="no", **settings)
    seen, compute_loss = [], trainer._compute_loss

    def watch(model, inputs):
        seen.append((*inputs["prompt_mask"].shape, inputs["completion_mask"].size(1)))
        num_tokens = int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())
        seen[-1] += (num_tokens,)
        return compute_loss(model, inputs)

    trainer._compute_loss = watch
    trainer.trial()
    whole = [(rows, prompt, completion, rows * (prompt + completion)) for rows, prompt, completion in sizes]
    assert seen[: len(sizes)] == whole


@pytest.mark.parametrize("empty", [prompts(0), {}, {"none": prompts(0)}], ids=["row", "dataset", "row of any"])
def test_an_evaluation_without_prompts_is_not_tried(tiny_model, tmp_path, empty):
    trainer = make(tiny_model, tmp_path, save_strategy="no")
    trainer.eval_dataset = empty
    report = trainer.trial()
    assert [phase.name for phase in report.phases] == ["sampling", "update", "update of this rollout"]
    assert report.schedule.num_evaluations == 0


def test_reward_functions_see_the_state_of_the_run_as_in_a_run(tiny_model, tmp_path):
    seen = []

    def by_progress(prompts, completions, trainer_state, **kwargs):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return letters(prompts, completions)

    trainer = make(tiny_model, tmp_path, reward=by_progress, eval_strategy="no")
    trainer.trial()
    assert {*seen} == {(0, 3)}  # the first call is the check before anything is sampled


def test_the_largest_update_has_the_state_of_the_optimizer_beside_it_as_from_the_second_step_of_a_run_on(
    tiny_model, tmp_path
):
    trainer = make(tiny_model, tmp_path, eval_strategy="no", save_strategy="no")
    state, compute_loss = [], trainer._compute_loss

    def watch(model, inputs):
        state.append(trainer._count_optimizer_bytes())
        return compute_loss(model, inputs)

    trainer._compute_loss = watch
    trainer.trial()
    # Adam keeps two numbers for each weight, and how many steps it took.
    num_weights = sum(weight.numel() for weight in trainer.model.parameters())
    assert min(state) >= 8 * num_weights


def test_the_longest_prompts_of_the_evaluation_are_evaluated_in_one_batch(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path, save_strategy="no")
    trainer.eval_dataset = {"short": prompts(3), "long": prompts(3).map(lambda row: {"prompt": row["prompt"] + " !"})}
    sampled, generate = [], trainer._generate

    def watch(prompts):
        if not trainer.model.training:
            sampled.extend(prompts)
        return generate(prompts)

    trainer._generate = watch
    report = trainer.trial()
    # 2 prompts x 4 completions fill a batch of 8. Both datasets have 3 prompts x 4: two batches each.
    assert Counter(sampled) == {"prompt 0: !": 4, "prompt 1: !": 4}
    assert report.schedule.batches_per_evaluation == 4


def test_a_stream_is_tried_out_too(tiny_model, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter({"prompt": f"prompt {i}:"} for i in range(40)))
    args = tiny_config(tmp_path)
    found = []
    for is_tried in (False, True):
        torch.manual_seed(0)
        trainer = DAPOTrainer(tiny_model, letters, args, train_dataset=stream)
        if is_tried:
            assert trainer.trial().fits
        trainer.train()
        found.append((untimed(trainer.state.log_history), weights(trainer).tolist()))
    assert found[0] == found[1]


# ---- Out of memory ----


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def failing_above(limit, size_of, function):
    """A function that runs out of memory if what it is given is larger than a limit."""

    def limited(*args, **kwargs):
        if size_of(*args, **kwargs) > limit:
            out_of_memory()
        return function(*args, **kwargs)

    return limited


def phases_of(report):
    return {phase.name: phase for phase in report.phases}


def test_rounds_that_run_out_of_memory_are_halved_until_they_fit(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    # A round of 4 prompts x 4 completions does not fit, one of 2 prompts does.
    trainer._generate_single_turn = failing_above(8, lambda ids, *_: len(ids), trainer._generate_single_turn)
    report = trainer.trial()
    sampling = phases_of(report)["sampling"]
    assert (sampling.failed, sampling.value) == ([None], 2)
    assert not report.fits
    said = " ".join(str(report).split())
    assert (
        "The sampling ran out of memory with the run's settings. It fits with `dynamic_sampling_max_round_size: 2`"
        in said
    )
    assert phases_of(report)["update"].fits


def test_what_was_logged_before_memory_ran_out_is_not_taken_for_a_log_of_the_next_attempt(
    tiny_model, tmp_path, monkeypatch
):
    sizes, warnings = [], []

    def logging(prompts, completions, log_extra, **kwargs):
        log_extra("length", [len(completion) for completion in completions])
        sizes.append(0 if is_dummy(completions[0]) else len(completions))
        return out_of_memory() if sizes[-1] > 8 else letters(prompts, completions)

    monkeypatch.setattr(trainer_module.logger, "warning_once", warnings.append)
    trainer = make(tiny_model, tmp_path, reward=logging, eval_strategy="no", save_strategy="no", log_completions=True)
    assert phases_of(trainer.trial())["sampling"].value == 2
    assert not any("log_extra" in warning for warning in warnings)


def test_if_nothing_can_be_sampled_the_rest_is_not_tried_and_what_to_change_is_said(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer._generate_single_turn = out_of_memory
    report = trainer.trial()
    (sampling, evaluation, checkpoint) = report.phases
    assert (sampling.measured, sampling.failed) == (None, [None, 2, 1])
    assert evaluation.measured is None
    assert checkpoint.fits
    assert report.run_seconds is None
    assert "lower `max_completion_length` or `prompts_per_rollout`" in " ".join(str(report).split())


@pytest.mark.parametrize(
    ("settings", "limit", "setting", "failed", "fits_with"),
    [
        # Two micro-batches of 4 rows of 18 tokens: 72. Half of it are 36, of which 2 rows of 18 are all.
        ({}, 40, "max_tokens_per_microbatch", [None], 36),
        ({"max_tokens_per_microbatch": 128}, 40, "max_tokens_per_microbatch", [128, 64], 32),
        ({"max_tokens_per_microbatch": 128}, 20, "max_tokens_per_microbatch", [128, 64, 32], 18),
        ({"loss_type": "grpo", "use_dynamic_sampling": False}, 40, "per_device_train_batch_size", [4], 2),
    ],
    ids=str,
)
def test_micro_batches_that_run_out_of_memory_are_halved_until_they_fit(
    tiny_model, tmp_path, settings, limit, setting, failed, fits_with
):
    trainer = make(tiny_model, tmp_path, **settings)

    def padded_tokens(model, inputs):
        return (inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()) if trainer.model.training else 0

    trainer._compute_loss = failing_above(limit, padded_tokens, trainer._compute_loss)
    update = phases_of(trainer.trial())["update"]
    assert (update.setting, update.failed, update.value) == (setting, failed, fits_with)
    assert f"It fits with `{setting}: {fits_with}`: set that." in update.describe_problem()


def test_an_update_of_which_not_even_one_row_fits_says_so_and_evaluation_and_checkpoint_are_tried(
    tiny_model, tmp_path
):
    trainer = make(tiny_model, tmp_path, max_tokens_per_microbatch=64)
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda *args: out_of_memory() if trainer.model.training else compute_loss(*args)
    report = trainer.trial()
    found = phases_of(report)
    assert found["update"].failed == [64, 32, 18]
    assert found["update"].measured is None
    assert (found["evaluation"].fits, found["checkpoint"].fits) == (True, True)
    assert "still with `max_tokens_per_microbatch: 18`" in " ".join(str(report).split())
    assert all(weight.grad is None for weight in trainer.model.parameters())


@pytest.mark.parametrize("num_made", [0, 1, 2], ids=["nothing", "one half of a weight's", "one weight's"])
def test_an_optimizer_whose_state_does_not_fit_is_named_and_left_without_a_part_of_it(
    tiny_model, tmp_path, monkeypatch, num_made
):
    trainer, states, rooms = make(tiny_model, tmp_path), [], iter([True] * num_made)

    class Torch:
        """The module `torch`, as Adam sees it: two tensors of zeros are the state of a weight."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def zeros_like(self, *args, **kwargs):
            return torch.zeros_like(*args, **kwargs) if next(rooms, False) else out_of_memory()

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "torch", Torch())
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *args: states.append(len(trainer.optimizer.state)) or save(*args)
    report = trainer.trial()
    assert [phase.name for phase in report.phases] == ["sampling", "optimizer's state", "evaluation", "checkpoint"]
    assert [phase.fits for phase in report.phases] == [True, False, True, True]
    assert states == [0]
    assert report.run_seconds is None
    said = " ".join(str(report).split())
    assert "The optimizer's state ran out of memory with the run's settings. Train an adapter" in said


def test_an_evaluation_that_runs_out_of_memory_takes_half_of_the_batch(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)

    def rows_of_evaluation(ids, *_):
        return 0 if trainer.model.training else len(ids)

    trainer._generate_single_turn = failing_above(4, rows_of_evaluation, trainer._generate_single_turn)
    report = trainer.trial()
    evaluation = phases_of(report)["evaluation"]
    assert (evaluation.failed, evaluation.value) == ([8], 4)
    assert "`per_device_eval_batch_size: 4`" in evaluation.describe_problem()
    assert report.schedule.batches_per_evaluation == 6  # 24 completions in batches of 4
    assert trainer.args.per_device_eval_batch_size == 8


def test_a_checkpoint_that_runs_out_of_memory_is_tried_without_the_optimizer(tiny_model, tmp_path, monkeypatch):
    trainer = make(tiny_model, tmp_path)
    save = trainer._save_optimizer_and_scheduler
    trainer._save_optimizer_and_scheduler = lambda *args: out_of_memory() and save(*args)
    checkpoint = phases_of(trainer.trial())["checkpoint"]
    assert (checkpoint.failed, checkpoint.value) == ([False], True)
    assert "`save_only_model: false`. It fits with `save_only_model: true`" in checkpoint.describe_problem()
    assert os.listdir(tmp_path) == []


def test_all_processes_go_on_with_what_fits_on_the_one_that_runs_out_of_memory(tiny_model, tmp_path):
    result = launch("one_runs_out_of_memory", tiny_model, tmp_path, "update", num_processes=2)
    assert result.returncode == 0, result.stderr[-5000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"report-2-{rank}.json").read_text())
        assert report["update"] == [[64], 32]


@pytest.mark.parametrize(
    "loss", [{"loss_type": "grpo", "beta": 0.1}, {"top_entropy_quantile": 0.5}], ids=["TRL's loss", "top entropy"]
)
def test_no_process_waits_for_one_that_ran_out_of_memory_in_a_loss_that_reduces_over_all(tiny_model, tmp_path, loss):
    # 4 rows of 18 tokens are 72. The completions of the rollout are shorter, so that its rows fit.
    settings = {"max_tokens_per_microbatch": None, "per_device_train_batch_size": 4, **loss}
    job = "one_runs_out_of_memory", tiny_model, tmp_path, "update", 70, json.dumps(settings)
    result = launch(*job, num_processes=2, timeout=120)
    assert result.returncode == 0, result.stderr[-5000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"report-2-{rank}.json").read_text())
        assert report["update"] == [[4], 2]


def test_where_processes_wait_for_each_other_running_out_of_memory_ends_them_all_and_names_the_phase(
    tiny_model, tmp_path
):
    result = launch("one_runs_out_of_memory", tiny_model, tmp_path, "sampling", num_processes=2)
    assert result.returncode != 0
    assert "This happened in a trial, in the sampling." in result.stderr


# ---- What cannot be tried ----


@pytest.mark.parametrize(
    ("settings", "num_prompts"),
    [
        ({"max_steps": 0}, 24),
        ({"max_steps": -1, "num_train_epochs": 0}, 24),
        ({"use_dynamic_sampling": False, "loss_type": "grpo"}, 3),  # a rollout has 4 prompts
    ],
    ids=str,
)
def test_a_run_without_an_optimizer_step_is_refused(tiny_model, tmp_path, settings, num_prompts):
    trainer = make(tiny_model, tmp_path, **settings)
    trainer.train_dataset = prompts(num_prompts)
    before = dict(vars(trainer))
    with pytest.raises(SetupError, match="takes no optimizer step"):
        trainer.trial()
    assert vars(trainer) == before


def test_sharded_weights_are_refused(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(SetupError, match=r"sharded by FSDP\. Instead train two steps"):
        trainer.trial()


def test_another_error_says_in_which_phase_it_happened_and_leaves_the_trainer_as_it_was(tiny_model, tmp_path):
    trainer = make(tiny_model, tmp_path)
    before, moved = dict(vars(trainer)), weights(trainer)
    trainer.reward_funcs[0] = lambda completions, **kwargs: [float("nan")] * (len(completions) - 1)
    with pytest.raises(SetupError, match="before anything is generated"):
        trainer.trial()
    trainer.reward_funcs[0] = letters
    before = dict(vars(trainer))

    def break_down(*args):
        raise OSError("No space left on device")

    trainer._save_optimizer_and_scheduler = break_down
    with pytest.raises(OSError, match="No space left") as error:
        trainer.trial()
    assert error.value.__notes__ == ["This happened in a trial, in the checkpoint with `save_only_model: false`."]
    assert vars(trainer) == before | {"_save_optimizer_and_scheduler": break_down}
    assert torch.equal(weights(trainer), moved)


@pytest.mark.parametrize(
    ("settings", "is_short"), [({}, True), ({"dynamic_sampling_mode": "replace", "min_replace_ratio": 0.25}, False)]
)
def test_a_batch_is_short_only_if_no_copies_fill_it(tiny_model, tmp_path, settings, is_short):
    # With a limit of one batch, some of the four groups are dropped. With "replace", copies of one group are enough.
    settings = {"dynamic_sampling_max_gen_batches": 1.0, **settings}
    trainer = make(tiny_model, tmp_path, right, ScriptedTrainer, **settings)
    notes = " ".join(trainer.trial().notes)
    assert ("so the update of this rollout trained on fewer rows" in notes) is is_short
