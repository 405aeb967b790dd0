# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes without gradient are trimmed too, and for a model that depends on its padding, TRL's widths are kept."""

import math
from dataclasses import replace
from functools import cached_property

import pytest
import torch
import transformers
from accelerate import Accelerator
from trl import GRPOTrainer
from update_helpers import (
    ROWS,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    collate,
    make_rows,
    mask,
    padded_tokens,
    passes_without_gradient,
    policy_with_reference,
    run,
    tiny_policy,
    whole_rows,
)

from trl_dapo.update.padding import _exact
from trl_dapo.update.phase import UpdatePhaseMixin


def test_old_logps_are_trls_for_fewer_padded_tokens_and_as_many_passes():
    trainer, rollout = ScriptedUpdate(), collate(mask(make_rows(30, longest=200), [3, 4]))
    found, expected = (
        passes_without_gradient(trainer, rollout, cls._get_per_token_logps_and_entropies)
        for cls in (UpdatePhaseMixin, GRPOTrainer)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert len(found[2]) == len(expected[2]) == 8
    assert sum(map(math.prod, found[2])) < 0.5 * sum(map(math.prod, expected[2]))
    assert max(map(math.prod, found[2])) <= max(map(math.prod, expected[2]))


def test_a_pass_without_gradient_is_trimmed_to_its_own_longest_prompt_and_completion():
    long, short = Row([5] * 12, [6] * 50, 1.0), Row([5], [6, 7], 1.0)
    assert passes_without_gradient(ScriptedUpdate(), collate([long, short] * 4))[2] == [(4, 12 + 50), (4, 1 + 2)]


def test_the_reference_pass_of_a_window_that_spans_rollouts_is_on_the_right_rows(tmp_path):
    spans = {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_completion_length": 16}
    trainer = ScriptedUpdate(model=policy_with_reference(tmp_path), beta=0.1, **spans)
    trainer.train()
    # The reference model is the policy before its first step, and old log-probabilities are its own.
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(0.0, abs=1e-6)
    assert log["clip_ratio/region_mean"] == 0.0


VOCABULARY = {"vocab_size": 103, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.1, **VOCABULARY}
WIDE = {"intermediate_size": 64, **TINY}
STATE = {"num_key_value_heads": 2, **WIDE}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.1, "n_positions": 128, **VOCABULARY}
HEADS_OF_MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16, "state_size": 8}
# The scaling begins above 20 columns. `ROWS` divided in two have 49 and 25, divided in four 49, 39, 26 and 19.
DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
BY_POSITION = {"rope_type": "default", "llama_4_scaling_beta": 4.0, "original_max_position_embeddings": 20}


def make(family, **config):
    """A model of one of the families of transformers."""
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config))


def gpt2(**config):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **config))


def lfm2(has_bias):
    """A model with convolutions and one layer of attention. A bias begins at zero, but changes in training."""
    model = make("Lfm2", full_attn_idxs=[1], conv_bias=has_bias, block_auto_adjust_ff_dim=False, **STATE)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1)
    return model


def recurrent_gemma():
    return make("RecurrentGemma", lru_width=32, head_dim=16, block_types=["recurrent", "attention"], **STATE)


def ministral3():
    return make("Ministral3", head_dim=16, rope_parameters={"rope_theta": 10000.0, **BY_POSITION}, **STATE)


DEPEND_ON_PADDING = {
    "recurrent_gemma": recurrent_gemma,
    "lfm2 with a bias": lambda: lfm2(has_bias=True),
    "gpt2": gpt2,
    "dynamic rope": lambda: make("Llama", max_position_embeddings=20, rope_parameters=DYNAMIC, **WIDE),
    "scaled by position": ministral3,
}


class WithOldLogps(ScriptedUpdate):
    """Computes old log-probabilities when the rollout is made, as TRL does if it trains for several steps."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        ids, attention = whole_rows(rollout)
        num_columns = rollout["completion_ids"].size(1)
        with torch.no_grad():
            logps, *_ = self._get_per_token_logps_and_entropies(self.model, ids, attention, num_columns, batch_size=8)
        return {**rollout, "old_per_token_logps": logps}


@pytest.mark.parametrize("name", DEPEND_ON_PADDING)
def test_a_model_that_feels_its_padding_keeps_trls_widths_and_is_on_policy(name, caplog):
    torch.manual_seed(0)
    settings = {"disable_dropout": True, "epsilon": 1e-3, "epsilon_high": 1e-3}
    trainer = run(WithOldLogps, ROWS, 4, model=DEPEND_ON_PADDING[name](), **settings)
    log = trainer.state.log_history[0]
    assert log["clip_ratio/region_mean"] == 0.0
    rollout = collate(ROWS)
    for microbatch in trainer.microbatches:
        assert microbatch["prompt_ids"].shape == (4, rollout["prompt_ids"].size(1))
        assert microbatch["completion_ids"].shape == (4, rollout["completion_ids"].size(1))
    num_tokens = sum(len(row.prompt) + len(row.completion) for row in ROWS)
    assert log["padding_share"] == pytest.approx(1 - num_tokens / sum(map(padded_tokens, trainer.microbatches)))
    (message,) = [record.message for record in caplog.records if "padding" in record.message]
    assert "keep the width" in message


def mamba2():
    return make("Mamba2", hidden_size=32, num_hidden_layers=2, initializer_range=0.1, **HEADS_OF_MAMBA2, **VOCABULARY)


# Their layers keep a state or convolve, and ignore padding.
LEAVE_PADDING_OUT = {"lfm2": lambda: lfm2(has_bias=False), "mamba2": mamba2}


@pytest.mark.parametrize("name", LEAVE_PADDING_OUT)
def test_a_model_with_a_state_that_leaves_padding_out_is_trimmed_and_has_trls_gradient(name, caplog):
    gradients = []
    for cls in (ScriptedUpdate, ScriptedGRPO):
        torch.manual_seed(0)
        trainer = run(cls, ROWS, 4, model=LEAVE_PADDING_OUT[name](), disable_dropout=True)
        gradients.append(trainer.gradients[0])
        is_trimmed = len({microbatch["completion_ids"].size(1) for microbatch in trainer.microbatches}) > 1
        assert is_trimmed is (cls is ScriptedUpdate)
    assert apart(*gradients) < 1e-4
    assert "padding" not in caplog.text


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["held in 16 bits", "computed in 16 bits too"])
@pytest.mark.parametrize(("has_bias", "why_padding_matters"), [(False, False), (True, True)])
def test_in_16_bits_a_model_is_asked_in_float32_and_handed_back_as_it_was(settings, has_bias, why_padding_matters):
    torch.manual_seed(0)
    model = lfm2(has_bias).bfloat16()
    before = {name: (weight.data_ptr(), weight.dtype) for name, weight in model.named_parameters()}
    trainer = ScriptedUpdate(model=model, **settings)
    assert (trainer._why_padding_matters is not None) is why_padding_matters
    assert {name: (weight.data_ptr(), weight.dtype) for name, weight in model.named_parameters()} == before
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    assert trainer.accelerator.autocast_handler is None


def test_attention_that_takes_16_bits_alone_is_set_aside_while_a_model_is_asked(monkeypatch):
    model, asked = lfm2(has_bias=False), []
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    monkeypatch.setattr(model, "set_attn_implementation", asked.append)
    with _exact(model, Accelerator()):
        assert asked == ["eager"]
    assert asked == ["eager", "flash_attention_2"]


def test_a_linear_layer_in_4_bits_computes_in_float32_while_a_model_is_asked():
    model = lfm2(has_bias=False)
    linear, seen = model.model.layers[0].feed_forward.w1, []
    linear.compute_dtype = torch.bfloat16  # like bitsandbytes' layers
    linear.register_forward_hook(lambda *_: seen.append(linear.compute_dtype))
    ScriptedUpdate(model=model)
    assert seen == [torch.float32] * 4
    assert linear.compute_dtype == torch.bfloat16


def test_a_model_of_attention_alone_is_not_run_when_its_trainer_is_made():
    passes = []
    for model in (tiny_policy(), lfm2(has_bias=False), tiny_policy()):
        if passes:  # a custom convolution, with plain attention
            model.model.layers[0].convolution = torch.nn.Conv1d(4, 4, kernel_size=2)
        model.register_forward_pre_hook(lambda *_: passes.append(1))
        ScriptedUpdate(model=model)
    assert len(passes) == 2 * 4  # passes of the others: without padding, padded on each side, and with noise


def opt():
    """A model with absolute positions, counted without padding."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 128}
    return make("OPT", num_hidden_layers=2, num_attention_heads=2, init_std=0.1, **sizes, **VOCABULARY)


OTHERS = {"qwen3": tiny_policy, "opt": opt, "qwen3 in bfloat16": lambda: tiny_policy().bfloat16()}


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_any_other_model_has_its_padding_trimmed_without_a_word(model, caplog):
    trainer = run(ScriptedUpdate, ROWS, 4, model=model())
    assert len({microbatch["completion_ids"].size(1) for microbatch in trainer.microbatches}) > 1
    assert "padding" not in caplog.text


def test_another_loss_keeps_trls_widths_without_a_word(caplog):
    trainer = run(WithOldLogps, ROWS, 4, model=gpt2(), loss_type="grpo", disable_dropout=True)
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0.0
    assert "padding" not in caplog.text


def test_a_surplus_cannot_be_carried_for_a_model_that_feels_its_padding():
    with pytest.raises(ValueError, match=r"'carry'.*padding.*'discard'"):
        ScriptedUpdate(model=gpt2(), dynamic_sampling_surplus="carry")


def test_whether_a_model_feels_its_padding_is_found_out_without_a_draw_and_in_the_mode_it_is_in():
    trainer = ScriptedUpdate(model=gpt2())  # with dropout
    assert trainer.model.training
    before = torch.get_rng_state()
    assert trainer._why_padding_matters is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.model.training


def test_the_pass_without_gradient_of_an_evaluation_keeps_the_width_of_the_pass_with_loss():
    trainer = ScriptedUpdate()
    trainer.model.eval()
    rollout = collate(make_rows(8, longest=60))
    width = rollout["prompt_ids"].size(1) + rollout["completion_ids"].size(1)
    assert passes_without_gradient(trainer, rollout)[2] == [(4, width)] * 2


def test_on_cuda_a_micro_batch_has_a_column_more_where_padding_would_get_nan_gradients():
    class OnCuda(ScriptedUpdate):
        @cached_property
        def _packer(self):
            return replace(UpdatePhaseMixin._packer.fget(self), on_cuda=True)

    script = [Row([5, 6, 7, 8], [9] * 60, 1.0), Row([5], [9] * 30, -1.0)]  # 4 + 60 = 64 columns
    found, expected = run(OnCuda, script, 1), run(ScriptedUpdate, script, 1)
    assert [padded_tokens(trainer.microbatches[0]) for trainer in (found, expected)] == [2 * 65, 2 * 64]
    assert apart(found.gradients[0], expected.gradients[0]) < 1e-6
