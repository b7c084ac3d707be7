"""Look at runs: learning curves, rollouts turn by turn and token by token, tasks, experience and
judges.

    python -m experiments.view runs/quickstart             # pages on http://127.0.0.1, until Ctrl-C
    python -m experiments.view runs/a runs/b               # curves of several runs in one plot
    python -m experiments.view runs/a --bundle shared-run  # files that open without a server
    python -m experiments.view runs/quickstart --text      # a table of groups in the terminal
    python -m experiments.view runs/quickstart --text --task "seat window" --step 3
    python -m experiments.view runs/judged --replay 200    # does the judge agree with replay?

A run that is going on is followed. docs/view.md describes the pages.
"""

import os
import shutil
import sys
from pathlib import Path

from envs.world import WorldError
from evolver.config.plugs import look_in
from experiments import commands
from experiments.view.bundle import write_bundle
from experiments.view.replay import NoReplay, compare, lines
from experiments.view.runs import Run, named, problems
from experiments.view.server import View
from experiments.view.text import group, groups_table


def main(argv: list[str] | None = None) -> int:
    """Show runs and return the exit code: 0 done, 1 the files or the port cannot be used, 2 wrong
    arguments."""
    return commands.run(view, argv)


def view(
    workdir: commands.Words,
    *,
    port: int = 8321,
    bundle: Path | None = None,
    text: bool = False,
    task: str = "",
    step: int | None = None,
    limit: int = 600,
    replay: int = 0,
    trust: bool = False,
    python: str = "",
) -> int:
    """Show runs.

    workdir: workdir of a run
    port: of the pages; 0 = any free one; default: 8321
    bundle: a directory: write static files instead of serving
    text: print a table of groups or, with --task, their rollouts
    task: with --text: part of a task's id or words
    step: with --text: the training step; default: the last one, or all of --task
    limit: with --text: characters of one action or observation
    replay: play the last N labelled rollouts again, and compare the labels (Judge)
    trust: with --replay: play any world that config.json names, which runs its code
    python: with --replay: the interpreter of the world; default: this one
    """
    folders = list(workdir)
    if wrong := problems(folders):
        raise commands.Problems(*wrong)
    if not text and (task or step is not None):
        raise commands.Problems("--task and --step are for --text; the pages have filters")
    runs = named(folders)
    hint = ""
    try:
        if text:
            width, limit = min(shutil.get_terminal_size().columns, 120), max(limit, 40)
            for run in runs:
                shown = groups_table(run, step=step)
                if task:
                    shown = group(run, step=step, task=task, limit=limit, width=width)
                for line in shown:
                    print(line)
            sys.stdout.flush()
        elif replay:
            if trust:
                look_in(Path.cwd())
            for run in runs:
                result = compare(run, replay, trust=trust, python=python)
                print(*lines(run, result), sep="\n")
        elif bundle:
            print(bundled(runs, bundle))
        else:
            hint = "; --port=0 takes any free port"
            serve(View(runs, port))
    except BrokenPipeError:  # nobody reads on, as in `... --text | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (NoReplay, WorldError, OSError) as error:
        print(f"{error}{hint}", file=sys.stderr)
        return 1
    return 0


def bundled(runs: list[Run], folder: Path) -> str:
    """Write a bundle and return a line on it. Raises commands.Problems and OSError."""
    page = folder / "index.html"
    if folder.exists() and any(folder.iterdir()) and not page.is_file():
        reason = "is not empty and holds no bundle; name another directory"
        raise commands.Problems(f"{folder}: {reason}")
    count = write_bundle(runs, folder)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return f"{count} files, {size / 1e6:.1f} MB: open {page}"


def serve(server: View) -> None:
    """Serve the pages until Ctrl-C."""
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
