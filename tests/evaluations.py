# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of evaluations: small problems, and a script, a server or a model that answers them."""

import http.server
import json
import threading

import pyarrow.parquet as pq
import torch
from datasets import Dataset

from trl_dapo.evaluation import evaluate


# ---- A server whose answers are scripted ----


class Server:
    """
    OpenAI-compatible server. `script(body)` returns the text of the completion, or (status, payload), or `None` to
    hang up.
    """

    def __init__(self, script):
        self.script = script
        self.requests = []  # (path, headers, body), in order of arrival
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, self.headers, body))
                answer = server.script(body)
                if answer is None:
                    return
                status, payload = answer if isinstance(answer, tuple) else (200, reply(answer, "messages" in body))
                payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(payload)))
                    self.end_headers()
                    self.wfile.write(payload)
                except BrokenPipeError:
                    pass  # the client was killed

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def asked(self):
        return [asked(body) for _, _, body in self.requests]

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


def asked(body):
    """Return what identifies a completion."""
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"], body["seed"]


def reply(text, conversational=True, num_tokens=7, finish_reason="stop"):
    said = {"message": {"role": "assistant", "content": text}} if conversational else {"text": text}
    return {"choices": [{**said, "finish_reason": finish_reason}], "usage": {"completion_tokens": num_tokens}}


class Deal:
    """Return a script that takes each prompt's completions from a list, whatever the order of the requests."""

    def __init__(self, **texts):
        self.left = {prompt: list(texts[name]) for prompt, name in zip(("1+1", "1+2", "1+3"), texts, strict=False)}
        self.lock = threading.Lock()

    def __call__(self, body):
        with self.lock:
            return self.left[asked(body)[0]].pop()


# ---- Problems ----


def sums(num, **columns):
    """Problems `1+1`, `1+2`, ... as plain text, with their answers and short ids."""
    return sums_of(range(1, num + 1), **columns)


def sums_of(numbers, **columns):
    return Dataset.from_dict(
        {
            "prompt": [f"1+{i}" for i in numbers],
            "solution": [str(1 + i) for i in numbers],
            "id": [f"id{i}" for i in numbers],
            **columns,
        }
    )


def mixed_prompts(num):
    texts = [f"{'Hm. ' * (i % 4)}What is 1+{i}?" for i in range(num)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": conversations, "solution": ["1"] * num})


def ask(server, dataset, output_dir, **settings):
    settings = {"k": 4, "concurrency": 4, "progress": False, **settings}
    return evaluate("tiny", dataset, output_dir, base_url=server.url, **settings)


# ---- In this process ----


def here(model, dataset, output_dir, **settings):
    settings = {"k": 4, "max_completion_length": 8, "progress": False, **settings}
    return evaluate(model, dataset, output_dir, **settings)


def completions(output_dir):
    return pq.read_table(output_dir / "completions.parquet").to_pylist()


class Echo(torch.nn.Module):
    """Wrap a model so that it generates `script(prompt ids)` and padding, in the form that `generate` returns."""

    def __init__(self, model, script):
        super().__init__()
        self.model, self.script = model, script
        self.config, self.generation_config, self.device = model.config, model.generation_config, model.device

    def generate(self, input_ids, attention_mask, generation_config):
        self.asked = generation_config
        rows = [self.script(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        width = max(map(len, rows))
        pad = self.config.pad_token_id
        return torch.cat([input_ids, torch.tensor([row + [pad] * (width - len(row)) for row in rows])], dim=1)
