"""The HTTP service: the reference's message formats, errors without tracebacks, and faults of
server and client."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("starlette", reason="pip install -r requirements/service.txt")
pytest.importorskip("uvicorn", reason="pip install -r requirements/service.txt")

import uvicorn

from envs import http as http_module
from envs import service as service_module
from envs.http import TOKEN_VARIABLE, listen
from envs.pool import Pool
from envs.process import ROOT, Deadlines
from envs.remote import Connections, RemoteWorld
from envs.service import Service, action_of, main, server_config
from envs.toolcalls import call_text, parse
from envs.world import Task, WorldError, WorldTimeout
from tests.envs.test_process import (
    CODER,
    COUNTER,
    FAULTY,
    SHORT,
    check_functions,
    is_running,
    solve,
    wait_until,
)


@contextlib.contextmanager
def service(env=COUNTER, kwargs=None, token="", max_body=1 << 20, local=False, **pool):
    """Run a service in a thread of this process. Yield (url, pool)."""
    pool = Pool(env, kwargs, **{"workers": 1, **pool})
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(
        server_config(
            Service(pool, token=token, max_body=max_body, local=local).app, log_level="critical"
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", pool
    finally:
        server.should_exit = True
        thread.join(20)
        pool.close()
        listener.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def counter():
    with service() as running:
        yield running


def post(url, route, data=None, headers=None, **body):
    """Send one POST with urllib. Return (status, answer)."""
    data = json.dumps(body).encode() if data is None else data
    request = urllib.request.Request(
        f"{url}/{route}", data, {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def say(content):
    return {"role": "assistant", "content": content}


# ----------------------------------------------------------------------------------- the reference's formats


def test_an_episode_of_the_references_client():
    """The reference's trainer expects two opening messages, one message per step and a number as
    the score."""
    with service("travel") as (url, _):
        with urllib.request.urlopen(f"{url}/healthz") as response:
            assert response.read() == b"OK"
        nothing = {"task_id": None, "instance_id": None, "messages": {}, "params": {}}
        status, answer = post(
            url,
            "get_env_profile",
            **{**nothing, "env_type": "travel", "params": {"split": "train"}},
        )
        assert (
            status == 200
            and answer["success"] is True
            and all(isinstance(id, str) for id in answer["data"])
        )
        task_id = answer["data"][0]
        body = {
            "env_type": "travel",
            "task_id": task_id,
            "instance_id": "x1",
            "params": {"is_open_query": False},
        }
        status, answer = post(url, "create", **body, messages={})
        state, info = answer["data"]["state"], answer["data"]["info"]
        assert [message["role"] for message in state] == ["system", "user"]
        assert "<tools>" in state[0]["content"] and '"name": "book"' in state[0]["content"]
        assert info["instance_id"] == "x1" and info["task_id"] == task_id
        status, answer = post(
            url, "step", instance_id="x1", messages=say(call_text("flights", {"city": "Rome"}))
        )
        data = answer["data"]
        assert len(data["state"]) == 1 and data["state"][0]["role"] == "user"
        assert data["state"][0]["content"].startswith("<tool_response>\n")
        assert data["is_terminated"] is False and isinstance(data["reward"], float)
        two = call_text("flights", {"city": "Rome"}) + call_text("flights", {"city": "Oslo"})
        _, answer = post(url, "step", instance_id="x1", messages=say(two))
        assert (
            len(answer["data"]["state"]) == 1
            and answer["data"]["state"][0]["content"].count("<tool_response>") == 2
        )
        assert post(url, "get_info", instance_id="x1")[1]["data"]["task_id"] == task_id
        _, answer = post(url, "step", instance_id="x1", messages=say("I give up."))
        assert answer["data"]["is_terminated"] is True and len(answer["data"]["state"]) == 1
        assert post(url, "evaluate", instance_id="x1", params={"sparse": True}) == (
            200,
            {"success": True, "data": 0.0},
        )
        assert post(url, "release", instance_id="x1") == (200, {"success": True, "data": None})
        assert post(url, "release", instance_id="x1") == (200, {"success": False, "data": None})


def test_structured_tool_calls_become_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert (
        action_of({"role": "assistant", "content": "Now.", "tool_calls": [call]})
        == f"Now.\n{call_text('f', {'a': 1})}"
    )
    tool = {"type": "tool", "tool": {"name": "f", "arguments": {}}}
    assert action_of({"content": None, "tool_calls": [tool]}) == call_text("f", {})
    for broken in (
        {"content": 1},
        {"tool_calls": [1]},
        {"tool_calls": 5},
        {"tool_calls": [{"type": [1]}]},
        {"tool_calls": [{"function": {"name": 7}}]},
    ):
        with pytest.raises(ValueError):
            action_of(broken)


UNREADABLE = [
    "{",
    "",
    "{'a': 1}",
    '{"a": NaN}',
    "[1]",
    '"text"',
    "7",
    "null",
    "{" * 5000,
    '{"a": %s}' % ("9" * 400),
]
UNREADABLE += ['{"a": %s}' % ("[" * 900 + "]" * 900), "} </tool_call> <tool_call>"]


@pytest.mark.parametrize("arguments", UNREADABLE, ids=range(len(UNREADABLE)))
def test_native_arguments_that_cannot_be_read_are_the_models_to_mend(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = parse(action_of({"role": "assistant", "content": "Now.", "tool_calls": [call]}))
    assert turn.content == "Now." and not turn.calls and len(turn.errors) == 1


def test_tasks_that_share_an_id_are_refused():
    with service("tests.envs.faulty:Twins") as (url, _):
        for body in {"params": {"split": "train"}}, {"task_id": "count-train-1"}:
            route = "create" if "task_id" in body else "get_env_profile"
            status, answer = post(url, route, **body)
            assert status == 500 and "share an id" in answer["detail"]
        status, answer = post(url, "create", task_id="count-dev-1", params={"split": "dev"})
        assert status == 200


def test_an_unreadable_native_call_is_answered_by_the_environment():
    with service("travel") as (url, _):
        task = post(url, "get_env_profile", params={"split": "train"})[1]["data"][0]
        post(url, "create", task_id=task, instance_id="x")
        message = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "flights", "arguments": "{"}}],
        }
        status, answer = post(url, "step", instance_id="x", messages=message)
        assert status == 200 and "not JSON" in answer["data"]["state"][0]["content"]
        assert answer["data"]["is_terminated"] is False


def test_functions_of_a_world_behind_the_service(counter):
    with service(CODER) as (url, _):
        check_functions(RemoteWorld(url), RemoteWorld(counter[0]))


def test_new_tools_are_listed():
    pytest.importorskip("bfcl_eval", reason="pip install --no-deps -r requirements/bfcl.txt")
    with service("bfcl", {"category": "multi_turn_miss_func"}) as (url, _):
        post(url, "create", task_id="multi_turn_miss_func_0", instance_id="x")
        answers = [
            post(url, "step", instance_id="x", messages=say("Next."))[1]["data"]["state"]
            for _ in range(3)
        ]
        assert all(len(state) == 1 for state in answers)
        assert [('"name": "sort"' in state[0]["content"]) for state in answers] == [
            False,
            False,
            True,
        ]
        assert post(url, "create", task_id="multi_turn_base_0", instance_id="y")[0] == 400


# --------------------------------------------------------------------------------------------------- errors

WRONG = [
    ("create", {}, 400, "task_id"),
    ("create", {"task_id": "no such task"}, 400, "no task"),
    ("create", {"params": {"task": {"id": "count-1"}}}, 400, "params.task"),
    ("create", {"params": {"task": "count-1"}}, 400, "params.task"),
    ("create", {"task_id": "count-1", "params": {"seed": "one"}}, 400, "params.seed"),
    ("step", {"instance_id": "x", "params": {"step": "one"}}, 400, "params.step"),
    ("create", {"task_id": 7}, 400, "must be a string"),
    ("step", {}, 400, "instance_id"),
    ("step", {"instance_id": "nobody", "messages": say("+")}, 400, "no instance"),
    ("step", {"instance_id": "nobody", "messages": "+"}, 400, "must be an object"),
    ("step", {"instance_id": "x", "messages": {"content": ["+"]}}, 400, "string"),
    ("step", {"instance_id": "x", "messages": say("+"), "params": {"step": 9}}, 400, "next step"),
    ("evaluate", {"instance_id": "nobody"}, 400, "no instance"),
    ("get_env_profile", {"params": {"split": "nothing"}}, 400, "no split"),
    ("get_info", {"instance_id": "x", "params": {"query": "_count"}}, 400, "no method"),
    ("get_info", {"instance_id": "x", "params": {"query": "evaluate"}}, 400, "no method"),
    ("restore", {"params": {"snapshot": 1}, "instance_id": ["x"]}, 400, "must be a string"),
    (
        "step",
        {"instance_id": "x", "messages": {"tool_calls": 5}},
        400,
        "'messages.tool_calls' must be a list, not int",
    ),
    (
        "step",
        {"instance_id": "x", "messages": {"tool_calls": [5]}},
        400,
        "'messages.tool_calls[0]' must be an object",
    ),
    (
        "step",
        {"instance_id": "x", "messages": {"tool_calls": [{"type": [1]}]}},
        400,
        "tool_calls[0].type' must be",
    ),
    (
        "step",
        {"instance_id": "x", "messages": {"tool_calls": [{}]}},
        400,
        "tool_calls[0].function.name' is missing",
    ),
    ("step", {"instance_id": "x", "messages": say("+"), "params": {"step": -1}}, 400, "0 or more"),
    (
        "step",
        {"instance_id": "x", "messages": say("+"), "params": {"step": True}},
        400,
        "must be an integer",
    ),
    (
        "get_env_profile",
        {"params": {"split": ["a"]}},
        400,
        "'params.split' must be a string, not list",
    ),
    (
        "create",
        {"task_id": "count-9", "params": {"split": 7}},
        400,
        "'params.split' must be a string, not int",
    ),
    ("create", {"task_id": "count-1", "params": {"seed": 10**400}}, 400, "params"),
    (
        "get_info",
        {"instance_id": "x", "params": {"query": ["a"]}},
        400,
        "'params.query' must be a string",
    ),
    (
        "get_info",
        {"instance_id": "x", "params": {"query": "spell", "args": "a"}},
        400,
        "'params.args' must be a list",
    ),
    (
        "get_info",
        {"instance_id": "x", "params": {"query": "spell", "kwargs": [1]}},
        400,
        "'params.kwargs' must be an",
    ),
    (
        "evaluate",
        {"instance_id": "x", "params": json.loads("[" * 500 + "]" * 500)},
        400,
        "'params' must be an object",
    ),
    (
        "evaluate",
        {"instance_id": "x", "params": {"a": json.loads("[" * 500 + "]" * 500)}},
        400,
        "nested deeper",
    ),
]


@pytest.mark.parametrize("route, body, status, detail", WRONG)
def test_errors_say_what_was_wrong(counter, route, body, status, detail):
    url, _ = counter
    post(url, "create", task_id="count-0", instance_id="x")
    got, answer = post(url, route, **body)
    assert got == status and detail in answer["detail"] and "Traceback" not in answer["detail"]


TWICE = b'{"instance_id": "x", "messages": {"content": "+"}, "messages": {"content": "x"}}'


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, TWICE])
def test_broken_bodies_are_refused(counter, data):
    url, _ = counter
    assert post(url, "step", data=data)[0] == 400


@pytest.mark.parametrize("megabytes", [2, 50])
def test_a_body_that_is_too_large_is_answered(counter, megabytes):
    status, answer = post(counter[0], "step", data=b" " * (megabytes << 20))
    assert status == 413 and "larger than" in answer["detail"]


HEAD = b"POST /step HTTP/1.1\r\nHost: x\r\n"
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "start", [b"", b"PO", HEAD, HEAD + b"Content-Length: 10\r\n\r\n{", WHOLE + b"POST /st"]
)
def test_half_a_request_ends(counter, start, monkeypatch):
    monkeypatch.setattr(service_module, "HEAD_S", 0.3)
    monkeypatch.setattr(http_module, "BODY_S", 0.3)
    with socket.create_connection(
        ("127.0.0.1", int(counter[0].rsplit(":", 1)[1])), timeout=30
    ) as client:
        if start.startswith(WHOLE):
            client.sendall(WHOLE)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(start.removeprefix(WHOLE))
        answer = b"".join(
            iter(lambda: client.recv(1 << 16), b"")
        )  # until the server closes the connection
    assert (b" 408 " in answer) == (b"Content-Length" in start)
    assert post(counter[0], "create", task_id="count-0")[0] == 200


def test_a_service_says_which_environment_it_runs():
    with service("travel") as (url, _):
        status, answer = post(url, "create", env_type="appworld", task_id="1")
        assert status == 400 and "travel" in answer["detail"]


def test_a_token_is_required(monkeypatch):
    with service(token="secret") as (url, _):
        assert post(url, "create", task_id="count-0")[0] == 401
        assert (
            post(url, "create", headers={"Authorization": "Bearer wrong"}, task_id="count-0")[0]
            == 401
        )
        assert (
            post(url, "create", headers={"Authorization": "Bearer secret"}, task_id="count-0")[0]
            == 200
        )
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/metrics")
        with pytest.raises(WorldError, match="token"):
            RemoteWorld(url).tasks("train")
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        assert solve(RemoteWorld(url)) == 1.0


def test_a_service_of_this_machine_answers_to_no_other_name():
    """As a page elsewhere has whose name was made to resolve to this machine."""
    with service(local=True) as (url, _):
        for host, status in (("evil.example:8080", 401), ("", 401), ("localhost:8080", 200)):
            assert post(url, "get_env_profile", headers={"Host": host})[0] == status
        assert solve(RemoteWorld(url)) == 1.0


def test_the_command_line_reports_errors(capsys):
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        assert main(["--env", "travel", "--port", str(taken.getsockname()[1])]) == 1
        assert "cannot listen" in capsys.readouterr().err
    assert main(["--env", "no_such_world", "--port", "0", "--workers", "1"]) == 1
    assert "there is no world" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- faults


def test_a_duplicate_step_is_executed_once(counter):
    url, _ = counter
    post(url, "create", task_id="count-1", instance_id="twice")
    body = {"instance_id": "twice", "messages": say("+"), "params": {"step": 0}}
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: post(url, "step", **body), range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][1]["data"]["state"][0]["content"].count("1") == 1
    assert post(url, "step", instance_id="twice", messages=say("x"), params={"step": 0})[0] == 400


class Lossy:
    """A proxy that drops the first answers to `/step`, so that the client cannot know if the steps
    ran."""

    def __init__(self, url: str, losses: int):
        self._target, self._losses = int(url.rsplit(":", 1)[1]), losses
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, connection.makefile("rb") as lines:
            while line := lines.readline():
                head = [line, *iter(lines.readline, b"\r\n")]
                length = next(
                    int(h.split(b":")[1]) for h in head if h.lower().startswith(b"content-length")
                )
                route = line.split()[1].decode()
                upstream = http.client.HTTPConnection("127.0.0.1", self._target)
                upstream.request(
                    "POST", route, lines.read(length), {"Content-Type": "application/json"}
                )
                response = upstream.getresponse()
                data = response.read()
                upstream.close()
                if route == "/step" and self._losses:
                    self._losses -= 1
                    return
                connection.sendall(
                    b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b"
                    % (response.status, len(data), data)
                )

    def close(self):
        self._listener.close()


def test_a_lost_answer_is_requested_again(counter):
    with contextlib.closing(Lossy(counter[0], losses=2)) as proxy:
        world = RemoteWorld(proxy.url)
        world.reset(world.tasks("train")[0])
        assert [world.step("+").messages[0]["content"] for _ in range(3)] == ["1", "2", "3"]
        assert world.evaluate().success
        world.close()


@pytest.mark.parametrize("fault", ["raise", "exit", "hang", "huge"])
def test_a_fault_in_one_instance_does_not_affect_the_others(fault):
    deadlines = SHORT if fault == "hang" else Deadlines()
    with service(FAULTY, {"fault": fault}, deadlines=deadlines) as (url, pool):
        connections = Connections(url)
        worlds = [RemoteWorld(connections) for _ in range(4)]
        for world in worlds:
            world.reset(world.tasks("train")[0])
            world.step("+")
        with pytest.raises(WorldTimeout if fault == "hang" else WorldError) as caught:
            worlds[0].step("break")
        assert "\n" not in str(caught.value)
        for world in worlds[1:]:
            assert world.step("+").messages[0]["content"] == "2"
        assert solve(worlds[0]) == 1.0
        for world in worlds:
            world.close()
        assert pool.alive() == 0


def test_leases_end_and_metrics_count_them():
    with service(lease_s=0.3) as (url, pool):
        for i in range(3):
            post(url, "create", task_id="count-0", instance_id=str(i))
        assert wait_until(lambda: pool.alive() == 0)
        status, answer = post(url, "step", instance_id="0", messages=say("+"))
        assert status == 400 and "idle" in answer["detail"]
        with urllib.request.urlopen(f"{url}/metrics") as response:
            text = response.read().decode()
        assert "env_instances 0" in text and 'env_events_total{event="released idle"} 3' in text
        assert 'env_requests_total{route="create",status="200"} 3' in text
        assert 'env_request_seconds_bucket{route="create",le="+Inf"} 3' in text
        assert all(
            re.fullmatch(r'# TYPE \w+ \w+|\w+(\{(\w+="[^"]*",?)+\})? [\d.]+', line)
            for line in text.splitlines()
        )


def test_a_request_to_a_full_service_is_repeated():
    with service(per_worker=1) as (url, _):
        first, second = RemoteWorld(url), RemoteWorld(url)
        task = first.tasks("train")[0]
        first.reset(task)
        assert post(url, "create", task_id="count-0")[0] == 503
        threading.Timer(0.2, first.close).start()
        second.reset(task)
        assert second.step("+").messages[0]["content"] == "1"


def test_a_reset_that_ends_after_its_client_gave_up_is_released(tmp_path):
    late = tmp_path / "late"
    with service("tests.envs.faulty:Late", {"path": str(late)}) as (url, pool):
        world = RemoteWorld(url, deadlines=Deadlines(reset=2.0))
        with pytest.raises(WorldTimeout):
            world.reset(Task("count-0", "counter", "wait"))
        with pytest.raises(WorldError, match="reset it first"):
            world.step("+")
        assert wait_until(lambda: pool.alive() == 1)
        world.close()
        assert pool.alive() == 0
        late.touch()
        other = RemoteWorld(url)
        other.reset(Task("count-0", "counter", "now"))
        assert other.count() == 1
        other.close()


def test_many_clients_at_once(counter):
    connections = Connections(counter[0])

    def episode(number):
        world = RemoteWorld(connections)
        world.reset(Task("count-0", "counter", ""))
        counts = [world.step("+").messages[0]["content"] for _ in range(number % 3 + 1)]
        world.close()
        return counts == [str(i + 1) for i in range(number % 3 + 1)]

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert all(threads.map(episode, range(100)))
    assert len(connections._idle) <= 16


def test_a_service_is_killed_during_a_rollout():
    command = [
        sys.executable,
        "-m",
        "envs.service",
        "--env",
        COUNTER,
        "--port",
        "0",
        "--workers",
        "2",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    url = server.stdout.readline().decode().split()[-1]
    world = RemoteWorld(url, deadlines=Deadlines(step=5.0))
    world.reset(world.tasks("train")[0])
    worker = world.step("+").info["pid"]
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdout.close()
    with pytest.raises(WorldError):
        world.step("+")
    assert wait_until(lambda: not is_running(worker))
    listen("127.0.0.1", int(url.rsplit(":", 1)[1])).close()  # the port is free
    world.close()


def test_a_restarted_service_has_no_old_instances():
    with service() as (url, _):
        world = RemoteWorld(url)
        world.reset(world.tasks("train")[0])
    with service() as (new, _):
        world._host.connections = Connections(new)
        with pytest.raises(WorldError, match="no instance"):
            world.step("+")
        assert solve(world) == 1.0


def test_an_interrupted_service_ends_its_workers():
    command = [
        sys.executable,
        "-m",
        "envs.service",
        "--env",
        COUNTER,
        "--port",
        "0",
        "--workers",
        "1",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    world = RemoteWorld(server.stdout.readline().decode().split()[-1])
    world.reset(world.tasks("train")[0])
    worker = world.step("+").info["pid"]
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(30) in (0, -signal.SIGTERM)
    server.stdout.close()
    assert wait_until(lambda: not is_running(worker))


@pytest.mark.parametrize(
    "reply, error",
    [
        (b"garbage\r\n\r\n", "did not answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhuh?", "huh"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]", "200"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 2\r\n\r\n{}", "502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (17 << 20), "16 MB"),
        (b"", "did not answer"),
        (None, "within"),
    ],
)
def test_invalid_answers_of_a_server_are_errors(reply, error):
    listener = listen("127.0.0.1", 0)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    if reply is None:
                        time.sleep(2)
                    else:
                        connection.sendall(reply)
                        connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    deadline = 0.5 if reply is None else 20.0
    world = RemoteWorld(url, deadlines=Deadlines(start=deadline), retries=1)
    with pytest.raises(WorldError, match=error):
        world.tasks("train")
    listener.close()


def test_a_url_is_checked():
    with pytest.raises(ValueError, match="URL"):
        RemoteWorld("ftp://host")
    assert Connections("localhost:80")._address == ("localhost", 80)
