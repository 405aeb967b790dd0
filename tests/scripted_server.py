# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Stands in for vLLM: what TRL asks of its client and of its engine is noted, and what they answer is scripted."""

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
    In the place of TRL's client: samples with weights of its own, which are the trainer's of the last push.

    Each completion depends on its prompt, its place in the request and the weights, and on nothing else: a resumed run
    is answered as the one that was not interrupted. `gate` holds all answers back until it is set, `hold` those to the
    prompts of these numbers. LoRA adapters are served beside the base, each under its name.
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
        self.adapters = {}  # models by the names that requests give them
        self._leave, self._unload = lambda: None, self._unload_adapter  # in place of HTTP
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.hold: dict[int, threading.Event] = {}
        self.begun = threading.Event()
        self.in_flight = 0
        self.events = []  # ("push" or "generate", how many requests were under way)
        self.requests = []
        self.threads = []
        self.error = None
        self.offset = 0.0  # of every log-probability, as where the probability of a part of the vocabulary is 1

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
        """Prompts 0, 3, 6, ... are answered "a", which is wrong; of the others every second completion is right."""
        text = "a"
        if number(self.tokenizer.decode(prompt)) % 3:
            text = "right" if i % 2 else "wrong"
        # What the weights have to say of it: the last token is theirs, so that completions differ with the policy.
        ids = self.tokenizer(text)["input_ids"]
        ids.append(int(_logits(engine, prompt, ids)[-1, 3:].argmax()) + 3)
        ids = [*ids, self.tokenizer.eos_token_id][:max_tokens]
        logits = _logits(engine, prompt, ids)[:-1] / temperature
        logprobs = logits.log_softmax(-1)[range(len(ids)), ids]
        return ids, [[value + self.offset] for value in logprobs.tolist()]

    @property
    def asked(self):
        """The numbers of the prompts of all requests, in order."""
        return [number(self.tokenizer.decode(ids)) for request in self.requests for ids in request["prompts"]]

    @property
    def kinds(self):
        """Pushes and requests, of which neighbours count as one."""
        return [kind for kind, _ in groupby(self.events)]


def _logits(engine, prompt, ids):
    """Of every token of `ids`, and of the one behind them."""
    return engine(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :]


def with_adapter(model: str, **settings):
    """A model with a LoRA adapter that does nothing yet."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": "all-linear", "lora_alpha": 32} | settings))


class SleepingEngine:
    """In the place of vLLM's `LLM` in the trainer's process: notes what wakes it, and samples by a script."""

    def __init__(self, model, **settings):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.calls = []
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self)))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def load_weights(self, named):
        ((name, _),) = named
        if name == "model.norm.weight":  # one of all that a push takes
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
    """TRL's engine runs as it is; what it imports from vLLM is replaced, which need not be installed."""
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
        "batch_multiplier": 1.5,  # 6 prompts a round, of which 4 are solved: as many as train
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "max_steps": 4,
    }
    return tiny_config(folder, **{**settings, **overrides})
