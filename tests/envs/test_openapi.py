"""HTTP services with an OpenAPI description as worlds."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import command
from envs import make
from envs.toolcalls import call_text
from envs.world import Task
from tests.envs.lamp_service import SPEC

pytest.importorskip("fastmcp")
pytest.importorskip("mcp")
from envs import openapi

OTHERS = {name: SPEC[name] for name in ("openapi", "info")}
ROOT = str(Path(__file__).parents[2])
SERVICE = f"{sys.executable} -m tests.envs.lamp_service {{port}}"


def lamps(*words):
    """Return a world of the service, which `words` are said of."""
    said = [sys.executable, "-m", "envs.openapi", *words]
    return make("mcp", command=said, env={"PYTHONPATH": ROOT})


@pytest.mark.parametrize("words", [[SERVICE], [f"{SERVICE} without-reset"]])
def test_a_service_is_a_world_whose_state_is_brought_back(words):
    world = lamps(*words)
    try:
        for _ in range(2):
            opening = world.reset(Task("a", "mcp", "Light the hall."), 0)
            tools = {tool["function"]["name"]: tool["function"] for tool in opening.tools}
            assert set(tools) == {"lamps", "switch"}
            assert tools["switch"]["parameters"]["required"] == ["room"]
            assert "Switch a lamp." in tools["switch"]["description"]
            lit = world.step(call_text("switch", {"room": "hall"}))
            assert lit.info["calls"][0]["ok"] and '"hall": true' in lit.messages[0]["content"]
            wrong = world.step(call_text("switch", {"room": "moon"}))
            assert wrong.info["errors"] == 1 and "no such lamp" in wrong.messages[0]["content"]
    finally:
        world.close()


def test_names_are_those_of_functions_where_they_stay_different():
    assert openapi.names_of(SPEC) == {
        "reset_reset_post": "reset",
        "lamps": "lamps",
        "switch_lamps__room__switch_post": "switch",
    }
    twice = {"/a": {"get": {"operationId": "do_a_get"}}, "/b": {"put": {"operationId": "do_b_put"}}}
    names = openapi.names_of({"paths": twice})
    assert names == {"do_a_get": "do_a_get", "do_b_put": "do_b_put"}


@pytest.mark.parametrize(
    "words, why",
    [
        (["http://127.0.0.1:9/openapi.json"], "is no command with {port} in it"),
        (["spec.json"], "is no command with {port} in it"),
        (["no-such-program {port}"], "cannot be started"),
        (["false {port}"], "does not listen on port"),
        ([SERVICE, "--spec=nowhere.json"], "describes no operation with an operationId"),
        ([SERVICE, "--spec={here}/empty.json"], "describes no operation with an operationId"),
        ([SERVICE, "--spec={here}/text.json"], "is no OpenAPI description in JSON"),
    ],
)
def test_what_cannot_be_a_world_is_one_message(words, why, tmp_path, capsys):
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "text.json").write_text("openapi: 3.1.0")
    assert openapi.main([word.replace("{here}", str(tmp_path)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("envs.openapi: ") and why in line


def test_the_description_may_be_a_file(tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"paths": {"/lamps": SPEC["paths"]["/lamps"]}} | OTHERS))
    world = lamps(SERVICE, f"--spec={spec}")
    try:
        opening = world.reset(Task("a", "mcp", "Look."), 0)
        assert [tool["function"]["name"] for tool in opening.tools] == ["lamps"]
        assert '"attic": true' in world.step(call_text("lamps", {})).messages[0]["content"]
    finally:
        world.close()


def test_a_service_ends_with_its_world_also_if_it_is_terminated():
    said = [sys.executable, "-m", "envs.openapi", SERVICE]
    bridge = subprocess.Popen(said, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        until = time.monotonic() + 30
        while not (started := children(bridge.pid)):
            assert time.monotonic() < until
            time.sleep(0.05)
        bridge.terminate()
        assert bridge.wait(20) == 143
        assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    finally:
        bridge.kill()


def children(pid):
    """Return the ids of a process's children."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return found.read_text().split() if found.exists() else []


def test_the_command_evolves_in_a_service(capsys):
    with pytest.raises(SystemExit):
        command.evolving(["--openapi", "spec.json"])
    assert "give the command that starts the service" in capsys.readouterr().err
    flags = command.evolving(["--openapi", SERVICE])
    assert "--config=configs/evolve.py:mcp" in flags
    said = [sys.executable, "-m", "envs.openapi", SERVICE]
    assert f"--config.env.args.command={said}" in flags
