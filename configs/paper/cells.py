"""Cells of tables: a training run, an evaluation of its policy, and the published numbers of each.

configs/paper/cells.toml has all cells. The file of a table says what they are, and has ORDERS: the
orderings that the published numbers show, of cells whose names differ in these words only.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from configs.paper import runs


class Cell(NamedTuple):
    """One cell. `run` is an argument of configs/paper/runs.py, and `split` is where its policy is
    evaluated: test_normal and dev are of AppWorld, val of BFCL, which has no other held-out split.

    published: {measure: percent, or steps}, named as in experiments/paper/measures.py. k: that of
    avg@k and best@k; every evaluation plays 8 rollouts. experience: share of them that is guided.
    template: row of runs.py whose context template the evaluation uses, "" = the causal one. model:
    another base model than that of the run's size.
    """

    run: str
    split: str
    published: Mapping[str, float] = {}
    k: int = 8
    experience: float = 0.0
    template: str = ""
    model: str = ""

    @property
    def world(self) -> str:
        """The world that the policy is evaluated in, which may not be the one of its run."""
        return "bfcl" if self.split == "val" else "appworld"


TABLES: dict[str, dict[str, Cell]] = {}  # {"table1": {name of a cell: cell}}
for table, cells in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
    TABLES[table] = {name: Cell(**fields) for name, fields in cells.items()}


def config_of(table: str) -> Callable[..., ConfigDict]:
    """Return the get_config of a table. It makes the config of the training run of a cell, of the
    first without an argument; ",tiny" after the name of the cell plays it on a CPU."""

    def get_config(arg: str | None = None) -> ConfigDict:
        cells = TABLES[table]
        arg = arg or next(iter(cells))
        name = arg.removesuffix(",tiny")
        if name not in cells:
            raise ValueError(f"{table}.py:{arg}: choose one of {'; '.join(cells)}")
        return runs.get_config(cells[name].run + arg.removeprefix(name))

    return get_config
