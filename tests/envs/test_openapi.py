"""HTTP services with an OpenAPI description as worlds."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import command
from envs import make
from tests.envs.lamp_service import SPEC

pytest.importorskip("fastmcp")
pytest.importorskip("mcp")
from envs import openapi
from tests.envs.playing import used
from tests.envs.test_mcp import tools_of
from tests.envs.test_process import all_end, wait_until

OTHERS = {name: SPEC[name] for name in ("openapi", "info")}
ROOT = str(Path(__file__).parents[2])
BRIDGE = [sys.executable, "-m", "envs.openapi"]
SERVICE = f"{sys.executable} -m tests.envs.lamp_service {{port}}"


def lamps(*words):
    """Return a world of the service, which `words` are said of."""
    return make("mcp", command=[*BRIDGE, *words], env={"PYTHONPATH": ROOT})


@pytest.mark.parametrize("words", [[SERVICE], [f"{SERVICE} without-reset"]])
def test_a_service_is_a_world_whose_state_is_brought_back(words):
    with contextlib.closing(lamps(*words)) as world:
        for _ in range(2):
            tools = tools_of(world)
            assert set(tools) == {"lamps", "switch"}
            assert tools["switch"]["parameters"]["required"] == ["room"]
            assert "Switch a lamp." in tools["switch"]["description"]
            assert '"hall": true' in used(world, "switch", room="hall")
            wrong = used(world, "switch", room="moon")
            assert wrong.startswith("error") and "no such lamp" in wrong
        bridge = world._session
        assert set(tools_of(world)) == {"lamps", "switch"}
        assert '"hall": false' in used(world, "lamps")
        assert world._session is bridge  # also where the service alone is started again


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
    with contextlib.closing(lamps(SERVICE, f"--spec={spec}")) as world:
        assert list(tools_of(world)) == ["lamps"]
        assert '"attic": true' in used(world, "lamps")


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_service_ends_with_its_world_however_that_ends(number, code):
    pipe = subprocess.PIPE
    bridge = subprocess.Popen([*BRIDGE, SERVICE], cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        assert wait_until(lambda: children(bridge.pid))
        started = children(bridge.pid)
        bridge.send_signal(number)
        assert bridge.wait(20) == code
        assert all_end(*started)
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
    assert f"--config.env.args.command={[*BRIDGE, SERVICE]}" in flags
