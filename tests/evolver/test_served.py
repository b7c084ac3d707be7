"""What a run serves itself, a language model or its world: the whole program, and servers that die."""

import os
import re
import signal
import socket
import sys
from types import SimpleNamespace

import httpx
import pytest

from evolver.llm import served
from evolver.llm.store import ledger_lines
from evolver.recipes import Recipe
from tests.evolver.runs import eventually, go, rollouts_of
from tests.faults.stage import command_of, descendants
from tests.tiny import tiny_policy

JUDGED = (
    "--config.attributing.enabled=True", "--config.attributing.judge.name=llm",
    "--config.advantage.name=adca", "--config.llm.url=served", "--config.llm.failures=1000",
    "--config.llm.serve.flags=--no-warm-up", "--config.llm.serve.context=1024",
    "--config.llm.step_judge.max_tokens=24", "--config.llm.attempts=1", "--config.steps=1",
    "--config.eval.every=0", "--config.llm.concurrency=4",
)  # fmt: skip
MORTAL = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("RuntimeError: told to die", flush=True)
            os._exit(1)
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_run_starts_its_judge_asks_it_and_ends_it(tiny, policy, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert go(tiny, workdir, f"--config.llm.serve.path={policy}", *JUDGED) == 0
    assert f"serving {policy}; log: {workdir}/llm_server.log" in capsys.readouterr().out
    lines = ledger_lines(workdir / "llm.jsonl")
    assert lines and {line["model"] for line in lines} == {str(policy)}
    log = (workdir / "llm_server.log").read_text()
    port = int(re.search(r"running on http://127.0.0.1:(\d+)/v1", log)[1])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_checkpoint_that_cannot_be_served_is_one_message(tiny, tmp_path, capsys):
    judge = tiny_policy(tmp_path / "judge")
    (judge / "model.safetensors").write_bytes(b"no weights")
    assert go(tiny, tmp_path / "run", f"--config.llm.serve.path={judge}", *JUDGED) == 1
    said = capsys.readouterr()
    assert f"the server of {judge}: it ended while starting: " in said.out + said.err
    assert "Traceback" not in said.out + said.err


def config(restarts):
    serve = SimpleNamespace(
        path="judge", python="", devices="", context=64, flags="", start_timeout=60.0,
        restarts=restarts,
    )  # fmt: skip
    return SimpleNamespace(llm=SimpleNamespace(serve=serve))


@pytest.fixture
def mortal(monkeypatch):
    """What is served is a server that dies when it is told to."""
    command = [sys.executable, "-c", MORTAL]
    monkeypatch.setattr(served, "command_of", lambda config, port: [*command, str(port)])


def die(address):
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{address}/die", trust_env=False)


@pytest.mark.parametrize("steps,given_up", [(0, [False, True]), (1, [False, False, False])])
def test_a_server_that_dies_is_started_again_at_its_address_once_a_step(
    tmp_path, mortal, steps, given_up
):
    """One restart is allowed, and so many steps end before each death."""
    said = []
    deaths = []

    def faults():
        return [text for text in said if "it ended, " in text]

    options = {"check": lambda: None, "progress": lambda: steps * len(deaths)}
    with served.serving(config(1), tmp_path, say=said.append, **options) as url:
        address = url.removesuffix("/v1")
        for _ in given_up:
            eventually(lambda: is_up(address))
            deaths.append(address)
            die(address)
            eventually(lambda: len(faults()) == len(deaths))
        if given_up[-1]:
            assert not is_up(address)
        else:
            eventually(lambda: is_up(address))
    starts = [text for text in said if text.startswith("serving")]
    assert len(starts) == 1 + given_up.count(False)
    for text in faults():
        assert "RuntimeError: told to die" in text and str(tmp_path) in text
    assert ["not started again" in text for text in faults()] == given_up


def is_up(address):
    try:
        return httpx.get(f"{address}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def test_a_run_that_is_interrupted_leaves_no_server(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(served, "command_of", lambda config, port: [sys.executable, "-c", code])

    def check():
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with served.serving(config(0), tmp_path, say=lambda text: None, check=check):
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


class KillsTheService(Recipe):
    """Kills the run's service after the first step's rollouts, when no episode is open."""

    def learn(self, run, batches, step):
        if step == 1:
            (service,) = [
                pid for pid in descendants(os.getpid()) if command_of(pid).startswith(SERVICE)
            ]
            os.kill(service, signal.SIGKILL)
        return super().learn(run, batches, step)


SERVICE = f"{sys.executable} -m envs.service"
WORLD = (
    "--config.env.mode=http", "--config.env.url=served", "--config.env.workers=1",
    "--config.steps=2",
)  # fmt: skip


def test_a_run_serves_its_world_plays_it_as_its_own_and_ends_the_service(tiny, tmp_path, capsys):
    recipe = f"--config.recipe.name={__name__}:KillsTheService"
    assert go(tiny, tmp_path / "run", *WORLD, recipe) == 0
    said = capsys.readouterr().out
    assert said.count("serving the world tests.tiny:Parity; log: ") == 2
    assert said.count("the server of the world tests.tiny:Parity: it ended, and is started") == 1
    # The same rollouts as without a service, so that none was lost with it.
    assert go(tiny, tmp_path / "here", "--config.steps=2") == 0
    assert scores(tmp_path / "run") == scores(tmp_path / "here")
    addresses = re.findall("running on (http.*)", (tmp_path / "run/env_server.log").read_text())
    assert len(addresses) == 2 and not any(map(is_up, addresses))


def scores(workdir):
    """Return the outcome of each rollout, in order."""
    records = [*rollouts_of(workdir, 1), *rollouts_of(workdir, 2)]
    return [
        (record["task"], record["rollout"], record["turns"][0]["action"], record["score"])
        for record in records
    ]


@pytest.mark.parametrize("mode", ["train", "evolve"])
def test_a_world_that_cannot_be_served_is_one_message(tiny, tmp_path, capsys, mode):
    words = *WORLD, "--config.env.name=no.such:World", f"--mode={mode}"
    assert go(tiny, tmp_path / "run", *words) == 1
    said = capsys.readouterr()
    text = said.out + said.err
    assert "the server of the world no.such:World: it ended while starting: " in text
    assert "Traceback" not in text
