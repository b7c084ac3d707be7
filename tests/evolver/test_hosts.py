"""Several processes as one run: the same result, one writer, and no process waits for a dead
one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import base
from evolver import loop
from evolver.config.checks.contradictions import machine_contradictions
from evolver.llm.client import Limits
from evolver.llm.roles import divided
from evolver.llm.store import Ledger
from evolver.processes import coordinator, hosts
from evolver.processes.identity import identity
from rl.engines import EngineFault
from tests.evolver.chat_server import ChatServer
from tests.evolver.runs import command, eventually, figures, flags
from tests.evolver.test_recipes import demonstrated
from tests.faults.stage import descendants

ROOT = Path(__file__).parents[2]
RUNS = ("alone", "together")
DEADLINE = 120.0  # generous, for busy machines; the death of a process is noticed much sooner


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def connecting(count, index, deadline, port):
    """Return the flags with which a process connects to the others at a port of this machine."""
    settings = f"hosts.count={count} hosts.index={index} hosts.deadline={deadline}"
    return flags(settings, f"hosts.coordinator=127.0.0.1:{port}")


def started(words, *, root=ROOT, devices=1):
    """Start a process with so many simulated devices."""
    simulated = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": simulated}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=root, env=environment, **streams)


def start(folder, config, count, workdir, *words, deadline=DEADLINE):
    """Start `count` processes of one run, or one process with `count` simulated devices when
    `count` is negative."""
    program = command(config, folder / workdir, *words)
    if count < 0:
        return [started(program, devices=-count)]
    port = free_port()
    return [started([*program, *connecting(count, n, deadline, port)]) for n in range(count)]


def finish(processes):
    ends = [(p.communicate(timeout=1800), p.returncode) for p in processes]
    return [(code, out, err) for (out, err), code in ends]


def assert_same(got, want):
    assert [line["step"] for line in got] == [line["step"] for line in want]
    for a, b in zip(got, want):
        assert a.keys() == b.keys()
        for name, value in b.items():
            where = f"step {a['step']}: {name}"
            np.testing.assert_allclose(a[name], value, rtol=1e-3, atol=1e-4, err_msg=where)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, mesh",
    [
        (2, "mesh.fsdp=2"),
        (4, "mesh.data=2 mesh.fsdp=2 recipe.name=separate_critic"),
    ],
)
def test_several_processes_give_the_result_of_one(tmp_path, tiny, count, mesh):
    words = [mesh, "steps=2", *([demonstrated(tmp_path)] if count == 2 else [])]
    alone = finish(start(tmp_path, tiny, -count, "alone", *words))
    together = finish(start(tmp_path, tiny, count, "together", *words))
    for code, _, err in (*alone, *together):
        assert code == 0, err[-3000:]
    assert_same(figures(tmp_path / "together"), figures(tmp_path / "alone"))
    said = [any("[Gloo]" not in line for line in out.splitlines()) for _, out, _ in together]
    assert said == [True] + [False] * (count - 1), "one writer"
    names = [{path.name for path in tmp_path.glob(f"{run}/policy/*")} for run in RUNS]
    assert names[0] == names[1] != set()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_others_and_the_run_can_resume(tmp_path, tiny, victim):
    words = "mesh.fsdp=2 steps=6"
    processes = start(tmp_path, tiny, 2, "run", words, deadline=20.0)
    eventually(lambda: len([*tmp_path.glob("run/checkpoints/[0-9]*")]) > 1, seconds=900)
    processes[victim].kill()
    ends = finish(processes)
    code, _, err = ends[1 - victim]
    assert code == 75, err[-3000:]
    assert f"process {1 - victim} ends too. The last checkpoint is intact" in err
    again = finish(start(tmp_path, tiny, 2, "run", words))
    assert [code for code, _, _ in again] == [0, 0], again[0][2][-3000:]
    assert "resuming after step" in again[0][1]
    assert [line["step"] for line in figures(tmp_path / "run")] == list(range(7))


@pytest.mark.slow
def test_a_machine_that_stands_still_for_a_while_ends_nothing(tmp_path, tiny):
    processes = start(
        tmp_path, tiny, 2, "run", "--config.mesh.fsdp=2", "--config.steps=4", deadline=6.0
    )
    eventually(lambda: [*tmp_path.glob("run/checkpoints/[0-9]*")], seconds=900)
    pids = []
    for process in processes:
        pids += [process.pid, *descendants(process.pid)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(20)
    for code, _, err in finish(processes):
        assert code == 0, err[-3000:]


def test_jax_aborts_no_process_before_the_watch_ends_it(monkeypatch):
    given = {}
    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda *_, **more: given.update(more))
    monkeypatch.setattr(hosts, "await_port", lambda *_: None)
    settings = SimpleNamespace(coordinator="127.0.0.1:1", count=2, index=1, deadline=3600.0)
    hosts._join(settings, None)
    assert given["heartbeat_timeout_seconds"] > 10 * settings.deadline


def test_a_process_that_cannot_connect_reports_it(tmp_path, tiny):
    words = connecting(2, 1, 3.0, free_port())
    ((code, _, err),) = finish(start(tmp_path, tiny, -1, "run", "mesh.fsdp=2", *words))
    assert code != 0 and "process 1 of 2 did not connect to the others at 127.0.0.1" in err


def test_a_process_that_meets_another_program_at_the_port_reports_it(tmp_path, tiny):
    with ChatServer("") as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        words = connecting(2, 1, 3.0, port)
        ((code, _, err),) = finish(start(tmp_path, tiny, -1, "run", "mesh.fsdp=2", *words))
    assert code == 1 and "(another program listens there)" in err and "Check failure" not in err


@pytest.mark.slow
def test_processes_with_other_code_or_settings_end_with_one_message(tmp_path, tiny):
    copy = tmp_path / "code"
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: [n for n in names if n[0] == "."])
    (copy / "rl/packing.py").write_text((copy / "rl/packing.py").read_text() + "\n# other\n")
    port = free_port()
    words = command(tiny, tmp_path / "run", "--config.mesh.fsdp=2")
    processes = [
        started([*words, *connecting(2, n, DEADLINE, port), f"--config.seed={n}"], root=root)
        for n, root in enumerate((ROOT, copy))
    ]
    for code, _, err in finish(processes):
        assert code == 1, err[-3000:]
        assert "differs from process 0" in err and "config.seed, rl/packing.py: give" in err
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_processes_that_are_the_same_agree(monkeypatch, tiny):
    monkeypatch.setattr(hosts, "gather", lambda mine: [mine, mine])
    hosts.agree(identity(base.get_config()))
    monkeypatch.setattr(hosts, "gather", lambda mine: [mine, ("b", {"jax": "2"})])
    with pytest.raises(hosts.HostsError, match=r"process 1 \(b\) differs .* in jax: give"):
        hosts.agree({"jax": "1"})


def test_settings_of_processes_are_checked():
    config = base.get_config()

    def problems(**changes):
        config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
        return "".join(machine_contradictions(config))

    assert not problems()
    assert "needs config.hosts.coordinator=host:port" in problems(hosts__count=4)
    found = problems(hosts__coordinator="node-0:1234", hosts__index=4)
    assert "from 0 to config.hosts.count - 1 = 3" in found
    vllm = {"engine__name": "vllm", "engine__vllm__python": "python", "rollout__async_depth": 1}
    assert not problems(hosts__index=0, rollout__tasks=4, **vllm), "each starts its own servers"
    found = problems(engine__vllm__urls=("http://a:1", "http://b:1"), rollout__tasks=3)
    assert "urls has 2 servers for config.hosts.count=4 processes" in found
    assert "config.rollout.tasks=3 gives some" in found


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_are_gathered_in_order(count, monkeypatch):
    items = list(range(11))
    parts = [items[i::count] for i in range(count)]
    monkeypatch.setattr(hosts, "gather", lambda part: parts)
    assert hosts.gather_shares(parts[0]) == items


def test_an_error_of_all_processes_is_known_by_what_it_stands_for():
    def lose():
        raise EngineFault("no server is left")

    with pytest.raises(RuntimeError, match="the run ends") as ended:
        try:
            hosts.together(lose)
        except EngineFault:
            raise RuntimeError("the run ends") from None
    assert hosts.in_all(ended.value) and not hosts.in_all(RuntimeError("alone"))


def test_metrics_of_processes_are_added_or_the_largest(monkeypatch):
    other = {"engine/lost": 2, "time/rollout": 5.0, "judge/agreed_rate": 0.5, "engine/gap": 0.1}
    monkeypatch.setattr(hosts, "gather", lambda metrics: [metrics, other])
    mine = {"engine/lost": 1, "time/rollout": 3.0, "engine/gap": 0.2}
    found = hosts.merge_metrics(mine, largest=["engine/gap"])
    rates = {"judge/agreed_rate": 0.5, "engine/gap": 0.2}
    assert found == {"engine/lost": 3, "time/rollout": 5.0} | rates


def test_processes_divide_rates_and_what_is_left_of_a_budget():
    ledger = Ledger()
    ledger.add("call", "judge", "m", prompt_tokens=600, completion_tokens=400, money=4.0)
    limits = Limits(requests_per_minute=7, budget_money=10.0, budget_tokens=1000)
    assert divided(limits, ledger, 1) == limits
    found = divided(limits, ledger, 2)
    assert (found.requests_per_minute, found.tokens_per_minute) == (4, 0)
    assert (found.budget_money, found.budget_tokens) == (7.0, 1000), "3 of the 6 that are left"
    assert divided(Limits(budget_tokens=1), Ledger(), 8).budget_tokens == 1, "0 is no limit"
    overspent = Limits(budget_money=3.0)
    assert divided(overspent, ledger, 1) == overspent


def test_what_all_processes_asked_is_counted_once(monkeypatch, tmp_path):
    path = tmp_path / "llm.jsonl"
    Ledger(path).add("call", "judge", "m", prompt_tokens=5, completion_tokens=0, money=1.0)
    ledgers = [Ledger(path), Ledger(path)]
    for ledger in ledgers:
        ledger.add("call", "judge", "m", prompt_tokens=10, completion_tokens=0, money=2.0)
    found = []
    for index, ledger in enumerate(ledgers):
        monkeypatch.setattr(hosts, "first", lambda index=index: index == 0)
        monkeypatch.setattr(hosts, "merge_metrics", lambda metrics: metrics)
        found.append(loop.asked(SimpleNamespace(chat=SimpleNamespace(ledger=ledger))))
    assert [f["llm/judge/calls"] for f in found] == [1, 1]
    assert sum(f["llm/money"] for f in found) == 5 and sum(f["llm/tokens"] for f in found) == 25


def test_the_service_stays_until_the_last_client_disconnects():
    port = free_port()
    with coordinator.serving(f"127.0.0.1:{port}", 2, 60.0):
        client = socket.create_connection(("127.0.0.1", port))
    time.sleep(1.0)  # process 0 is gone, this client is still connected
    socket.create_connection(("127.0.0.1", port)).close()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        eventually(lambda: socket.create_connection(("127.0.0.1", port)).close())


def test_a_service_whose_port_is_taken_reports_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = f"no service at {address}: another process listens there"
        with pytest.raises(OSError, match=told), coordinator.serving(address, 2, 1.0):
            pass
