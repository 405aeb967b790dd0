# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The update phase, held against TRL's own loss, against one row at a time, and against itself on two processes."""

import ast
import inspect
import textwrap
from dataclasses import replace

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOTrainer
from update_helpers import (
    CASES,
    OTHER_LOSSES,
    ROWS,
    SAMPLED,
    SPLITS,
    Row,
    ScriptedGRPO,
    ScriptedUpdate,
    apart,
    collate,
    fill,
    gradient,
    make_rows,
    mask,
    old,
    padded_tokens,
    reference_gradient,
    rows_of,
    run,
    tiny_experts,
    tiny_policy,
    two_processes,
)

from trl_dapo import DAPOTrainer
from trl_dapo.update.loss import LOSS_MEANS
from trl_dapo.update.phase import UpdatePhase
from trl_dapo.update.rows import ROLLOUT_KEYS


# ---- The exact token mean ----


@pytest.mark.parametrize("split", [*SPLITS, (16, 16)], ids=str)
def test_the_same_rows_give_the_same_gradient_for_every_split(split):
    trainer = run(ScriptedUpdate, ROWS, *split)
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    assert len(trainer.microbatches) == split[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_gradient_of_one_row_at_a_time(ranks, case):
    rows, _ = CASES[case]
    expected = reference_gradient(rows)
    for rank in ranks:
        assert apart(rank[case]["gradient"], expected) < 1e-6


@pytest.mark.parametrize("name", SAMPLED)
def test_two_processes_train_on_the_one_row_that_each_has_sampled(ranks, name):
    found = [rank[f"sampled, {name}"] for rank in ranks]
    rows = [Row(**row) for rank in found for row in rank["rows"]]
    assert len(rows) == 2
    assert rows[0].advantage == -rows[1].advantage != 0
    for rank in found:
        assert apart(rank["gradient"], reference_gradient(rows)) < 1e-6


@pytest.mark.parametrize("case", ["a single token", "one long row"])
def test_one_process_gives_the_gradient_of_one_row_at_a_time(case):
    rows, split = CASES[case]
    assert apart(run(ScriptedUpdate, rows, *split).gradients[0], reference_gradient(rows)) < 1e-6


def test_each_optimizer_step_divides_by_its_own_tokens():
    trainer = run(ScriptedUpdate, make_rows(32), num_microbatches=2, steps_per_generation=4, max_steps=2)
    tokens = [log["num_loss_tokens"] for log in trainer.state.log_history if "loss" in log]
    assert tokens[0] != tokens[1]
    assert sum(tokens) == sum(len(row.completion) for row in make_rows(32))
    # Weighted with their tokens, the two means are the mean over all of them.
    mean = (tokens[0] * trainer.gradients[0] + tokens[1] * trainer.gradients[1]) / sum(tokens)
    assert apart(mean, reference_gradient(make_rows(32))) < 1e-6


def test_the_shorter_last_step_of_an_epoch_divides_by_its_own_tokens():
    # 64 prompts x 2 completions are 16 micro-batches of 8 rows: with 3 to an optimizer step, the last has one.
    script = make_rows(128)
    trainer = run(ScriptedUpdate, script, 3, 2, per_device_train_batch_size=8, num_train_epochs=1, max_steps=-1)
    assert len(trainer.microbatches) == 16
    last = trainer.microbatches[-1]
    assert last["num_items_in_batch"] == last["completion_mask"].sum()
    # An optimizer step takes one and a half rollouts of 16 rows; the last takes the second half of the eighth.
    assert {
        tuple(ids[m.bool()].tolist()) for ids, m in zip(last["completion_ids"], last["completion_mask"], strict=True)
    } < {tuple(row.completion) for row in script[112:]}


def test_rows_carried_from_an_older_policy_keep_its_logps_and_the_others_are_on_policy():
    rows = old(ROWS, range(0, 16, 3))
    assert apart(run(ScriptedUpdate, rows, 4).gradients[0], reference_gradient(rows)) < 1e-6
    assert apart(reference_gradient(rows), reference_gradient(ROWS)) > 1e-2


# ---- What TRL's loss honours, ours honours ----

B, P, T = 5, 4, 9


def hostile_microbatch(masked=(3,)):
    """Rows of all kinds in one micro-batch: of one token and of `T`, clipped on either side, masked as a whole."""
    generator = torch.Generator().manual_seed(0)
    rows = make_rows(B, longest=T)
    rows[0] = replace(rows[0], completion=rows[0].completion[:1])
    rows[1] = replace(rows[1], completion=list(range(3, 3 + T)))
    inputs = collate(mask(rows, masked))
    shape = inputs["completion_ids"].shape
    inputs["old_per_token_logps"] = torch.randn(shape, generator=generator) - 4.5
    inputs["ref_per_token_logps"] = torch.randn(shape, generator=generator) - 4.5
    inputs["sampling_per_token_logps"] = torch.randn(shape, generator=generator) - 4.5
    inputs["sampling_per_token_logps"][1, 2] = torch.nan  # what vLLM could not score
    return inputs


OPTIONS = {
    "plain": {},
    "on-policy": {"drop": ["old_per_token_logps"]},
    "kl": {"beta": 0.1},
    "kl, bias-corrected": {"beta": 0.1, "use_bias_correction_kl": True},
    "sequence level": {"importance_sampling_level": "sequence"},
    "sequence level, kl, bias-corrected": {
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "use_bias_correction_kl": True,
    },
    "delta": {"delta": 1.5},
    "delta below the upper clip": {"delta": 1.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "off-policy mask, no sampling logps": {"off_policy_mask_threshold": 0.01, "drop": ["sampling_per_token_logps"]},
    "high entropy": {"top_entropy_quantile": 0.4},
    "entropy bonus": {"_entropy_bonus_enabled": True, "entropy_coef": 0.05},
    "entropy bonus, high entropy": {"_entropy_bonus_enabled": True, "entropy_coef": 0.05, "top_entropy_quantile": 0.4},
    "adaptive entropy, at rest": {
        "_entropy_bonus_enabled": True,
        "entropy_coef": 0.05,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
    },
    "adaptive entropy, at work": {
        "_entropy_bonus_enabled": True,
        "entropy_coef": 0.05,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "_last_world_entropy": 4.0,
    },
    "adaptive entropy, above target": {
        "_entropy_bonus_enabled": True,
        "entropy_coef": 0.05,
        "use_adaptive_entropy": True,
        "entropy_target": 0.1,
        "_last_world_entropy": 4.0,
    },
    "vllm, one ratio per token": {"use_vllm": True, "ratio": T},
    "vllm, one ratio per completion": {"use_vllm": True, "ratio": 1},
    "vllm, not corrected": {"use_vllm": True, "vllm_importance_sampling_correction": False},
    "tools": {"tools": True},
    "advantages per token": {"token_advantages": True},
    "sequence level, advantages per token": {"importance_sampling_level": "sequence", "token_advantages": True},
    "everything": {
        "beta": 0.1,
        "use_bias_correction_kl": True,
        "delta": 1.5,
        "off_policy_mask_threshold": 0.01,
        "top_entropy_quantile": 0.4,
        "_entropy_bonus_enabled": True,
        "entropy_coef": 0.05,
        "use_vllm": True,
        "ratio": T,
        "tools": True,
    },
}


def configured(trainer, inputs, options):
    """Put a line of `OPTIONS` in force, on the attributes that the trainer itself sets from its config."""
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
        loss = UpdatePhase._compute_loss(trainer, model, inputs)
        trainer._tally.add_microbatch(real_tokens=1, padded_tokens=1)
        trainer._publish(trainer._tally, "train")
        return loss

    found = loss_gradient_metrics(trainer, ours, inputs)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-6, abs=1e-9)
    assert apart(found[1], expected[1]) < 1e-6
    assert expected[2].keys() <= found[2].keys()
    for name, values in expected[2].items():
        assert found[2][name] == pytest.approx(values, rel=1e-5, abs=1e-7), name
    assert (trainer.entropy_coef, trainer._last_world_entropy) == (adapted[0], pytest.approx(adapted[1]))


def training(**settings):
    """A trainer in the middle of an optimizer step of one micro-batch."""
    trainer = ScriptedUpdate(gradient_accumulation_steps=1, **settings)
    trainer.current_gradient_accumulation_steps = 1  # TRL's own loss reads it
    trainer.model.train()
    return trainer


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_gradient_and_metrics_are_those_of_trl_on_the_same_rows(name):
    # At sequence level TRL counts masked completions as unclipped ones; ours counts what is in the loss.
    microbatch = hostile_microbatch(masked=[] if "sequence level" in name else [3])
    trainer = training()
    assert_agrees_with_trl(trainer, configured(trainer, microbatch, OPTIONS[name]))


def test_every_option_changes_the_gradient():
    """Else the grid would compare nothing: an option that never bites agrees with anything."""
    gradients = {}
    for name, options in OPTIONS.items():
        trainer = training()
        inputs = configured(trainer, hostile_microbatch(), options)
        gradients[name] = loss_gradient_metrics(trainer, trainer._compute_loss, inputs)[1]
    same_as_plain = {"plain", "adaptive entropy, at rest", "adaptive entropy, above target", "vllm, not corrected"}
    for name, found in gradients.items():
        distance = apart(found, gradients["plain"])
        assert distance == 0 if name in same_as_plain else distance > 1e-4, name


def test_the_dual_clip_is_off_by_default_and_bounds_bad_tokens_when_on():
    trainer = training()
    inputs = hostile_microbatch()
    inputs["old_per_token_logps"] -= 6.0  # the policy has moved far: ratios around e^6
    without = loss_gradient_metrics(trainer, trainer._compute_loss, inputs)
    trainer.args.delta = 10.0
    with_ = loss_gradient_metrics(trainer, trainer._compute_loss, inputs)
    assert with_[0] < without[0]
    assert with_[1].norm() < without[1].norm()


def test_evaluation_agrees_with_trl():
    trainer = ScriptedUpdate(gradient_accumulation_steps=4, steps_per_generation=8)
    trainer.model.eval()
    inputs = configured(trainer, hostile_microbatch(), {"entropy_coef": 0.05, "_entropy_bonus_enabled": True})
    with torch.no_grad():
        expected = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        metrics, trainer._metrics["eval"] = dict(trainer._metrics["eval"]), type(trainer._metrics["eval"])(list)
        found = trainer._compute_loss(trainer.model, inputs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, values in metrics.items():
        assert trainer._metrics["eval"][name] == pytest.approx(values, rel=1e-5), name


def test_the_load_balancing_loss_of_experts_agrees_with_trl():
    trainer = training(model=tiny_experts())
    assert trainer.aux_loss_enabled
    assert_agrees_with_trl(trainer, configured(trainer, hostile_microbatch(), {}))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
def test_any_other_loss_is_trls_to_the_bit(loss_type):
    settings = {"num_microbatches": 2, "steps_per_generation": 4, "max_steps": 2, "loss_type": loss_type}
    found, expected = (run(cls, make_rows(32), **settings) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert all(map(torch.equal, found.gradients, expected.gradients))


# ---- Rows that only fill a rollout ----

LOSSES = ["grpo", "sapo", "dr_grpo", "luspo", "bnpo", "cispo", "vespo", "dapo"]


@pytest.fixture(scope="module")
def saved_policy(tmp_path_factory):
    """Where the reference model of `policy_with_reference` is loaded from."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return str(folder)


def policy_with_reference(folder):
    model = tiny_policy()
    model.config._name_or_path = folder
    return model


@pytest.mark.parametrize("settings", [{}, {"beta": 0.1}, {"entropy_coef": 0.1}], ids=str)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_filler_rows_leave_the_gradient_that_the_others_have_alone(loss_type, settings, saved_policy):
    # A mean over the tokens of a micro-batch depends on the cut, unless all rows are of one length.
    has_one_length = loss_type == "bnpo" or "entropy_coef" in settings
    rows = [replace(row, ref=[-4.0] * 9 if has_one_length else [-4.0] * len(row.completion)) for row in ROWS]
    if has_one_length:
        rows = [replace(row, completion=(row.completion * 9)[:9]) for row in rows]
    filler = [0, 2, 3, 4, 5, 7, 8, 9, 11, 13, 14, 15]
    gradients = [
        run(cls, script, num, model=policy_with_reference(saved_policy), loss_type=loss_type, **settings).gradients[0]
        for cls, script, num in [
            (ScriptedUpdate, fill(rows, filler), 4),
            (ScriptedGRPO, [row for i, row in enumerate(rows) if i not in filler], 1),
        ]
    ]
    assert apart(*gradients) < 2e-6


@pytest.mark.parametrize("loss_type", LOSSES)
def test_completions_that_were_cut_off_count_as_rows_where_trl_counts_them(loss_type):
    # 3 rows are filler; of the 13 others, 5 were cut off and 8 have tokens.
    rows = mask(fill(ROWS, range(13, 16)), range(8, 13))
    found = run(ScriptedUpdate, rows, 1, loss_type=loss_type).gradients[0]
    expected = run(ScriptedGRPO, [*rows[:13], rows[8]], 1, loss_type=loss_type).gradients[0]  # 14: groups of two
    by_rows = {"grpo", "sapo", "dr_grpo", "luspo"}
    assert apart(found, expected * (14 / 13 if loss_type in by_rows else 1)) < 2e-6


def test_a_micro_batch_of_bnpo_weighs_as_many_rows_as_are_no_filler():
    rows = fill(ROWS, range(4, 16))
    trainer = run(ScriptedUpdate, rows, 4, loss_type="bnpo")
    expected = 0
    for microbatch in trainer.microbatches:
        live = [row for row in rows_of(microbatch) if row.completion]
        if live:
            expected = expected + len(live) / 4 * reference_gradient(live)  # the mean over these rows' tokens
    assert apart(trainer.gradients[0], expected) < 2e-6
    assert (
        sorted(sum(bool(row.completion) for row in rows_of(microbatch)) for microbatch in trainer.microbatches)
        != [1] * 4
    )


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_an_empty_rollout_does_not_dilute_another_one_of_the_same_step(loss_type):
    script = [*ROWS[:8], *fill(ROWS[8:], range(8))]
    found = run(ScriptedUpdate, script, 4, 2, loss_type=loss_type).gradients[0]
    expected = run(ScriptedGRPO, ROWS[:8], 2, 2, loss_type=loss_type).gradients[0]
    assert apart(found, expected) < 2e-6


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_two_processes_leave_filler_rows_out_of_any_loss(ranks, name):
    rows, _, settings = OTHER_LOSSES[name]
    expected = run(ScriptedGRPO, [row for row in rows if not row.is_filler], 1, **settings).gradients[0]
    for rank in ranks:
        assert apart(rank[name]["gradient"], expected) < 2e-6


def losses_of_trl():
    """The values that TRL's loss compares `loss_type` with."""
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
    "self.accelerator",
    "self.args.delta",
    "self.args.entropy_coef_delta",
    "self.args.entropy_coef_max",
    "self.args.entropy_coef_min",
    "self.args.entropy_target",
    "self.args.use_bias_correction_kl",
    "self._entropy_bonus_enabled",
    "self._get_per_token_logps_and_entropies",
    "self._last_world_entropy",
    "self._metrics",
    "self.aux_loss_enabled",
    "self.beta",
    "self.entropy_coef",
    "self.epsilon_high",
    "self.epsilon_low",
    "self.get_high_entropy_mask",
    "self.get_off_policy_mask",
    "self.importance_sampling_level",
    "self.loss_type",
    "self.model",
    "self.off_policy_mask_threshold",
    "self.router_aux_loss_coef",
    "self.top_entropy_quantile",
    "self.use_adaptive_entropy",
    "self.use_vllm",
    "self.vllm_importance_sampling_correction",
}
OF_OTHER_LOSSES = {
    "self.args.sapo_temperature_neg",
    "self.args.sapo_temperature_pos",
    "self.args.vespo_k_neg",
    "self.args.vespo_k_pos",
    "self.args.vespo_lambda_neg",
    "self.args.vespo_lambda_pos",
    "self.get_gamma_weights",
    "self.max_completion_length",
}
# Ours counts the optimizer step's own tokens and micro-batches, and keeps the entropy sums with its other metrics.
REPLACED = {
    "self.args.steps_per_generation",
    "self._entropy_window_stats",
    "self.current_gradient_accumulation_steps",
}
INPUTS = {
    "advantages",
    "completion_ids",
    "completion_mask",
    "image_grid_thw",
    "image_position_ids",
    "image_sizes",
    "importance_sampling_ratio",
    "mm_token_type_ids",
    "num_images",
    "num_items_in_batch",
    "num_tiles",
    "old_per_token_logps",
    "pixel_attention_mask",
    "pixel_values",
    "prompt_ids",
    "prompt_mask",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "spatial_shapes",
    "token_type_ids",
    "tool_mask",
}


def fields_read(method):
    """`self.x` and `self.args.x` that a method names, and the keys of `inputs` it reads."""
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
    """The keys of the dict `output` that a method builds."""
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
    assert set(ROLLOUT_KEYS) == INPUTS | {"is_filler", "age"}  # what DAPOTrainer adds


def test_ours_reads_every_field_that_it_claims_to_honour():
    ours = set()
    for name in ("_compute_loss", "_objective", "_publish", "_adapt_entropy_coef"):
        source = inspect.getsource(getattr(UpdatePhase, name)).replace(" args.", " self.args.")
        ours |= {field for field in HONOURED if field in source}
    assert ours == HONOURED


# ---- The window ----

TIMED = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_iterations": 2}, {"beta": 0.1}, {"mask_truncated_completions": True}],
    ids=str,
)
def test_sampling_included_the_run_is_trls_step_for_step(settings, tmp_path):
    tiny_policy().save_pretrained(tmp_path)  # the reference model is loaded from disk
    runs = []
    for cls in (ScriptedUpdate, ScriptedGRPO):
        model = tiny_policy()
        model.config._name_or_path = str(tmp_path)
        trainer = cls(model=model, max_steps=3, learning_rate=0.1, max_completion_length=16, **settings)
        trainer.train()
        runs.append(trainer)
    found, expected = runs
    for ours, trls in zip(found.state.log_history, expected.state.log_history, strict=True):
        # TRL averages metrics over micro-batches, however few tokens one has; all else is the same number.
        for name in trls.keys() - {*TIMED, "entropy", "kl"} - {key for key in trls if key.startswith("clip_ratio")}:
            assert ours[name] == pytest.approx(trls[name], rel=1e-4, abs=1e-6), name
    for step, (ours, trls) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert apart(ours, trls) < 1e-5, step


def completions_of(microbatches):
    return {
        tuple(ids[mask_.bool()].tolist())
        for microbatch in microbatches
        for ids, mask_ in zip(microbatch["completion_ids"], microbatch["completion_mask"], strict=True)
    }


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_each_optimizer_step_takes_the_rows_that_trl_would_take(num_iterations):
    settings = {"num_microbatches": 2, "steps_per_generation": 4, "num_iterations": num_iterations}
    steps = range(2 * num_iterations)
    script = make_rows(32)
    found, expected = (
        run(cls, script, per_device_train_batch_size=8, max_steps=len(steps), **settings)
        for cls in (ScriptedUpdate, ScriptedGRPO)
    )
    for step in steps:
        window = slice(2 * step, 2 * step + 2)
        assert completions_of(found.microbatches[window]) == completions_of(expected.microbatches[window])


def test_rollouts_made_ahead_of_time_are_of_the_prompts_that_trl_would_take():
    settings = {"num_microbatches": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    found, expected = (run(cls, make_rows(48), **settings).asked for cls in (ScriptedUpdate, ScriptedGRPO))
    assert len(found) == 6
    assert found == expected


def test_a_micro_batch_is_trimmed_to_its_own_longest_row_and_the_longest_row_goes_alone():
    rows, split = CASES["one long row"]
    trainer = run(ScriptedUpdate, rows, *split)
    first = trainer.microbatches[0]
    assert first["completion_ids"].tolist() == [list(range(3, 93))]
    assert first["prompt_ids"].tolist() == [[9] * 5]
    for microbatch in trainer.microbatches:
        assert microbatch["prompt_mask"][:, 0].any()
        assert microbatch["completion_mask"][:, -1].any()


def test_padding_share_is_logged():
    # Two rows to a micro-batch, of 1 + 1 and of 1 + 4 prompt and completion tokens: 4 + 10 tokens, no padding.
    one, four = Row([5], [6], 1.0), Row([5], [6, 7, 8, 9], -1.0)
    assert run(ScriptedUpdate, [one, four, one, four], 2).state.log_history[0]["padding_share"] == 0.0
    # All in one micro-batch: 4 x 5 = 20 padded tokens, 6 of them padding.
    trainer = run(ScriptedUpdate, [one, four, one, four], 1)
    assert trainer.state.log_history[0]["padding_share"] == pytest.approx(6 / 20)


@pytest.mark.parametrize("seed", range(4))
def test_no_micro_batch_holds_more_padded_tokens_than_trls_largest(seed):
    script = make_rows(64, seed, longest=200)
    found, expected = (run(cls, script, 4, 8, max_steps=2) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert max(map(padded_tokens, found.microbatches)) <= max(map(padded_tokens, expected.microbatches))
    assert sum(map(padded_tokens, found.microbatches)) < 0.6 * sum(map(padded_tokens, expected.microbatches))


def test_columns_honour_pad_to_multiple_of():
    trainer = run(ScriptedUpdate, [replace(row, completion=row.completion[:7]) for row in ROWS], 4)
    assert any(microbatch["completion_ids"].size(1) % 4 for microbatch in trainer.microbatches)
    rows = make_rows(16, longest=20)
    # The rollout itself is padded to a multiple by TRL.
    rows[0] = Row(list(range(3, 15)), list(range(3, 23)), 1.0)
    trainer = run(ScriptedUpdate, rows, 4, pad_to_multiple_of=4)
    for microbatch in trainer.microbatches:
        assert microbatch["prompt_ids"].size(1) % 4 == microbatch["completion_ids"].size(1) % 4 == 0


@pytest.mark.parametrize(("num_microbatches", "budget"), [(1, None), (8, None), (8, 60)])
def test_a_step_takes_two_collectives_whatever_the_number_of_micro_batches(num_microbatches, budget, monkeypatch):
    trainer = ScriptedUpdate(
        ROWS,
        per_device_train_batch_size=16 // num_microbatches,
        gradient_accumulation_steps=num_microbatches,
        max_tokens_per_microbatch=budget,
        logging_strategy="no",
    )
    calls = []

    def counted(collective):
        return lambda *args, **kwargs: calls.append(collective.__name__) or collective(*args, **kwargs)

    for name in ("gather", "reduce", "gather_for_metrics"):
        monkeypatch.setattr(trainer.accelerator, name, counted(getattr(trainer.accelerator, name)))
    trainer.train()
    assert calls == ["gather", "gather"]


def test_at_each_micro_batch_both_ranks_have_about_the_same_cost(ranks):
    case = "long rows on one rank"
    lengths = [len(row.prompt) + len(row.completion) for row in CASES[case][0]]
    assert sum(lengths[:8]) > 2 * sum(lengths[8:])  # as they were sampled
    costs = [rank[case]["costs"] for rank in ranks]
    for ours, theirs in zip(*costs, strict=True):
        assert abs(ours - theirs) < max(lengths) / 2
    assert sum(costs[0]) == pytest.approx(sum(costs[1]), rel=0.1)


def test_both_ranks_log_what_one_process_logs(ranks):
    (alone, *_) = run(ScriptedUpdate, ROWS, 4).state.log_history
    for name in ("loss", "entropy", "num_loss_tokens", "clip_ratio/high_mean", "grad_norm"):
        assert ranks[0]["split (4, 4)"]["logs"][name] == pytest.approx(alone[name], rel=1e-5, abs=1e-7), name


# ---- Nothing to learn ----


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_step_without_a_token_moves_neither_weights_nor_optimizer_state(loss_type):
    script = [*ROWS, *fill(ROWS, range(16)), *ROWS]
    states = []

    class Spy(ScriptedUpdate):
        def training_step(self, *args):
            moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
            states.append([*(parameter.detach().clone() for parameter in self.model.parameters()), *moments])
            return super().training_step(*args)

    adamw = {"optim": "adamw_torch", "learning_rate": 0.1, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    trainer = run(Spy, script, 2, max_steps=3, entropy_coef=0.1, loss_type=loss_type, **adamw)
    first, _, second, _, third, _ = states
    assert all(map(torch.equal, second, third))
    assert not all(map(torch.equal, first, second))
    assert not trainer.gradients[1].any()
    assert trainer.gradients[2].any()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[1]["loss"] == 0.0
    if loss_type == "dapo":
        assert [log["frac_empty_steps"] for log in logs] == [0.0, 1.0, 0.0]
        assert [log["num_loss_tokens"] > 0 for log in logs] == [True, False, True]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_step_without_a_token_moves_no_router_either(loss_type):
    script, settings = fill(ROWS, range(16)), {"entropy_coef": 0.1, "loss_type": loss_type}
    trainer = run(ScriptedUpdate, script, 2, model=tiny_experts(), **settings)
    assert trainer.aux_loss_enabled
    assert not trainer.gradients[0].any()


def test_a_micro_batch_without_a_token_gives_loss_zero_and_the_others_the_right_gradient():
    rows = mask(ROWS, range(12))
    trainer = run(ScriptedUpdate, rows, 8)
    assert any(not microbatch["completion_mask"].any() for microbatch in trainer.microbatches)
    assert apart(trainer.gradients[0], reference_gradient(rows)) < 1e-6


def test_metrics_leave_completions_without_a_token_out():
    rows = mask(ROWS, range(8, 16))
    found, expected = run(ScriptedUpdate, rows, 4), run(ScriptedUpdate, rows[:8], 4)
    for name in ("loss", "entropy", "num_loss_tokens", "clip_ratio/low_min", "clip_ratio/high_max"):
        assert found.state.log_history[0][name] == pytest.approx(expected.state.log_history[0][name], rel=1e-5), name


def with_ratios(rows, ratios):
    """`rows` with old log-probabilities that give these ratios to the policy's own."""
    trainer, rollout = training(), collate(rows)
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
    attention = torch.ones_like(ids)
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, rollout["completion_ids"].size(1)
        )[0]
    return [
        replace(row, old=(logps[i, : len(row.completion)] - torch.tensor(ratios[i]).log()).tolist())
        for i, row in enumerate(rows)
    ]


def test_clip_ratios_are_shares_of_the_optimizer_steps_tokens():
    rows = [Row([5, 6], [7] * n, advantage) for n, advantage in [(6, 1.0), (2, -1.0), (1, -1.0), (1, 1.0)]]
    rows = with_ratios(rows, [[2.0, 2.0, 2.0, 1.0, 1.0, 1.0], [0.5, 1.0], [20.0], [1.0]])
    log = run(ScriptedUpdate, rows, 2, delta=10.0).state.log_history[0]
    # 10 tokens: three good ones above 1.28, one bad one below 0.8, one bad one above 10.
    assert log["clip_ratio/high_mean"] == pytest.approx(0.3)
    assert log["clip_ratio/low_mean"] == pytest.approx(0.1)
    assert log["clip_ratio/region_mean"] == pytest.approx(0.4)
    assert log["clip_ratio/dual_mean"] == pytest.approx(0.1)
    assert log["clip_ratio/high_max"] == pytest.approx(3 / 6)  # of the first completion
    assert log["clip_ratio/low_min"] == 0.0


def test_the_least_clipped_completion_is_one_that_has_tokens():
    rows = with_ratios([Row([5], [7, 8], -1.0)] * 4, [[0.5, 1.0], [0.5, 0.5], [0.5, 1.0], [1.0, 1.0]])
    log = run(ScriptedUpdate, mask(rows, [3]), 2).state.log_history[0]
    assert log["clip_ratio/low_min"] == pytest.approx(1 / 2)
    assert log["clip_ratio/low_mean"] == pytest.approx(4 / 6)


# ---- What cannot be cut again ----


def test_images_stay_with_their_rows():
    rows = [replace(row, image=float(i)) for i, row in enumerate(ROWS)]
    trainer = run(ScriptedUpdate, rows, 4)
    expected = [(row.prompt + row.completion, [row.image] * 2) for row in rows]
    assert sorted(trainer.images) == sorted(expected)
    assert apart(trainer.gradients[0], reference_gradient(ROWS)) < 1e-6
    assert [len(microbatch["prompt_ids"]) for microbatch in trainer.microbatches] == [4] * 4
    assert len({microbatch["completion_ids"].size(1) for microbatch in trainer.microbatches}) > 1


def test_a_quantile_over_the_micro_batch_keeps_trls_micro_batches():
    settings = {"num_microbatches": 4, "top_entropy_quantile": 0.3}
    found, expected = (run(cls, ROWS, **settings) for cls in (ScriptedUpdate, ScriptedGRPO))
    assert apart(found.gradients[0], expected.gradients[0]) < 1e-5
    for ours, trls in zip(found.microbatches, expected.microbatches, strict=True):
        assert completions_of([ours]) == completions_of([trls])
        assert padded_tokens(ours) <= padded_tokens(trls)


def test_an_unknown_rollout_key_is_refused_by_name():
    class Audio(ScriptedUpdate):
        def _generate_and_score_completions(self, inputs):
            return {**super()._generate_and_score_completions(inputs), "audio_values": torch.zeros(len(inputs))}

    with pytest.raises(ValueError, match="audio_values"):
        run(Audio, ROWS, 4)
    assert run(Audio, ROWS, 4, loss_type="grpo").gradients  # which leaves padding where it is


# ---- Log-probabilities without gradient ----


def no_grad_logps(trainer, compute, rollout, **options):
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
    attention = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
    seen = []
    hook = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with torch.no_grad():
        logps, entropies, _ = compute(
            trainer, trainer.model, ids, attention, rollout["completion_ids"].size(1), batch_size=4, **options
        )
    hook.remove()
    return logps, entropies, seen


def test_old_logps_are_trls_for_fewer_padded_tokens_and_as_many_passes():
    trainer, rollout = ScriptedUpdate(), collate(mask(make_rows(30, longest=200), [3, 4]))
    options = {"compute_entropy": True}
    found, expected = (
        no_grad_logps(trainer, cls._get_per_token_logps_and_entropies, rollout, **options)
        for cls in (UpdatePhase, GRPOTrainer)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert len(found[2]) == len(expected[2]) == 8
    assert sum(found[2]) < 0.5 * sum(expected[2])
    assert max(found[2]) <= max(expected[2])


def test_a_pass_without_gradient_is_trimmed_to_its_own_longest_prompt_and_completion():
    long, short = Row([5] * 12, [6] * 50, 1.0), Row([5], [6, 7], 1.0)
    rollout = collate([long, short] * 4)
    _, _, seen = no_grad_logps(ScriptedUpdate(), UpdatePhase._get_per_token_logps_and_entropies, rollout)
    assert seen == [4 * (12 + 50), 4 * (1 + 2)]


def test_the_reference_pass_of_a_window_that_spans_rollouts_is_on_the_right_rows(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    model = tiny_policy()
    model.config._name_or_path = str(tmp_path)
    trainer = ScriptedUpdate(
        model=model, beta=0.1, gradient_accumulation_steps=3, steps_per_generation=2, max_completion_length=16
    )
    trainer.train()
    # The reference is the policy itself before its first step, and old log-probabilities are its own.
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(0.0, abs=1e-6)
    assert log["clip_ratio/region_mean"] == 0.0


# ---- Models that depend on their padding ----

VOCABULARY = {"vocab_size": 103, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.1, **VOCABULARY}
TINY_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.1, "n_positions": 128, **VOCABULARY}
# In force where the columns exceed 20: `ROWS` cut in two have 49 and 25, cut in four 49, 39, 26 and 19.
LONG_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 20}
DEPEND_ON_PADDING = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**TINY_GPT2)),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(attn_pdrop=0.0, **TINY_GPT2)),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=128,
            initializer_range=0.1,
            **VOCABULARY,
        )
    ),
    "dynamic rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            intermediate_size=64,
            max_position_embeddings=20,
            rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
            **TINY,
        )
    ),
    "longrope": lambda: Phi3ForCausalLM(
        Phi3Config(
            intermediate_size=64,
            num_key_value_heads=2,
            max_position_embeddings=128,
            original_max_position_embeddings=20,
            rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **LONG_FACTORS},
            **TINY,
        )
    ),
    "scaled by position": lambda: Ministral3ForCausalLM(
        Ministral3Config(
            intermediate_size=64,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 4.0,
                "original_max_position_embeddings": 20,
            },
            **TINY,
        )
    ),
}


class WithOldLogps(ScriptedUpdate):
    """Takes old log-probabilities when the rollout is made, as TRL does where it lasts for several steps."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        ids, attention = (
            torch.cat([rollout[f"prompt_{kind}"], rollout[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
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
    assert "keep the widths" in message


@pytest.mark.parametrize(
    "model",
    [
        tiny_policy,
        lambda: OPTForCausalLM(  # absolute positions, counted without padding
            OPTConfig(
                hidden_size=32,
                word_embed_proj_dim=32,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=128,
                init_std=0.1,
                **VOCABULARY,
            )
        ),
        lambda: tiny_policy().bfloat16(),
    ],
    ids=["qwen3", "opt", "qwen3 in bfloat16"],
)
def test_any_other_model_has_its_padding_trimmed_without_a_word(model, caplog):
    trainer = run(ScriptedUpdate, ROWS, 4, model=model())
    assert len({microbatch["completion_ids"].size(1) for microbatch in trainer.microbatches}) > 1
    assert "padding" not in caplog.text


def test_another_loss_keeps_trls_widths_without_a_word(caplog):
    trainer = run(WithOldLogps, ROWS, 4, model=DEPEND_ON_PADDING["gpt2"](), loss_type="grpo", disable_dropout=True)
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0.0
    assert "padding" not in caplog.text


def test_a_surplus_cannot_be_carried_for_a_model_that_feels_its_padding():
    settings = {"model": DEPEND_ON_PADDING["gpt2"](), "dynamic_sampling_surplus": "carry"}
    with pytest.raises(ValueError, match=r"'carry'.*padding.*'discard'"):
        run(ScriptedUpdate, ROWS, 4, **settings)


def test_whether_a_model_feels_its_padding_is_found_out_without_a_draw_and_in_the_mode_it_is_in():
    trainer = ScriptedUpdate(model=DEPEND_ON_PADDING["gpt2"]())  # with dropout
    assert trainer.model.training
    before = torch.get_rng_state()
    assert trainer._depends_on_padding
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.model.training


def test_the_pass_without_gradient_of_an_evaluation_keeps_the_width_of_the_pass_with_loss():
    trainer = ScriptedUpdate()
    trainer.model.eval()
    rollout = collate(make_rows(8, longest=60))
    _, _, seen = no_grad_logps(trainer, UpdatePhase._get_per_token_logps_and_entropies, rollout)
    width = rollout["prompt_ids"].size(1) + rollout["completion_ids"].size(1)
    assert seen == [4 * width] * 2


# ---- Checkpoints and evaluation ----


@pytest.mark.parametrize("budget", [None, 80])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_a_checkpoint_inside_a_rollout_goes_on_to_the_bit(num_iterations, budget, tmp_path):
    update = {"num_iterations": num_iterations, "max_tokens_per_microbatch": budget}
    settings = {"num_microbatches": 2, "steps_per_generation": 4, "max_steps": 4, "per_device_train_batch_size": 8}
    script = make_rows(64)
    whole = run(ScriptedUpdate, script, **settings, **update)

    class Saves(ScriptedUpdate):
        def training_step(self, *args):
            if len(self.gradients) == 1 and not (tmp_path / "state.pt").exists():
                torch.save(self.update_state_dict(), tmp_path / "state.pt")
            return super().training_step(*args)

    run(Saves, script, **settings, **update)
    steps_left = 2 * num_iterations - 1  # of the rollout
    loop = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": steps_left}
    resumed = ScriptedUpdate([], **loop, **update)
    resumed.load_update_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.train()
    assert len(resumed.gradients) == steps_left
    assert all(map(torch.equal, resumed.gradients, whole.gradients[1:]))


def test_a_checkpoint_between_rollouts_holds_no_rows():
    trainer = run(ScriptedUpdate, ROWS, 4)
    assert trainer.update_state_dict() == {"step": 0, "generate_every": 4, "rollout": None}


def test_a_rollout_of_another_shape_is_not_resumed():
    state = {"step": 2, "generate_every": 4, "rollout": [collate(ROWS)] * 4}
    with pytest.raises(ValueError, match="= 4 micro-batches, but this run has 8"):
        ScriptedUpdate(gradient_accumulation_steps=8).load_update_state_dict(state)


def test_evaluation_is_trls():
    found, expected = (
        cls(per_device_eval_batch_size=4, max_completion_length=16).evaluate()
        for cls in (ScriptedUpdate, ScriptedGRPO)
    )
    shared = {name for name in expected if not name.endswith(("time", "per_second"))}
    assert {"eval_loss", "eval_entropy", "eval_reward"} <= shared
    for name in shared:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


class EvaluatesAfterEachMicroBatch(TrainerCallback):
    def __init__(self):
        self.logged = []

    def on_substep_end(self, args, state, control, **kwargs):
        random_state = torch.get_rng_state()
        self.logged.append(self.trainer.evaluate())
        torch.set_rng_state(random_state)


@pytest.mark.parametrize("budget", [None, 60])
def test_an_evaluation_between_two_micro_batches_counts_its_own_tokens_and_none_of_the_steps(budget):
    evaluates, runs = EvaluatesAfterEachMicroBatch(), []
    settings = {"max_steps": 2, "max_completion_length": 16, "max_tokens_per_microbatch": budget}
    for callbacks in ([], [evaluates]):
        trainer = evaluates.trainer = ScriptedUpdate(make_rows(32), **settings)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        runs.append([{name: value for name, value in log.items() if name not in TIMED} for log in logs])
    assert runs[0] == runs[1]
    assert len(evaluates.logged) == 2 * 3  # between four micro-batches lie three gaps
    for log in evaluates.logged:
        # 4 prompts x 2 completions in one batch.
        assert log["eval_num_loss_tokens"] == 8 * log["eval_completions/mean_length"]


def test_the_trainer_has_this_update_phase():
    assert DAPOTrainer._compute_loss is UpdatePhase._compute_loss
    assert DAPOTrainer._prepare_inputs is UpdatePhase._prepare_inputs
