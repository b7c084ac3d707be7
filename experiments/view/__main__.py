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

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from envs.world import WorldError
from evolver.config.plugs import look_in
from experiments.view import replay
from experiments.view.bundle import write_bundle
from experiments.view.runs import named, problems
from experiments.view.server import View
from experiments.view.text import group, groups_table


def main(argv: list[str] | None = None) -> int:
    """Show runs and return the exit code: 0 done, 1 the files or the port cannot be used, 2 wrong
    arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdir", nargs="+", help="workdir of a run")
    parser.add_argument(
        "--port", type=int, default=8321, help="of the pages; 0 = any free one; default: 8321"
    )
    parser.add_argument(
        "--bundle", metavar="DIR", type=Path, help="write static files instead of serving"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="print a table of groups or, with --task, their rollouts",
    )
    parser.add_argument("--task", default="", help="with --text: part of a task's id or words")
    parser.add_argument(
        "--step",
        type=int,
        help="with --text: the training step; default: the last one, or all of --task",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=600,
        help="with --text: characters of one action or observation",
    )
    parser.add_argument(
        "--replay",
        metavar="N",
        type=int,
        help="play the last N labelled rollouts again, and compare the labels (Judge)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --replay: play any world that config.json names, which runs its code",
    )
    parser.add_argument(
        "--python",
        default="",
        help="with --replay: the interpreter of the world; default: this one",
    )
    flags = parser.parse_args(argv)
    if wrong := problems(flags.workdir):
        print(*wrong, sep="\n", file=sys.stderr)
        return 2
    if not flags.text and (flags.task or flags.step is not None):
        print("--task and --step are for --text; the pages have filters", file=sys.stderr)
        return 2
    runs = named(flags.workdir)
    try:
        if flags.text:
            width = min(shutil.get_terminal_size().columns, 120)
            for run in runs:
                options = {"step": flags.step}
                shown = {"task": flags.task, "limit": max(flags.limit, 40), "width": width}
                lines = (
                    group(run, **options, **shown) if flags.task else groups_table(run, **options)
                )
                for line in lines:
                    print(line)
            sys.stdout.flush()
            return 0
        if flags.replay:
            if flags.trust:
                look_in(Path.cwd())
            for run in runs:
                result = replay.compare(run, flags.replay, trust=flags.trust, python=flags.python)
                print(*replay.lines(run, result), sep="\n")
            return 0
        if flags.bundle:
            if (
                flags.bundle.exists()
                and any(flags.bundle.iterdir())
                and not (flags.bundle / "index.html").is_file()
            ):
                print(
                    f"{flags.bundle}: is not empty and holds no bundle; name another directory",
                    file=sys.stderr,
                )
                return 2
            count = write_bundle(runs, flags.bundle, show)
            size = sum(p.stat().st_size for p in flags.bundle.rglob("*") if p.is_file())
            print(f"{count} files, {size / 1e6:.1f} MB: open {flags.bundle / 'index.html'}")
            return 0
        server = View(runs, flags.port)
    except BrokenPipeError:  # nobody reads on, as in `... --text | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (replay.NoReplay, WorldError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        hint = (
            "" if flags.bundle or flags.text or flags.replay else "; --port=0 takes any free port"
        )
        print(f"{error}{hint}", file=sys.stderr)
        return 1
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def show(text: str) -> None:
    """Write over the last line of a terminal."""
    if sys.stderr.isatty():
        print(f"{text}\x1b[K\r", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
