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
from experiments import commands
from experiments.launch import __main__ as launcher

LAUNCH = Path("experiments/launch").resolve()
INTERRUPTED = 130  # exit code of a run that was told to end
RUN = ["--config=configs/quickstart.py", "--config.seed=3"]


def launch(words: list[str]) -> int:
    """Return the exit code of the command."""
    return commands.run(launcher.launch, words)


def command(folder: Path, name: str, body: str) -> None:
    """Write a stand-in for a program."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def hosts_of(line: str) -> list[object]:
    """Return count, index and coordinator, and the seed, as the run reads them from the line that a
    stand-in of python wrote down."""
    parsed = cli.parse(line.split())
    assert line.startswith("run.py ") and not parsed.problems
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
    nodes = (slurm.folder / "nodes").read_text().splitlines()
    assert list(map(hosts_of, nodes)) == [[2, 0, "a1:21234", 3], [2, 1, "a1:21234", 3]]
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


def here(folder: Path, body: str) -> subprocess.Popen[str]:
    """Start here.sh for two processes of four devices, with a stand-in of python."""
    command(folder, "python", body)
    environment = os.environ | {"PYTHON": f"{folder}/python"}
    words = [LAUNCH / "here.sh", "2", "4", *RUN]
    return subprocess.Popen(words, env=environment, text=True, stderr=subprocess.PIPE)


def test_one_machine_plays_several_with_simulated_devices(tmp_path):
    body = f"""printf "%s\\n" "$XLA_FLAGS" "$*" > {tmp_path}/node.$BASHPID
[[ $* == *index=1* ]] && exit {LOST}; exit 0"""
    assert here(tmp_path, body).wait(30) == LOST
    lines = [path.read_text().splitlines() for path in tmp_path.glob("node.*")]
    for devices, _ in lines:
        assert devices.startswith("--xla_force_host_platform_device_count=4")
    nodes = sorted(hosts_of(line) for _, line in lines)
    assert [node[:2] for node in nodes] == [[2, 0], [2, 1]] and nodes[0][2] == nodes[1][2]


def test_a_signal_reaches_all_processes_of_a_machine_and_they_end_in_their_time(tmp_path):
    body = f"""trap 'sleep 0.5; touch {tmp_path}/ended.$BASHPID; exit {INTERRUPTED}' TERM
touch {tmp_path}/runs.$BASHPID; while true; do sleep 0.1; done"""
    run = here(tmp_path, body)
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
    return hosts_of((tmp_path / "called").read_text().replace("train", "run.py", 1))


def test_skypilot_gives_each_node_its_number_and_recovers_from_a_lost_process(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    node |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RUN": " ".join(RUN)}
    assert played(tmp_path, task["run"], "python", node) == [2, 1, "10.0.0.1:20000", 3]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [LOST]
    assert task["envs"].keys() >= {"RUN", "TARGET"}
    assert Path(f"requirements/{task['envs']['TARGET']}.txt").is_file()


def job_of(spec):
    """Return the job of a JobSet, its container, and the variables of that."""
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job, container, {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_jobset_gives_each_pod_its_number_and_ends_at_an_exit_code_that_stays(tmp_path):
    spec = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]
    job, container, given = job_of(spec)
    assert given["NODES"] == str(job["completions"]) == str(job["parallelism"])
    pod = given | {"JOBSET_NAME": "mine", "JOB_COMPLETION_INDEX": "0", "RUN": " ".join(RUN)}
    hosts = played(tmp_path, container["args"][0], "evolver", pod | {"NODES": "4"})
    assert hosts == [4, 0, "mine-learner-0-0.mine:20000", 3]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [LOST, INTERRUPTED, 128 + signal.SIGKILL]
    assert rule["action"] == "FailJob" and job["backoffLimit"] == 0


# {what is asked of a scheduler: the nodes, and the devices of each, in what it gets}
RENDERED = {
    ("slurm",): (1, "8"),
    ("slurm", "--nodes=2", "--devices=4"): (2, "4"),
    ("jobset",): (1, {"nvidia.com/gpu": 8}),
    ("jobset", "--nodes=4", "--image=mine"): (4, {"nvidia.com/gpu": 8}),
    ("jobset", "--devices=tpu-v6e-slice:4x4:4"): (4, {"google.com/tpu": 4}),
    ("jobset", "--devices=tpu-v5p-slice:2x2x1:4"): (1, {"google.com/tpu": 4}),
    ("skypilot", "--devices=H100:8"): (1, "H100:8"),
    ("skypilot", "--nodes=3", "--devices=A100-80GB:8"): (3, "A100-80GB:8"),
    ("skypilot", "--devices=tpu-v6e-16"): (1, "tpu-v6e-16"),
}  # fmt: skip
TOOLS = Path(".venv-launch/bin").resolve()
tooled = [
    pytest.mark.services,
    pytest.mark.skipif(not TOOLS.is_dir(), reason="make test-launch installs the tools"),
]


def rendered(capsys, words):
    """Return what --dry-run prints: the command, and the file that it would get."""
    assert launch([*words, "--dry-run", "--", *RUN]) == 0
    command, _, text = capsys.readouterr().out.partition("\n")
    return command.removeprefix("# "), text


@pytest.mark.parametrize("words", RENDERED, ids=" ".join)
def test_a_dry_run_renders_one_node_several_nodes_and_slices_of_tpus(words, capsys):
    command, text = rendered(capsys, words)
    nodes, devices = RENDERED[words]
    if words[0] == "slurm":
        assert f"--nodes={nodes} --gpus-per-node={devices} {LAUNCH}/slurm.sh" in command
        assert command.endswith(" ".join(RUN))
        return
    task = yaml.safe_load(text)
    if words[0] == "skypilot":
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (nodes, devices)
        target = "tpu" if "tpu" in devices else "cuda"
        assert task["envs"] == {"RUN": " ".join(RUN), "TARGET": target}
        return
    job, container, given = job_of(task["spec"])
    assert given["NODES"] == str(nodes) and job["completions"] == job["parallelism"] == nodes
    assert given["RUN"] == " ".join(RUN) and container["resources"]["limits"] == devices
    assert ("nodeSelector" in job["template"]["spec"]) == ("google.com/tpu" in devices)


@pytest.mark.parametrize("scheduler", ["slurm", "jobset", "skypilot"])
def test_a_scheduler_that_is_not_there_is_one_message(scheduler, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    devices = ["--devices=H100:8"] * (scheduler == "skypilot")
    assert launch([scheduler, *devices, "--", *RUN]) == 2
    said = capsys.readouterr()
    assert "is not on this machine, so nothing was started" in said.err and not said.out


def test_a_scheduler_gets_the_file_and_its_exit_code_is_ours(capsys, monkeypatch, tmp_path):
    command(tmp_path, "sky", f'/bin/cat "${{@: -1}}" > {tmp_path}/got; exit 7')
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["skypilot", "--devices", "tpu-v6e-8", "--"]
    assert launch([*words, *RUN]) == 7
    assert yaml.safe_load((tmp_path / "got").read_text())["envs"]["TARGET"] == "tpu"


@pytest.mark.parametrize(
    "words, said",
    [
        (["jobset", "--devices=tpu-v6e-slice:4x4:5"], "16 chips, which nodes of 5 do not divide"),
        (["slurm", "--devices=H100:8"], "'H100:8' is no number of devices"),
        (["jobset", "--nodes=0"], "at least one"),
        (["skypilot", "--nodes=2"], "name the accelerator, such as H100:8"),
        (["skypilot", "--devices=8"], "name the accelerator, such as H100:8"),
        (["skypilot", "--devices=H100:8", "--", "--config.llm.key=a b"], "has spaces"),
    ],
)
def test_what_no_scheduler_could_start_is_refused(words, said, capsys):
    assert launch([*words[:2], *(words[2:] or ["--", *RUN])]) == 2
    assert said in capsys.readouterr().err


# Run by the interpreter of the tools, on a file that --dry-run rendered.
LINT = {
    "jobset": """
import kubernetes_validate, sys, yaml
from kubeflow_trainer_api import models
task = yaml.safe_load(open(sys.argv[1]))
job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
job["spec"] = task["spec"]["replicatedJobs"][0]["template"]["spec"]
kubernetes_validate.validate(job, "1.37", strict=True)
spec = models.JobsetV1alpha2JobSetSpec
def known(given, model):
    for name, value in given.items():
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        assert name in fields, f"{name} is no field of {model.__name__}"
        if name not in ("template",):
            inner = [m for m in vars(models).values() if isinstance(m, type) and m.__name__ in str(fields[name].annotation)]
            inner = sorted((m for m in inner if hasattr(m, "model_fields")), key=lambda m: -len(m.__name__))[:1]
            for part in value if isinstance(value, list) else [value]:
                if inner and isinstance(part, dict):
                    known(part, inner[0])
known(task["spec"], spec)
assert task["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and task["kind"] == "JobSet"
""",
    "skypilot": """
import sky, sys
print(sky.Task.from_yaml(sys.argv[1]).num_nodes)
""",
}


@pytest.mark.parametrize("words", [words for words in RENDERED if words[0] in LINT], ids=" ".join)
@pytest.mark.parametrize("tool", [pytest.param(None, marks=tooled)])
def test_the_schemas_of_the_tools_accept_what_is_rendered(words, tool, capsys, tmp_path):
    _, text = rendered(capsys, words)
    file = tmp_path / "task.yaml"
    # SkyPilot looks for the folder that it would copy.
    file.write_text(text.replace("workdir: .", f"workdir: {tmp_path}"))
    run = [TOOLS / "python", "-c", LINT[words[0]], file]
    ended = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    misspelt = file.read_text().replace("completions", "completion").replace("num_nodes", "nodes")
    file.write_text(misspelt)
    ended = subprocess.run(run, capture_output=True, cwd=tmp_path)
    assert ended.returncode, "a misspelt key passes"


@pytest.mark.parametrize(
    "tool", [pytest.param(t, marks=tooled) for t in ("shellcheck", "hadolint")]
)
def test_the_linters_find_nothing_in_scripts_and_containers(tool):
    files = LAUNCH.glob("*.sh") if tool == "shellcheck" else Path().glob("Dockerfile*")
    more = [] if tool == "shellcheck" else ["--failure-threshold=error"]
    ended = subprocess.run([TOOLS / tool, *more, *sorted(files)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
