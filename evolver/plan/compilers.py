"""Run XLA's compiler for another machine, in a subprocess with a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.process import code_folder
from evolver.files.workdir import plain
from evolver.plan.targets import Target

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"cuda": "plan-gpu", "tpu": "plan-tpu"}
TIMEOUT = (
    3600.0  # seconds for all programs of a plan, which take a minute or two on an idle machine
)


def interpreter(target: Target) -> Path | None:
    """Return the Python that compiles for the target, None if it is not installed.

    It is EVOLVER_PLAN_PYTHON, or that of the environment which `make plan-gpu` or `make plan-tpu`
    makes.
    """
    given = os.environ.get("EVOLVER_PLAN_PYTHON")
    path = (
        Path(given)
        if given
        else ROOT / f".venv-{ENVIRONMENTS[target.chip.platform]}" / "bin" / "python"
    )
    return path if path.exists() else None


def how_to_install(target: Target) -> str:
    """Return a sentence on how to install the compiler."""
    name = ENVIRONMENTS[target.chip.platform]
    return f"`make {name}` installs the compiler (requirements/{name}.txt); it needs no such device"


def environment(target: Target) -> dict[str, str]:
    """Return environment variables that let jax compile for absent devices without searching for
    any."""
    own = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": code_folder()}
    if target.chip.platform == "cuda":
        own["XLA_FLAGS"] = (
            "--xla_gpu_autotune_level=0"  # autotuning runs kernels, which needs a device
        )
    else:
        own |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_LIBRARY_PATH": os.environ.get("TPU_LIBRARY_PATH", ""),
        }
    return {name: value for name, value in (os.environ | own).items() if value}


def compile_programs(
    config: dict[str, Any],
    target: Target,
    *,
    phases: list[str],
    slots: int,
    micro_batches: float,
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the result of `programs.run` in the plan environment; {"error": why} if there is none
    or it failed.

    show: called with a line of progress after each program.
    """
    python = interpreter(target)
    if python is None:
        return {"error": f"no compiler for {target.chip.name}: {how_to_install(target)}"}
    job = {"config": plain(config), "target": target.name, "phases": phases, "slots": slots}
    job["micro_batches"] = micro_batches
    with tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryFile("w+") as stderr:
        json.dump(job, stdin)
        stdin.seek(0)
        process = subprocess.Popen(
            [str(python), "-m", "evolver.plan.programs"], cwd=code_folder(), env=environment(target), text=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        try:
            result = ""
            for result in process.stdout:
                if result.startswith("compiled "):
                    show(result.strip())
            process.wait()
        finally:
            timer.cancel()
            process.kill()  # has no effect if the process has ended
        if process.returncode:
            stderr.seek(0)
            last = " | ".join(line.strip() for line in stderr.readlines()[-3:])
            return {
                "error": f"the compiler for {target.chip.name} failed (exit code {process.returncode}): {last}"
            }
        return json.loads(result)
