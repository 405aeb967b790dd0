# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans by hand, and of every recipe."""

import json
import math
import re

import pytest
from plan_helpers import GIB, NINE_MACHINES, ONE_GPU

from trl_dapo.plan import plan


NUM_WEIGHTS = 1_720_574_976  # of Qwen3-1.7B, which `ONE_GPU` trains


def test_a_plan_for_one_gpu_by_hand(on_one_gpu):
    planned = on_one_gpu()
    num = NUM_WEIGHTS
    assert [planned.training.memory[part] / num for part in ("weights", "gradients", "optimizer")] == [4, 4, 8]
    # 16,384 tokens x 2,048 wide in float32 for 28 layers; the last norm and the output layer's input, 12 bytes; the
    # mask of rows of 10,240, 3 bytes.
    assert planned.training.memory["activations"] == 16_384 * (2_048 * (4 * 28 + 12) + 3 * 10_240)
    # vLLM has half of the GPU; weights, moments and 1.5 GiB are there too.
    assert planned.peak_sampling == 0.5 * 81_559 * 2**20 + 12 * num + 1.5 * GIB
    assert planned.peak_updating == sum(planned.training.memory.values()) + GIB
    assert planned.training.checkpoint == 12 * num
    assert planned.batches.num_rollouts == 300
    # 256 rows a step, of which one of 10,240 tokens fits a micro-batch of 16,384, or six of 2,560.
    assert planned.batches.num_microbatches == 256
    short = on_one_gpu({"max_completion_length": 512}).batches
    assert (short.longest_row, short.num_microbatches) == (2_560, math.ceil(256 / 6))
    # If vLLM does not sleep, it keeps its share.
    awake = on_one_gpu({"vllm_enable_sleep_mode": False})
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
    # Two GPUs an engine, which has half of the weights on each.
    assert planned.vllm.num_shards == 2
    assert planned.vllm.memory["weights"] == num
    reduced = ["--accelerator_config", "{gradient_accumulation_kwargs: {sync_each_batch: true}}"]
    assert plan(path, accelerate_config="fsdp2", overrides=reduced).training.memory["gradients"] == 4 * num / 8


def test_tensor_parallelism_divides_gpus_and_heads(write):
    path = write("8 GPUs of 80 GB", ONE_GPU)
    advice = r"which divide the number of GPUs that train \(8\) and of attention heads \(16\)\."
    for shards, message in ((3, f"does not divide the 8 GPUs.*{advice}"), (32, "does not divide the 8 GPUs")):
        with pytest.raises(ValueError, match=message):
            plan(path, overrides=["--vllm_tensor_parallel_size", str(shards)])
    # A server's engines are as wide as a machine, as far as the 40 heads divide.
    server = plan(write("64 GPUs of 80 GB train with ZeRO-3, 8 more serve vLLM", NINE_MACHINES))
    assert server.vllm.num_shards == 8
    assert server.vllm.memory["weights"] == 2 * 32_763_876_352 / 8
    # It has GPUs of its own.
    assert server.peak_updating == sum(server.training.memory.values())


def test_two_iterations_halve_the_rollouts(on_one_gpu):
    once, twice = on_one_gpu(), on_one_gpu({"num_iterations": 2})
    assert twice.batches.num_rollouts == once.batches.num_rollouts / 2


ADAPTER = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
NUM_LORA = 28 * 16 * (2_048 + 2_048 + 2_048 + 1_024)  # queries and values


def test_an_adapter_is_all_that_trains(on_one_gpu):
    planned, num_lora = on_one_gpu(ADAPTER), NUM_LORA
    assert planned.training.memory["weights"] == 2 * NUM_WEIGHTS + 4 * num_lora
    assert planned.training.memory["optimizer"] == 8 * num_lora
    assert planned.training.checkpoint == 12 * num_lora
    assert on_one_gpu({**ADAPTER, "beta": 0.1}).training.memory["reference"] == 0


def test_copies_of_modules_train_as_they_are_loaded(write):
    # FSDP2 trains copies in float32, DeepSpeed in bfloat16, and so does TRL if weights are quantized.
    path = write("8 GPUs of 80 GB", {**ONE_GPU, **ADAPTER, "lora_modules_to_save": ["lm_head"]})
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


def test_without_vllm_the_keys_and_values_of_all_rows_are_cached(on_one_gpu):
    planned = on_one_gpu({"use_vllm": False, "vllm_mode": "server", "vllm_max_model_length": None})
    kept = sum(planned.training.memory[part] for part in ("weights", "optimizer", "reference", "context"))
    # 1,024 rows of 10,240 tokens in bfloat16: 2 x 28 layers x 8 heads x 128 numbers of 2 bytes.
    assert planned.peak_sampling == kept + 1_024 * 10_240 * 2 * 28 * 8 * 128 * 2


def test_prompts_are_as_long_as_those_of_the_file(on_one_gpu, tmp_path):
    rows = [{"problem": "x" * length, "answer": "1"} for length in (40, 80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_name": str(tmp_path / "rows.jsonl"), "prompt_style": "as_is"}
    # Four characters a token, and a chat template of 32.
    assert on_one_gpu(data).recipe.longest_prompt == 80 / 4 + 32
    assert on_one_gpu({**data, "prompt_style": None}).recipe.longest_prompt == 80 / 4 + 32
    assert on_one_gpu({"dataset_name": "nowhere.jsonl"}).recipe.longest_prompt == 2_048
