"""The confinement of the processes that run a model's code in AppWorld, without the package."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import types

import pytest

from envs.appworld import confine
from envs.appworld.engine import Engine
from envs.appworld.sandbox import Session, SessionEnded
from envs.process import ROOT
from tests.envs.test_process import all_end

PREPARED = """
import ctypes, os, socket, sqlite3, subprocess, sys, threading, _posixsubprocess
from envs.appworld import confine
libc = ctypes.CDLL(None)
confine.confine(2000)
def exec_(*words):
    pipe = os.pipe()
    more = [False] if sys.version_info >= (3, 11) else []
    pid = _posixsubprocess.fork_exec(
        [os.fsencode(w) for w in words], [os.fsencode(words[0])], True, (pipe[1],), None, None, -1, -1, -1, -1, -1, -1,
        pipe[0], pipe[1], False, False, -1, None, None, None, -1, None, *more)
    assert os.waitpid(pid, 0)[1] == 0
"""


def confined(code: str, folder) -> subprocess.CompletedProcess:
    """Run code in a confined process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OUT": str(folder)}
    command = [sys.executable, "-c", PREPARED + code]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100
    )


FORBIDDEN = {
    "reading": "print(open('secret').read())",
    "reading by bytes": "print(open(b'secret', 'rb').read())",
    "listing": "print(os.listdir('.'))",
    "writing": "open(os.environ['OUT'] + '/made', 'w')",
    "writing beside the interpreter": "open(os.path.dirname(os.__file__) + '/evolver_was_here', 'w')",
    "a program": "subprocess.run(['touch', 'made'])",
    "a shell": "assert os.system('touch made') == 0",
    "a socket": "socket.create_connection(('127.0.0.1', 9))",
    "a database": "sqlite3.connect('made').execute('create table t (a)')",
    "a signal to the parent": "os.kill(os.getppid(), 0)",
    "memory": "x = [0] * 10**9",
    "a higher limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "the memory of the interpreter": "import gc; gc.get_objects()",
}
BY_THE_KERNEL = {  # no audit event, or one that the code has got rid of
    "a program behind the hooks": "exec_('/usr/bin/touch', 'made'); assert os.stat",
    "a pipe": "os.mkfifo('made')",
    "a node": "os.mknod('made')",
    "reading by the C library": "assert libc.open(b'secret', 0) >= 0",
    "writing by the C library": "assert libc.open(b'made', 65, 0o600) >= 0",
    "attaching a database": "c = sqlite3.connect(''); c.execute(\"attach 'made' as m\"); c.execute('create table m.t (a)')",
    "a changed helper": "os.path.realpath = lambda path: os.__file__; print(open('secret').read())",
}


@pytest.mark.parametrize("what", FORBIDDEN | BY_THE_KERNEL)
def test_a_confined_process_cannot(what, tmp_path):
    if what in BY_THE_KERNEL and confine.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "secret").write_text("the answer")
    done = confined((FORBIDDEN | BY_THE_KERNEL)[what], tmp_path)
    assert done.returncode != 0 and "the answer" not in done.stdout, done.stdout
    assert "confine.confine" not in done.stderr, done.stderr  # it got as far as the forbidden thing
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_confined_process_can_compute_import_and_talk(tmp_path):
    code = "import decimal, statistics, json, wave; print(json.dumps(statistics.mean([1, 2])), len('x' * 10**8))"
    done = confined(code, tmp_path)
    assert done.stdout == "1.5 100000000\n", done.stderr


# ------------------------------------------------------------------------------------------------- sessions


class Played:
    """A session whose process is played by a function in a thread. The process that is killed in
    the end only waits."""

    def __init__(self, play, handler=lambda *request: [200, "{}"], seconds=20.0):
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        ours, theirs = socket.socketpair()

        def run():
            with contextlib.suppress(OSError, ValueError), theirs, theirs.makefile("rwb") as lines:
                lines.write(b'{"output": ""}\n')
                lines.flush()
                lines.readline()
                for part in play(lines):
                    lines.write(part)
                    lines.flush()

        threading.Thread(target=run, daemon=True).start()
        self.session = Session(ours, self.process.pid, handler, seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()
        self.process.wait()


def forever(message):
    def play(lines):
        while True:
            yield message
            lines.readline()

    return play


def hold(lines):
    yield b'{"output'
    lines.readline()


HOSTILE = {
    "garbage": (lambda lines: [b"\xff\xfe\n"], "something else"),
    "another message": (lambda lines: [b'{"score": 1.0}\n'], "something else"),
    "a list": (lambda lines: [b"[1, 2]\n"], "something else"),
    "a request without its parts": (lambda lines: [b'{"request": [1]}\n'], "something else"),
    "depth": (lambda lines: [b"[" * 100_000 + b"\n"], "something else"),
    "an unending line": (lambda lines: [b"x" * (1 << 20)] * 20, "16 MB"),
    "endless requests": (
        forever(b'{"request": ["get", "phone/x", {}]}\n'),
        "more than 50 requests",
    ),
    "silence": (hold, "it timed out"),
    "an end": (lambda lines: [], "died"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_session_is_ended_and_nothing_else_happens(what):
    play, reason = HOSTILE[what]
    with Played(play, seconds=0.5 if what == "silence" else 20.0) as played:
        with pytest.raises(SessionEnded, match=reason):
            played.session.run("code", 50)
        assert all_end(played.process.pid)


def test_requests_are_answered_until_there_is_an_output():
    asked = []

    def handler(*request):
        asked.append(request)
        return [200, '{"a": 1}']

    def play(lines):
        yield b'{"request": ["post", "phone/call", {"json": {"n": 1}}]}\n'
        yield json.dumps({"output": f"it said {json.loads(lines.readline())}"}).encode() + b"\n"

    with Played(play, handler) as played:
        assert played.session.run("code", 50) == "it said [200, '{\"a\": 1}']"
    assert asked == [("post", "phone/call", {"json": {"n": 1}})]


@pytest.mark.parametrize(
    "request_",
    [
        ("get", "admin/dbs", {}),
        ("get", "phone/../admin/dbs", {}),
        ("get", "./admin", {}),
        ("get", "/admin/dbs", {}),
        ("get", "http://testserver/admin/dbs", {}),
        ("trace", "phone/x", {}),
        ("get", "phone/x", {"timeout": 1}),
        ("get", "phone/x", {"auth": ["a", "b"]}),
        ("get", "venmo/x", {}),
    ],
)
def test_only_requests_to_the_apps_of_the_task_are_served(request_):
    engine, client = (
        Engine(),
        types.SimpleNamespace(request=lambda *a, **k: pytest.fail("it was served")),
    )
    engine._apps = ["phone", "supervisor"]
    engine._world = types.SimpleNamespace(requester=types.SimpleNamespace(client=client))
    with pytest.raises(ValueError):
        engine._answer(*request_)
