"""Cells of tables: a training run, an evaluation of its policy, and the published numbers of
each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs.paper import runs

FINAL = {"appworld": "test_normal", "bfcl": "val"}  # the splits of tables 1 to 3
DEV = {"appworld": "dev", "bfcl": "val"}  # BFCL has no other held-out split


class Cell(NamedTuple):
    """One cell. `run` is an argument of configs/paper/runs.py, `world` and `split` are where its
    policy is evaluated.

    published: {measure: percent, or steps}, named as in experiments/paper/measures.py. k: that of
    avg@k and best@k;
    every evaluation plays 8 rollouts. experience: share of them that is guided. template: row of
    runs.py whose context template the evaluation uses, "" = the causal one. model: another base
    model than that of the run's size.
    """

    run: str
    world: str
    split: str
    published: Mapping[str, float]
    k: int = 8
    experience: float = 0.0
    template: str = ""
    model: str = ""


def cell(
    run: str,
    published: Mapping[str, float],
    *,
    splits: dict[str, str] = FINAL,
    world: str = "",
    **fields: Any,
) -> Cell:
    """Return the cell of a run that is evaluated in its own world, or in another."""
    world = world or run.split(",")[1]
    return Cell(run, world, splits[world], published, **fields)


def both(
    numbers: dict[str, tuple[float, float, float, float]],
    rows: dict[str, Any],
    *,
    splits: dict[str, str] = FINAL,
    k: int = 8,
) -> dict[str, Cell]:
    """Return {"SIZE,WORLD,ROW": cell} of a table with the columns avg and best of AppWorld and
    BFCL.

    numbers: {"SIZE,ROW": four numbers}; rows: {row of the table: row of runs.py, or {world: row}}.
    """
    cells = {}
    for name, (app_avg, app_best, bfcl_avg, bfcl_best) in numbers.items():
        size, row = name.split(",")
        for world, avg, best in (("appworld", app_avg, app_best), ("bfcl", bfcl_avg, bfcl_best)):
            run = f"{size},{world},{rows[row] if isinstance(rows[row], str) else rows[row][world]}"
            published = {f"avg@{k}": avg, f"best@{k}": best}
            cells[f"{size},{world},{row}"] = cell(run, published, splits=splits, k=k)
    return cells


def config(cells: dict[str, Cell], arg: str | None, file: str) -> ConfigDict:
    """Return the config of the training run of a cell; ",tiny" after its name plays it on a CPU."""
    name, _, tiny = (arg or next(iter(cells))).partition(",tiny")
    if name not in cells or tiny:
        raise ValueError(f"{Path(file).name}:{arg}: choose one of {'; '.join(cells)}")
    return runs.get_config(cells[name].run + (",tiny" if (arg or "").endswith(",tiny") else ""))
