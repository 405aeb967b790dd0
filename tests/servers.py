# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A server of completions whose answers are scripted."""

import http.server
import json
import threading


class Server:
    """OpenAI-compatible; `script(body)` is the completion's text, or (status, payload), or `None` to hang up."""

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
                    pass  # whoever asked was killed

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
    """What tells one completion from another."""
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"], body["seed"]


def reply(text, conversational=True, num_tokens=7, finish_reason="stop"):
    said = {"message": {"role": "assistant", "content": text}} if conversational else {"text": text}
    return {"choices": [{**said, "finish_reason": finish_reason}], "usage": {"completion_tokens": num_tokens}}
