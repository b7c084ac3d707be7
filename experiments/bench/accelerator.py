"""Cases of a model's size and a length in tokens, measured on an accelerator or planned for one."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from configs import base
from envs.values import Json
from evolver.config import cli
from evolver.config.keys import flat
from evolver.plan import compilers, targets
from experiments import commands
from experiments.compare import markdown

SIZES = ("0.5b", "1.5b", "7b")
Record = Json


def bfloat16_config(size: str) -> Any:
    """Return a config whose computation and cache are in bfloat16."""
    config = base.get_config()
    config.model.preset = size
    config.model.dtype = config.engine.cache_dtype = "bfloat16"
    return config


def changes_of(settings: Iterable[str]) -> Json:
    """Return {key: value} of settings such as "lora.rank=32". Raises commands.Problems."""
    words = [f"--config.{setting}" for setting in settings]
    command = cli.parse(["run.py", "--config=configs/base.py", *words])
    if command.problems:
        raise commands.Problems(*command.problems)
    values = flat(command.config)
    return {key: values[key] for key in (setting.partition("=")[0] for setting in settings)}


def chip_of(kind: str) -> targets.Chip | None:
    """Return the entry of `targets.CHIPS` for a JAX device kind; None if it is unknown."""
    name = kind.lower().replace(" ", "-")
    return next((c for key, c in targets.CHIPS.items() if key.partition("-")[0] in name), None)


def compiled_for(
    config: Any, target: targets.Target, phase: str, slots: int, micro_batches: int
) -> Record:
    """Return the record of a phase's program, compiled for a target, with the "peak_gb" of its
    memory; {"note": why} if it does not compile."""
    compiled = compilers.compile_programs(
        config, target, phases=[phase], slots=slots, micro_batches=micro_batches
    )
    return peak_of(compiled, phase)


def peak_of(compiled: Mapping[str, Any], phase: str) -> Record:
    """Return the same of the result of `compilers.compile_programs`."""
    record = compiled.get("phases", {}).get(phase, {})
    if "memory" not in record:
        reason = compiled.get("error") or record.get("error", "no program")
        return {"note": reason.splitlines()[0][:100]}
    memory = record["memory"]
    peak = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    return record | {"peak_gb": peak / 1e9}


def show(
    head: list[str], records: Iterable[Record], cells: Callable[[Record], list[str]], planned: str
) -> None:
    """Print each record as it comes, and at the end the table of their cells. planned: the target,
    "" = none."""
    rows = [[*head, kind_of(planned)]]
    for record in records:
        print(json.dumps(record), file=sys.stderr, flush=True)
        rows.append(cells(record))
    print(markdown(rows), end="")


def kind_of(planned: str) -> str:
    """Return the heading of the results. planned: the target, "" = none."""
    return f"planned for {planned}, not measured" if planned else "measured"
