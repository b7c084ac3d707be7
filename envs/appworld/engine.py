"""AppWorld's engine behind a small interface. No other module uses the `appworld` package while
tasks run.

The engine runs in a worker process under a separate Python: it needs pydantic 1, allows one open
task per process, and freezes the clock of the whole process while a task is open.

This process holds the databases and the answers, serves the APIs and evaluates. It never runs a
model's code, which a process of its own does (envs/appworld/session.py); what comes from there are
requests to the APIs of the task's apps.
"""

import functools
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from envs.appworld.sandbox import Sandbox, Session, SessionEnded
from envs.values import Json

MAX_REQUESTS = 1000  # per piece of code; the package's default
METHODS = ("get", "post", "put", "patch", "delete")
OPTIONS = {"params", "json", "data", "headers"}
# The folders to which the processes of this machine have AppWorld write the state after each step.
OUTPUTS = f"evolver-{socket.gethostname()}-"
PRIVATE = "admin"  # the app through which the package manages its databases


class Engine:
    """A holder of at most one open task. Raises AppWorld's own errors for missing or damaged
    data."""

    def __init__(self) -> None:
        self._world: Any = None
        self._root: str = ""
        self._sandbox: Sandbox | None = None
        self._session: Session | None = None

    def open(self, root: str, task_id: str, timeout_s: int, memory_mb: int) -> Json:
        """Close the open task and start one of the data in `root`.

        Each piece of code has `timeout_s` seconds, and the process that runs it `memory_mb` of
        address space. Return {"instruction", "supervisor": {first_name, last_name, email,
        phone_number}, "apps": {name: description}}.
        """
        self.close()
        self._use(root)
        from appworld import AppWorld, requester

        requester.build_main_app = _main_app
        mine = f"{OUTPUTS}{os.getpid()}"
        self._world = AppWorld(task_id=task_id, experiment_name=mine, timeout_seconds=None)
        task = self._world.task
        self._apps = [app for app in self._world.requester.apps if app != PRIVATE]
        _forget_logouts(self._apps)
        self._task = {
            "apps": self._apps,
            "datetime": task.datetime.isoformat(),
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "max_requests": MAX_REQUESTS,
        }
        self._session = self._start()
        fields = ("first_name", "last_name", "email", "phone_number")
        return {
            "instruction": task.instruction,
            "supervisor": {name: task.supervisor[name] for name in fields},
            "apps": dict(task.app_descriptions),
        }

    def run(self, code: str) -> str:
        """Run code in the session of the open task. Return its output or its error. Never raises
        for what code does.

        A session that ends itself, or is ended, loses its variables; what it did to the apps
        remains.
        """
        try:
            if self._session is None:
                self._session = self._start()
            output = self._session.run(code, MAX_REQUESTS + 1)
        except SessionEnded as error:
            self._session = None
            output = (
                f"Execution failed. Traceback:\nThe session ended: {error}. Its variables are lost."
            )
        self._world._save_state(self._world.output_db_home_path_on_disk)
        return output

    def _start(self) -> Session:
        if self._sandbox is None or not self._sandbox.alive:
            self._sandbox = Sandbox()
        return self._sandbox.session(self._task, self._answer)

    def _answer(self, method: str, url: str, options: Json) -> tuple[int, str]:
        """Answer a request of a session: with status 400 if it holds text or numbers that JSON
        lacks, which the package would store and then fail to read, and 500 if it breaks an API.

        Raises ValueError for a request that the package's own client would not send.
        """
        parts = url.split("/")
        if method not in METHODS or not set(options) <= OPTIONS or "." in parts or ".." in parts:
            raise ValueError("not a request to an API")
        if parts[0] not in self._apps:
            raise ValueError(f"no app {parts[0]!r}")
        try:
            json.dumps(options, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            return 400, json.dumps({"message": f"The request is no valid JSON: {error}"})
        try:
            response = self._world.requester.client.request(method.upper(), url, **options)
        except (
            Exception
        ) as error:  # an API may raise anything, such as OverflowError for a number no float holds
            return 500, json.dumps({"message": f"{type(error).__name__}: {error}"[:500]})
        return response.status_code, response.text

    def completed(self) -> bool:
        """Return True if the code has declared the open task complete."""
        return bool(self._world.task_completed())

    def answer(self) -> str:
        """Return the answer with which the open task was completed, "" if it was given none."""
        given = self._world.requester.request("supervisor", "show_active_task", track=False)[
            "answer"
        ]
        return "" if given is None else given if isinstance(given, str) else json.dumps(given)

    def tests(self) -> list[tuple[str, bool]]:
        """Run the open task's tests. Return (label, passed) of each, with the label "no_op_fail" or
        "no_op_pass"."""
        tracker = self._world.evaluate()
        tests = [(test["label"], True) for test in tracker.passes]
        tests += [(test["label"], False) for test in tracker.failures]
        return tests + [("no_op_fail", False)] * (tracker.num_tests - len(tests))

    def apis(self, root: str) -> dict[str, dict[str, Json]]:
        """Return the public docs of the APIs of every app, as `apis.api_docs` shows them: {app:
        {api: doc}}."""
        self._use(root)
        from appworld.collections.api_docs import ApiDocCollection

        return ApiDocCollection.load()

    def close(self) -> None:
        """Close the open task and unfreeze the clock."""
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._world is not None:
            world, self._world = self._world, None
            world.close()
            shutil.rmtree(world.output_directory, ignore_errors=True)

    def _use(self, root: str) -> None:
        if self._root != root:
            os.environ["APPWORLD_ROOT"] = self._root = root
            os.environ.setdefault("APPWORLD_CACHE", root)
            _sweep(Path(root) / "experiments" / "outputs")


@functools.cache
def _main_app(apps: tuple[str, ...]) -> Any:
    """Return the application behind the APIs. Building it takes a third of the time to open a
    task."""
    from appworld.apps import build_main_app

    return build_main_app(apps)


def _forget_logouts(apps: list[str]) -> None:
    """Make the access tokens of logged-out users valid again. The databases belong to the task, but
    the package keeps these tokens for the life of the process, and the next episode of the task,
    whose clock and random numbers are the same, is given the same ones."""
    for app in apps:
        manager = getattr(sys.modules[f"appworld.apps.{app}.apis"], "logging_manager", None)
        if manager is not None:
            manager.blacklisted_tokens.clear()


def _sweep(outputs: Path) -> None:
    """Remove the folders of killed processes of this machine."""
    for path in outputs.glob(OUTPUTS + "*"):
        try:
            os.kill(int(path.name.removeprefix(OUTPUTS)), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
