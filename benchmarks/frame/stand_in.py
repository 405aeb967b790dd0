# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve`: a process of its own, with weights of its own, behind TRL's engine in server mode."""

import contextlib
import multiprocessing
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import torch
import transformers
import trl.generation.vllm_generation
from transformers import AutoModelForCausalLM


class Model:
    """
    Samples with the weights of the last push.

    Args:
        path (`str`):
            The model.
        seed (`int`):
            Seed of everything it samples.
        delay (`float`, *optional*, defaults to `0.0`):
            Seconds that it waits before it samples.
    """

    def __init__(self, path, seed, delay=0.0):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.delay = delay
        torch.manual_seed(seed)

    def push(self, weights):
        weights = {name: torch.from_numpy(value) for name, value in weights.items()}
        self.model.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def generate(self, prompts, n, max_tokens, temperature):
        time.sleep(self.delay)
        rows, config = [ids for ids in prompts for _ in range(n)], self.model.config
        width = max(map(len, rows))
        ids = torch.tensor([[config.pad_token_id] * (width - len(row)) + list(row) for row in rows])
        sampled = self.model.generate(
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
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


class Script:
    """
    Takes a set time to give every prompt a right and wrong answers.

    Args:
        delay (`float`):
            Seconds of a request.
        right, wrong (`list[int]`):
            Token ids of a right and of a wrong completion.
    """

    def __init__(self, delay, right, wrong):
        self.delay, self.right, self.wrong = delay, right, wrong

    def push(self, weights):
        pass

    def generate(self, prompts, n, max_tokens, temperature):
        time.sleep(self.delay)
        completions = [self.wrong if i else self.right for _ in prompts for i in range(n)]
        logprobs = [[[-1.0]] * len(ids) for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def serve(pipe):
    """The server's process: answers one request after the other until its pipe is closed."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with contextlib.suppress(EOFError):
        make, settings = pipe.recv()
        engine = make(**settings)
        while True:
            what, arguments = pipe.recv()
            pipe.send(getattr(engine, what)(**arguments))


class Client:
    """In the place of TRL's client."""

    def __init__(self, make, settings):
        answer = SimpleNamespace(status_code=200, raise_for_status=lambda: None, json=self._config)
        self.session, self.base_url = SimpleNamespace(adapters={}, get=lambda url, **kwargs: answer), "a stand-in"
        self._pipe, other = multiprocessing.Pipe()
        # Not a `multiprocessing.Process`, which the daemons of a pool may not have.
        command = [sys.executable, __file__, str(other.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[other.fileno()])
        other.close()
        self._pipe.send((make, settings))

    def _ask(self, what, **arguments):
        self._pipe.send((what, arguments))
        return self._pipe.recv()

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def _config(self):
        return {"vllm_config": self.get_server_info()}

    def reset_prefix_cache(self):
        pass

    def cpu_seconds(self):
        """CPU seconds that the server has spent."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def update_named_params(self, metadata, named_params):
        self._ask("push", weights={name: value.detach().numpy() for name, value in named_params})

    def generate(self, prompts, features=None, *, n, max_tokens, temperature, **sampling):
        return self._ask("generate", prompts=prompts, n=n, max_tokens=max_tokens, temperature=temperature)

    def close(self):
        self._pipe.close()
        self._process.wait()


@contextlib.contextmanager
def server(make, **settings):
    """A block in which trainers find a server made by `make(**settings)`, each its own; vLLM need not be installed."""
    module, clients = trl.generation.vllm_generation, []

    class Asked(Client):
        def __init__(self, **_):
            super().__init__(make, settings)
            clients.append(self)

    usual = {name: vars(module).get(name) for name in ("is_vllm_available", "VLLMClient")}
    module.is_vllm_available, module.VLLMClient = (lambda *args, **kwargs: True), Asked
    try:
        yield clients
    finally:
        vars(module).update(usual)
        for opened in clients:
            opened.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
