"""HTTP services with an OpenAPI description as worlds."""

import json
import sys
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
        (["nowhere.json"], "nowhere.json is no OpenAPI description in JSON"),
        (["http://127.0.0.1:9/openapi.json"], "is no OpenAPI description in JSON"),
        (["no-such-program {port}"], "cannot be started"),
        (["false {port}"], "does not listen on port"),
        (["{here}/empty.json"], "describes no operation with an operationId"),
        (["{here}/fixed.json"], "has no operation `reset`"),
        (["{here}/spec.json"], "name it with --url"),
        (["{here}/text.json"], "is no OpenAPI description in JSON"),
    ],
)
def test_what_cannot_be_a_world_is_one_message(words, why, tmp_path, capsys):
    fixed = {"paths": {path: SPEC["paths"][path] for path in ("/lamps",)}}
    for name, spec in (("empty", {}), ("fixed", fixed), ("spec", SPEC)):
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
    (tmp_path / "text.json").write_text("openapi: 3.1.0")
    assert openapi.main([word.replace("{here}", str(tmp_path)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("envs.openapi: ") and why in line


def test_the_command_evolves_in_a_service():
    flags = command.evolving(["--openapi", SERVICE])
    assert "--config=configs/evolve.py:mcp" in flags
    said = [sys.executable, "-m", "envs.openapi", SERVICE]
    assert f"--config.env.args.command={said}" in flags
