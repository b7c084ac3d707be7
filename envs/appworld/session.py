"""The process that runs a model's code in AppWorld, under the interpreter that has the package.

It holds no tasks, no databases, no answers and no evaluator. Its `apis` send each request over a
socket to the process that does (envs/appworld/engine.py), and get back what an HTTP client would
get. A parent that has imported everything forks one such process per episode, so that nothing of
one episode is left in the next.

    parent    {"task": {...}} with a socket   ->   {"pid": 123} session   {"code": "..."}
    ->   {"request": [method, url, options]}  any number of times, each
                                                   answered with [status, text]; then {"output":
                                                   "..."}
"""

import contextlib
import ctypes
import datetime
import functools
import json
import os
import random
import signal
import socket
import sys
import types
from typing import Any

from envs.appworld.confine import confine
from envs.values import Json

SEED = 100  # the package's default
# Fields of the package's environment that a session has no use for: those that are None, and False.
_ABSENT = """
    remote_environment_url remote_apis_url models_to_db_home_path models_from_db_home_path
    random_seed show_api_response_schemas
"""
_OFF = """
    raise_on_extra_parameters parse_datetimes allow_datetime_change add_login_shortcut
    munchify_response import_utils
"""


class Answer:
    """The parts of an HTTP response that the package's requester reads."""

    def __init__(self, status: int, text: str):
        self.status_code, self.text = status, text

    def json(self) -> Any:
        return json.loads(self.text)


class Client:
    """The parts of an HTTP client that the package's requester calls, over a socket."""

    def __init__(self, lines: Any):
        self._lines = lines

    def _request(self, method: str, url: str, **options: Any) -> Answer:
        if params := options.get("params"):
            options["params"] = {name: _parameter(value) for name, value in params.items()}
        send(self._lines, {"request": [method, url, options]})
        return Answer(*json.loads(self._lines.readline()))

    def __getattr__(self, method: str) -> Any:
        if method not in ("get", "post", "put", "patch", "delete"):
            raise AttributeError(method)
        return functools.partial(self._request, method)


def _parameter(value: Any) -> Any:
    """Return a value of a query as an HTTP client writes it: lists are repeated, the rest is
    text."""
    if isinstance(value, list | tuple):
        return [_parameter(part) for part in value]
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    return str(value)


def send(lines: Any, message: Any) -> None:
    """Write one message. Raises TypeError for a value that JSON lacks, as an HTTP client does for a
    body."""
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()


def main() -> None:
    """Fork a session for each request of the parent's socket, whose descriptor is the argument."""
    end_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    warm_up()
    # Sessions end by themselves or are killed, and leave nothing.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.sendall(b"ready\n")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            end_with_parent()
            try:
                serve(socket.socket(fileno=descriptors[0]), json.loads(data)["task"])
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def warm_up() -> None:
    """Make a session that nobody uses, and let it end. It takes 3 s to import, parse and look up
    what those forked afterwards then have."""
    from appworld.apps import get_all_apps
    from appworld.apps.api_lib import unset_local_date_and_time

    world = session(
        Client(None),
        {"apps": get_all_apps(), "max_requests": 1, "timeout_s": 1, "datetime": "2000-01-01"},
    )
    unset_local_date_and_time(begin(world))


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, whatever code it runs then."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def serve(connection: socket.socket, task: Json) -> None:
    """Run the code of one episode until the other end of the socket is closed."""
    lines = connection.makefile("rwb")
    world = session(Client(lines), task)
    begin(world)
    confine(task["memory_mb"])
    send(lines, {"output": ""})
    for line in lines:
        send(lines, {"output": run(world, json.loads(line)["code"])})


def run(world: Any, code: str) -> str:
    """Return the output of code, or its error. Never raises."""
    try:
        return world.execute(code)
    except BaseException as error:  # code can raise KeyboardInterrupt
        with contextlib.suppress(Exception):
            world.safety_guard.disable()
        return f"Execution failed. Traceback:\n{type(error).__name__}: {str(error)[:500]}"


def session(client: Client, task: Json) -> Any:
    """Return the package's own environment without a task: its shell, its guard, and APIs that lead
    to `client`."""
    from appworld import environment
    from appworld.collections import apis
    from appworld.requester import Requester, RequestTracker

    requester = Requester.__new__(Requester)
    vars(requester).update(
        client=client, remote_apis_url=None, apps=tuple(task["apps"]), date_and_time=None,
        time_freezer_or_id=None,
        request_tracker=RequestTracker(max_num_requests=task["max_requests"]),
        raise_on_failure=True, raise_on_extra_parameters=False, parse_datetimes=False,
        munchify_response=False,
    )  # fmt: skip
    real, apis.Requester = apis.Requester, lambda **_: requester
    world = environment.AppWorld.__new__(environment.AppWorld)
    config = environment.Config()
    config.HistoryManager.enabled = False
    shell = environment.InteractiveShellEmbed(config=config)
    shell.ast_node_interactivity = "none"
    sys.excepthook = sys.__excepthook__
    moment = datetime.datetime.fromisoformat(task["datetime"])
    vars(world).update(
        dict.fromkeys(_ABSENT.split()), **dict.fromkeys(_OFF.split(), False),
        safety_guard=environment.SafetyGuard(), environment_io=[], num_interactions=0,
        max_interactions=1000, max_api_calls_per_interaction=task["max_requests"],
        raise_on_failure=True, raise_on_unsafe_syntax=True, null_patch_unsafe_execution=True,
        timeout_seconds=task["timeout_s"], output_db_home_path_on_disk="",
        _save_state=lambda directory: None, save_logs=lambda: None,
        # The fields of a task that the package reads to set up a session.
        task=types.SimpleNamespace(datetime=moment, allowed_apps=list(task["apps"])),
    )  # fmt: skip
    world.shell = shell
    try:
        world._execute_preamble()
    finally:
        apis.Requester = real
    return world


def begin(world: Any) -> Any:
    """Set the clock and the random numbers that the code of an episode sees. Return what sets the
    clock free again."""
    from appworld.apps.api_lib import set_local_date_and_time

    random.seed(SEED)
    return set_local_date_and_time(world.task.datetime)


if __name__ == "__main__":
    main()
