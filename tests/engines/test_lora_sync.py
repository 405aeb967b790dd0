# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters that vLLM can serve, and the messages if it cannot. The tests with a real vLLM are in `vllm_cpu`."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers import tiny_config
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_dapo.engines import server
from trl_dapo.engines.lora_adapters import changed_weight, max_lora_rank, why_not_served
from trl_dapo.engines.lora_client import AdapterRefused
from trl_dapo.engines.lora_sync import AdapterGeneration, syncing_adapters


def adapted(**overrides):
    return get_peft_model(make_model(), LoraConfig(**{"r": 4, "target_modules": "all-linear", **overrides}))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"use_rslora": True},
        {"r": 12, "lora_alpha": 3, "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian", "exclude_modules": ["k_proj"], "task_type": "CAUSAL_LM"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]},
    ],
    ids=str,
)
def test_plain_and_rank_stabilized_lora_on_linear_layers_is_served(overrides):
    assert why_not_served(adapted(**overrides)) is None


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"use_dora": True}, "`use_dora=True`"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save=['lm_head']`"),
        ({"bias": "all"}, "`bias='all'`"),
        # vLLM scales every layer by one alpha and one rank.
        ({"rank_pattern": {"q_proj": 2}}, "`rank_pattern={'q_proj': 2}`"),
        ({"alpha_pattern": {"q_proj": 2}}, "`alpha_pattern={'q_proj': 2}`"),
        ({"trainable_token_indices": [1]}, "`trainable_token_indices=[1]`"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding or the head"),
        ({"target_modules": ["q_proj", "lm_head"]}, "embedding or the head"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights='pissa'` changes the base"),
        ({"r": 600}, "600 is above 512, the largest that vLLM supports"),
    ],
    ids=str,
)
def test_what_vllm_would_leave_out_or_scale_otherwise_is_named(overrides, why):
    assert why in why_not_served(adapted(**overrides))


def test_adapters_that_are_not_lora_and_models_without_one_are_named():
    adaptive = get_peft_model(make_model(), AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    assert why_not_served(adaptive) == "the adapter is ADALORA, not LoRA"
    assert why_not_served(make_model()) == "the model has no adapter"
    assert changed_weight(adapted()) is None  # without a checkpoint there is nothing to compare


def test_one_of_several_adapters_is_served_and_two_at_once_are_not():
    several = adapted()
    several.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    assert why_not_served(several) is None
    several.base_model.set_adapter(["default", "other"])
    assert why_not_served(several) == "2 adapters are active (default, other)"


def test_weights_that_train_beside_the_adapter_are_named():
    both = adapted()
    both.get_input_embeddings().weight.requires_grad_()
    assert "weights that are not part of the adapter are trained" in why_not_served(both)
    assert "embed_tokens" in why_not_served(both)


# The first weight that differs, in the order of files and of the names in a file.
@pytest.mark.parametrize(
    ("shards", "merged", "resized"),
    [
        (1, "model.layers.0.mlp.down_proj.weight", "lm_head.weight"),
        (3, "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_was_changed_in_memory_is_told_from_its_checkpoint(tmp_path, shards, merged, resized, dtype):
    whole = make_model()
    size = sum(parameter.nbytes for parameter in whole.parameters())
    whole.save_pretrained(tmp_path, max_shard_size=size // shards + 1)
    assert len([*tmp_path.glob("*.safetensors")]) >= shards
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    apart = get_peft_model(loaded, LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    assert changed_weight(apart) is None
    # As if an earlier adapter had been merged into it.
    again = get_peft_model(apart.merge_and_unload(), LoraConfig(r=4, target_modules=["q_proj"]))
    assert changed_weight(again) == merged
    grown = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    grown.resize_token_embeddings(grown.config.vocab_size + 8)
    assert changed_weight(get_peft_model(grown, LoraConfig(target_modules=["q_proj"]))) == resized


def test_a_rank_takes_the_next_capacity_of_vllms():
    assert [max_lora_rank(rank) for rank in (1, 2, 8, 9, 64, 65, 512)] == [1, 8, 8, 16, 64, 128, 512]


# ---- Decisions before vLLM starts ----


@pytest.fixture
def make(monkeypatch, tmp_path):
    """An engine with a server that gets no requests, for which TRL's setup only records that it ran."""
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "_init_vllm", lambda self: vars(self).update(merges=True))

    def make(model, lora_sync=None):
        settings = {"mode": "server", "lora_sync": lora_sync, "output_dir": tmp_path}
        return AdapterGeneration(model, Accelerator(cpu=True), make_tokenizer(), **settings)

    return make


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr("trl_dapo.engines.lora_sync.logger", SimpleNamespace(warning=lines.append))
    return lines


def test_what_cannot_travel_or_has_a_base_that_was_changed_is_merged_and_one_line_says_why(make, said, tmp_path):
    make_model().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded.model.norm.weight.data.mul_(2)
    for model in (adapted(use_dora=True), get_peft_model(loaded, LoraConfig(r=4, target_modules=["q_proj"]))):
        engine = make(model)
        assert engine.merges
        assert not engine.serves_adapter
    first, second = said
    assert "merged" in first
    assert "`use_dora=True`" in first
    assert f"`model.norm.weight` differs from {tmp_path / 'base'}" in second


@pytest.mark.parametrize("lora_sync", [None, "merge"])
def test_nothing_is_said_of_a_model_without_an_adapter_or_of_what_was_asked_for(make, said, lora_sync):
    assert make(make_model(), lora_sync).merges
    assert make(adapted(), "merge").merges
    assert said == []


@pytest.mark.parametrize(
    ("model", "why"), [(lambda: adapted(use_dora=True), "`use_dora=True`"), (make_model, "the model has no adapter")]
)
def test_an_adapter_asked_for_by_hand_is_refused_where_it_cannot_travel(make, model, why):
    with pytest.raises(ValueError, match=f"`vllm_lora_sync='adapter'` .*{why}"):
        make(model(), "adapter")


@pytest.mark.parametrize(("options", "lora_sync"), [({"use_dora": True}, None), ({}, "merge")])
def test_a_quantized_model_is_not_merged(make, options, lora_sync):
    quantized = adapted(**options)
    quantized.base_model.model.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="vLLM does not accept weights that are merged into a quantized model"):
        make(quantized, lora_sync)


def test_the_engines_requests_may_take_as_long_as_those_of_the_settings(tmp_path):
    with syncing_adapters(tiny_config(tmp_path, ddp_timeout=100)):
        assert grpo_trainer.VLLMGeneration.keywords["request_seconds"] == 90


# ---- An engine in this process that sleeps, which engines on CPUs do not ----


class Engine:
    """Records its calls, in order."""

    def __init__(self, told, **kwargs):
        self.told, self.kwargs = told, kwargs
        self.llm_engine = SimpleNamespace(
            add_lora=lambda request: told.append(("add", request.lora_int_id)),
            remove_lora=lambda number: told.append(("remove", number)),
            vllm_config=SimpleNamespace(lora_config=SimpleNamespace(lora_dtype=torch.bfloat16)),
        )

    def sleep(self, level):
        self.told.append(("sleep", level))

    def wake_up(self, tags):
        self.told.append(("wake", *tags))

    def chat(self, **kwargs):
        raise AssertionError("nobody chats")

    def generate(self, prompts, sampling_params, use_tqdm, lora_request):
        weights = load_file(f"{lora_request.lora_path}/adapter_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        self.told.append(("generate", lora_request.lora_int_id, max(w.abs().max().item() for w in weights.values())))
        output = SimpleNamespace(token_ids=[1], logprobs=None)
        return [SimpleNamespace(prompt_token_ids=[3], outputs=[output]) for _ in prompts]


def test_a_sleeping_engine_keeps_its_base_and_wakes_without_a_push(monkeypatch, tmp_path):
    told, request = [], ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, number, path: SimpleNamespace(lora_int_id=number, lora_path=path)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "empty_cache", lambda: None)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: Engine(told, **kwargs), raising=False)
    policy = adapted(r=12)
    engine = AdapterGeneration(
        policy, Accelerator(cpu=True), make_tokenizer(), enable_sleep_mode=True, lora_sync=None, output_dir=tmp_path
    )
    kwargs = engine.llm.kwargs
    assert (kwargs["enable_lora"], kwargs["max_lora_rank"], kwargs["quantization"]) == (True, 16, None)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = torch.full_like(parameter, 7.0)
    engine.sync_weights()
    engine.generate([[3]], None, 1)
    engine.generate([[3]], None, 1)  # a second round
    # Level 2 would discard the base model, which is not sent again.
    sampled = [("wake", "kv_cache"), ("generate", 2, 7.0), ("sleep", 1)]
    assert told == [
        *[("add", 1), ("sleep", 1)],
        *[("wake", "weights"), ("remove", 1), ("add", 2)],
        *sampled,
        *[("wake", "weights"), *sampled],
    ]


# ---- The address of a server may have a user and a password ----

ADDRESS = "http://user:pa55word@gpu-7:8000"
SHOWN = "server at http://gpu-7:8000 "


def generation(**client):
    made = object.__new__(AdapterGeneration)
    made.vllm_client = SimpleNamespace(base_url=ADDRESS, clear=lambda folder: None, **client)
    made.model, made._adapter = adapted(r=4), "default"
    return made


def test_why_a_server_cannot_get_the_adapter_is_said_without_its_user(tmp_path):
    def refuse(state_dict):
        raise AdapterRefused("cannot read it.")

    served = {"lora_config": {"max_lora_rank": 8, "lora_dtype": "bfloat16"}, "model_config": {"model": "m"}}
    one, two = ({**served, "parallel_config": {"data_parallel_size": replicas}} for replicas in (1, 2))
    assert generation(server_config=lambda: one)._check_server()[0] is None
    for started, why in (
        ({"lora_config": None}, "does not serve adapters. "),
        (two, "has 2 replicas, of which only one would "),
    ):
        found, _ = generation(server_config=lambda started=started: started)._check_server()
        assert found.startswith(f"the vLLM {SHOWN}{why}")
    made = generation()
    made._adapter_root, made._serve = tmp_path / "adapters", refuse
    made._adapter_root.mkdir()
    assert made._why_refused({}) == f"the vLLM {SHOWN}cannot read it."
    client = object.__new__(server.BoundClient)
    client.base_url = ADDRESS
    client.session = SimpleNamespace(get=lambda *args, **kwargs: SimpleNamespace(status_code=404))
    with pytest.raises(RuntimeError, match=f"{SHOWN}does not report how it was started"):
        client.server_config()


def test_tools_are_called_beside_an_engine_in_the_trainers_process_which_has_no_client():
    engine = object.__new__(AdapterGeneration)
    engine.mode, engine.accelerator = "colocate", SimpleNamespace(is_main_process=True)
    with engine.tool_turns():
        turns = ["one"]
    assert turns == ["one"]
