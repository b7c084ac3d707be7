"""An OpenAI-compatible HTTP server whose answers and failures are scripted by the test."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from evolver.llm.client import Chat, Limits
from evolver.llm.questions import Role
from evolver.llm.roles import ROLES
from evolver.llm.store import Cache


class Answer:
    """An answer. `cut` bytes at the end of the body are not sent; `stall` seconds pass before the
    first byte."""

    def __init__(self, body, status=200, *, headers=None, cut=0, stall=0.0):
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status = status
        self.headers = headers or {}
        self.cut = cut
        self.stall = stall


def said(text, *, finish="stop", prompt=10, completion=5, stall=0.0):
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    record = {
        "id": "x",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }
    return Answer(record, stall=stall)


def refused(status, message, **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer({"error": {"message": message}}, status, headers=names)


Script = Callable[[dict[str, Any], int], Answer] | Answer | str


class ChatServer:
    """Answers the n-th POST with `script(body, n)`; `requests` holds (path, headers, body) of all
    POSTs.

    script: or an Answer or a text, which is the answer to all. models: those that GET /v1/models
    lists; () = the server has no such route.
    """

    def __init__(self, script, *, models=("tiny",), key="", context=4096):
        self.script = script
        self.key = key
        self.requests = []
        self.models = [{"id": name, "object": "model", "max_model_len": context} for name in models]
        self._lock = threading.Lock()
        self.busy = 0
        self.busiest = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                known = self.path == "/v1/models" and outer.models
                self.send(Answer({"data": outer.models}) if known else Answer({}, 404))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    outer.requests.append((self.path, dict(self.headers), body))
                    number = len(outer.requests) - 1
                    outer.busy += 1
                    outer.busiest = max(outer.busiest, outer.busy)
                try:
                    known = self.path.startswith("/v1/")
                    self.send(outer.answer(body, number) if known else Answer({}, 404))
                finally:
                    with outer._lock:
                        outer.busy -= 1

            def send(self, answer):
                given = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if outer.key and given != outer.key:
                    answer = refused(401, f"Incorrect API key provided: {given}")
                time.sleep(answer.stall)
                try:
                    self.send_response(answer.status)
                    self.send_header("content-length", str(len(answer.body)))
                    self.send_header("content-type", "application/json")
                    for name, value in answer.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer.body[: len(answer.body) - answer.cut])
                    if answer.cut:
                        self.close_connection = True
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def answer(self, body, number):
        answer = self.script(body, number) if callable(self.script) else self.script
        return said(answer) if isinstance(answer, str) else answer

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def client(script, *, key="", models=("tiny",), limits=None, role=None, cache=None, **settings):
    """A client whose every role is answered by a script; `lines` holds what it says."""
    settings["cache"] = cache and Cache(cache)
    with ChatServer(script, models=models, key=key and "sk-right") as server:
        spec = {"url": server.url, "model": "tiny", "key": key, "max_tokens": 64} | (role or {})
        fast = {"first_wait": 0.01, "longest_wait": 0.02, "deadline": 5.0} | (limits or {})
        roles = dict.fromkeys(ROLES, Role(**spec))
        lines = []
        chat = Chat(roles, limits=Limits(**fast), say=lines.append, **settings)
        chat.server = server
        chat.lines = lines
        with contextlib.closing(chat):
            yield chat


def asked(chat):
    """All that was said in each request."""
    asked = [body["messages"] for _, _, body in chat.server.requests]
    return ["\n".join(message["content"] for message in messages) for messages in asked]


def answer(value):
    return said(json.dumps(value))
