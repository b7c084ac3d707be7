"""The pages and all of their data as static files, which open from `file://` without a server or a
network.

A page that was opened from a file may not read other files, but it may load scripts. So each
resource becomes a script that hands over its JSON, compressed and in base64, under the resource's
name.
"""

import base64
import gzip
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.view.runs import TASKS, Run, encoded
from experiments.view.server import STATIC
from models.files import write_atomically


def write_bundle(runs: list[Run], folder: Path) -> int:
    """Write the pages of `runs` into a folder and return the number of files. Raises OSError."""
    count = 0
    for path in sorted(STATIC.iterdir()):
        text = path.read_text(encoding="utf-8")
        if path.name == "index.html":
            text = text.replace("<!-- bundle -->", '<script src="data/bundle.js"></script>')
        write_atomically(folder / path.name, text)
        count += 1
    shutil.rmtree(folder / "data", ignore_errors=True)
    write_atomically(folder / "data" / "bundle.js", "window.BUNDLE = true;\n")
    for name, value in resources(runs):
        packed = base64.b64encode(gzip.compress(encoded(value), 9, mtime=0)).decode("ascii")
        script = f"deliver({json.dumps(name)}, {json.dumps(packed)});\n"
        write_atomically(folder / "data" / f"{name.replace('/', '-')}.js", script)
        count += 1
    return count + 1


def resources(runs: list[Run]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything that the pages can ask for."""
    yield "runs", [{"name": run.name, "path": ""} for run in runs]
    for number, run in enumerate(runs):
        here = f"run/{number}"
        overview = run.overview()
        yield f"{here}/overview", overview | {"path": ""}
        index = run.index()
        yield f"{here}/index", index
        tasks = run.tasks()
        yield f"{here}/tasks", tasks
        for part in range(-(-len(tasks) // TASKS)):
            yield f"{here}/tasks/{part}", run.task_details(part)
        yield f"{here}/experience", run.experience()
        for file, described in enumerate(index["files"]):
            show(f"{run.name}: file {file + 1} of {len(index['files'])}")
            for member in range(len(described["members"])):
                yield f"{here}/rollouts/{file}/{member}", run.chunk(file, member)


def show(text: str) -> None:
    """Write over the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"{text}\x1b[K\r", end="", file=sys.stderr)
