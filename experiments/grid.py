"""Run a grid of configs, go on where it was cut off, and compare the runs in a table and a figure.

    python -m experiments.grid --config=configs/quickstart.py:qa \\
        --set advantage.args.alpha=0.05,0.1,0.2 --seeds 0 1 2
    python -m experiments.grid --config=configs/quickstart.py --rows grpo q qn qa all \\
        --seeds 0 1 2 --jobs 2
    python -m experiments.grid --sweep experiments/sweeps/alpha.yaml --seeds 0 1 2
    python -m experiments.grid --workdir=runs/grid ... --only-report

Every combination of `--rows` (arguments of the config file) and `--set` (values of a key) is a row
of the table, and every row has one run per seed. Flags after `--` go to every run. The others are
compared with the first row.

The runs are processes of their own, with the workdirs WORKDIR/ROW-SEED and logs beside them. The
same command goes on after a crash, a kill or Ctrl-C: finished runs are kept, unfinished ones
resume, and one that a killed grid left behind is waited for. Several grids, also of several hosts
that share the directory, may work on one WORKDIR. A run that fails is marked and stops no other.
Programs that one run compiled serve the others.

WORKDIR/grid.jsonl is the record of the grid: a line for each attempt, with the scores. The tables
are made of it, and a copy of this file alone lets the grid go on in another place, where a finished
run is repeated only if an unfinished one needs its files. To repeat a run, delete its lines.

`wandb sweep experiments/sweeps/alpha.yaml` and `wandb agent` run the values of the same file: each
trial is `--trial --config=FILE FLAGS`, which is `run.py` in a workdir of its own,
runs/sweeps/SWEEP/TRIAL.

As a module, for studies of their own:

    rates = {"optim.lr": [1e-4, 5e-4]}
    runs = product("configs/quickstart.py", rows=["grpo", "all"], sets=rates, seeds=[0, 1])
    problems(runs, folder)                  # everything that is wrong, before anything is started
    states = execute(runs, folder, jobs=2)  # by name: done, exit code 1, waits for ..., interrupted
    rows = gather(runs, folder)             # experiments.compare.Row of each row, in order
    report(runs, folder, "title")           # writes grid.md, .csv, .png and .svg; returns the text

`Run` is one process: a row, a seed, a config file, overrides, and a mode of `run.py` or another
module. `after` names runs that have to be finished before, and "{folder}" in an override stands for
the grid's workdir, so that a run can start from the policy of another:

    Run("eval", 0, CONFIG, {"model.path": "{folder}/train-0/policy"}, mode="eval",
    after=("train-0",))
"""

import contextlib
import fcntl
import itertools
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from absl import logging

from configs import base
from evolver.config import cli
from evolver.config.checks import problems as config_problems
from evolver.files import formats
from evolver.files.progress import clock
from evolver.files.workdir import Workdir
from experiments import commands, compare
from experiments.ledger import INTERRUPTED, Ledger, outcome
from models.files import write_atomically

ROOT = Path(__file__).parents[1]
# Runs of a grid compile the same programs, which takes a third of the time of a small one. With a
# limit JAX also locks the directory, where runs that start together write the same files.
COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 << 30),
}
POLL, HEARTBEAT = 0.2, 60.0  # seconds between two looks at the runs, and lines about progress


@dataclass(frozen=True)
class Run:
    """One process of a grid. See the module."""

    row: str
    seed: int
    config: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "train"
    module: str = ""  # "" = run.py; another module takes --config, --workdir and overrides too
    after: tuple[str, ...] = ()
    same: str = ""  # name of a run of another row with these settings, whose workdir is shared

    @property
    def name(self) -> str:
        """The name of the workdir."""
        return self.same or f"{self.row}-{self.seed}"

    def command(self, folder: Path, flags: Sequence[str] = ()) -> list[str]:
        """Return the words after the interpreter that start the run."""
        values = {"seed": self.seed, **self.overrides}
        if self.module:
            words = ["-m", self.module]
        else:
            words = [str(ROOT / "run.py"), f"--mode={self.mode}"]
            values = {"log.group": folder.name, "log.tags": (self.row,)} | values
        words += [f"--config={self.config}", f"--workdir={folder / self.name}"]
        for key, value in values.items():
            words.append(f"--config.{key}={value}".replace("{folder}", str(folder)))
        return [*words, *flags]

    def recorded(self, flags: Sequence[str]) -> list[str]:
        """Return the same without the places of the grid and of run.py and without settings of the
        log, which may be moved and changed."""
        words = self.command(Path("{folder}"), flags)
        kept = [word for word in words if not word.startswith("--config.log.")]
        return [word.removeprefix(f"{ROOT}/") for word in kept]


def product(
    config: str,
    *,
    rows: Sequence[str] = (),
    sets: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
) -> list[Run]:
    """Return the runs of every combination of arguments of the config file, values and seeds; seeds
    vary slowest, so that a grid that is cut off has complete comparisons.

    A row is named after what varies: "q,lr=0.1". Keys are shortened to their last word where that
    is unambiguous.
    """
    sets = dict(sets or {})
    last = [key.rpartition(".")[2] for key in sets]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(sets, last)}
    runs = []
    for seed, argument in itertools.product(seeds, rows or [""]):
        for values in itertools.product(*sets.values()):
            overrides = dict(zip(sets, values))
            parts = [argument] if argument else []
            parts += [f"{short[key]}={value}" for key, value in overrides.items()]
            row = re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))
            row = row or Path(config.partition(":")[0]).stem
            runs.append(Run(row, seed, f"{config}:{argument}" if argument else config, overrides))
    return runs


def problems(runs: Sequence[Run], folder: str | Path, flags: Sequence[str] = ()) -> list[str]:
    """Return everything that keeps runs from starting, each problem once, with the runs that have
    it.

    Runs of other modules, and files that only an earlier run will write, are not checked.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, count in sorted(Counter(run.name for run in runs).items()):
        if count > 1:
            found["two runs have this name"].append(name)
    for run in (run for run in runs if not run.module):
        command = cli.parse(run.command(Path(folder), flags))
        reasons = list(command.problems)
        if command.config is not None:
            checked = config_problems(command.config, base.Config, command.workdir, run.mode)
            reasons += [s for s in checked if not (run.after and "there is no such" in s)]
        for reason in reasons:
            found[reason.replace(run.name, "RUN")].append(run.name)
    return [f"{reason} ({some(names)})" for reason, names in found.items()]


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --- running --------------------------------------------------------------------------------------


def remove_incomplete(compiled: Path) -> None:
    """Remove the programs from JAX's cache whose writer was killed.

    JAX writes the time of use, KEY-atime, after the program, KEY-cache. A program without it may be
    cut short, and makes every later write to the cache fail, so that each run of the grid compiles
    for itself.
    """
    if not compiled.is_dir():
        return
    with open(compiled / ".lockfile", "w") as lock:  # of jax, whose `filelock` calls flock too
        if not locked(lock):
            return  # A run is reading or writing. The next start of a run looks again.
        for program in compiled.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink()


def locked(file: TextIO) -> bool:
    """Lock a file. Return False if another process has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class Active(NamedTuple):
    """A run that is going on, with its lock and when it was started."""

    process: subprocess.Popen
    lock: TextIO
    began: float


class Execution:
    """Runs the processes of a grid, `jobs` at a time. flags: further words for every `run.py`."""

    def __init__(
        self,
        runs: Sequence[Run],
        folder: Path,
        *,
        jobs: int = 1,
        flags: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ):
        self.folder, self.jobs, self.flags, self.say = folder, jobs, flags, say
        self.runs = {run.name: run for run in runs}
        self.ledger = Ledger(folder)
        # Another host may lack this processor's instructions.
        self.compiled = folder / ".compiled" / platform.node()
        self.environ = dict(os.environ)
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            self.environ |= {"JAX_COMPILATION_CACHE_DIR": str(self.compiled)} | COMPILED
        self.states: dict[str, str] = {}
        self.active: dict[str, Active] = {}
        self.asked = False  # to end, by a signal

    def run(self) -> dict[str, str]:
        """Run everything that is not finished. Returns the state of each run by name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._find_finished()
        if self.states:
            self.say(f"{len(self.states)} of {len(self.runs)} runs are finished")
        shown = time.monotonic()
        with self._signals():
            while self._start():
                time.sleep(POLL)
                for name in [n for n, run in self.active.items() if run.process.poll() is not None]:
                    self._end(name)
                if time.monotonic() - shown > HEARTBEAT:
                    shown = time.monotonic()
                    self._show()
        states = {}
        for name, run in self.runs.items():
            waits = f"waits for {', '.join(self._missing(run))}"
            states[name] = self.states.get(name, "interrupted" if self.asked else waits)
        return states

    def _find_finished(self) -> None:
        """Mark the finished runs as done, but not those without files that another run needs."""
        self.states = {name: "done" for name in self.runs if self._finished(name)}
        unfinished = [name for name in self.runs if name not in self.states]
        for needy in unfinished:  # which grows
            for name in self.runs[needy].after:
                if name in self.states and not (self.folder / name).is_dir():
                    del self.states[name]
                    unfinished.append(name)
                    # so that a repetition that is killed does not look finished
                    self._record(name, INTERRUPTED, 0.0)

    def _finished(self, name: str) -> bool:
        return self.ledger.finished(name, self.runs[name].recorded(self.flags))

    def _record(self, name: str, code: int, seconds: float, **found: Any) -> None:
        command = self.runs[name].recorded(self.flags)
        self.ledger.add(run=name, command=command, code=code, seconds=seconds, **found)

    def _missing(self, run: Run) -> list[str]:
        return [name for name in run.after if self.states.get(name) != "done"]

    def _start(self) -> bool:
        """Start runs until `jobs` are active. Return False if no run is going on, neither here nor
        in another process."""
        elsewhere = False
        for name, run in self.runs.items():
            if self.asked or len(self.active) >= self.jobs:
                break
            if name in self.states or name in self.active or self._missing(run):
                continue
            path = self.folder / f"{name}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(path, "w")  # noqa: SIM115 (closed when the process ends)
            # The process inherits the lock, so that it is held for as long as the process lives,
            # whatever happens to this one: a list of process ids would be wrong after a reboot and
            # on another host.
            free = locked(lock)
            if free and not self._finished(name):
                self._spawn(name, lock)
                continue
            lock.close()
            if free:  # whoever held the lock has finished it
                self.states[name] = "done"
            elsewhere |= not free
        return bool(self.active) or elsewhere

    def _spawn(self, name: str, lock: TextIO) -> None:
        command = self.runs[name].command(self.folder, self.flags)
        remove_incomplete(self.compiled)
        with open(self.folder / f"{name}.log", "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            # A session of its own: Ctrl-C reaches it through `_forward` only, once per signal.
            process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                cwd=Path.cwd(), env=self.environ, pass_fds=(lock.fileno(),), start_new_session=True,
            )  # fmt: skip
        self.active[name] = Active(process, lock, time.monotonic())
        self._tell(f"{name} starts")

    def _tell(self, text: str) -> None:
        self.say(f"[{len(self.states)}/{len(self.runs)}] {text}")

    def _end(self, name: str) -> None:
        process, lock, began = self.active.pop(name)
        seconds, code = time.monotonic() - began, process.returncode
        self._record(name, code, round(seconds, 1), **outcome(self.folder / name))
        lock.close()
        if self.asked and code:
            return
        self.states[name], hint = "done", ""
        if code:
            self.states[name], hint = f"exit code {code}", f", see {self.folder / name}.log"
        self._tell(f"{name}: {self.states[name]} in {clock(seconds)}{hint}{self._left()}")

    def _left(self) -> str:
        """Return the time left at the mean time of the runs that took part, "" while no run of the
        grid has ended."""
        done = [name for name, state in self.states.items() if state == "done"]
        remaining = len(self.runs) - len(self.states) - sum(map(self._done, self.active))
        if not done or remaining <= 0:
            return ""
        mean = self.ledger.seconds(done) / len(done)
        return f"; about {clock(mean * remaining / self.jobs)} left"

    def _done(self, name: str) -> float:
        """Return the fraction of its steps that a run has done."""
        workdir = Workdir(self.folder / name)
        try:
            steps, lines = formats.found(workdir.config(), "config.steps"), workdir.metrics()
            return lines[-1]["step"] / steps if lines and steps else 0.0
        except (OSError, ValueError):  # it is being written
            return 0.0

    def _show(self) -> None:
        if self.active:
            running = ", ".join(f"{name} {self._done(name):.0%}" for name in self.active)
            self._tell(f"running: {running}{self._left()}")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, self._forward) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: Any) -> None:
        """Pass a signal on: the runs end at their next safe point, and at the second one at
        once."""
        self.asked = True
        self.say("\nending: the runs save what is complete; press Ctrl-C again to end at once")
        for run in self.active.values():
            run.process.send_signal(number)


def execute(runs: Sequence[Run], folder: str | Path, **options: Any) -> dict[str, str]:
    """Run everything that is not finished, and return {name: state}. options: as `Execution` takes
    them.

    States are "done", "exit code N", "waits for NAME" (of one that failed) and "interrupted".
    """
    return Execution(runs, Path(folder).absolute(), **options).run()


# --- the results ----------------------------------------------------------------------------------


def gather(runs: Sequence[Run], folder: str | Path) -> list[compare.Row]:
    """Return the rows in order, with the evaluations of every finished run, and notes on the
    others."""
    ledger = Ledger(Path(folder))
    rows = {run.row: compare.Row(run.row) for run in runs}
    for run in runs:
        row, code = rows[run.row], ledger.last(run.name).code
        if code == 0:
            row.curves[run.seed] = ledger.curve(run.name)
        else:
            known = {None: "was not run", INTERRUPTED: "is unfinished"}
            what = known.get(code, f"failed (exit code {code})")
            row.notes.append(f"seed {run.seed} {what}")
    return list(rows.values())


def report(runs: Sequence[Run], folder: str | Path, title: str = "", measure: str = "") -> str:
    """Write grid.md, grid.csv, grid.png and grid.svg into the grid's workdir, and return the
    Markdown."""
    folder, rows = Path(folder), gather(runs, folder)
    table = compare.lines(rows, sorted({run.seed for run in runs}), measure)
    hours = Ledger(folder).seconds({run.name for run in runs}) / 3600
    parts = [f"# {title or folder.name}\n", compare.markdown(table), compare.before(rows)]
    parts += [f"{hours:.1f} hours of runs", "![grid](grid.png)"]
    text = "\n".join(filter(None, parts))
    write_atomically(folder / "grid.md", text + "\n")
    write_atomically(folder / "grid.csv", compare.csv_text(table))
    compare.draw(rows, folder / "grid", measure=measure, title=title)
    return text


# --- the command ----------------------------------------------------------------------------------


def split_values(text: str) -> list[str]:
    """Return the comma-separated values of a text; commas inside brackets and quotes belong to a
    value."""
    values, depth, quote = [""], 0, ""
    for char in text:
        quote = ("" if char == quote else quote) if quote else char if char in "'\"" else ""
        depth += (char in "([{") - (char in ")]}") if not quote else 0
        if char == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += char
    return [value.strip() for value in values]


def sets_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Return {key: values} of "KEY=V1,V2" texts. Raises ValueError."""
    sets: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        key, values = key.removeprefix("--").removeprefix("config."), split_values(text)
        if not all(values):
            raise ValueError(f"--set {word}: give KEY=VALUE,VALUE,... such as optim.lr=1e-4,5e-4")
        if key in sets:
            raise ValueError(f"--set {key} is given twice: give all its values at once")
        sets[key] = values
    return sets


def read_sweep(path: Path) -> tuple[dict[str, list[Any]], str]:
    """Return ({key: values}, config) of a sweep file; its seeds are left out, because a grid has
    `--seeds`.

    Raises ValueError, which names the file.
    """
    import yaml

    try:
        sweep = yaml.safe_load(path.read_text(encoding="utf-8"))
        parameters, words = sweep["parameters"], map(str, sweep["command"])
        config = next(word for word in words if word.startswith("--config="))
    except (OSError, yaml.YAMLError, TypeError, KeyError, StopIteration) as error:
        raise ValueError(
            f"--sweep {path}: not a sweep with parameters and a command ({error!r})"
        ) from None
    sets = {}
    for name, rule in parameters.items():
        if not {"value", "values"} & rule.keys():
            raise ValueError(f"--sweep {path}: {name} has a distribution; a grid needs `values`")
        sets[name.removeprefix("config.")] = rule["values"] if "values" in rule else [rule["value"]]
    sets.pop("seed", None)
    return sets, config.removeprefix("--config=")


def trial(flags: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command of one trial of a sweep: `run.py` with these flags, in a workdir of its
    own.

    environ: the agent names the sweep and the trial in WANDB_SWEEP_ID and WANDB_RUN_ID.
    """
    sweep = environ.get("WANDB_SWEEP_ID", "trials")
    name = environ.get("WANDB_RUN_ID", secrets.token_hex(4))
    wanted = {
        "--config.log.wandb": "offline" if environ.get("WANDB_MODE") == "offline" else "online",
        "--config.log.group": sweep,
        "--workdir": f"runs/sweeps/{sweep}/{name}",
    }
    given = {word.partition("=")[0] for word in flags}
    more = [f"{flag}={value}" for flag, value in wanted.items() if flag not in given]
    return [sys.executable, str(ROOT / "run.py"), *flags, *more]


def command(
    runs: Sequence[Run],
    folder: Path,
    report: Callable[[], str],
    *,
    jobs: int,
    flags: Sequence[str],
    only_report: bool,
) -> int:
    """Run what is not finished and print the report. Return the exit code: 0 if every run is done,
    1 if some failed, 130 if interrupted. Raises commands.Problems, when nothing was started."""
    states = {}
    if not only_report:
        if found := problems(runs, folder, flags):
            raise commands.Problems(*found)
        states = execute(runs, folder, jobs=jobs, flags=flags)
    print("\n" + report())
    if "interrupted" in states.values():
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    failed = [f"{name} ({state})" for name, state in states.items() if state != "done"]
    if failed:
        print(f"not done: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main(
    *,
    config: str = "",
    rows: commands.Words = (),
    set_: commands.Words = (),
    sweep: Path | None = None,
    seeds: commands.Numbers = (0,),
    workdir: Path = Path("runs/grid"),
    jobs: int = 1,
    measure: str = "",
    only_report: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Run a grid. Words after `--` go to every run of run.py.

    config: FILE or FILE:ARGUMENT
    rows: arguments of the config file
    set_: KEY=V1,V2: values to combine
    sweep: a sweep of Weights & Biases whose values are combined
    jobs: number of runs at a time
    measure: avg@8 (default: avg@k), best@8, pass@8, greedy
    only_report: report on the existing runs and start none
    """
    logging.set_verbosity(logging.ERROR)
    if not (config or sweep):
        raise commands.Problems("--config=FILE is missing, or --sweep FILE")
    if config.partition(":")[2] and rows:
        both = "--config=FILE:ARGUMENT and --rows both name arguments"
        raise commands.Problems(f"{both}; give --config=FILE with --rows")
    try:
        swept, commanded = read_sweep(sweep) if sweep else ({}, "")
        sets = swept | sets_of(set_)
    except ValueError as error:
        raise commands.Problems(str(error)) from None
    runs = product(config or commanded, rows=rows, sets=sets, seeds=seeds)

    def told() -> str:
        files = f"table: {workdir}/grid.md, {workdir}/grid.csv; figure: {workdir}/grid.png"
        return f"{report(runs, workdir, measure=measure)}\n\n{files}"

    return command(runs, workdir, told, jobs=jobs, flags=flags, only_report=only_report)


if __name__ == "__main__":
    if "--trial" in sys.argv:
        words = trial([word for word in sys.argv[1:] if word != "--trial"], os.environ)
        os.execv(words[0], words)  # in place of this process: the agent's signals reach the run
    commands.program(main)
