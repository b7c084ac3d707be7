"""The runs behind the cells of tables: base policies, training, experience pools, evaluations; each
once, whoever shares it."""

import difflib
import fnmatch
import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.paper.cells import TABLES, Cell
from configs.paper.runs import thinking, tiny_policy
from envs.values import Json
from experiments.commands import Problems
from experiments.grid import Run

RUNS = "configs/paper/runs.py"
UNTRAINED = ("base", "icl", "thinking")  # rows of runs.py that train nothing
MODELS = {
    "7b": "Qwen/Qwen2.5-7B-Instruct",
    "14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen3-14b": "Qwen/Qwen3-14B",
}
SPLITS = {"test_normal": "test"}  # of travel, which stands for AppWorld at tiny scale
ROLLOUTS = 8


@dataclass(frozen=True)
class Source:
    """The runs that hold the scores of one cell and seed.

    scores: name of the run with the rollouts at temperature 0.9. greedy: that with 8 rollouts at
    temperature 0, "" where the first run's greedy rollouts count. train: the training run, "" =
    none.
    """

    scores: str
    greedy: str = ""
    train: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return list(dict.fromkeys(filter(None, (self.train, self.scores, self.greedy))))


@dataclass
class Study:
    """The runs of some cells at one scale.

    models: {size: checkpoint, or "URL,NAME,TOKENIZER" of a server that already has the model}, for
    the full scale.
    starts: False if nothing will be run, so that servers need not be known.
    """

    scale: str
    seeds: Sequence[int] = (0,)
    models: Mapping[str, str] = field(default_factory=dict)
    starts: bool = True
    # by name, in an order in which they can be run
    runs: dict[str, Run] = field(default_factory=dict)
    # name of a run -> "TABLE:CELL" of the cells that need it
    users: dict[str, list[str]] = field(default_factory=dict)
    # (table, cell, seed) -> its scores
    sources: dict[tuple[str, str, int], Source] = field(default_factory=dict)
    # (table, cell) -> why it has no run
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)
    # table -> its cells
    tables: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """True if cells are played with the quickstart's policy."""
        return self.scale == "tiny"

    def add(self, table: str, name: str, cell: Cell) -> None:
        """Add the runs of one cell. Raises Problems."""
        self.tables.setdefault(table, []).append(name)
        if self.tiny and cell.model not in ("", "7b", "14b"):
            self.left_out[table, name] = "has no counterpart at tiny scale"
            return
        for seed in self.seeds:
            source = self._source(cell, seed)
            self.sources[table, name, seed] = source
            for run in self._needed(source):
                self.users.setdefault(run, []).append(f"{table}:{name}")

    def _needed(self, source: Source) -> list[str]:
        """Return the names of the runs of a source, and of those that have to come before them."""
        found = list(source.names)
        for name in found:
            found += [before for before in self.runs[name].after if before not in found]
        return found

    def _source(self, cell: Cell, seed: int) -> Source:
        size, world, row = cell.run.split(",")
        policy, train = self._base(cell.model or size, world), ""
        if row not in UNTRAINED:
            name = cell.run.replace(",", "-")
            train = self._add(Run(name, seed, self._config(cell.run), self._start(policy)))
            policy = f"{{folder}}/{train}/policy"
        as_trained = world == cell.world and not (cell.experience or cell.template)
        if train and as_trained and cell.split in ("dev", "val"):  # its last evaluation
            scores = train
        else:
            scores = self._evaluation(cell, seed, policy, train, 0.9)
        greedy = "" if self.tiny else self._evaluation(cell, seed, policy, train, 0.0)
        return Source(scores, greedy, train)

    def _evaluation(
        self, cell: Cell, seed: int, policy: str, train: str, temperature: float
    ) -> str:
        """Add an evaluation and return its name."""
        size, world, row = cell.run.split(",")
        how = cell.template or ("icl" if cell.experience else row if row in UNTRAINED else "base")
        overrides = self._start(policy) | {
            "eval.split": SPLITS.get(cell.split, cell.split) if self.tiny else cell.split,
            "eval.rollouts": ROLLOUTS,
            "eval.temperature": temperature,
            "eval.greedy": temperature > 0,
        }
        if not self.tiny and (cell.model or size).startswith("qwen3"):
            overrides["template.thinking"] = thinking(how)
        after = [train] if train else []
        if cell.experience:
            pool = self._pool(size, cell.world, seed, policy, after)
            overrides |= {
                "eval.experience": cell.experience,
                "navigating.pool": f"{{folder}}/{pool}/experience",
            }
            after.append(pool)
        what = train.rpartition("-")[0] if train else f"{cell.model or size}-{world}"
        name = f"eval-{what}-in-{cell.world}-{cell.split}"
        name += f"-{how}" if how != "base" else ""
        name += f"-e{cell.experience:g}" if cell.experience else ""
        name += "-t0" if temperature == 0 else ""
        config = self._config(f"{size},{cell.world},{how}")
        return self._add(Run(name, seed, config, overrides, mode="eval", after=tuple(after)))

    def _pool(self, size: str, world: str, seed: int, policy: str, after: Sequence[str]) -> str:
        """Add the experience pool of a base policy and return the name of its run."""
        name, config = f"pool-{size}-{world}", self._config(f"{size},{world},icl")
        start = self._start(policy)
        return self._add(Run(name, seed, config, start, mode="pool", after=tuple(after)))

    def _base(self, size: str, world: str) -> str:
        """Return the policy before training."""
        if not self.tiny:
            model = self.models.get(size) or MODELS.get(size, "")
            if not model and self.starts:
                raise Problems(
                    f"{size} is only evaluated, on a server that already has it: give --models"
                    f" {size}=URL,NAME,TOKENIZER, or choose other cells with --cells"
                )
            return model
        return tiny_policy(size, world)

    def _start(self, policy: str) -> Json:
        """Return the overrides of every run: the policy that it starts from, a checkpoint or a
        server's "URL,NAME,TOKENIZER", and the place of answers of language models.

        Rows explore the same worlds with the same seeds. With one place for all answers they train
        on the same tasks, and these are paid for once.
        """
        shared = {} if self.tiny else {"llm.cache": "{folder}/llm_cache"}
        if not policy.startswith(("http://", "https://")):
            return {"model.path": policy} | shared
        parts = policy.split(",")
        if len(parts) != 3:
            raise Problems(f"--models {policy}: give URL,NAME,TOKENIZER of the server")
        url, name, tokenizer = parts
        # The learner is not used: its shape is the smallest one, and the server's weights are never
        # replaced.
        return {
            "model.preset": "tiny", "model.tokenizer": tokenizer, "engine.vllm.urls": (url,),
            "engine.vllm.model": name, "engine.vllm.transfer": "none",
        } | shared  # fmt: skip

    def _config(self, run: str) -> str:
        return f"{RUNS}:{run}{',tiny' if self.tiny else ''}"

    def _add(self, run: Run) -> str:
        known = self.runs.setdefault(run.name, run)
        if known != run:
            raise Problems(f"two different runs are called {run.name}: {known} and {run}")
        return run.name


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest word, "" if none is near."""
    return "".join(f" Did you mean {near}?" for near in difflib.get_close_matches(word, known, 1))


def module_of(table: str) -> Any:
    """Return the module of a table in configs/paper."""
    return importlib.import_module(f"configs.paper.{table}")


def title_of(table: str) -> str:
    """Return the title of a table: the first paragraph of the header of its file."""
    return " ".join((module_of(table).__doc__ or "").partition("\n\n")[0].split())


def chosen(tables: Sequence[str], patterns: Sequence[str] = ()) -> dict[str, dict[str, Cell]]:
    """Return {table: {name: cell}} of the cells whose names match one of the patterns, of all cells
    if there are none.

    A pattern is a name, or has `*` in it: "14b,*,hybrid". Tables without a matching cell are left
    out. Raises Problems with all unknown tables and all patterns that no table matches; it lists
    what there is.
    """
    cells = {table: TABLES[table] for table in tables if table in TABLES}
    found = []
    for table in dict.fromkeys(table for table in tables if table not in TABLES):
        hint = did_you_mean(table, TABLES)
        found.append(
            f"{table}: there is no such table.{hint} There are {', '.join(TABLES)}, and all"
        )
    names = list(dict.fromkeys(itertools.chain(*cells.values())))
    wanted = set() if patterns else set(names)
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        wanted.update(matching)
        if cells and not matching:
            whose = "none of these tables has a" if len(cells) > 1 else f"{min(cells)} has no"
            hint = did_you_mean(pattern, names)
            found.append(f"{whose} cell {pattern}.{hint} The cells are {'; '.join(names)}")
    if found:
        raise Problems(*found)
    kept = {}
    for table, known in cells.items():
        kept[table] = {name: cell for name, cell in known.items() if name in wanted}
    return {table: known for table, known in kept.items() if known}


def study_of(
    tables: Sequence[str],
    *,
    scale: str,
    seeds: Sequence[int] = (0,),
    cells: Sequence[str] = (),
    models: Mapping[str, str] | None = None,
    starts: bool = True,
) -> Study:
    """Return the study of some tables. Raises Problems with everything that is wrong."""
    study = Study(scale, seeds, models or {}, starts)
    found: list[str] = []
    for table, known in chosen(tables, cells).items():
        try:
            for name, cell in known.items():
                study.add(table, name, cell)
        except Problems as problems:
            found += problems.args
    if found:
        raise Problems(*dict.fromkeys(found))
    return study
