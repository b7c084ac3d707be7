"""Start one run by a scheduler: Slurm, Kubernetes with JobSet, or SkyPilot.

python -m experiments.launch slurm --nodes 2 --devices 8 -- --config=configs/mine.py
python -m experiments.launch jobset --nodes 2 --devices 8 --image evolver-cuda -- --config=...
python -m experiments.launch jobset --devices tpu-v6e-slice:4x4:4 --image evolver-tpu -- ...
python -m experiments.launch skypilot --nodes 2 --devices H100:8 -- --config=...
python -m experiments.launch skypilot --devices tpu-v6e-16 -- --config=...

With --dry-run it prints what it would hand to the scheduler, and starts nothing. --devices are
those of a node, in the scheduler's own words: a number of GPUs for Slurm and JobSet; for JobSet a
slice of TPUs as accelerator:topology:chips of a node, whose nodes are counted from it. Whatever
else a site needs, such as accounts, partitions and claims of volumes, is set in the files beside
this one.
"""

import math
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from experiments import commands

HERE = Path(__file__).parent
SLICE = "gke-tpu-accelerator", "gke-tpu-topology"  # labels of a node, below cloud.google.com
GPUS = "8"  # of a node, where nothing else is asked for
FILE = "FILE"  # in a command: the file that holds the text
Rendered = tuple[list[str], str]  # the command and the text


class Asked(NamedTuple):
    """The request: the words of the run, and where it runs."""

    run: commands.Words
    nodes: int
    devices: str
    image: str


class Unfit(Exception):
    """The devices are no words of the scheduler."""


def slurm(asked: Asked) -> Rendered:
    """Return the command that submits slurm.sh."""
    devices = counted(asked.devices or GPUS)
    size = [f"--nodes={asked.nodes}", f"--gpus-per-node={devices}"]
    return ["sbatch", *size, str(HERE / "slurm.sh"), *asked.run], ""


def jobset(asked: Asked) -> Rendered:
    """Return jobset.yaml for these nodes and devices."""
    task = yaml.safe_load((HERE / "jobset.yaml").read_text())
    job = task["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    nodes, words = asked.nodes, asked.devices.split(":")
    if len(words) == 3:
        accelerator, topology, chips = words
        whole = math.prod(counted(side) for side in topology.split("x"))
        nodes, rest = divmod(whole, counted(chips))
        if rest or not nodes:
            raise Unfit(f"{topology} has {whole} chips, which nodes of {chips} do not divide")
        labels = (f"cloud.google.com/{name}" for name in SLICE)
        pod["nodeSelector"] = dict(zip(labels, (accelerator, topology)))
        limits = {"google.com/tpu": int(chips)}
    else:
        limits = {"nvidia.com/gpu": counted(asked.devices or GPUS)}
    job["completions"] = job["parallelism"] = nodes
    container["image"] = asked.image or container["image"]
    container["resources"] = {"limits": limits}
    given = {"RUN": " ".join(asked.run), "NODES": str(nodes)}
    for entry in container["env"]:
        if entry["name"] in given:
            entry["value"] = given[entry["name"]]
    return ["kubectl", "apply", "-f", FILE], yaml.safe_dump(task, sort_keys=False)


def skypilot(asked: Asked) -> Rendered:
    """Return skypilot.yaml for these nodes and devices."""
    if not asked.devices or asked.devices.isdigit():
        raise Unfit("name the accelerator, such as H100:8")
    task = yaml.safe_load((HERE / "skypilot.yaml").read_text())
    task["num_nodes"] = asked.nodes
    task["resources"]["accelerators"] = asked.devices
    target = "tpu" if asked.devices.startswith("tpu") else "cuda"
    task["envs"] |= {"RUN": " ".join(asked.run), "TARGET": target}
    return ["sky", "jobs", "launch", "--yes", FILE], yaml.safe_dump(task, sort_keys=False)


SCHEDULERS: dict[str, Callable[[Asked], Rendered]] = {
    "slurm": slurm, "jobset": jobset, "skypilot": skypilot,
}  # fmt: skip


def counted(text: str) -> int:
    """Return a number of devices or nodes. Raises Unfit."""
    if not text.isdigit() or not int(text):
        raise Unfit(f"{text!r} is no number of devices")
    return int(text)


def launch(
    scheduler: Literal["slurm", "jobset", "skypilot"],
    run: commands.Words,
    *,
    nodes: int = 1,
    devices: str = "",
    image: str = "",
    dry_run: bool = False,
) -> int:
    """Start a run, or print what would be started. Return the exit code of the scheduler's command,
    2 if nothing could be started.

    run: the words of the run, after --
    nodes: nodes, with a process on each
    devices: of a node, see above
    image: container image, for jobset
    dry_run: print it, and start nothing
    """
    if nodes < 1:
        raise commands.Problems(f"--nodes={nodes}: at least one")
    spaced = [word for word in run if len(word.split()) != 1]
    if spaced and scheduler != "slurm":
        reason = "has spaces, which do not reach the run: set it in a config"
        raise commands.Problems(f"{spaced[0]!r} {reason}")
    try:
        command, text = SCHEDULERS[scheduler](Asked(run, nodes, devices, image))
    except Unfit as error:
        raise commands.Problems(f"--devices={devices}: {error}") from None
    if dry_run:
        print(f"# {shlex.join(command)}\n{text}" if text else shlex.join(command))
        return 0
    if shutil.which(command[0]) is None:
        print(
            f"{command[0]} is not on this machine, so nothing was started: start it where"
            f" {scheduler}'s commands are, or see what it would get with --dry-run",
            file=sys.stderr,
        )
        return 2
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        words = [file.name if word == FILE else word for word in command]
        return subprocess.run(words).returncode


if __name__ == "__main__":
    commands.program(launch)
