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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from absl import logging

from evolver.plan import PlanError
from evolver.plan.targets import TargetError
from experiments import commands, compare, grid
from experiments.paper import costs
from experiments.paper.study import TABLES, Study, study_of
from experiments.paper.tables import write


def seeds_of(text: str) -> list[int]:
    """Return comma-separated seeds. Raises commands.Problems."""
    try:
        return sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise commands.Problems(f"--seeds={text}: give whole numbers, such as 0,1,2") from None


def models_of(words: Sequence[str]) -> Mapping[str, str]:
    """Return {size: where} of SIZE=WHERE texts. Raises commands.Problems."""
    if wrong := [word for word in words if "=" not in word]:
        hint = "give SIZE=WHERE, such as 14b=/dir/of/Qwen2.5-14B-Instruct"
        raise commands.Problems(f"--models {' '.join(wrong)}: {hint}")
    return dict(word.split("=", 1) for word in words)


def estimated(study: Study, target: str, prices: str) -> str:
    """Return the list of the runs with their hours and money. Raises PlanError and OSError."""
    lines = [compare.markdown(costs.rows(study, target, prices))]
    lines += [f"{table}:{cell} {why}" for (table, cell), why in study.left_out.items()]
    if not study.tiny:
        lines += [
            f"hours: estimated by arithmetic for {target} without environments and judges",
            "money: of runs that share no answers; "
            "rows that ask the same questions pay for them once",
        ]
    return "\n".join(lines)


def report(study: Study, folder: Path) -> str:
    """Write the tables and return them."""
    texts = []
    for name, cells in study.tables.items():
        texts += [write(study, name, cells, folder)]
        texts += [f"written to {folder / 'tables'}/{name}.md, .csv, .tex, .png, .svg\n"]
    return "\n".join(texts)


def main(
    tables: commands.Words,
    *,
    scale: Literal["tiny", "full"] = "full",
    cells: commands.Words = (),
    seeds: str = "0",
    models: commands.Words = (),
    workdir: Path | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    target: str = "a100-80g:8",
    prices: str = "",
    only_report: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Make tables. Words after `--` go to every run of run.py.

    tables: table1, figure12a ..., or all
    cells: names of cells, or patterns such as '14b,*'
    seeds: comma-separated: 0,1,2
    models: SIZE=WHERE: directory, Hub id, or URL,NAME,TOKENIZER
    workdir: directory of all runs and tables
    jobs: number of runs at a time
    dry_run: list the runs, hours and money, and start nothing
    target: devices of --dry-run, as for --mode=plan
    prices: price list of language models for --dry-run (config.llm.prices)
    only_report: write the tables from the finished runs
    """
    logging.set_verbosity(logging.ERROR)
    folder = workdir or Path("runs/paper-tiny" if scale == "tiny" else "runs/paper")
    try:
        study = study_of(
            list(TABLES) if list(tables) == ["all"] else tables, scale=scale, seeds=seeds_of(seeds),
            cells=cells, models=models_of(models), starts=not (dry_run or only_report),
        )  # fmt: skip
        if dry_run:
            print(estimated(study, target, prices))
            return 0
    except (PlanError, TargetError, OSError) as error:
        raise commands.Problems(str(error)) from None
    runs = list(study.runs.values())
    return grid.command(
        runs, folder, lambda: report(study, folder), jobs=jobs, flags=flags, only_report=only_report
    )


if __name__ == "__main__":
    commands.program(main)
