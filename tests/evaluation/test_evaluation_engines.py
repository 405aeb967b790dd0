# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers and vLLM in this process say what a server would."""

import json
import sys
import threading
import types

import pytest
import torch
from datasets import Dataset
from evaluations import Echo, completions, here, mixed_prompts, reply, sums
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_dapo.evaluation import evaluate


@pytest.fixture
def loaded(tiny_model):
    """A model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def vllm(monkeypatch):
    """In vLLM's place a module that has no model yet."""
    module, params = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    module.LLM, module.SamplingParams, module.sampling_params = None, types.SimpleNamespace, params
    params.RequestOutputKind = types.SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    return module


def serve_model(path, serve):
    """The same model behind HTTP, with generation settings spelt out by the test itself."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    lock = threading.Lock()

    def script(body):
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with lock:
            output = model.generate(**inputs, max_new_tokens=body["max_tokens"], do_sample=body["temperature"] > 0)
        ids = output[0, inputs["input_ids"].size(1) :]
        is_over = ids[-1] == tokenizer.eos_token_id
        said = tokenizer.decode(ids, skip_special_tokens=True)
        return 200, reply(said, num_tokens=len(ids), finish_reason="stop" if is_over else "length")

    return serve(script)


def test_the_most_probable_completion_is_the_same_here_in_a_batch_and_behind_a_server(tiny_model, serve, tmp_path):
    dataset, settings = mixed_prompts(6), {"k": 1, "temperature": 0.0, "max_completion_length": 8}
    here(tiny_model, dataset, tmp_path / "batch", batch_size=6, **settings)
    here(tiny_model, dataset, tmp_path / "single", batch_size=1, **settings)
    server = serve_model(tiny_model, serve)
    evaluate(tiny_model, dataset, tmp_path / "server", base_url=server.url, progress=False, **settings)
    batch, single, served = (completions(tmp_path / name) for name in ("batch", "single", "server"))
    assert batch == single == served
    assert len({row["completion"] for row in batch}) > 1


def test_a_completion_ends_with_its_end_token_which_counts(loaded, tmp_path):
    model, tokenizer = loaded

    def script(prompt_ids):
        is_first = tokenizer.decode(prompt_ids) == "1+1"
        return tokenizer("abc" if is_first else "abcdefgh")["input_ids"] + [tokenizer.eos_token_id] * is_first

    summary = here(Echo(model, script), sums(2), tmp_path, k=1, processing_class=tokenizer)
    first, second = completions(tmp_path)
    assert (first["completion"], first["length"], first["truncated"]) == ("abc", 4, False)
    assert (second["completion"], second["length"], second["truncated"]) == ("abcdefgh", 8, True)
    assert (summary["mean_length"], summary["truncated"]) == (6.0, 0.5)


def test_a_model_in_training_mode_is_evaluated_without_dropout(loaded, tmp_path):
    seen, (model, tokenizer) = [], loaded
    model = Echo(model, lambda prompt_ids: seen.append(model.training) or [3])
    model.train()
    here(model, sums(1), tmp_path, k=1, min_p=0.1, processing_class=tokenizer)
    how = model.asked
    assert (seen, how.do_sample, how.temperature, how.top_p, how.top_k, how.min_p) == ([False], True, 1.0, 0.7, 0, 0.1)
    assert model.training


def test_a_chat_template_says_itself_how_a_prompt_begins(loaded, tmp_path):
    prompts, (model, tokenizer) = [], loaded
    begin = TemplateProcessing(single="<unk> $0", special_tokens=[("<unk>", tokenizer.unk_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    model = Echo(model, lambda prompt_ids: prompts.append(prompt_ids) or [3])
    here(model, mixed_prompts(1), tmp_path / "chat", k=1, processing_class=tokenizer)
    here(model, sums(1), tmp_path / "plain", k=1, processing_class=tokenizer)
    assert [tokenizer.decode(ids) for ids in prompts] == ["<u>What is 1+0?<eos><a>", "<unk>1+1"]


def test_batches_of_one_problem_do_not_repeat_each_other(tiny_model, tmp_path):
    here(tiny_model, sums(1), tmp_path, k=8, batch_size=2)
    assert len({row["completion"] for row in completions(tmp_path)}) == 8


def test_sampling_settings_that_come_with_a_model_have_no_say(loaded, tmp_path):
    model, tokenizer = loaded
    own = model.generation_config
    here(model, sums(2), tmp_path / "without", processing_class=tokenizer)
    own.update(top_k=1, repetition_penalty=9.0, do_sample=False, max_new_tokens=2)
    model.train()
    here(model, sums(2), tmp_path / "with", processing_class=tokenizer)
    assert completions(tmp_path / "with") == completions(tmp_path / "without")
    assert len({row["completion"] for row in completions(tmp_path / "with")}) == 8
    assert model.generation_config is own
    assert model.training


def test_an_evaluation_does_not_change_the_random_numbers_of_the_program(tiny_model, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    here(tiny_model, sums(1), tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_an_interrupted_evaluation_here_ends_like_an_unbroken_one(tiny_model, tmp_path):
    unbroken = here(tiny_model, sums(3), tmp_path / "unbroken", batch_size=2)
    journal = tmp_path / "unbroken" / "completions.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "completions.jsonl").write_bytes(b"".join(lines[: 1 + 6]))
    assert here(tiny_model, sums(3), tmp_path / "broken", batch_size=2) == unbroken
    assert (tmp_path / "broken" / "completions.jsonl").read_bytes() == journal.read_bytes()


def test_more_tokens_than_the_model_is_made_for_are_a_warning(tiny_model, loaded, tmp_path, caplog):
    here(tiny_model, sums(1), tmp_path / "short", k=1)
    assert "the model's context" not in caplog.text
    model, tokenizer = loaded
    echo = Echo(model, lambda prompt_ids: [tokenizer.eos_token_id])
    here(echo, sums(1), tmp_path / "long", k=1, max_completion_length=2046, processing_class=tokenizer)
    assert "2049 tokens, which is more than the model's context of 2048" in caplog.text


def test_messages_need_a_chat_template(loaded, tmp_path):
    model, tokenizer = loaded
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template.*use prompts of plain text"):
        here(model, mixed_prompts(1), tmp_path, processing_class=tokenizer)
    summary = here(model, sums(1), tmp_path / "plain", k=1, processing_class=tokenizer)  # the way out that is named
    assert summary["num_problems"] == 1


def test_without_vllm_its_engine_says_what_to_do(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'trl\[vllm\]'.*base_url"):
        here(tiny_model, sums(1), tmp_path, engine="vllm")


def test_vllm_gets_all_requests_at_once_and_completes_them_in_any_order(tiny_model, loaded, vllm, tmp_path):
    class Engine:
        def __init__(self):
            self.waiting = []
            self.engine_core = self

        def shutdown(self):
            made.append("shut down")

        def add_request(self, request_id, prompt, params):
            self.waiting.append((request_id, prompt["prompt_token_ids"], params))

        def has_unfinished_requests(self):
            return bool(self.waiting)

        def step(self):
            request_id, ids, params = self.waiting.pop()
            said = {"text": f"Answer: {tokenizer.decode(ids)[-1:]}", "token_ids": [0] * params.max_tokens}
            answer = types.SimpleNamespace(**said, finish_reason="length")
            return [
                types.SimpleNamespace(request_id="0", finished=False, outputs=[]),
                types.SimpleNamespace(request_id=request_id, finished=True, outputs=[answer]),
            ]

    def make_llm(model, tensor_parallel_size, max_model_len, seed):
        made.append((model, tensor_parallel_size, max_model_len))
        seeds.append(seed)
        return types.SimpleNamespace(llm_engine=Engine())

    made, seeds, (_, tokenizer) = [], [], loaded
    vllm.LLM = make_llm
    dataset = Dataset.from_dict({"prompt": ["say 3", "say 4"], "solution": ["3", "5"]})
    summary = here(tiny_model, dataset, tmp_path, engine="vllm", tensor_parallel_size=2)
    assert [problem["num_correct"] for problem in summary["problems"]] == [4, 0]
    assert (summary["mean_length"], summary["truncated"]) == (8, 1.0)
    assert made == [(tiny_model, 2, 5 + 8), "shut down"]
    # What is left is not sampled with the random numbers of what is there, even if it is as much with the same first.
    journal = tmp_path / "completions.jsonl"
    header, *lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([header, *(line for line in lines if json.loads(line)["index"])]))
    here(tiny_model, dataset, tmp_path, engine="vllm", tensor_parallel_size=2, k=7)
    assert len(set(seeds)) == 2


@pytest.mark.usefixtures("vllm")
def test_vllm_refuses_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is an adapter, .* Merge it into its model first"):
        here(tmp_path, sums(1), tmp_path / "eval", engine="vllm")
