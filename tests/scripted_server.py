# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's server and engine, which record TRL's requests and answer them by a script."""

import contextlib
import threading
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import torch
import trl.generation.vllm_generation
from helpers import number, tiny_config
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


class StandIn:
    """
    Replaces TRL's client. It samples with weights of its own, which are the trainer's at the last push.

    Each completion depends only on its prompt, its position in the request and the weights, so a resumed run gets the
    same answers as an uninterrupted one. `gate` holds all answers back until it is set, `hold` those for the prompts
    with these numbers. LoRA adapters are served next to the base model, each under its name.
    """

    logprobs_mode = "processed_logprobs"
    max_loras = 3

    def __init__(self, model: str):
        self.model_name = model
        self.engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        info = {"vllm_config": self.get_server_info(), "data": [{"id": model}]}
        answer = SimpleNamespace(status_code=200, raise_for_status=lambda: None, json=lambda: info)
        self.session = SimpleNamespace(
            adapters={}, close=lambda: None, get=lambda url, **kwargs: answer, post=self._load_adapter
        )
        self.base_url, self._load_url = "http://gpu-7:8000", "http://gpu-7:8000/v1/load_lora_adapter"
        self.adapters = {}  # models by the names that requests use for them
        self._clean_up, self._unload = lambda: None, self._unload_adapter  # instead of an HTTP request
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.hold: dict[int, threading.Event] = {}
        self.begun = threading.Event()
        self.in_flight = 0
        self.events = []  # ("push" or "generate", number of requests in progress)
        self.requests = []
        self.threads = []
        self.error = None
        # added to every log-probability, as if the engine sampled from a part of the vocabulary that it normalizes to
        # 1
        self.offset = 0.0

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        lora = {"max_lora_rank": 8, "max_loras": self.max_loras, "lora_dtype": "torch.float32"}
        return {
            "model_config": {"logprobs_mode": self.logprobs_mode, "model": self.model_name},
            "lora_config": lora,
            "parallel_config": {"data_parallel_size": 1},
        }

    def _load_adapter(self, url, json):
        base = AutoModelForCausalLM.from_pretrained(self.model_name, dtype=torch.float32)
        self.adapters[json["lora_name"]] = PeftModel.from_pretrained(base, json["lora_path"]).eval()
        return SimpleNamespace(status_code=200, text="")

    def _unload_adapter(self, name, path):
        del self.adapters[name]

    def reset_prefix_cache(self):
        pass

    def update_named_params(self, metadata, named_params):
        if self.in_flight:
            raise RuntimeError("Weights were pushed while a request was under way.")
        self.events.append("push")
        self.engine.load_state_dict({name: value.clone() for name, value in named_params}, strict=False)

    @torch.no_grad()
    def generate(self, prompts, features=None, *, n, max_tokens, temperature, generation_kwargs=None, **sampling):
        named = (generation_kwargs or {}).get("model", getattr(self, "model", None))
        with self.lock:
            self.events.append("generate")
            self.requests.append({"prompts": prompts, "n": n, "max_tokens": max_tokens, "temperature": temperature})
            self.threads.append(threading.current_thread() is threading.main_thread())
            self.in_flight += 1
        self.begun.set()
        try:
            self.gate.wait()
            for ids in prompts if self.hold else ():
                if (event := self.hold.get(number(self.tokenizer.decode(ids)))) is not None:
                    event.wait()
            if self.error is not None:
                raise self.error
            engine = self.adapters[named] if named else self.engine
            rows = [self._complete(ids, i, max_tokens, temperature, engine) for ids in prompts for i in range(n)]
        finally:
            with self.lock:
                self.in_flight -= 1
        completions, logprobs = zip(*rows, strict=True)
        return {"prompt_ids": prompts, "completion_ids": list(completions), "logprobs": list(logprobs)}

    def _complete(self, prompt, i, max_tokens, temperature, engine):
        """
        Prompts 0, 3, 6, ... are answered with "a", which is incorrect. For the others, every second completion is
        correct.
        """
        text = "a"
        if number(self.tokenizer.decode(prompt)) % 3:
            text = "right" if i % 2 else "wrong"
        # The last token depends on the weights, so that completions differ with the policy.
        ids = self.tokenizer(text)["input_ids"]
        ids.append(int(_logits(engine, prompt, ids)[-1, 3:].argmax()) + 3)
        ids = [*ids, self.tokenizer.eos_token_id][:max_tokens]
        logits = _logits(engine, prompt, ids)[:-1] / temperature
        logprobs = logits.log_softmax(-1)[range(len(ids)), ids]
        return ids, [[value + self.offset] for value in logprobs.tolist()]

    @property
    def asked(self):
        """Return the numbers of the prompts of all requests, in order."""
        return [number(self.tokenizer.decode(ids)) for request in self.requests for ids in request["prompts"]]

    @property
    def kinds(self):
        """Return pushes and requests in order. Equal neighbors count as one."""
        return [kind for kind, _ in groupby(self.events)]


def _logits(engine, prompt, ids):
    """Return the log-probability of every token of `ids`, and of the one after them."""
    return engine(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :]


def with_adapter(model: str, **settings):
    """Return a model with a LoRA adapter that has no effect yet."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": "all-linear", "lora_alpha": 32} | settings))


class SleepingEngine:
    """Replaces vLLM's `LLM` in the trainer's process. It records when it is woken up, and samples by a script."""

    def __init__(self, model, **settings):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.calls = []
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self)))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def load_weights(self, named):
        ((name, _),) = named
        if name == "model.norm.weight":  # a push consists of several calls, of which this counts one
            self.calls.append("push")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def sleep(self, level):
        self.calls.append("sleep")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append("generate")
        outputs = []
        for i, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            solvable = number(self.tokenizer.decode(ids)) % 3
            completion = self.tokenizer("right" if solvable and i % 2 else "wrong")["input_ids"]
            completion.append(self.tokenizer.eos_token_id)
            logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in completion]
            output = SimpleNamespace(token_ids=completion, logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[output]))
        return outputs


@contextlib.contextmanager
def stand_ins(model: str):
    """
    Replace what TRL's engine imports from vLLM, which does not have to be installed. The engine itself is unchanged.
    """
    module = trl.generation.vllm_generation
    clients = []

    class Client(StandIn):
        def __init__(self, **settings):
            super().__init__(model)
            clients.append(self)

    replaced = {
        "is_vllm_available": lambda *args, **kwargs: True,
        "VLLMClient": Client,
        "LLM": SleepingEngine,
        "SamplingParams": lambda **settings: settings,
        "StructuredOutputsParams": lambda **settings: settings,
    }
    usual = {name: vars(module).get(name) for name in replaced}
    vars(module).update(replaced)
    try:
        yield clients
    finally:
        vars(module).update(usual)


def ahead_config(folder: Path, **overrides):
    settings = {
        "use_vllm": True,
        "vllm_mode": "server",
        "rollouts_ahead": 1,
        "dynamic_sampling_surplus": "carry",
        "batch_multiplier": 1.5,  # 6 prompts per round, of which 4 are solved: exactly those that train
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "max_steps": 4,
    }
    return tiny_config(folder, **{**settings, **overrides})
