"""The HTTP service: the reference's message formats, errors without tracebacks, and faults of
server and client."""

import concurrent.futures
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("starlette", reason="pip install -r requirements/service.txt")
pytest.importorskip("uvicorn", reason="pip install -r requirements/service.txt")

import uvicorn

from envs import http as http_module
from envs import service as service_module
from envs.http import TOKEN_VARIABLE, bearer, listen
from envs.pool import Pool
from envs.process import ROOT, Deadlines
from envs.remote import Connections, RemoteWorld
from envs.service import Service, action_of, main, server_config
from envs.toolcalls import call_text, parse
from envs.world import Task, WorldError, WorldTimeout
from tests.envs.playing import begin, solve, take_all, told
from tests.envs.test_process import (
    CODER,
    COUNTER,
    FAULTY,
    SHORT,
    all_end,
    check_functions,
    wait_until,
)


@contextlib.contextmanager
def service(env=COUNTER, kwargs=None, token="", local=False, **pool):
    """Run a service in a thread of this process. Yield (url, pool)."""
    pool = Pool(env, kwargs, workers=1, **pool)
    listener = listen("127.0.0.1", 0)
    app = Service(pool, token=token, local=local).app
    server = uvicorn.Server(server_config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield url_of(listener), pool
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
    request = urllib.request.Request(f"{url}/{route}", data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def url_of(listener):
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def port_of(url):
    return int(url.rpartition(":")[2])


def say(content):
    return {"role": "assistant", "content": content}


# ----------------------------------------------------------------------------------- the reference's formats


def test_an_episode_of_the_references_client():
    """The reference's trainer expects two opening messages, one message per step and a number as
    the score."""
    with service("travel") as (url, _):
        with urllib.request.urlopen(f"{url}/healthz") as response:
            assert response.read() == b"OK"
        nothing = {"env_type": "travel", "task_id": None, "instance_id": None, "messages": {}}
        status, answer = post(url, "get_env_profile", **nothing, params={"split": "train"})
        assert status == 200 and answer["success"] is True
        assert all(isinstance(id, str) for id in answer["data"])
        task_id = answer["data"][0]
        body = nothing | {"task_id": task_id, "instance_id": "x1"}
        status, answer = post(url, "create", **body, params={"is_open_query": False})
        state, info = answer["data"]["state"], answer["data"]["info"]
        assert [message["role"] for message in state] == ["system", "user"]
        assert "<tools>" in state[0]["content"] and '"name": "book"' in state[0]["content"]
        assert info["instance_id"] == "x1" and info["task_id"] == task_id

        def send(route, **body):
            return post(url, route, instance_id="x1", **body)[1]

        two = call_text("flights", {"city": "Rome"}) + call_text("flights", {"city": "Oslo"})
        data = send("step", messages=say(two))["data"]
        (shown,) = data["state"]
        assert shown["role"] == "user" and shown["content"].startswith("<tool_response>\n")
        assert shown["content"].count("<tool_response>") == 2
        assert data["is_terminated"] is False and isinstance(data["reward"], float)
        assert send("get_info")["data"]["task_id"] == task_id
        data = send("step", messages=say("I give up."))["data"]
        assert data["is_terminated"] is True and len(data["state"]) == 1
        scored = send("evaluate", params={"sparse": True})
        assert scored == {"success": True, "data": 0.0}
        for success in (True, False):
            assert send("release") == {"success": success, "data": None}


def test_structured_tool_calls_become_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert (
        action_of({"role": "assistant", "content": "Now.", "tool_calls": [call]})
        == f"Now.\n{call_text('f', {'a': 1})}"
    )
    tool = {"type": "tool", "tool": {"name": "f", "arguments": {}}}
    assert action_of({"content": None, "tool_calls": [tool]}) == call_text("f", {})


UNREADABLE = [
    "{", "", "{'a': 1}", '{"a": NaN}', "[1]", '"text"', "7", "null", "{" * 5000,
    '{"a": %s}' % ("9" * 400), '{"a": %s}' % ("[" * 900 + "]" * 900), "} </tool_call> <tool_call>",
]  # fmt: skip


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
        message = {"tool_calls": [{"function": {"name": "flights", "arguments": "{"}}]}
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
        for has_sort in (False, False, True):
            data = post(url, "step", instance_id="x", messages=say("Next."))[1]["data"]
            (shown,) = data["state"]
            assert ('"name": "sort"' in shown["content"]) == has_sort
        assert post(url, "create", task_id="multi_turn_base_0", instance_id="y")[0] == 400


# --------------------------------------------------------------------------------------------------- errors

DEEP = json.loads("[" * 500 + "]" * 500)
WRONG = [
    ("create", {}, "task_id"),
    ("create", {"task_id": "no such task"}, "no task"),
    ("create", {"params": {"task": {"id": "count-1"}}}, "params.task"),
    ("create", {"params": {"task": "count-1"}}, "params.task"),
    ("create", {"task_id": "count-1", "params": {"seed": "one"}}, "params.seed"),
    ("create", {"task_id": 7}, "must be a string"),
    ("create", {"task_id": "count-9", "params": {"split": 7}}, "'params.split' must be a string, not int"),
    ("create", {"task_id": "count-1", "params": {"seed": 10**400}}, "params"),
    ("step", {}, "instance_id"),
    ("step", {"instance_id": "nobody", "messages": say("+")}, "no instance"),
    ("step", {"instance_id": "nobody", "messages": "+"}, "must be an object"),
    ("evaluate", {"instance_id": "nobody"}, "no instance"),
    ("get_env_profile", {"params": {"split": "nothing"}}, "no split"),
    ("get_env_profile", {"params": {"split": ["a"]}}, "'params.split' must be a string, not list"),
    ("restore", {"params": {"snapshot": 1}, "instance_id": ["x"]}, "must be a string"),
    *(("step", {"messages": messages}, detail) for messages, detail in [
        ({"content": ["+"]}, "string"),
        ({"tool_calls": 5}, "'messages.tool_calls' must be a list, not int"),
        ({"tool_calls": [5]}, "'messages.tool_calls[0]' must be an object"),
        ({"tool_calls": [{"type": [1]}]}, "tool_calls[0].type' must be"),
        ({"tool_calls": [{}]}, "tool_calls[0].function.name' is missing"),
        ({"tool_calls": [{"function": {"name": 7}}]}, "function.name' must be a string"),
    ]),
    *((route, {"messages": say("+"), "params": params}, detail) for route, params, detail in [
        ("step", {"step": "one"}, "params.step"),
        ("step", {"step": 9}, "next step"),
        ("step", {"step": -1}, "0 or more"),
        ("step", {"step": True}, "must be an integer"),
        ("get_info", {"query": "_count"}, "no method"),
        ("get_info", {"query": "evaluate"}, "no method"),
        ("get_info", {"query": ["a"]}, "'params.query' must be a string"),
        ("get_info", {"query": "spell", "args": "a"}, "'params.args' must be a list"),
        ("get_info", {"query": "spell", "kwargs": [1]}, "'params.kwargs' must be an"),
        ("evaluate", DEEP, "'params' must be an object"),
        ("evaluate", {"a": DEEP}, "nested deeper"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("route, body, detail", WRONG)
def test_errors_say_what_was_wrong(counter, route, body, detail):
    url, _ = counter
    post(url, "create", task_id="count-0", instance_id="x")
    if "messages" in body:
        body = {"instance_id": "x"} | body
    status, answer = post(url, route, **body)
    assert status == 400 and detail in answer["detail"] and "Traceback" not in answer["detail"]


TWICE = b'{"instance_id": "x", "messages": {"content": "+"}, "messages": {"content": "x"}}'


@pytest.mark.parametrize("data", [b"", b"[]", b'"x"', TWICE])
def test_broken_bodies_are_refused(counter, data):
    url, _ = counter
    assert post(url, "step", data=data)[0] == 400


@pytest.mark.parametrize("megabytes", [5, 50])
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
    with socket.create_connection(("127.0.0.1", port_of(counter[0])), timeout=30) as client:
        if start.startswith(WHOLE):
            client.sendall(WHOLE)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(start.removeprefix(WHOLE))
        # Until the server closes the connection:
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert (b" 408 " in answer) == (b"Content-Length" in start)
    assert post(counter[0], "create", task_id="count-0")[0] == 200


def test_a_service_says_which_environment_it_runs():
    with service("travel") as (url, _):
        status, answer = post(url, "create", env_type="appworld", task_id="1")
        assert status == 400 and "travel" in answer["detail"]


def test_a_token_is_required(monkeypatch):
    with service(token="secret") as (url, _):
        for header, status in ({}, 401), (bearer("wrong"), 401), (bearer("secret"), 200):
            assert post(url, "create", headers=header, task_id="count-0")[0] == status
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


def test_a_lost_answer_is_requested_again(counter):
    """The client cannot know whether a step ran whose answer does not arrive."""
    losses = ["first", "second"]

    class Lossy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with urllib.request.urlopen(counter[0] + self.path, body) as response:
                answer = response.read()
            self.close_connection = self.path == "/step" and bool(losses)
            if self.close_connection:
                losses.pop()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with ThreadingHTTPServer(("127.0.0.1", 0), Lossy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        world = RemoteWorld(f"http://127.0.0.1:{proxy.server_port}")
        begin(world)
        assert take_all(world, "+++") == ["1", "2", "3"] and not losses
        assert world.evaluate().success
        world.close()
        proxy.shutdown()


@pytest.mark.parametrize("fault", ["raise", "exit", "hang", "huge"])
def test_a_fault_in_one_instance_does_not_affect_the_others(fault):
    deadlines = SHORT if fault == "hang" else Deadlines()
    with service(FAULTY, {"fault": fault}, deadlines=deadlines) as (url, pool):
        connections = Connections(url)
        worlds = [RemoteWorld(connections) for _ in range(4)]
        for world in worlds:
            begin(world)
            world.step("+")
        with pytest.raises(WorldTimeout if fault == "hang" else WorldError) as caught:
            worlds[0].step("break")
        assert "\n" not in str(caught.value)
        for world in worlds[1:]:
            assert told(world, "+") == "2"
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
        form = r'# TYPE \w+ \w+|\w+(\{(\w+="[^"]*",?)+\})? [\d.]+'
        assert all(re.fullmatch(form, line) for line in text.splitlines())


def test_a_request_to_a_full_service_is_repeated():
    with service(per_worker=1) as (url, _):
        first, second = RemoteWorld(url), RemoteWorld(url)
        task = first.tasks("train")[0]
        first.reset(task)
        assert post(url, "create", task_id="count-0")[0] == 503
        threading.Timer(0.2, first.close).start()
        second.reset(task)
        assert told(second, "+") == "1"


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
        counts = take_all(world, "+" * (number % 3 + 1))
        world.close()
        return counts == [*"123"][: number % 3 + 1]

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert all(threads.map(episode, range(100)))
    assert len(connections._idle) <= 16


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_ends_during_a_rollout_leaves_nothing(how):
    command = [sys.executable, "-m", "envs.service", "--env", COUNTER, "--port=0", "--workers=2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    url = server.stdout.readline().decode().split()[-1]
    world = RemoteWorld(url, deadlines=Deadlines(step=5.0))
    begin(world)
    worker = world.step("+").info["pid"]
    server.send_signal(how)
    assert server.wait(30) in (0, -how)
    server.stdout.close()
    with pytest.raises(WorldError):
        world.step("+")
    assert all_end(worker)
    listen("127.0.0.1", port_of(url)).close()  # the port is free
    world.close()


def test_a_restarted_service_has_no_old_instances():
    with service() as (url, _):
        world = RemoteWorld(url)
        begin(world)
    with service() as (new, _):
        world._host.connections = Connections(new)
        with pytest.raises(WorldError, match="no instance"):
            world.step("+")
        assert solve(world) == 1.0


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
                    connection.sendall(reply or b"")
                    connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    url = url_of(listener)
    deadline = 0.5 if reply is None else 20.0
    world = RemoteWorld(url, deadlines=Deadlines(start=deadline), retries=1)
    with pytest.raises(WorldError, match=error):
        world.tasks("train")
    listener.close()


def test_a_url_is_checked():
    with pytest.raises(ValueError, match="URL"):
        RemoteWorld("ftp://host")
    assert Connections("localhost:80")._address == ("localhost", 80)
