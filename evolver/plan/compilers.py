"""The compilers of other machines, each in a virtual environment of its own, run as a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evolver.books import plain
from evolver.plan.targets import Target

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"cuda": "plan-gpu", "tpu": "plan-tpu"}
TIMEOUT = 3600.0  # seconds for all programs of a plan; a minute or two, and more on a busy machine


def interpreter(target: Target) -> Path | None:
    """Python of the target's plan environment: EVOLVER_PLAN_PYTHON, or that of `make plan-gpu`, `make plan-tpu`."""
    given = os.environ.get("EVOLVER_PLAN_PYTHON")
    path = Path(given) if given else ROOT / f".venv-{ENVIRONMENTS[target.chip.platform]}" / "bin" / "python"
    return path if path.exists() else None


def offer(target: Target) -> str:
    """How to get it."""
    name = ENVIRONMENTS[target.chip.platform]
    return f"`make {name}` installs the compiler (requirements/{name}.txt), which needs no such device"


def environment(target: Target) -> dict[str, str]:
    """Variables under which jax compiles for devices that are not here, and looks for none."""
    own = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    if target.chip.platform == "cuda":
        own["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # timing kernels would need a device
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
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """`programs.run` in the plan environment; {"error": why} where there is none, or where it failed."""
    python = interpreter(target)
    if python is None:
        return {"error": f"no compiler for {target.chip.name}: {offer(target)}"}
    job = {"config": plain(config), "target": target.name, "phases": phases, "slots": slots}
    job["micro_batches"] = micro_batches
    command = [str(python), "-m", "evolver.plan.programs"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(target), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    lines: list[str] = []
    reader = threading.Thread(target=_follow, args=(process.stderr, lines, say), daemon=True)
    reader.start()
    killer = threading.Timer(TIMEOUT, process.kill)
    killer.start()
    try:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        out = process.stdout.read()
        process.wait()
    except BrokenPipeError:
        out = ""
        process.wait()
    finally:
        killer.cancel()
        if process.poll() is None:  # interrupted
            process.kill()
    reader.join(5)
    if process.returncode:
        tail = " | ".join(lines[-3:])
        return {"error": f"the compiler for {target.chip.name} failed (exit code {process.returncode}): {tail}"}
    return json.loads(out.strip().splitlines()[-1])


def _follow(stream: Any, lines: list[str], say: Callable[[str], None]) -> None:
    for line in stream:
        lines.append(line.strip())
        if line.startswith("compiled "):
            say(line.strip())


def tell(line: str) -> None:
    """Progress, beside the plan itself."""
    print(f"  {line}", file=sys.stderr, flush=True)
