# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything that TRL's loss supports is supported by ours: gradients, metrics, and the fields that its code reads."""

import ast
import inspect
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer
from update_helpers import (
    LOSSES,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    collate,
    gradient,
    make_rows,
    mask,
    run,
    tiny_experts,
    training,
)

from trl_dapo.update.loss import LOSS_MEANS
from trl_dapo.update.objective import adapted_entropy_coef
from trl_dapo.update.phase import UpdatePhaseMixin
from trl_dapo.update.rollout_tensors import ROLLOUT_KEYS


B, P, T = 5, 4, 9


def hostile_microbatch(masked=(3,)):
    """Rows of all kinds in one micro-batch: of one token and of `T`, clipped on either side, completely masked."""
    generator, rows = torch.Generator().manual_seed(0), make_rows(B, longest=T)
    rows[0] = replace(rows[0], completion=rows[0].completion[:1])
    rows[1] = replace(rows[1], completion=list(range(3, 3 + T)))
    inputs = collate(mask(rows, masked))
    shape = inputs["completion_ids"].shape
    inputs["old_per_token_logps"] = torch.randn(shape, generator=generator) - 4.5
    inputs["ref_per_token_logps"] = torch.randn(shape, generator=generator) - 4.5
    inputs["sampling_per_token_logps"] = torch.randn(shape, generator=generator) - 4.5
    inputs["sampling_per_token_logps"][1, 2] = torch.nan  # tokens that vLLM could not score
    return inputs


SEQUENCE = {"importance_sampling_level": "sequence"}
BONUS = {"_entropy_bonus_enabled": True, "entropy_coef": 0.05}
ADAPTIVE = {**BONUS, "use_adaptive_entropy": True}
OPTIONS = {
    "plain": {},
    "on-policy": {"drop": ["old_per_token_logps"]},
    "kl": {"beta": 0.1},
    "kl, bias-corrected": {"beta": 0.1, "use_bias_correction_kl": True},
    "sequence level": SEQUENCE,
    "sequence level, kl, bias-corrected": {**SEQUENCE, "beta": 0.1, "use_bias_correction_kl": True},
    "delta": {"delta": 1.5},
    "delta below the upper clip": {"delta": 1.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "off-policy mask, no sampling logps": {"off_policy_mask_threshold": 0.01, "drop": ["sampling_per_token_logps"]},
    "high entropy": {"top_entropy_quantile": 0.4},
    "entropy bonus": BONUS,
    "entropy bonus, high entropy": {**BONUS, "top_entropy_quantile": 0.4},
    "adaptive entropy, at rest": {**ADAPTIVE, "entropy_target": 5.0},
    "adaptive entropy, at work": {**ADAPTIVE, "entropy_target": 5.0, "_last_world_entropy": 4.0},
    "adaptive entropy, above target": {**ADAPTIVE, "entropy_target": 0.1, "_last_world_entropy": 4.0},
    "vllm, one ratio per token": {"use_vllm": True, "ratio": T},
    "vllm, one ratio per completion": {"use_vllm": True, "ratio": 1},
    "vllm, not corrected": {"use_vllm": True, "vllm_importance_sampling_correction": False},
    "tools": {"tools": True},
    "advantages per token": {"token_advantages": True},
    "sequence level, advantages per token": {**SEQUENCE, "token_advantages": True},
    "everything": {
        "beta": 0.1,
        "use_bias_correction_kl": True,
        "delta": 1.5,
        "off_policy_mask_threshold": 0.01,
        "top_entropy_quantile": 0.4,
        **BONUS,
        "use_vllm": True,
        "ratio": T,
        "tools": True,
    },
}


def configured(trainer, inputs, options):
    """Apply a line of `OPTIONS` to the attributes that the trainer sets from its config."""
    generator = torch.Generator().manual_seed(1)
    for name, value in options.items():
        if name == "drop":
            inputs = {key: held for key, held in inputs.items() if key not in value}
        elif name == "ratio":
            inputs["importance_sampling_ratio"] = torch.rand(B, value, generator=generator) * 2
        elif name == "tools":
            tool_mask = torch.ones(B, T, dtype=torch.long)
            tool_mask[:, 1:3] = 0
            inputs["tool_mask"] = tool_mask
        elif name == "token_advantages":
            inputs["advantages"] = torch.randn(B, T, generator=generator)
        else:
            setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
    loss_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return {**inputs, "num_items_in_batch": loss_mask.sum()}


def loss_gradient_metrics(trainer, compute_loss, inputs):
    trainer.model.zero_grad()
    loss = compute_loss(trainer.model, inputs)
    if loss.requires_grad:
        loss.backward()
    metrics, trainer._metrics["train"] = trainer._metrics["train"], type(trainer._metrics["train"])(list)
    return loss.detach(), gradient(trainer.model), metrics


def assert_agrees_with_trl(trainer, inputs):
    controlled = trainer.entropy_coef, trainer._last_world_entropy
    expected = loss_gradient_metrics(trainer, lambda *args: GRPOTrainer._compute_loss(trainer, *args), inputs)
    adapted = trainer.entropy_coef, trainer._last_world_entropy
    trainer.entropy_coef, trainer._last_world_entropy = controlled

    def ours(model, inputs):
        loss = UpdatePhaseMixin._compute_loss(trainer, model, inputs)
        trainer._step_metrics.add_microbatch(real_tokens=1, padded_tokens=1)
        trainer._finish_step_metrics(trainer._step_metrics, "train")
        return loss

    found = loss_gradient_metrics(trainer, ours, inputs)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-6, abs=1e-9)
    assert apart(found[1], expected[1]) < 1e-6
    assert expected[2].keys() <= found[2].keys()
    for name, values in expected[2].items():
        assert found[2][name] == pytest.approx(values, rel=1e-5, abs=1e-7), name
    assert (trainer.entropy_coef, trainer._last_world_entropy) == (adapted[0], pytest.approx(adapted[1]))


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_gradient_and_metrics_are_those_of_trl_on_the_same_rows(name):
    # At sequence level TRL counts masked completions as not clipped. Ours only counts those in the loss.
    microbatch = hostile_microbatch(masked=[] if "sequence level" in name else [3])
    trainer = training()
    assert_agrees_with_trl(trainer, configured(trainer, microbatch, OPTIONS[name]))


def test_every_option_changes_the_gradient():
    """Otherwise the grid would compare nothing: an option without effect agrees with anything."""
    gradients = {}
    for name, options in OPTIONS.items():
        trainer = training()
        inputs = configured(trainer, hostile_microbatch(), options)
        gradients[name] = loss_gradient_metrics(trainer, trainer._compute_loss, inputs)[1]
    same_as_plain = {"plain", "adaptive entropy, at rest", "adaptive entropy, above target", "vllm, not corrected"}
    for name, found in gradients.items():
        distance = apart(found, gradients["plain"])
        assert distance == 0 if name in same_as_plain else distance > 1e-4, name


def test_the_load_balancing_loss_of_experts_agrees_with_trl():
    trainer = training(model=tiny_experts())
    assert trainer.aux_loss_enabled
    assert_agrees_with_trl(trainer, configured(trainer, hostile_microbatch(), {}))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
def test_any_other_loss_is_trls_to_the_bit(loss_type):
    settings = {"num_microbatches": 2, "steps_per_generation": 4, "max_steps": 2, "loss_type": loss_type}
    found, expected = (run(cls, make_rows(32), **settings) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert all(map(torch.equal, found.gradients, expected.gradients))


def losses_of_trl():
    """Return the values with which TRL's loss compares `loss_type`."""
    tree, found = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss))), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            value = ast.literal_eval(node.comparators[0])
            found |= {value} if isinstance(value, str) else set(value)
    return found


def test_it_is_known_of_every_loss_of_trl_what_it_is_a_mean_over():
    assert losses_of_trl() == set(LOSSES) == set(LOSS_MEANS)


# Fields of `self` and `self.args` that TRL's loss reads. Those of other losses than dapo are in the second set.
HONOURED = {
    *("self.accelerator", "self.model", "self._metrics", "self.use_vllm", "self.loss_type", "self.beta"),
    *("self.epsilon_low", "self.epsilon_high", "self.args.delta", "self.importance_sampling_level"),
    *("self.args.entropy_coef_delta", "self.args.entropy_coef_max", "self.args.entropy_coef_min"),
    *("self.args.entropy_target", "self.entropy_coef", "self.use_adaptive_entropy", "self._last_world_entropy"),
    *("self._entropy_bonus_enabled", "self.top_entropy_quantile", "self.get_high_entropy_mask"),
    *("self.off_policy_mask_threshold", "self.get_off_policy_mask", "self.args.use_bias_correction_kl"),
    *("self.aux_loss_enabled", "self.router_aux_loss_coef", "self._get_per_token_logps_and_entropies"),
    "self.vllm_importance_sampling_correction",
}
OF_OTHER_LOSSES = {
    *("self.args.sapo_temperature_neg", "self.args.sapo_temperature_pos", "self.max_completion_length"),
    *("self.args.vespo_k_neg", "self.args.vespo_k_pos", "self.get_gamma_weights"),
    *("self.args.vespo_lambda_neg", "self.args.vespo_lambda_pos"),
}
# Ours uses the tokens and micro-batches of the optimizer step, and keeps the entropy sums with its other metrics.
REPLACED = {
    *("self.args.steps_per_generation", "self.current_gradient_accumulation_steps", "self._entropy_window_stats")
}
INPUTS = {
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *("num_items_in_batch", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    *("importance_sampling_ratio", "token_type_ids", "mm_token_type_ids", "num_images", "num_tiles"),
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_position_ids", "image_sizes"),
    "spatial_shapes",
}


def fields_read(method):
    """Return the `self.x` and `self.args.x` that a method reads, and the keys of `inputs`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    fields, keys = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "self.args"):
            fields.add(ast.unparse(node))
        subscript = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "inputs" and node.slice
        call = isinstance(node, ast.Call) and ast.unparse(node.func) == "inputs.get" and node.args[0]
        contains = isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "inputs" and node.left
        if key := subscript or call or contains:
            keys.add(ast.literal_eval(key))
    return fields - {"self.args"}, keys


def test_trls_loss_reads_nothing_that_ours_does_not_know():
    fields, keys = fields_read(GRPOTrainer._compute_loss)
    assert fields == HONOURED | OF_OTHER_LOSSES | REPLACED
    assert keys == INPUTS


def keys_written(method):
    """Return the keys of the dict `output` that a method builds."""
    tree, keys = ast.parse(textwrap.dedent(inspect.getsource(method))), set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "output"
            and isinstance(node.value, ast.Dict)
        ):
            keys |= {ast.literal_eval(key) for key in node.value.keys}
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "output":
            keys.add(ast.literal_eval(node.slice))
    return keys


def test_the_layout_of_every_key_of_a_rollout_is_known():
    assert keys_written(GRPOTrainer._generate_and_score_completions) == INPUTS
    assert set(ROLLOUT_KEYS) == INPUTS | {"is_filler", "staleness", "group"}  # added by DAPOTrainer


def test_ours_reads_every_field_that_it_claims_to_honour():
    names = "_compute_loss", "_objective", "_finish_step_metrics", "_append_metrics"
    methods = [getattr(UpdatePhaseMixin, name) for name in names]
    source = "".join(map(inspect.getsource, (*methods, adapted_entropy_coef))).replace(" args.", " self.args.")
    assert {field for field in HONOURED if field in source} == HONOURED


@pytest.mark.parametrize(("entropy", "coef"), [(0.4, 0.03), (0.5, 0.03), (0.6, 0.01)])
def test_the_entropy_coefficient_rises_at_the_target_as_below_it(entropy, coef):
    args = SimpleNamespace(entropy_target=0.5, entropy_coef_delta=0.01, entropy_coef_min=0.0, entropy_coef_max=1.0)
    assert adapted_entropy_coef(0.02, entropy, args) == pytest.approx(coef)
