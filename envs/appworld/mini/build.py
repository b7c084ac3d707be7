"""Builder of the mini data set: `python -m envs.appworld.mini.build`, under the interpreter that
has AppWorld.

The files combine AppWorld's own code (table definitions, API documents) with our rows and tasks.
They derive from a part of AppWorld that may be distributed in encrypted form only, so they belong
in a cache and never in a repository. Their layout is that of AppWorld's own data; see
`appworld.task` and `appworld.ground_truth`.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys

from envs import commands
from envs.appworld.mini import data, evaluation
from envs.appworld.mini.data import HERE, SPLITS, MiniTask

CACHE = HERE.parents[2] / ".cache" / "appworld"


def default_root() -> pathlib.Path:
    """Return the folder of the data set for this source code and AppWorld version.

    Raises PackageNotFoundError if AppWorld is not installed.
    """
    digest = hashlib.blake2b(importlib.metadata.version("appworld").encode(), digest_size=6)
    for path in sorted([*HERE.glob("*.py"), *HERE.glob("*.json")]):
        digest.update(path.read_bytes())
    return CACHE / f"mini-{digest.hexdigest()}"


def ensure(root: pathlib.Path) -> None:
    """Build the data set in `root` unless it exists. Safe to call from many processes at once."""
    if (root / "data").is_dir():
        return
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (root / "data").is_dir():
            return
        # Use a separate process, because AppWorld keeps databases in globals and freezes the clock
        # of its process.
        command = [sys.executable, "-m", "envs.appworld.mini.build", "--root", str(root)]
        result = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(
                f"AppWorld's mini data set could not be built:\n{result.stderr[-2000:]}"
            )


def build(root: pathlib.Path) -> None:
    """Write databases, API documents, tasks and splits to `root`/data, which appears only once it
    is complete."""
    os.environ["APPWORLD_ROOT"] = str(root)
    from appworld.apps import get_all_apps
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.collections.models import ModelCollection
    from appworld.common.constants import CANARY_STRING

    target, apps = root / "data.new", get_all_apps()
    shutil.rmtree(target, ignore_errors=True)
    clock = set_local_date_and_time(data.NOW)
    docs = ApiDocCollection.build(load_apps=tuple(get_all_apps(skip_admin=True)))
    for app, apis in docs.items():
        marked = {api: {**doc, "canary_string": CANARY_STRING} for api, doc in apis.items()}
        _write(target / "api_docs" / "standard" / f"{app}.json", json.dumps(marked))
    models = ModelCollection.load(
        to_db_home_path=":memory:mini",
        from_db_home_path=":memory:mini",
        load_apps=apps,
        create_db=True,
    )
    for apis in docs.values():
        for doc in apis.values():
            doc = dict(doc)
            models.api_docs.ApiDoc.create_save(app_name_=doc.pop("app_name"), **doc)
    for table, rows in data.tables().items():
        app, model = table.split(".")
        for number, row in enumerate(rows, 1):
            if row.get("path", "").startswith("~/"):
                home = models.file_system.User.by_id(row["user_id"]).home_directory_path
                row = {**row, "path": home + row["path"].removeprefix("~/")}
            record = models[app][model].create_save(**row)
            if record.id != number:
                raise RuntimeError(f"{table}: row {number} got the id {record.id}")
    base = target / "base_dbs"
    base.mkdir()
    models.save(str(base), format="full", app_names=apps, delete_if_exists=True)
    models.close()
    for task in data.tasks():
        _write_task(target, task, apps)
    for split in SPLITS:
        ids = [task.id for task in data.tasks() if task.split == split]
        _write(target / "datasets" / f"{split}.txt", "\n".join(ids) + "\n")
    clock.stop()
    target.rename(root / "data")


def _write_task(target: pathlib.Path, task: MiniTask, apps: list[str]) -> None:
    from appworld.collections.models import ModelCollection
    from appworld.common.constants import DB_VERSION

    folder = target / "tasks" / task.id
    user, passwords = data.person(task.person)
    # Apps to which a task adds rows; the files of the others are empty.
    own = ["admin", "supervisor"]
    models = ModelCollection.load(
        to_db_home_path=f":memory:task_input-{task.id}",
        from_db_home_path=str(target / "base_dbs"),
        load_apps=own,
    )
    models.start_db_tracker()
    models.supervisor.Supervisor.create_save(**user)
    for app, password in passwords.items():
        models.supervisor.AccountPassword.create_save(
            supervisor_id=1, account_name=app, password=password
        )
    models.supervisor.Task.create_save(supervisor_id=1, instruction=task.instruction)
    folder.mkdir(parents=True)
    models.save(str(folder / "dbs"), format="changes", app_names=own, delete_if_exists=True)
    models.stop_db_tracker()
    models.close()
    for app in set(apps) - set(own):
        (folder / "dbs" / f"{app}.jsonl").touch()
    specs = {
        "instruction": task.instruction,
        "supervisor": {key: value for key, value in user.items() if key != "birthday"},
        "datetime": data.NOW.isoformat(),
        "db_version": DB_VERSION,
    }
    private = {"changes": task.changes, "touched": task.touched}
    truth = {
        "metadata": {
            "mode": "minimal",
            "difficulty": min(len(task.apps), 3),
            "num_apps": len(task.apps),
            "num_apis": "\n".join(task.solution).count("apis."),
            "num_solution_code_lines": sum(len(code.splitlines()) for code in task.solution),
        },
        "public_data": {},
        "private_data": private,
        "answer": task.answer,
        "test_data": evaluation.requirements(private, task.answer),
    }
    _write(folder / "specs.json", json.dumps(specs))
    for name, value in truth.items():
        _write(folder / "ground_truth" / f"{name}.json", json.dumps(value))
    shutil.copy(evaluation.__file__, folder / "ground_truth" / "evaluation.py")


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(*, root: pathlib.Path | None = None) -> None:
    """Build the data set.

    root: target folder (default: the project's cache)
    """
    if root is None:
        ensure(default_root())
    else:
        root.mkdir(parents=True, exist_ok=True)
        build(root)


if __name__ == "__main__":
    commands.called(main)
