"""Run XLA's compiler for another machine, in a subprocess with a virtual environment of its own."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.process import code_folder
from evolver.config.derived import xla_flags
from evolver.config.paths import ROOT
from evolver.files.workdir import plain
from evolver.plan.case import LEARNER, PHASES, Case
from evolver.plan.estimate import sequences
from evolver.plan.targets import Target

ENVIRONMENTS = {"cuda": "plan-gpu", "tpu": "plan-tpu"}
TIMEOUT = 3600.0  # seconds for all programs, which take a minute or two on an idle machine
AUTOTUNING = "--xla_gpu_autotune_level=0"  # it would run kernels, which needs a device
# Variables that let jax compile for absent TPUs without searching for any.
TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


def interpreter(target: Target) -> Path | None:
    """Return the Python that compiles for the target, None if it is not installed.

    It is EVOLVER_PLAN_PYTHON, or that of the environment which `make plan-gpu` or `make plan-tpu`
    makes.
    """
    made = ROOT / f".venv-{ENVIRONMENTS[target.chip.platform]}" / "bin" / "python"
    path = Path(os.environ.get("EVOLVER_PLAN_PYTHON") or made)
    return path if path.exists() else None


def variables(config: Any, target: Target) -> dict[str, str]:
    """Return the variables with which XLA compiles for absent devices as it would for real ones."""
    if target.chip.platform == "tpu":
        return TPU
    return {"XLA_FLAGS": xla_flags(config, AUTOTUNING)}


def how_to_install(target: Target) -> str:
    """Return a sentence on how to install the compiler."""
    name = ENVIRONMENTS[target.chip.platform]
    return f"`make {name}` installs the compiler (requirements/{name}.txt); it needs no such device"


def compiled(case: Case) -> Case:
    """Return the case with the figures of its programs, compiled for its target."""
    slots = max(1, min(case.engine.sequences, sequences(case)))
    phases = PHASES if case.on_jax else LEARNER
    found = compile_programs(
        case.config, case.target, phases=phases, slots=slots, micro_batches=case.micro_batches
    )
    return replace(case, compiled=found)


def compile_programs(
    config: Any, target: Target, *, phases: Sequence[str], slots: int, micro_batches: float
) -> dict[str, Any]:
    """Return the result of `programs.run` in the plan environment; {"error": why} if there is none
    or it failed. Each program is reported on stderr when it is compiled."""
    chip = target.chip.name
    python = interpreter(target)
    if python is None:
        return {"error": f"no compiler for {chip}: {how_to_install(target)}"}
    job = {"config": plain(config.to_dict()), "target": target.name, "phases": phases}
    job |= {"slots": slots, "micro_batches": micro_batches}
    own = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": code_folder()}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), "-m", "evolver.plan.programs", json.dumps(job)],
            cwd=code_folder(),
            env=os.environ | own | variables(config, target),
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        try:
            assert process.stdout
            line = ""
            for line in process.stdout:
                if line.startswith("compiled "):
                    print(f"  {line}", end="", file=sys.stderr, flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # has no effect if the process has ended
        if code:
            errors.seek(0)
            last = " | ".join(line.strip() for line in errors.readlines()[-3:])
            return {"error": f"the compiler for {chip} failed (exit code {code}): {last}"}
        return json.loads(line)
