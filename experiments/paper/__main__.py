"""Make a table or figure of the paper: run what is missing, evaluate, and write it beside the
published numbers.

    python -m experiments.paper table2 --dry-run    # the runs, what is shared, hours, money
    python -m experiments.paper table2 --scale=tiny --seeds=0,1,2    # on two CPU cores
    python -m experiments.paper table2 --scale=full \\
        --models 14b=/dir/of/Qwen2.5-14B-Instruct 7b=/dir/of/...
    python -m experiments.paper all --cells "14b,*" --only-report

Flags after `--` go to every run, such as
`-- --config.llm.url=http://127.0.0.1:8000/v1 --config.llm.model=judge`.

The files are WORKDIR/tables/TABLE.md, .csv, .tex, .png and .svg; WORKDIR is runs/paper or
runs/paper-tiny. All tables share the runs of one WORKDIR. The same command goes on where it was cut
off (experiments/grid.py). docs/paper.md explains the columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from experiments import compare, grid
from experiments.paper import costs, tables
from experiments.paper.study import TABLES, Study, StudyError, study_of

FOLDERS = {"full": Path("runs/paper"), "tiny": Path("runs/paper-tiny")}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="experiments.paper",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="-- FLAGS: for every run of run.py",
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE", help=f"{', '.join(TABLES)}, or all")
    parser.add_argument("--scale", choices=("tiny", "full"), default="full")
    parser.add_argument(
        "--cells", nargs="+", default=[], help="names of cells, or patterns such as '14b,*'"
    )
    parser.add_argument("--seeds", default="0", help="comma-separated: 0,1,2")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        metavar="SIZE=WHERE",
        help="directory, Hub id, or URL,NAME,TOKENIZER",
    )
    parser.add_argument("--workdir", type=Path, help="directory of all runs and tables")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs, hours and money, and start nothing"
    )
    parser.add_argument(
        "--target", default="a100-80g:8", help="devices of --dry-run, as for --mode=plan"
    )
    parser.add_argument(
        "--prices",
        default="",
        help="price list of language models for --dry-run (config.llm.prices)",
    )
    parser.add_argument(
        "--gpu-hour", type=float, default=0.0, help="money of one GPU-hour for --dry-run"
    )
    parser.add_argument(
        "--only-report", action="store_true", help="write the tables from the finished runs"
    )
    return parser


def study_from(args: argparse.Namespace) -> Study:
    """Return the study that the arguments ask for. Raises StudyError."""
    try:
        seeds = sorted({int(seed) for seed in args.seeds.split(",")})
    except ValueError:
        raise StudyError(f"--seeds={args.seeds}: give whole numbers, such as 0,1,2") from None
    wrong = [word for word in args.models if "=" not in word]
    if wrong:
        raise StudyError(
            f"--models {' '.join(wrong)}: give SIZE=WHERE, such as 14b=/dir/of/Qwen2.5-14B-Instruct"
        )
    models = dict(word.split("=", 1) for word in args.models)
    names = list(TABLES) if args.tables == ["all"] else args.tables
    starts = not (args.dry_run or args.only_report)
    return study_of(
        names, scale=args.scale, seeds=seeds, cells=args.cells, models=models, starts=starts
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Make tables. Returns 0 if every run is done, 1 if some failed, 2 if nothing was started, 130
    if interrupted."""
    logging.set_verbosity(logging.ERROR)
    words, flags = grid.split_flags(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    folder = args.workdir or FOLDERS[args.scale]
    try:
        study = study_from(args)
        if args.dry_run:
            print(compare.markdown(costs.rows(study, args.target, args.prices, args.gpu_hour)))
            print(*(f"{t}:{c} {why}" for (t, c), why in study.left_out.items()), sep="\n")
            if not study.tiny:
                print(
                    "hours: estimated by arithmetic for",
                    args.target,
                    "without environments and judges",
                )
                print(
                    "money: of runs that share no answers; "
                    "rows that ask the same questions pay for them once"
                )
            return 0
        found = [] if args.only_report else grid.problems(list(study.runs.values()), folder, flags)
    except (StudyError, costs.PlanError, OSError, ValueError) as error:
        found = str(error).splitlines()
    if found:
        print(
            f"{len(found)} problem{'s' * (len(found) > 1)}; nothing was started.\n", file=sys.stderr
        )
        print(
            *(f"  {n}. {problem}" for n, problem in enumerate(found, 1)), sep="\n", file=sys.stderr
        )
        return 2
    states = {}
    if not args.only_report:
        states = grid.execute(list(study.runs.values()), folder, jobs=args.jobs, flags=flags)
    for name, cells in study.tables.items():
        print(tables.write(study, name, cells, folder))
        print(f"written to {folder / 'tables'}/{name}.md, .csv, .tex, .png, .svg\n")
    if "interrupted" in states.values():
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    failed = [f"{name} ({state})" for name, state in states.items() if state != "done"]
    if failed:
        print(f"not done: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
