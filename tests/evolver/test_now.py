"""A run says what it is doing while it goes on, and the view shows it."""

import http.client
import json
import os
import threading

from evolver.phases import now
from experiments.view.runs import Run
from experiments.view.server import View
from tests.evolver.chat_server import ChatServer
from tests.evolver.runs import go
from tests.evolver.test_llm_run import LABELLED, asking, script


def told(tiny, workdir, monkeypatch, *words):
    """Play a run, and return what it said of itself meanwhile."""
    found = []
    monkeypatch.setattr(now, "EVERY", 0.05)
    monkeypatch.setattr(now, "write_atomically", lambda path, text: found.append((path, text)))
    assert go(tiny, workdir, *words) == 0
    assert {path.name for path, _ in found} == {"now.json"}
    return [json.loads(text) for _, text in found]


def test_a_run_tells_its_servers_workers_queues_memory_speed_and_cost(tiny, tmp_path, monkeypatch):
    prices = tmp_path / "prices.json"
    prices.write_text('{"tiny": [2.0, 8.0]}')
    paid = f"llm.prices={prices} llm.budget_tokens=-1"
    with ChatServer(script, context=32_768) as server:
        words = asking(server, *LABELLED, paid)
        figures = told(tiny, tmp_path / "run", monkeypatch, *words)
    last = figures[-1]
    assert all(each["servers"][0]["state"] == "up" for each in figures)
    assert max(each["workers"]["episodes"] for each in figures) > 0
    assert last["workers"]["episodes"] == 0, "all worlds were given back"
    assert [queue["name"] for queue in last["queues"]] == [server.url]
    assert max(each["tokens_per_s"] for each in figures) > 0
    assert last["money"] > 0 and last["tokens"] > 0 and figures[0]["money"] == 0
    assert all(0 < each["used"] <= each["of"] for each in last["memory"])
    assert any("rollouts" in each["phase"] for each in figures)


def test_nothing_is_said_after_the_end(tiny, tmp_path):
    assert go(tiny, tmp_path / "run", "steps=1") == 0
    assert not list((tmp_path / "run").glob("now*"))


def test_the_memory_of_gpus_is_that_of_all_processes(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 1024, 81920'\necho '1, 0, 81920'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = [(each["name"], each["used"] >> 20, each["of"] >> 20) for each in now.memory()]
    assert found == [("GPU 0", 1024, 81920), ("GPU 1", 0, 81920)]


def test_the_view_shows_what_each_process_says_and_how_old_it_is(tmp_path):
    run = Run(tmp_path)
    assert run.now() == []
    for name, host in {"now": "a", "now_1": "b"}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"host": host}))
    (tmp_path / "now_2.json").write_text("{")  # is being written
    os.utime(tmp_path / "now.json", (0, 0))
    first, second = run.now()
    assert (first["host"], second["host"]) == ("a", "b") and second["age"] < 60 < first["age"]
    view = View([run])
    threading.Thread(target=view.serve_forever, daemon=True).start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", view.server_address[1])
        connection.request("GET", "/api/run/0/now")
        assert [each["host"] for each in json.loads(connection.getresponse().read())] == ["a", "b"]
    finally:
        view.shutdown()
        view.server_close()
