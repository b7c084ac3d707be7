"""AppWorld's engine behind a small interface. No other module uses the `appworld` package while tasks run.

The engine runs in a worker process under a separate Python: it needs pydantic 1, allows one open task per process,
freezes the clock of the whole process while a task is open, and uses SIGALRM, which requires the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from envs.appworld.confine import confined


class Engine:
    """A holder of at most one open task. Raises AppWorld's own errors for missing or damaged data."""

    def __init__(self) -> None:
        self._world: Any = None
        self._root: str = ""

    def open(self, root: str, task_id: str, timeout_s: int) -> dict[str, Any]:
        """Close the open task and start one of the data in `root`, with `timeout_s` seconds for each piece of code.

        Return {"instruction", "supervisor": {first_name, last_name, email, phone_number}, "apps": {name: description}}.
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
        """Run code in the session of the open task. Return its output or its error. Never raises."""
        try:
            return self._world.execute(code)
        except BaseException as error:  # code can raise KeyboardInterrupt, or errors whose text cannot be encoded
            with contextlib.suppress(Exception):
                self._world.safety_guard.disable()
            return f"Execution failed. Traceback:\n{type(error).__name__}: {str(error)[:500]}"

    def completed(self) -> bool:
        """Return True if the code has declared the open task complete."""
        return bool(self._world.task_completed())

    def answer(self) -> str:
        """Return the answer with which the open task was completed, "" if it was given none."""
        given = self._world.requester.request("supervisor", "show_active_task", track=False)["answer"]
        return "" if given is None else given if isinstance(given, str) else json.dumps(given)

    def tests(self) -> list[tuple[str, bool]]:
        """Run the open task's tests. Return (label, passed) of each, with the label "no_op_fail" or "no_op_pass"."""
        tracker = self._world.evaluate()
        tests = [(test["label"], True) for test in tracker.passes]
        tests += [(test["label"], False) for test in tracker.failures]
        return tests + [("no_op_fail", False)] * (tracker.num_tests - len(tests))

    def apis(self, root: str) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the public docs of the APIs of every app, as `apis.api_docs` shows them: {app: {api: doc}}."""
        self._use(root)
        from appworld.collections.api_docs import ApiDocCollection

        return ApiDocCollection.load()

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
    """Return the stateless application behind the APIs. Building it takes a third of the time to open a task."""
    from appworld.apps import build_main_app

    return build_main_app(apps)


def _outputs() -> str:
    """Return the name of this process's folder, to which AppWorld writes the state after each step."""
    return f"evolver-{socket.gethostname()}-{os.getpid()}"


def _sweep(outputs: Path) -> None:
    """Remove the folders of killed processes of this machine."""
    mine = f"evolver-{socket.gethostname()}-"
    for path in outputs.glob(mine + "*"):
        try:
            os.kill(int(path.name.removeprefix(mine)), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
