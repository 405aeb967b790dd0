# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `vllm serve`: a process with its own weights, behind TRL's engine in server mode."""

import contextlib
import multiprocessing
import threading
import time
from multiprocessing.managers import BaseManager
from types import SimpleNamespace

import torch
import transformers
import trl.generation.vllm_generation
from peft import PeftModel
from transformers import AutoModelForCausalLM


class Engine:
    """The engine in the server's process. It takes `delay` seconds to answer a request."""

    def __init__(self, delay=0.0):
        torch.set_num_threads(1)
        transformers.logging.disable_progress_bar()
        self.delay = delay

    def cpu_seconds(self):
        return time.process_time()

    def push(self, weights):
        pass

    def generate(self, prompts, n, max_tokens, temperature, adapter=None):
        time.sleep(self.delay)
        completions, logprobs = self.sample(prompts, n, max_tokens, temperature, adapter)
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


class Model(Engine):
    """Sample with the weights of the last push, or with the adapter that a request names, one request at a time."""

    def __init__(self, path, seed):
        super().__init__()
        self.path, self.lock, self.adapters = path, threading.Lock(), {}
        self.model = self.load()
        torch.manual_seed(seed)

    def load(self):
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def load_adapter(self, name, path):
        with self.lock:
            self.adapters[name] = PeftModel.from_pretrained(self.load(), path).eval()

    def unload_adapter(self, name):
        with self.lock:
            self.adapters.pop(name, None)

    def push(self, weights):
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)

    def sample(self, prompts, n, max_tokens, temperature, adapter):
        with self.lock:
            return self._sample(self.adapters[adapter] if adapter else self.model, prompts, n, max_tokens, temperature)

    @torch.no_grad()
    def _sample(self, model, prompts, n, max_tokens, temperature):
        rows, config = [ids for ids in prompts for _ in range(n)], model.config
        width = max(map(len, rows))
        ids = torch.tensor([[config.pad_token_id] * (width - len(row)) + list(row) for row in rows])
        sampled = model.generate(
            input_ids=ids,
            attention_mask=(ids != config.pad_token_id).long(),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logps = (torch.stack(sampled.logits, dim=1) / temperature).log_softmax(-1)
        completions, logprobs = [], []
        for row, row_logps in zip(sampled.sequences[:, width:], logps, strict=True):
            ends = (row == config.eos_token_id).nonzero()
            length = int(ends[0]) + 1 if len(ends) else len(row)
            completions.append(row[:length].tolist())
            logprobs.append(row_logps[range(length), row[:length]].unsqueeze(1).tolist())
        return completions, logprobs


class Script(Engine):
    """Give every prompt one correct completion, and otherwise incorrect ones, as token ids."""

    def __init__(self, delay, correct, incorrect):
        super().__init__(delay)
        self.correct, self.incorrect = correct, incorrect

    def sample(self, prompts, n, max_tokens, temperature, adapter):
        completions = [self.incorrect if i else self.correct for _ in prompts for i in range(n)]
        return completions, [[[-1.0]] * len(ids) for ids in completions]


class Server(BaseManager):
    pass


Server.register("Model", Model)
Server.register("Script", Script)


class Client:
    """A replacement for TRL's client, and for the requests that load and unload adapters."""

    base_url = _load_url = "a stand-in"

    def __init__(self, engine):
        self.engine = engine
        config = {"vllm_config": self.get_server_info(), "data": []}
        answer = SimpleNamespace(status_code=200, raise_for_status=lambda: None, json=lambda: config)
        get, close = (lambda url, **kwargs: answer), (lambda: None)
        self.session = SimpleNamespace(adapters={}, get=get, post=self._load, close=close)
        self._unload, self._clean_up = (lambda name, path: engine.unload_adapter(name)), close

    def _load(self, url, json):
        self.engine.load_adapter(json["lora_name"], json["lora_path"])
        return SimpleNamespace(status_code=200, text="")

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        lora = {"max_lora_rank": 64, "max_loras": 3, "lora_dtype": "torch.float32"}
        return {
            "model_config": {"logprobs_mode": "processed_logprobs", "model": "a stand-in"},
            "lora_config": lora,
            "parallel_config": {"data_parallel_size": 1},
        }

    def reset_prefix_cache(self):
        pass

    def update_named_params(self, metadata, named_params):
        self.engine.push({name: value.detach().numpy() for name, value in named_params})

    def generate(self, prompts, features=None, *, n, max_tokens, temperature, generation_kwargs=None, **sampling):
        adapter = (generation_kwargs or {}).get("model", getattr(self, "model", None))
        return self.engine.generate(prompts, n, max_tokens, temperature, adapter)


@contextlib.contextmanager
def server(make, **settings):
    """
    A block in which each trainer connects to its own server, made by `make(**settings)`. vLLM need not be installed.
    Yield the engines of the servers.
    """
    module, engines = trl.generation.vllm_generation, []

    with contextlib.ExitStack() as servers:

        class Asked(Client):
            def __init__(self, **_):
                started = servers.enter_context(Server(ctx=multiprocessing.get_context("spawn")))
                super().__init__(getattr(started, make.__name__)(**settings))
                engines.append(self.engine)

        usual = {name: vars(module).get(name) for name in ("is_vllm_available", "VLLMClient")}
        module.is_vllm_available, module.VLLMClient = (lambda *args, **kwargs: True), Asked
        try:
            yield engines
        finally:
            vars(module).update(usual)
