# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans by hand, and of every recipe."""

import json
import math
import re

import pytest
from plan_helpers import GIB, NINE_MACHINES, ONE_GPU

from trl_dapo.plan import plan
from trl_dapo.plan.rollout_cost import Lengths, sampling_seconds, training_flops
from trl_dapo.plan.text import describe


NUM_WEIGHTS = 1_720_574_976  # of Qwen3-1.7B, which `ONE_GPU` trains


def test_a_plan_for_one_gpu_by_hand(on_one_gpu):
    planned = on_one_gpu(lengths=(2000, 8192), acceptance=0.4)
    num = NUM_WEIGHTS
    assert [planned.training.memory[part] / num for part in ("weights", "gradients", "optimizer")] == [4, 4, 8]
    # 16,384 tokens x 2,048 wide in float32 for 28 layers; the last norm and the output layer's input, 12 bytes; the
    # mask of rows of 10,240, 3 bytes.
    assert planned.training.memory["activations"] == 16_384 * (2_048 * (4 * 28 + 12) + 3 * 10_240)
    # vLLM has half of the GPU; weights, moments and 1.5 GiB are there too.
    assert planned.peak_sampling == 0.5 * 81_559 * 2**20 + 12 * num + 1.5 * GIB
    assert planned.peak_updating == sum(planned.training.memory.values()) + GIB
    # Filling a batch of 64 takes 160 groups on average, and a few for when they are not enough. GRPO's budget is 64.
    assert 160 <= planned.sampling.num_groups <= 1.1 * 160
    limited = on_one_gpu({"dynamic_sampling_max_gen_batches": 1}, lengths=(2000, 8192), acceptance=0.4)
    assert limited.sampling.num_groups == pytest.approx(64)
    assert planned.training.checkpoint == 12 * num
    assert planned.batches.num_rollouts == 300
    # 256 rows a step of 2,256 tokens, a tenth of what fits is padding.
    assert planned.batches.num_microbatches == math.ceil(256 * 2_256 / 0.9 / 16_384)
    # Forward, backward (twice as much), and forward again; without checkpointing three of these.
    flops = training_flops(planned.shape, 1_024, planned.lengths, 256, 4, causal=False)
    assert planned.seconds["update"] == pytest.approx(flops / 0.9 / (0.31 * 989e12))
    assert limited.seconds["update"] == pytest.approx(0.4 * planned.seconds["update"])
    assert planned.seconds["logps"] == pytest.approx(planned.seconds["update"] / 4)
    # Weights are copied beside themselves.
    assert planned.seconds["sync"] == pytest.approx(4 * num / (0.7 * 3.35e12))
    # Where vLLM does not sleep, its share stays.
    awake = on_one_gpu({"vllm_enable_sleep_mode": False}, lengths=(2000, 8192))
    assert awake.peak_updating == sum(planned.training.memory.values()) + 0.5 * 81_559 * 2**20


def test_a_plan_for_fsdp2_by_hand(write):
    fields = {**ONE_GPU, "model_name_or_path": "Qwen/Qwen2.5-Math-7B", "vllm_tensor_parallel_size": 2}
    path = write("8 GPUs of 80 GB", fields)
    planned, num = plan(path, accelerate_config="fsdp2"), 7_615_616_512
    # Shards in float32, and whole gradients in bfloat16 between micro-batches.
    assert planned.training.memory["weights"] == 4 * num / 8
    assert planned.training.memory["gradients"] == pytest.approx(4 * num / 8 + 2 * num)
    # Layers pass on bfloat16.
    assert planned.training.memory["activations"] == 16_384 * (3_584 * (2 * 28 + 8) + 3 * 10_240)
    assert planned.training.checkpoint == 16 * num
    # Two GPUs an engine, which has half of the weights on each and as many sequences as both have rows.
    assert (planned.sampling.engine.num_engines, planned.sampling.engine.max_num_seqs) == (4, 2 * 128)
    assert planned.sampling.vllm_memory["weights"] == num
    reduced = ["--accelerator_config", "{gradient_accumulation_kwargs: {sync_each_batch: true}}"]
    assert plan(path, accelerate_config="fsdp2", overrides=reduced).training.memory["gradients"] == 4 * num / 8
    # On a slow link gathering shards takes longer than computing: twice for an update, and gradients once a step.
    rows = {"gpus": "8xL40S-48GB", "overrides": ["--max_tokens_per_microbatch", "null"], "lengths": (10, 8192)}
    slow = plan(path, accelerate_config="fsdp2", **rows)
    passes = 4 * 16 * 16 / 8  # of one row
    assert slow.seconds["update"] == pytest.approx((passes * 4 * num + 4 * 2 * num) / (0.7 * 32e9))


def test_two_iterations_take_an_update_twice(on_one_gpu):
    once, twice = on_one_gpu(), on_one_gpu({"num_iterations": 2})
    assert twice.seconds["update"] == pytest.approx(2 * once.seconds["update"])
    assert twice.seconds["logps"] == pytest.approx(once.seconds["logps"])
    assert twice.batches.num_rollouts == once.batches.num_rollouts / 2


ADAPTER = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
NUM_LORA = 28 * 16 * (2_048 + 2_048 + 2_048 + 1_024)  # queries and values


def test_an_adapter_travels_alone_and_vllms_base_sleeps_in_the_machines_memory(on_one_gpu):
    planned, num_lora = on_one_gpu(ADAPTER), NUM_LORA
    assert planned.training.memory["weights"] == 2 * NUM_WEIGHTS + 4 * num_lora
    assert planned.training.memory["optimizer"] == 8 * num_lora
    assert planned.training.checkpoint == 12 * num_lora
    assert planned.seconds["sync"] == pytest.approx(4 * num_lora / (0.7 * 450e9) + 2 * 2 * NUM_WEIGHTS / 25e9)
    assert on_one_gpu({**ADAPTER, "beta": 0.1}).training.memory["reference"] == 0


def test_copies_of_modules_train_as_they_are_loaded_and_all_weights_travel(write, on_one_gpu):
    saving = {**ADAPTER, "lora_modules_to_save": ["lm_head"]}
    # vLLM serves no copy beside its base: the adapter is merged.
    merged = on_one_gpu(saving).seconds["sync"]
    assert merged == pytest.approx(2 * NUM_WEIGHTS / (0.7 * 3.35e12))
    assert on_one_gpu({**ADAPTER, "use_dora": True}).seconds["sync"] == pytest.approx(merged)
    # FSDP2 trains copies in float32, DeepSpeed and TRL beside quantized weights in bfloat16.
    path = write("8 GPUs of 80 GB", {**ONE_GPU, **saving})
    weights = [plan(path, accelerate_config=kind).training.weights for kind in ("fsdp2", "zero3")]
    assert [(each.trained, each.saved) for each in weights] == [(4, 4), (2, 2)]


@pytest.mark.parametrize("fields", [{"lora_modules_to_save": ["lm_head"]}, {"use_peft": False}], ids=str)
def test_an_adapter_that_does_not_travel_is_refused_as_the_run_refuses_it(on_one_gpu, fields):
    adapter = {**ADAPTER, "vllm_lora_sync": "adapter"}
    assert on_one_gpu(adapter).fits
    said = "`vllm_lora_sync='adapter'` and a quantized base need an adapter that vLLM serves"
    with pytest.raises(ValueError, match=re.escape(said)):
        on_one_gpu({**adapter, **fields})


def test_the_kl_term_has_a_model_of_its_own(on_one_gpu):
    planned, without = on_one_gpu({"beta": 0.1}), on_one_gpu()
    assert planned.training.memory["reference"] == 4 * NUM_WEIGHTS
    assert planned.peak_sampling - without.peak_sampling == pytest.approx(4 * NUM_WEIGHTS)
    assert planned.seconds["logps"] == pytest.approx(2 * without.seconds["logps"])


def test_an_evaluation_is_sampled_and_its_loss_computed_on_padded_rows(on_one_gpu):
    evaluates = {"eval_strategy": "steps", "eval_steps": 8, "num_generations_eval": 2}
    evaluates |= {"eval_dataset_name": "me/AIME-2024", "per_device_eval_batch_size": 4}
    planned = on_one_gpu(evaluates)
    assert (planned.num_problems, planned.evaluation_every) == (30, 2)
    sampled, _ = sampling_seconds(planned.shape, planned.sampling.engine, 60, planned.lengths, 256, 2)
    padded = training_flops(planned.shape, 60, Lengths(8_110.08, 8_192), 256, 2, causal=False) / 0.9 / (0.31 * 989e12)
    assert planned.evaluation_seconds == pytest.approx(sampled + padded)
    assert planned.seconds_with_evaluation == planned.rollout_seconds + planned.evaluation_seconds / 2


def test_prompts_are_as_long_as_those_of_the_file(on_one_gpu, tmp_path):
    rows = [{"problem": "x" * length, "answer": "1"} for length in (40, 80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_name": str(tmp_path / "rows.jsonl"), "prompt_style": "as_is"}
    recipe = on_one_gpu(data).recipe
    # Four characters a token, and a chat template of 32.
    assert (recipe.prompt, recipe.longest_prompt) == (60 / 4 + 32, 80 / 4 + 32)
    assert on_one_gpu({**data, "prompt_style": None}).recipe.longest_prompt == recipe.longest_prompt
    elsewhere = on_one_gpu({"dataset_name": "nowhere.jsonl"}).recipe
    assert (elsewhere.prompt, elsewhere.longest_prompt) == (256, 2_048)


A_SERVER = "64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM"


def test_a_server_waits_and_is_waited_for_unless_a_rollout_is_ahead(write):
    turns = plan(write(A_SERVER, NINE_MACHINES))
    parts = turns.seconds
    assert turns.rollout_seconds == pytest.approx(sum(parts.values()))
    trains = parts["update"] + parts["logps"]
    idle = (64 * (turns.rollout_seconds - trains) + 8 * (turns.rollout_seconds - parts["sampling"])) / 72
    assert turns.idle_share == pytest.approx(idle / turns.rollout_seconds)
    # All bfloat16 weights through one port of 50 GB/s, after gathering them through a machine's eight.
    assert parts["sync"] == pytest.approx(2 * 32_763_876_352 / 0.7 * (1 / 50e9 + 1 / 400e9))
    ahead = plan(write(A_SERVER, {**NINE_MACHINES, "rollouts_ahead": 1, "dynamic_sampling_surplus": "carry"}))
    longer = max(ahead.seconds["sampling"], ahead.seconds["update"] + ahead.seconds["logps"])
    assert ahead.rollout_seconds == pytest.approx(longer + ahead.seconds["sync"])


def test_rounds_of_one_size_and_of_no_refill_are_counted(on_one_gpu):
    def rounds(**fields):
        discarded = {"dynamic_sampling_surplus": "discard"}
        found = on_one_gpu(discarded | fields, acceptance=0.25).sampling.rounds
        return [(often, size) for often, size in found if often > 1e-6]

    assert rounds(batch_multiplier=3) == [(2, 3 * 64)]  # 4 batches are needed
    assert rounds(batch_multiplier=1, dynamic_sampling_max_gen_batches=3) == [(3, 64)]
    assert rounds(batch_multiplier=3, dynamic_sampling_surplus="carry") == [(pytest.approx(4 / 3), 192)]
    assert rounds(use_dynamic_sampling=False) == rounds(dynamic_sampling_mode="mask") == [(1, 64)]
    assert rounds(dynamic_sampling_mode="replace") == rounds()[:1]  # it asks for all, and needs a third
    assert rounds(use_vllm=False) == rounds(use_vllm=False, dynamic_sampling_max_gen_batches=5) == [(4, 64)]
    assert rounds(use_vllm=False, dynamic_sampling_max_gen_batches=2.5) == [(3, 160 / 3)]
    assert rounds(dynamic_sampling_max_gen_batches=2.5) == [(1, 160)]
    # 64 / 0.25 = 256 groups in rounds of 48.
    assert rounds(dynamic_sampling_max_round_size=48) == [(6, 48)]
    assert rounds(dynamic_sampling_max_round_size=48, batch_multiplier=3) == [(6, 48)]


def test_where_little_is_accepted_rounds_end_before_the_rollout_is_full(on_one_gpu):
    planned = on_one_gpu(acceptance=0.01)
    # 6,400 groups are needed. A rollout samples ten batches of 64 at most, in one round: of these 6.4 are accepted.
    assert planned.sampling.rounds == [(1, 640)]
    assert planned.sampling.num_trained == pytest.approx(16 * 6.4)
    said = " ".join(describe(planned).split())
    assert "`dynamic_sampling_max_gen_batches: 10` ends a rollout before its batch is full" in said
    # Without a limit: 2,048 groups per round at most, 32 batches, and surplus is carried.
    enough = on_one_gpu({"dynamic_sampling_max_gen_batches": 0}, acceptance=0.01)
    assert enough.sampling.rounds == [(6_400 / 2_048, 2_048)]
    assert "before its batch is full" not in describe(enough)
    assert on_one_gpu({"dynamic_sampling_max_round_size": 16}, acceptance=0.001).sampling.rounds == [(40, 16)]


ANOTHER_LOSS = {"loss_type": "grpo", "max_tokens_per_microbatch": None}


@pytest.mark.parametrize(
    ("overrides", "num_passes"),
    [
        ({}, 1),  # 4 steps a rollout
        ({"prompts_per_step": 64}, 0),
        ({"prompts_per_step": 64, "beta": 0.1}, 1),  # the reference's
        ({"prompts_per_step": 64, "num_iterations": 2}, 1),
        ({**ANOTHER_LOSS, "prompts_per_step": 64}, 1),  # TRL weighs what vLLM sampled
        ({**ANOTHER_LOSS, "prompts_per_step": 64, "vllm_importance_sampling_correction": False}, 0),
    ],
    ids=str,
)
def test_rows_pass_without_gradient_where_the_pass_that_trains_does_not_tell_the_same(
    on_one_gpu, overrides, num_passes
):
    assert on_one_gpu(overrides).training.num_without_gradient == num_passes
