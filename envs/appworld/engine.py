"""AppWorld's engine behind five methods. The only module that touches the `appworld` package while tasks run.

The engine keeps one task open per process, freezes the clock of the whole process while it does, uses SIGALRM (so it
belongs to the main thread) and wants pydantic 1: it runs in a worker process under a Python of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from envs.appworld.confine import confined


class Engine:
    """At most one open task. Raises what AppWorld raises where data is missing or damaged."""

    def __init__(self) -> None:
        self._world: Any = None
        self._root: str = ""

    def open(self, root: str, task_id: str, timeout_s: int) -> dict[str, Any]:
        """Start a task of the data in `root`, in place of the one that is open.

        Gives {"instruction", "supervisor": {first_name, last_name, email, phone_number}, "apps": {name: description}}.
        timeout_s: seconds that one piece of code may run.
        """
        self.close()
        self._use(root)
        from appworld import AppWorld, requester

        requester.build_main_app = _main_app
        self._world = AppWorld(task_id=task_id, experiment_name=_outputs(), timeout_seconds=timeout_s)
        shell = self._world.shell
        run_cell = shell.run_cell

        @functools.wraps(run_cell)
        def confined_cell(*args: Any, **kwargs: Any) -> Any:
            with confined():
                return run_cell(*args, **kwargs)

        shell.run_cell = confined_cell
        task = self._world.task
        fields = ("first_name", "last_name", "email", "phone_number")
        return {
            "instruction": task.instruction,
            "supervisor": {name: task.supervisor[name] for name in fields},
            "apps": dict(task.app_descriptions),
        }

    def run(self, code: str) -> str:
        """Run code in the session of the open task and give what it printed, or how it failed. Never raises."""
        try:
            return self._world.execute(code)
        except BaseException as error:  # code can raise KeyboardInterrupt, and text of its own that cannot be encoded
            with contextlib.suppress(Exception):
                self._world.safety_guard.disable()
            return f"Execution failed. Traceback:\n{type(error).__name__}: {str(error)[:500]}"

    def completed(self) -> bool:
        return bool(self._world.task_completed())

    def tests(self) -> list[tuple[str, bool]]:
        """The open task's tests: (label, passed), the label "no_op_fail" or "no_op_pass"."""
        tracker = self._world.evaluate()
        found = [(test["label"], True) for test in tracker.passes] + [
            (test["label"], False) for test in tracker.failures
        ]
        return found + [("no_op_fail", False)] * (tracker.num_tests - len(found))

    def apis(self, root: str) -> dict[str, dict[str, str]]:
        """Descriptions of the APIs of every app: {app: {api: description}}."""
        self._use(root)
        from appworld.collections.api_docs import ApiDocCollection

        docs = ApiDocCollection.load()
        return {app: {name: doc["description"] for name, doc in apis.items()} for app, apis in docs.items()}

    def close(self) -> None:
        """Close the open task and unfreeze the clock."""
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
    """The application behind the APIs. It keeps no state, and building it took a third of the time to open a task."""
    from appworld.apps import build_main_app

    return build_main_app(apps)


def _outputs() -> str:
    """AppWorld writes the state after each step to a folder of this name: one per process."""
    return f"evolver-{socket.gethostname()}-{os.getpid()}"


def _sweep(outputs: Path) -> None:
    """Remove what processes of this machine that were killed have left."""
    mine = f"evolver-{socket.gethostname()}-"
    for path in outputs.glob(mine + "*"):
        try:
            os.kill(int(path.name.removeprefix(mine)), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
