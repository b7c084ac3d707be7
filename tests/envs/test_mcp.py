"""The tools of an MCP server as an environment, tested with a small server."""

import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs import make
from envs.mcp import AGREED, RESTARTS, McpWorld, _innermost, _printed, _Spare
from envs.mcp_results import shown, text_of
from envs.source import Source
from envs.toolcalls import call_text
from envs.toolworld import SYSTEM
from envs.world import Task, opening
from tests.envs.playing import told, used
from tests.envs.test_process import all_end, is_running, wait_until

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None,
    reason="needs the MCP client: pip install -r requirements/mcp.txt",
)
WANTED = {"name": "add_note", "arguments": {"text": "milk"}}
TASK = Task("t", "mcp", "Write down 'milk'.", verifier={"calls": [WANTED]})
TRY = Task("t", "mcp", "Try.")


def opened(*words, **options):
    """Return a world of the server of the tests, which offers what the words say."""
    return McpWorld([*SERVER, *words], timeout_s=60.0, **options)


def tools_of(world):
    return {tool["function"]["name"]: tool["function"] for tool in world.reset(TASK).tools}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a command or a url"),
        ({"command": ["a"], "url": "http://127.0.0.1:1/mcp"}, "either a command or a url"),
        ({"command": ["a"], "files": "/no/such"}, "has to be a directory"),
        ({"command": ["a"], "stateless": True}, "needs `files`"),
        ({"url": "http://127.0.0.1:1", "files": "."}, "not an address"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        McpWorld(**arguments)


def test_a_world_that_has_not_begun():
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
    inner = ExceptionGroup("b", [ValueError("what happened")])
    assert _innermost(ExceptionGroup("a", [inner])) == "what happened"
    assert _innermost(KeyError()) == "KeyError"


@pytest.fixture
def world():
    world = opened()
    yield world
    world.close()


@needs_mcp
def test_an_episode_over_the_tools_of_a_server(world):
    start = world.reset(TASK)
    assert start.messages == opening(f"{SYSTEM}\n\nKeep notes short.", TASK.query)
    assert json.loads(json.dumps(start.to_dict())) == start.to_dict()
    tools = tools_of(world)
    assert set(tools) == {"add_note", "list_notes", "pid", "attach", "fail", "wait", "die"}
    assert tools["add_note"]["description"] == "Keep a note."
    schema = tools["add_note"]["parameters"]
    assert schema["type"] == "object" and "text" in schema["properties"]
    calls = call_text("list_notes", {}) + call_text("add_note", {"text": "bread"})
    assert told(world, calls) == "(no output)\nnote 1"
    assert world.evaluate().score == 0.0
    result = world.step(call_text("add_note", {"text": "milk"}))
    assert result.info["calls"][0]["ok"] and not result.terminated
    result = world.step("It is written down.")
    assert result.terminated and result.reward == 1.0 and world.evaluate().success
    assert world.step("More.").terminated
    world.reset(TASK)  # starts a new server, so the notes are gone
    assert used(world, "list_notes") == "(no output)"


@needs_mcp
def test_the_model_sees_errors(world):
    world.reset(TRY)
    for text, expected in (
        (call_text("no_such_tool", {}), "error: there is no tool 'no_such_tool'"),
        (call_text("fail", {}), "out of paper"),
        (call_text("add_note", {"wrong": 1}), "error"),
        ("<tool_call>\nnot json\n</tool_call>", "error: tool call is not JSON"),
        (call_text("list_notes", {}) * 9, "error: 8 calls a turn at most"),
    ):
        result = world.step(text)
        assert expected in result.messages[-1]["content"]
        assert result.info["errors"] == 1 and not result.terminated
    assert world.step("I give up.").terminated and world.evaluate().score == 0.0
    world.reset(TRY)
    assert "error" in used(world, "die")
    assert "error" in used(world, "list_notes")
    world.reset(TRY)
    assert world.step(call_text("list_notes", {})).info["errors"] == 0


@needs_mcp
def test_a_server_that_does_not_start_is_an_error():
    code = "import sys; sys.exit('no key is set')"
    world = McpWorld([sys.executable, "-c", code], timeout_s=60.0)
    with pytest.raises(RuntimeError, match="cannot be used") as failure:
        world.reset(TASK)
    message = str(failure.value)
    assert "Run it by hand" in message and message.endswith("ends with:\nno key is set")
    log = re.search(r"standard error, in (\S+),", message).group(1)
    assert Path(log).read_text() == "no key is set\n"
    Path(log).unlink()
    world = McpWorld("no-such-program-anywhere --port 1", timeout_s=60.0)
    with pytest.raises(RuntimeError, match="no-such-program-anywhere --port 1"):
        world.reset(TASK)
    with pytest.raises(RuntimeError, match=r"Is a server running at http://127.0.0.1:1/mcp"):
        McpWorld("http://127.0.0.1:1/mcp", timeout_s=60.0).reset(TASK)


@needs_mcp
@pytest.mark.parametrize(
    "offers, kept",
    [
        ([], False),
        (["reset"], True),
        pytest.param(["broken reset"], False, marks=pytest.mark.slow),
        pytest.param(["snapshot"], True, marks=pytest.mark.slow),
    ],
)
def test_a_server_is_reset_by_what_it_offers(offers, kept, tmp_path):
    log = tmp_path / "server.log"
    world = opened(*offers, log=str(log))
    assert not {"reset", "snapshot", "restore"} & set(tools_of(world))
    first = used(world, "pid")
    world.reset(TASK)
    assert used(world, "pid") == first, "nothing has changed"
    assert used(world, "add_note", text="milk") == "note 1"
    world.reset(TASK)
    assert used(world, "list_notes") == "(no output)"
    assert (used(world, "pid") == first) is kept
    used(world, "add_note", text="milk")
    last = used(world, "pid")
    world.close()
    again = opened(*offers, log=str(log))  # the next world of this process
    again.reset(TASK)
    assert (used(again, "pid") == last) is kept and used(again, "list_notes") == "(no output)"
    if kept:
        used(again, "die")
        again.reset(TASK)
        assert used(again, "list_notes") == "(no output)" and used(again, "pid") != last
    again.close()
    assert "the notes are served" in log.read_text()


@needs_mcp
def test_what_servers_print_among_their_messages_is_told_once_and_counted(caplog, monkeypatch):
    monkeypatch.setattr(_printed, "lines", 0)
    world = opened("prints")
    for _ in range(2):
        world.reset(TASK)
        assert used(world, "add_note", text="milk") == "note 1"
    world.close()
    (message,) = caplog.records
    assert "prints 'warming up' to its standard output" in message.getMessage()
    assert message.exc_info is None and _printed.lines >= 6


@needs_mcp
def test_a_server_waits_for_the_next_episode_and_ends_with_the_world():
    world, numbers = opened(), []
    for _ in range(2 * RESTARTS):
        world.reset(TASK)
        assert used(world, "list_notes") == "(no output)"
        used(world, "add_note", text="milk")
        numbers.append(used(world, "pid"))
    assert len(set(numbers)) == len(numbers)
    spare = _Spare.of(world._start)
    waiting = spare.next.result().call("pid", {})[0]
    assert waiting not in numbers
    world.reset(TASK)
    assert used(world, "pid") == waiting
    waiting = spare.next.result().call("pid", {})[0]
    world.close()
    assert all_end(*numbers, waiting)


@needs_mcp
def test_worlds_in_many_threads_never_share_a_server():
    def play(number):
        world, seen = opened(), []
        for _ in range(4):
            world.reset(TASK)
            used(world, "add_note", text=str(number))
            assert used(world, "list_notes") == str(number)
            seen.append(used(world, "pid"))
        world.close()
        return seen

    with ThreadPoolExecutor(8) as threads:
        seen = list(itertools.chain(*threads.map(play, range(8))))
    assert len(set(seen)) == len(seen) == 32


@needs_mcp
def test_a_server_that_bears_no_other_one_is_started_when_the_last_one_has_ended(tmp_path):
    """It holds a lock: another one beside it does not start."""
    program = tmp_path / "server.py"
    top = f"import fcntl; lock = open({str(tmp_path / 'lock')!r}, 'w')\n"
    top += "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    program.write_text(top + Path(SERVER[1]).read_text())
    world = McpWorld([sys.executable, str(program)], timeout_s=60.0)
    for _ in range(2 * RESTARTS):
        world.reset(TASK)
        assert used(world, "add_note", text="milk") == "note 1"
        if spare := _Spare.of(world._start).next:
            assert "Connection closed" in str(spare.exception())
    assert _Spare.of(world._start).alone
    world.close()


@needs_mcp
def test_a_reset_tool_can_be_named():
    with pytest.raises(ValueError, match="no tool 'add_note' that resets it without arguments"):
        opened("reset", reset_tool="add_note").reset(TASK)
    for name, is_shown in (("reset", False), (None, True)):
        world = opened("reset", reset_tool=name)
        assert ("reset" in tools_of(world)) is is_shown
        world.close()


@needs_mcp
def test_closing_a_world_whose_server_still_starts_ends_it_at_once(tmp_path):
    """A server that never answers is ended when the user ends the run, not at its deadline."""
    here = tmp_path / "pid"
    code = f"import os, time; open({str(here)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = (
        "import sys; from envs.mcp import AGREED, McpWorld; from envs.world import Task\n"
        "import signal; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"McpWorld([sys.executable, '-c', {code!r}], timeout_s=300.0).reset(Task('t', 'mcp', 'q'))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    assert wait_until(lambda: here.exists() and here.read_text())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert not is_running(here.read_text())


def test_no_block_of_a_result_is_lost():
    def block(**facts):
        return text_of(SimpleNamespace(**facts))

    def resource(**facts):
        return block(type="resource", resource=SimpleNamespace(**facts))

    assert block(type="text", text=" a\n") == " a\n"
    text = resource(uri="file:///a.md", mime_type="text/markdown", text="# A\n\nb")
    assert text == "[resource uri: file:///a.md, type: text/markdown]\n# A\n\nb"
    assert resource(uri="a:b", mime_type=None, text="") == "[resource uri: a:b]\n"
    blob = resource(uri="file:///a.png", mime_type="image/png", blob="AAEC")
    assert blob == "[resource uri: file:///a.png, type: image/png, bytes: 3]"
    told = resource(uri="file:///a.txt", mime_type="text/plain", blob="YcO8")
    assert told == "[resource uri: file:///a.txt, type: text/plain]\na\u00fc"
    assert resource(uri="a:b", mime_type="text/plain", blob="/w==").endswith("bytes: 1]")
    link = {"name": "log", "title": None, "uri": "file:///log", "mime_type": "text/plain"}
    assert block(type="resource_link", description="of today", size=0, **link) == (
        "[resource_link name: log, uri: file:///log, type: text/plain, description: of today,"
        " bytes: 0]"
    )
    assert block(type="image", data="AA==", mime_type="image/png") == (
        "[image type: image/png, bytes: 1]"
    )
    assert block(type="hologram") == "[hologram]"


@pytest.mark.parametrize(
    ("texts", "structured", "text"),
    [
        (["3 notes found"], {"notes": ["a", "b"]}, '3 notes found\n{"notes": ["a", "b"]}'),
        (["done"], {"result": 7}, 'done\n{"result": 7}'),
        ([], {"result": []}, '{"result": []}'),
        (['{"b": 1, "a": 2}'], {"a": 2, "b": 1}, '{"b": 1, "a": 2}'),
        (["12"], {"result": "12"}, "12"),
        (["12"], {"result": 12}, "12"),
        (["a", "b"], {"result": ["a", "b"]}, "a\nb"),
        (["1", "2"], {"result": [1, 2]}, "1\n2"),
        (["a"], None, "a"),
        (["[FILE] a.txt"], {"content": "[FILE] a.txt"}, "[FILE] a.txt"),
        (['[{"name": "Ann"}]'], {"entities": [{"name": "Ann"}]}, '[{"name": "Ann"}]'),
        (["3"], {"notes": 3}, '3\n{"notes": 3}'),
        (['{\n  "a": 1\n}', '{"a": 2}'], {"result": [{"a": 1}, {"a": 2}]}, '[{"a": 1}, {"a": 2}]'),
        (['{"a": 1}'], {"result": [{"a": 1}]}, '[{"a": 1}]'),
        (['{\n  "a": 1\n}'], {"a": 1}, '{"a": 1}'),
        (['{"a": 1}', '{"a": 2}'], None, '[{"a": 1}, {"a": 2}]'),
    ],
)
def test_structured_content_is_shown_unless_the_texts_say_it(texts, structured, text):
    content = [SimpleNamespace(type="text", text=text) for text in texts]
    assert shown(SimpleNamespace(content=content, structured_content=structured)) == text


@needs_mcp
def test_resources_of_a_result_are_shown(world):
    world.reset(TASK)
    attached = used(world, "attach")
    for part in ("notes://1", "buy milk", "all notes", "notes://all", "every note"):
        assert part in attached


@needs_mcp
def test_it_runs_in_a_worker_and_profiles_itself():
    with Source("mcp", {"command": SERVER, "timeout_s": 60.0}, mode="worker", workers=1) as source:
        world = source.world()
        world.reset(TASK)
        assert used(world, "add_note", text="milk") == "note 1"
        assert world.evaluate().success
        entity = world.profile()["entities"][0]
        assert entity["name"] == "notes"
        assert {"text", "tags", "seconds"} <= set(entity["attributes"])
        assert {"name": "add_note", "description": "Keep a note."} in entity["operations"]


@needs_mcp
@pytest.mark.parametrize("tool, goes_on", [("keep_file", True), ("add_note", False)])
def test_a_server_that_keeps_nothing_but_its_files_goes_on(tmp_path, tool, goes_on):
    world, pids = opened("files", "{files}", files=str(tmp_path)), []
    for n in range(AGREED + 3 if goes_on else 4):
        world.reset(TASK)
        if n == 1:
            pids.append(used(world, "pid"))  # which no two processes answer alike
        if tool == "keep_file":
            assert used(world, tool, name=f"/files/{n}.txt") == f"written to /files/{n}.txt"
        else:
            assert used(world, tool, text="milk") == "note 1"
        kept = f"{n}.txt" if tool == "keep_file" else "(no output)"
        assert used(world, "list_files") == kept
        pids.append(used(world, "pid"))
    assert (pids[-1] == pids[-2]) == goes_on and pids[1] != pids[0]
    world.close()


@needs_mcp
@pytest.mark.parametrize("stateless", [True, False])
def test_each_episode_begins_with_a_copy_of_the_files(tmp_path, stateless):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/ann.txt").write_text("Dear Ann")
    kept = {"files": str(tmp_path), "stateless": stateless, "env": {"AT": "{files}/log"}}
    world, pids = opened("files", "{files}", **kept), []
    for _ in range(2):
        world.reset(TASK)
        told = [used(world, tool) for tool in ("place", "variable", "list_files")]
        assert told == ["/files", "/files/log", "letters/ann.txt"]
        assert used(world, "keep_file", name="/files/b.txt") == "written to /files/b.txt"
        refused = used(world, "keep_file", name="/files/no/b.txt")
        assert "'/files/no/b.txt'" in refused and "mcp-files" not in refused
        assert used(world, "list_files") == "b.txt\nletters/ann.txt"
        pids.append(used(world, "pid"))
    assert (pids[0] == pids[1]) == stateless
    world.close()
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]
