# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance sampling weights for vLLM's completions come from the pass that trains, as those of TRL come from a pass
before.
"""

import math
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from helpers import prompts, right, tiny_config, untimed
from scripted_server import stand_ins
from update_helpers import Recorder, apart

from trl_dapo import DAPOTrainer
from trl_dapo.settings.sampling_defaults import PAPER
from trl_dapo.update.loss import importance_weight
from trl_dapo.update.phase import UpdatePhaseMixin
from trl_dapo.update.step_metrics import StepMetrics, metrics_of_tokens


# ---- The weight, by hand ----

# The policy gives three tokens 0.5, 1 and 4 times the engine's probability. The fourth is not in the loss.
LOG_RATIO = torch.tensor([[0.5, 1.0, 4.0, 9.0]]).log()
MASK = torch.tensor([[1, 1, 1, 0]])
WEIGHTS = {
    ("token_truncate", None, 2.0): [[0.5, 1.0, 2.0, 1.0]],
    ("token_truncate", 0.8, 2.0): [[0.8, 1.0, 2.0, 1.0]],
    ("token_mask", None, 2.0): [[0.5, 1.0, 0.0, 1.0]],
    ("token_mask", 0.8, None): [[0.0, 1.0, 4.0, 1.0]],
    ("sequence_truncate", None, 1.5): [[1.5]],  # 0.5 x 1 x 4 = 2
    ("sequence_truncate", None, 3.0): [[2.0]],
    ("sequence_mask", None, 1.5): [[0.0]],
    ("sequence_mask", 1.0, 3.0): [[2.0]],
}


@pytest.mark.parametrize("how", WEIGHTS, ids=str)
def test_the_ratio_is_bounded_by_the_token_or_by_the_completion(how):
    assert importance_weight(LOG_RATIO, MASK, *how).tolist() == [[pytest.approx(value) for value in WEIGHTS[how][0]]]


def test_a_token_of_which_the_engine_says_nothing_weighs_1():
    log_ratio = torch.tensor([[math.log(0.5), math.nan]])
    assert importance_weight(log_ratio, torch.ones(1, 2), "token_mask", None, 2.0).tolist() == [[0.5, 1.0]]
    assert importance_weight(log_ratio, torch.ones(1, 2), "sequence_mask", None, 2.0).tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("weight", "expected"),
    # The engine gives no log-probability for a fourth token. The ratios are 0.5, 1 and 4, and their product for the
    # completion.
    [(torch.ones(1, 4), (0.5, 5.5 / 3, 4.0)), (torch.ones(1, 1), (2.0, 2.0, 2.0))],
    ids=["by the token", "by the completion"],
)
def test_the_ratio_is_logged_before_its_bound_too(weight, expected):
    step_metrics = StepMetrics()
    step_metrics.add_tokens(MASK, torch.zeros(1, 4), (torch.zeros(1, 4),) * 3)
    step_metrics.add_ratio(torch.ones(1, 4), LOG_RATIO.masked_fill(MASK == 0, torch.nan), weight)
    metrics = metrics_of_tokens(step_metrics.reduce(Accelerator(cpu=True)))
    found = [metrics[f"sampling/raw_importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
    assert found == [pytest.approx(value) for value in expected]


# ---- Compared with TRL's own pass ----

WEIGHT = "sampling/importance_sampling_ratio"


def weighed_by(mode, low, high):
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return {"vllm_importance_sampling_mode": mode, **bounds}


CARRY = {"dynamic_sampling_surplus": "carry", "batch_multiplier": 1.75}
SETTINGS = {
    "by the token, cut": weighed_by("token_truncate", 0.7, 1.5),
    "by the completion, or not at all": weighed_by("sequence_mask", None, 6.0),
    "without dynamic sampling": {"use_dynamic_sampling": False},
    "carried, by the completion": {**CARRY, **weighed_by("sequence_mask", None, 6.0)},
    "one rollout ahead": {**CARRY, "rollouts_ahead": 1},
    "a reference": {**CARRY, "beta": 0.1},
    "budget of tokens": {"max_tokens_per_microbatch": 40},
    # Without carried groups, the minimum of the first rollout is over both steps, unlike TRL's mean of the two minima.
    "two rollouts per step": {"gradient_accumulation_steps": 8, "steps_per_generation": 4, **PAPER},
}


class Watched(DAPOTrainer):
    """Count passes, and record the gradient of each optimizer step."""

    def __init__(self, *args, **kwargs):
        self.gradients, self.passes = [], []
        super().__init__(*args, callbacks=[Recorder(self)], **kwargs)


def stray(client):
    """
    Make the engine's log-probabilities differ from the policy's, per token, and be missing for some. The first of each
    four completions is cut off.
    """
    generate = client.generate

    def generate_strangely(*args, **kwargs):
        answer = generate(*args, **kwargs)
        for row, (ids, logprobs) in enumerate(zip(answer["completion_ids"], answer["logprobs"], strict=True)):
            if row % 4 == 0:
                del ids[-1], logprobs[-1]
            for i, token in enumerate(ids):
                logprobs[i] = [None if token % 11 == 0 else logprobs[i][0] + 0.8 * math.sin(token + i)]
        return answer

    client.generate = generate_strangely


def train(model, folder, **settings):
    """Two steps with an engine that differs. Passes are recorded as (with gradient, model, rows)."""
    defaults = {"use_vllm": True, "vllm_mode": "server", "max_steps": 2, "num_generations": 4, "learning_rate": 1e-2}
    args = tiny_config(folder, **{**defaults, "shuffle_dataset": False, "logging_steps": 1, **settings})
    with stand_ins(model) as clients:
        trainer = Watched(model, right, args, train_dataset=prompts(64), eval_dataset=prompts(4))
        stray(clients[-1])

        def note(model, args, kwargs):
            trainer.passes.append((torch.is_grad_enabled(), len(kwargs["input_ids"])))

        trainer.model.register_forward_pre_hook(note, with_kwargs=True)
        trainer.train()
    return trainer


def passes_without_gradient(trainer):
    return [num_rows for has_gradient, num_rows in trainer.passes if not has_gradient]


@pytest.fixture
def keep_the_pass(monkeypatch):
    return partial(monkeypatch.setattr, UpdatePhaseMixin, "_trains_in_one_step", False)


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_gradient_and_metrics_are_those_of_a_pass_before(name, tiny_model, tmp_path, keep_the_pass):
    found = train(tiny_model, tmp_path / "found", **SETTINGS[name])
    keep_the_pass()
    expected = train(tiny_model, tmp_path / "expected", **SETTINGS[name])
    assert max(map(apart, found.gradients, expected.gradients)) < 1e-6
    for log, log_before in zip(untimed(found.state.log_history), untimed(expected.state.log_history), strict=True):
        assert log == {key: pytest.approx(value, rel=1e-5, abs=1e-7) for key, value in log_before.items()}
    # Otherwise the bounds compared would not apply to any token.
    least, mean, most = (found.state.log_history[0][f"{WEIGHT}/{which}"] for which in ("min", "mean", "max"))
    assert least < mean < most
    assert len(passes_without_gradient(found)) < len(passes_without_gradient(expected))


def test_rows_that_fill_a_rollout_are_in_no_metric_of_the_engine(tiny_model, tmp_path, keep_the_pass):
    one_batch = {"dynamic_sampling_max_gen_batches": 1, "batch_multiplier": 1.0, "max_steps": 1, **PAPER}
    # 2 of 4 prompts train: in a batch of 4, which the others fill, and in a batch of 2.
    filled = train(tiny_model, tmp_path / "filled", **one_batch)
    one_round_of_4 = {"dynamic_sampling_max_gen_batches": 2, "batch_multiplier": 2.0}
    full = train(tiny_model, tmp_path / "full", **one_batch | one_round_of_4, gradient_accumulation_steps=2)
    keep_the_pass()
    before = train(tiny_model, tmp_path / "before", **one_batch)
    assert apart(filled.gradients[0], before.gradients[0]) < 1e-6
    logs = [{k: x for k, x in t.state.log_history[0].items() if k.startswith("sampling/")} for t in (filled, full)]
    assert len(logs[0]) == 8
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "num_passes"),
    [
        ({}, 0),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 4),  # only the second of two steps needs it
        ({"num_iterations": 2}, 4),
        ({"loss_type": "grpo"}, 8),  # TRL computes the weights, from a pass over each of two rollouts
    ],
    ids=["one step per rollout", "two steps", "two iterations", "another loss"],
)
def test_rows_pass_once_where_one_step_trains_on_a_rollout(settings, num_passes, tiny_model, tmp_path):
    """Micro-batches of 4 rows. A rollout has 4 of these, and two optimizer steps."""
    trainer = train(tiny_model, tmp_path, **PAPER, **settings)  # carried rows have passes of their own
    assert passes_without_gradient(trainer) == [4] * num_passes
    assert f"{WEIGHT}/mean" in trainer.state.log_history[0]
