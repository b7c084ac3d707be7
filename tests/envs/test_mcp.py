"""The tools of an MCP server as an environment, tested with a small server."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from envs import make
from envs.mcp import McpWorld, _innermost
from envs.source import Source
from envs.toolcalls import call_text
from envs.world import Task

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None,
    reason="needs the MCP client: pip install -r requirements/mcp.txt",
)
TASK = Task(
    "t",
    "mcp",
    "Write down 'milk'.",
    verifier={"calls": [{"name": "add_note", "arguments": {"text": "milk"}}]},
)


def test_it_needs_either_a_command_or_a_url():
    for arguments in ({}, {"command": ["a"], "url": "http://127.0.0.1:1/mcp"}):
        with pytest.raises(ValueError, match="either a command or a url"):
            McpWorld(**arguments)
    world = make("mcp", command=["a"])
    assert world.tasks("train") == []
    with pytest.raises(ValueError, match="no split"):
        world.tasks("test_normal")
    with pytest.raises(ValueError, match="verifier"):
        world.reset(Task("t", "mcp", "Do.", verifier={"calls": "all"}))
    with pytest.raises(RuntimeError, match="reset"):
        world.step("x")
    world.close()
    world.close()


def test_an_error_is_extracted_from_its_groups():
    assert (
        _innermost(ExceptionGroup("a", [ExceptionGroup("b", [ValueError("what happened")])]))
        == "what happened"
    )
    assert _innermost(KeyError()) == "KeyError"


@pytest.fixture
def world():
    world = McpWorld(SERVER, timeout_s=60.0)
    yield world
    world.close()


@needs_mcp
def test_an_episode_over_the_tools_of_a_server(world):
    start = world.reset(TASK)
    assert start.messages[-1] == {"role": "user", "content": TASK.query}
    tools = {tool["function"]["name"]: tool["function"] for tool in start.tools}
    assert set(tools) == {"add_note", "list_notes", "fail", "wait", "die"}
    assert tools["add_note"]["description"] == "Keep a note."
    assert (
        tools["add_note"]["parameters"]["type"] == "object"
        and "text" in tools["add_note"]["parameters"]["properties"]
    )
    result = world.step(call_text("list_notes", {}) + call_text("add_note", {"text": "bread"}))
    assert [message["content"] for message in result.messages] == ["(no output)", "note 1"]
    assert world.evaluate().score == 0.0
    result = world.step(call_text("add_note", {"text": "milk"}))
    assert result.info["calls"][0]["ok"] and not result.terminated
    result = world.step("It is written down.")
    assert result.terminated and result.reward == 1.0 and world.evaluate().success
    assert world.step("More.").terminated
    world.reset(TASK)  # starts a new server, so the notes are gone
    assert world.step(call_text("list_notes", {})).messages[0]["content"] == "(no output)"
    assert json.loads(json.dumps(start.to_dict())) == start.to_dict()


@needs_mcp
def test_the_model_sees_errors(world):
    world.reset(Task("t", "mcp", "Try."))
    for text, expected in (
        (call_text("no_such_tool", {}), "error: there is no tool 'no_such_tool'"),
        (call_text("fail", {}), "out of paper"),
        (call_text("add_note", {"wrong": 1}), "error"),
        ("<tool_call>\nnot json\n</tool_call>", "error: tool call is not JSON"),
        (call_text("list_notes", {}) * 9, "error: 8 calls a turn at most"),
    ):
        result = world.step(text)
        assert (
            expected in result.messages[-1]["content"]
            and result.info["errors"] == 1
            and not result.terminated
        )
    assert world.step("I give up.").terminated and world.evaluate().score == 0.0
    world.reset(Task("t", "mcp", "Try."))
    assert "error" in world.step(call_text("die", {})).messages[0]["content"]
    assert "error" in world.step(call_text("list_notes", {})).messages[0]["content"]
    world.reset(Task("t", "mcp", "Try."))
    assert world.step(call_text("list_notes", {})).info["errors"] == 0


@needs_mcp
def test_a_server_that_does_not_start_is_an_error():
    world = McpWorld([sys.executable, "-c", "raise SystemExit(1)"], timeout_s=60.0)
    with pytest.raises(RuntimeError, match="cannot be used"):
        world.reset(TASK)
    world = McpWorld(["no-such-program-anywhere"], timeout_s=60.0)
    with pytest.raises(RuntimeError, match="cannot be used"):
        world.reset(TASK)


@needs_mcp
def test_it_runs_in_a_worker_and_profiles_itself():
    with Source("mcp", {"command": SERVER, "timeout_s": 60.0}, mode="worker", workers=1) as source:
        world = source.world()
        world.reset(TASK)
        assert (
            world.step(call_text("add_note", {"text": "milk"})).messages[0]["content"] == "note 1"
        )
        assert world.evaluate().success
        entity = world.profile()["entities"][0]
        assert entity["name"] == "notes" and {"text", "tags", "seconds"} <= set(
            entity["attributes"]
        )
        assert {"name": "add_note", "description": "Keep a note."} in entity["operations"]
