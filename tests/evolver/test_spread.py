"""What only the first process does asks the language models of all processes."""

import sys
import threading
import time

import jax
import pytest

from evolver.llm.questions import ChatError, Question, ServerDown
from evolver.processes import hosts
from tests.evolver.chat_server import refused
from tests.evolver.test_hosts import finish, start
from tests.tiny import tiny_policy

OWN = ("explorer", "writer")


class Store:
    """The part of a coordination service that `hosts.Stream` uses."""

    def __init__(self):
        self.kept = {}
        self.changed = threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self.changed:
            self.kept[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.kept, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.kept[key]

    def key_value_delete(self, key):
        del self.kept[key]


@pytest.fixture
def processes(monkeypatch, chat_of):
    """The clients of two processes with these scripts, and the store between them."""
    store = Store()
    me = threading.local()
    monkeypatch.setattr(hosts, "_client", lambda: store)
    monkeypatch.setattr(hosts, "count", lambda: 2)
    monkeypatch.setattr(hosts, "index", lambda: getattr(me, "index", 0))

    def made(*scripts, **limits):
        chats = [chat_of(script, **limits) for script in scripts]
        for chat in chats:
            chat.spread_roles(OWN)

        def serve():
            me.index = 1
            chats[1].spread.serve()

        helper = threading.Thread(target=serve, daemon=True)
        helper.start()
        return chats, helper

    return made, store


def asking(chat, role, count=24):
    """Ask so many questions, and return their answers."""
    questions = [[{"role": "user", "content": f"question {i}"}] for i in range(count)]
    return chat.ask([Question(role, question, seed=i) for i, question in enumerate(questions)])


def echo(body, number):
    return body["messages"][-1]["content"]


def test_both_processes_answer_and_the_answers_are_in_order(processes):
    made, store = processes
    (first, other), helper = made(echo, echo)
    with first.spread.lent():
        replies = asking(first, "explorer")
    helper.join(10)
    assert [reply.text for reply in replies] == [f"question {i}" for i in range(24)]
    counts = [len(chat.server.requests) for chat in (first, other)]
    assert min(counts) >= 6 and sum(counts) == 24
    assert other.ledger.total["explorer"].calls == counts[1], "each counts what it was asked"
    assert not helper.is_alive() and not store.kept
    asking(first, "writer")
    assert len(other.server.requests) == counts[1], "outside of the block each asks its own"


def test_a_server_that_all_processes_share_is_asked_by_the_first(processes):
    made, _ = processes
    (first, other), _ = made(echo, echo)
    with first.spread.lent():
        asking(first, "judge")
    assert len(first.server.requests) == 24 and not other.server.requests


def test_what_the_other_process_cannot_answer_counts_as_here(processes):
    made, _ = processes
    (first, other), _ = made(echo, "")
    with first.spread.lent():
        replies = asking(first, "writer")
    unanswered = [reply for reply in replies if isinstance(reply, ChatError)]
    assert {error.kind for error in unanswered} == {"empty"}
    assert len(unanswered) == other.ledger.total["writer"].unanswered >= 6


def test_a_server_of_another_process_that_is_down_ends_the_first_ones_work(processes):
    made, _ = processes
    (first, _), helper = made(echo, lambda body, number: refused(401, "no"), attempts=1)
    with pytest.raises(ServerDown, match="requires a key"), first.spread.lent():
        asking(first, "writer")
    helper.join(10)
    assert not helper.is_alive()


def test_a_first_process_that_is_interrupted_waits_for_no_answer(processes):
    made, _ = processes
    (first, other), helper = made(echo, lambda body, number: time.sleep(30) or "late")
    other.limits.__dict__["grace"] = 0.1
    ended = time.monotonic() + 0.5

    def check():
        if time.monotonic() > ended:
            raise KeyboardInterrupt

    first.check = check
    with pytest.raises(KeyboardInterrupt), first.spread.lent():
        asking(first, "writer")
    helper.join(10)
    assert not helper.is_alive() and time.monotonic() < ended + 15


WRITER = """
#!{python}
import http.server, json, pathlib, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"data": [{{"id": {name!r}}}]}})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        with open(pathlib.Path({folder!r}) / str(port), "a") as file:
            file.write(body + "\\n")
        query = json.loads(body)["messages"][-1]["content"].partition("\\n")[0]
        message = {{"content": json.dumps({{"queries": [query]}})}}
        self.answer({{"choices": [{{"message": message}}]}})

    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.slow
def test_the_writers_of_two_processes_word_the_first_tasks(tmp_path, tiny):
    asked = tmp_path / "asked"
    model = str(tiny_policy(tmp_path / "writer"))
    asked.mkdir()
    program = tmp_path / "python"
    text = WRITER.format(python=sys.executable, folder=str(asked), name=model)
    program.write_text(text.lstrip())
    program.chmod(0o755)
    flags = (
        "--config.env.name=travel", "--config.questioning.enabled=True",
        "--config.questioning.budget=24", "--config.questioning.words.name=model",
        "--config.llm.url=served", f"--config.llm.serve.path={model}",
        f"--config.llm.serve.python={program}", "--config.mesh.fsdp=2", "--mode=explore",
    )  # fmt: skip
    tasks = []
    for name, count in (("alone", -2), ("together", 2)):
        for code, _, err in finish(start(tmp_path, tiny, count, name, *flags)):
            assert code == 0, err[-3000:]
        tasks.append((tmp_path / name / "tasks.jsonl").read_bytes())
    assert tasks[0] == tasks[1]
    counts = sorted(len(path.read_text().splitlines()) for path in asked.iterdir())
    assert counts[-1] == 24 and len(counts) == 3 and min(counts) >= 6 and sum(counts) == 48
