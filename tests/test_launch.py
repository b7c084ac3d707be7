"""The launchers start one process a node, and start the job again where the run can go on.

They are played with stand-ins of srun, scontrol and python, which write down how they were called.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from evolver.config import cli
from evolver.processes.hosts import LOST

LAUNCH = Path("experiments/launch").resolve()
INTERRUPTED = 130  # exit code of a run that was told to end
RUN = ["--config=configs/quickstart.py", "--config.seed=3"]


def command(folder: Path, name: str, body: str) -> None:
    """Write a stand-in for a program."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def flags(text: str) -> list[str]:
    """Return the flags of a line that a stand-in of python wrote down."""
    program, *found = text.split()
    assert program == "run.py"
    return found


def hosts_of(found: list[str]) -> list[object]:
    """Return count, index and coordinator as the run reads them from its flags."""
    parsed = cli.parse(["run.py", *found])
    assert not parsed.problems
    hosts = parsed.config.hosts
    return [hosts.count, hosts.index, hosts.coordinator, parsed.config.seed]


@pytest.fixture
def slurm(tmp_path):
    """An allocation of two nodes; `exits` is the exit code of the run."""
    command(
        tmp_path,
        "scontrol",
        f"""
echo "scontrol $*" >> {tmp_path}/called
[[ $1 == show ]] && printf "a1\\na2\\n"; true""",
    )
    command(
        tmp_path,
        "srun",
        f"""
shift  # its own option
for rank in 0 1; do SLURM_PROCID=$rank "$@"; code=$?; done
[[ -e {tmp_path}/waits ]] && {{
trap "exit $(<{tmp_path}/waits)" TERM; while true; do sleep 0.1; done; }}
exit $code""",
    )
    command(tmp_path, "python", f"""echo "$*" >> {tmp_path}/nodes; exit ${{EXITS:-0}}""")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": f"{tmp_path}/python",
        "SLURM_JOB_ID": "41234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[1-2]",
    }  # fmt: skip

    def start(exits: int = 0) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [LAUNCH / "slurm.sh", *RUN], env=environment | {"EXITS": str(exits)}, text=True,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    start.folder = tmp_path
    return start


def test_slurm_starts_one_process_on_each_node(slurm):
    assert slurm().wait(30) == 0
    nodes = [hosts_of(flags(line)) for line in (slurm.folder / "nodes").read_text().splitlines()]
    assert nodes == [[2, 0, "a1:21234", 3], [2, 1, "a1:21234", 3]]
    assert "requeue" not in (slurm.folder / "called").read_text()


@pytest.mark.parametrize(("code", "again"), [(LOST, True), (INTERRUPTED, False), (2, False)])
def test_slurm_starts_the_job_again_after_a_lost_process_alone(slurm, code, again):
    assert slurm(code).wait(30) == code
    assert ("requeue 41234" in (slurm.folder / "called").read_text()) == again


@pytest.mark.parametrize(("ends", "code"), [(INTERRUPTED, LOST), (143, LOST), (0, 0), (1, 1)])
def test_slurm_tells_the_run_to_save_before_the_time_limit_and_starts_it_again(slurm, ends, code):
    """A run that ends by itself just then, done or failed, is not started again."""
    (slurm.folder / "waits").write_text(str(ends))
    job = slurm()
    while not (slurm.folder / "nodes").exists():
        time.sleep(0.05)
    time.sleep(0.5)  # until the stand-in of srun waits
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == code
    assert ("requeue 41234" in (slurm.folder / "called").read_text()) == (code == LOST)


def test_slurm_shows_what_it_would_run_and_refuses_to_start_elsewhere():
    shown = subprocess.run(
        [LAUNCH / "slurm.sh", "--dry-run", *RUN], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    assert "run.py --config.hosts.count=$SLURM_NNODES" in shown and RUN[1] in shown
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    refused = subprocess.run([LAUNCH / "slurm.sh"], capture_output=True, text=True, env=outside)
    assert refused.returncode == 2 and "sbatch" in refused.stderr


def here(folder: Path, *words: str, body: str) -> subprocess.Popen[str]:
    """Start here.sh with a stand-in of python."""
    command(folder, "python", body)
    environment = os.environ | {"PYTHON": f"{folder}/python"}
    return subprocess.Popen(
        [LAUNCH / "here.sh", *words], env=environment, text=True, stderr=subprocess.PIPE
    )


def test_one_machine_plays_several_with_simulated_devices(tmp_path):
    body = f"""printf "%s\\n" "$XLA_FLAGS" "$*" > {tmp_path}/node.$BASHPID
[[ $* == *index=1* ]] && exit {LOST}; exit 0"""
    assert here(tmp_path, "2", "4", *RUN, body=body).wait(30) == LOST
    lines = [path.read_text().splitlines() for path in tmp_path.glob("node.*")]
    assert all(
        devices.startswith("--xla_force_host_platform_device_count=4") for devices, _ in lines
    )
    nodes = sorted(hosts_of(flags(line)) for _, line in lines)
    assert [node[:2] for node in nodes] == [[2, 0], [2, 1]] and nodes[0][2] == nodes[1][2]


def test_a_signal_reaches_all_processes_of_a_machine_and_they_end_in_their_time(tmp_path):
    body = f"""trap 'sleep 0.5; touch {tmp_path}/ended.$BASHPID; exit {INTERRUPTED}' TERM
touch {tmp_path}/runs.$BASHPID; while true; do sleep 0.1; done"""
    run = here(tmp_path, "2", "4", *RUN, body=body)
    while len(list(tmp_path.glob("runs.*"))) < 2:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == INTERRUPTED and len(list(tmp_path.glob("ended.*"))) == 2


def test_processes_of_a_machine_need_a_number():
    refused = subprocess.run([LAUNCH / "here.sh", *RUN], capture_output=True, text=True)
    assert refused.returncode == 2 and "PROCESSES DEVICES" in refused.stderr


def played(tmp_path: Path, script: str, program: str, variables: dict[str, str]) -> list[object]:
    """Return the settings of hosts that a shell command of a launcher gives a run."""
    command(tmp_path, program, f'echo "$*" > {tmp_path}/called')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
    script = script.replace(".venv/bin/python", "python")
    subprocess.run(["bash", "-c", script], check=True, env=environment)
    return hosts_of(flags((tmp_path / "called").read_text().replace("train", "run.py", 1)))


def test_skypilot_gives_each_node_its_number_and_recovers_from_a_lost_process(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    node |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RUN": " ".join(RUN)}
    assert played(tmp_path, task["run"], "python", node) == [2, 1, "10.0.0.1:20000", 3]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [LOST]
    assert task["envs"].keys() >= {"RUN", "TARGET"}
    assert Path(f"requirements/{task['envs']['TARGET']}.txt").is_file()


def test_jobset_gives_each_pod_its_number_and_ends_at_an_exit_code_that_stays(tmp_path):
    spec = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert given["NODES"] == str(job["completions"]) == str(job["parallelism"])
    pod = given | {"JOBSET_NAME": "mine", "JOB_COMPLETION_INDEX": "0", "RUN": " ".join(RUN)}
    hosts = played(tmp_path, container["args"][0], "evolver", pod | {"NODES": "4"})
    assert hosts == [4, 0, "mine-learner-0-0.mine:20000", 3]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [LOST, INTERRUPTED, 128 + signal.SIGKILL]
    assert rule["action"] == "FailJob" and job["backoffLimit"] == 0


@pytest.mark.services
def test_skypilot_reads_the_task():
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml")).num_nodes == 1
