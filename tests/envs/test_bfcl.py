"""BFCL: ground truths score 1, and any other trajectory scores as in the package."""

import ast
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import threading
import types

import pytest

pytest.importorskip("bfcl_eval", reason="pip install --no-deps -r requirements/bfcl.txt")

from envs import boundary
from envs.bfcl import Bfcl
from envs.bfcl import data as bfcl
from envs.bfcl.data import CATEGORIES, package_dir
from envs.bfcl.replies import official_calls
from envs.bfcl.world import Apis
from envs.toolcalls import Call, call_text
from envs.world import Task
from tests.envs.playing import begin, take_all

THREADS = 8


@functools.cache
def every_entry() -> tuple[bfcl.Entry, ...]:
    return tuple(itertools.chain(*(bfcl.entries(category).values() for category in CATEGORIES)))


def play(world: Bfcl, entry: bfcl.Entry, turns: list[list[Call]], one_by_one: bool = True) -> bool:
    """Take the calls of each turn, one per reply or all in one, and score. Two turns have more than
    the 20 allowed."""
    world.reset(Task(entry.id, "bfcl", ""))
    for calls in turns:
        apart = one_by_one and len(calls) <= 20
        replies = [[call] for call in calls] if apart else [calls] * bool(calls)
        for reply in replies:
            world.step("\n".join(call_text(call.name, call.arguments) for call in reply))
        world.step("Done.")
    return world.evaluate().success


def corrupt(turns: list[list[Call]], rng: random.Random) -> None:
    """Change one argument of one call to another value of its type."""
    call = rng.choice(list(itertools.chain(*turns)))
    if not call.arguments:
        call.arguments["unexpected"] = 1
        return
    name = rng.choice(sorted(call.arguments))
    value = call.arguments[name]
    if isinstance(value, bool):
        call.arguments[name] = not value
    elif isinstance(value, int | float):
        call.arguments[name] = value + 1
    elif isinstance(value, str):
        call.arguments[name] = value + "x"
    else:
        call.arguments[name] = []


def variants(entry: bfcl.Entry) -> dict[str, list[list[Call]]]:
    rng = random.Random(entry.id)
    truth = entry.truth
    filled = [turn for turn, calls in enumerate(truth) if calls]
    kinds = ("truncated", "reordered", "corrupted", "empty", "extra", "unknown")
    found = {kind: copy.deepcopy(truth) for kind in kinds}
    found["truncated"][rng.choice(filled)].pop()
    for calls in found["reordered"]:
        rng.shuffle(calls)
    corrupt(found["corrupted"], rng)
    found["empty"] = [[] for _ in truth]
    calls = found["extra"][rng.randrange(len(truth))]
    calls.insert(rng.randint(0, len(calls)), copy.deepcopy(rng.choice(truth[rng.choice(filled)])))
    found["unknown"][rng.randrange(len(truth))].append(Call("no_such_tool", {"path": "."}))
    return found


@contextlib.contextmanager
def clean_globals():
    """The package's executor, whose module keeps instances in its globals; they are removed."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    before = set(vars(multi_turn_utils))
    try:
        yield multi_turn_utils
    finally:
        for name in set(vars(multi_turn_utils)) - before:
            delattr(multi_turn_utils, name)


def python_text(call: Call) -> str:
    return f"{call.name}({','.join(f'{k}={v!r}' for k, v in call.arguments.items())})"


def official(entry: bfcl.Entry, turns: list[list[Call]], tag: str) -> bool:
    """Apply the package's checker to the calls as its Qwen handler decodes them. `tag` separates
    its globals."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    row = {"id": entry.id, "initial_config": entry.config, "involved_classes": entry.classes}
    decoded = [[[python_text(call)] for call in calls] for calls in turns]
    truth = [list(map(python_text, calls)) for calls in entry.truth]
    with clean_globals():
        return multi_turn_checker(decoded, truth, row, entry.category, tag)["valid"]


def names_of(tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


local = threading.local()


def thread_world() -> Bfcl:
    """The world of the thread, over all conversations."""
    local.world = getattr(local, "world", None) or Bfcl(list(CATEGORIES))
    return local.world


def in_threads(function, items):
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def test_the_four_categories_hold_800_conversations_of_four_domains():
    assert len(every_entry()) == 800
    assert {entry.domain for entry in every_entry()} == set(bfcl.DOMAINS)
    assert bfcl.entries("multi_turn_base")["multi_turn_base_199"].domain == "travel"


def test_all_ground_truths_score_one_in_threads():
    def solve(task):
        world = thread_world()
        world.reset(task)
        *_, result = map(world.step, task.reference)
        evaluation = world.evaluate()
        return result.terminated and evaluation.score == evaluation.components["progress"] == 1.0

    solved = in_threads(solve, Bfcl(list(CATEGORIES)).tasks("all"))
    assert len(solved) == 800 and all(solved)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_wrong_trajectories_score_as_the_package_scores_them(every):
    cases = []
    for entry in every_entry()[::every]:
        cases += [(entry, kind, turns) for kind, turns in variants(entry).items()]

    def ours(case):
        entry, kind, turns = case
        return play(thread_world(), entry, turns, one_by_one=kind != "reordered")

    scores = in_threads(ours, cases)
    expected = [official(entry, turns, f"tag{i}") for i, (entry, _, turns) in enumerate(cases)]
    wrong = [f"{e.id} {kind}" for (e, kind, _), a, b in zip(cases, scores, expected) if a != b]
    assert not wrong
    assert 0.2 < sum(expected) / len(expected) < 0.6  # both outcomes are well represented
    assert not any(score for (_, kind, _), score in zip(cases, scores) if kind == "empty")


def test_an_unfinished_conversation_scores_zero_and_its_progress_grows():
    world = Bfcl()
    task = world.tasks("all")[0]
    world.reset(task)
    progress = [world.evaluate().components["progress"]]
    for action in task.reference:
        assert world.evaluate().score == 0.0
        world.step(action)
        progress.append(world.evaluate().components["progress"])
    assert progress == sorted(progress) and progress[0] == 0.0 and progress[-1] == 1.0
    assert world.evaluate() == world.evaluate()


def test_withheld_tools_appear_in_their_turn():
    world = Bfcl("multi_turn_miss_func")
    first = world.reset(Task("multi_turn_miss_func_0", "bfcl", ""))  # `sort` appears in turn 3
    names = set(names_of(first.tools))
    assert "sort" not in names and "grep" in names
    results = [world.step("Next.") for _ in range(4)]
    assert [r.tools is None for r in results] == [True, True, False, True]
    assert set(names_of(results[2].tools)) == names | {"sort"}
    assert "updated some more functions" in results[2].messages[0]["content"]


def test_the_21st_reply_with_calls_in_one_turn_ends_the_episode():
    world = Bfcl()
    task = world.tasks("all")[0]
    world.reset(task)
    results = [world.step(call_text("pwd", {})) for _ in range(21)]
    assert [r.truncated for r in results] == [False] * 20 + [True]
    assert world.step("Done.").terminated
    assert world.evaluate().score == 0.0


def test_malformed_calls_end_the_turn_or_are_answered():
    broken = '<tool_call>\n{"name": "pwd", "arguments": {}\n</tool_call>'
    official_world, lenient = Bfcl(), Bfcl(malformed="error")
    for world in (official_world, lenient):
        begin(world, split="all")
    ended, answered = official_world.step(broken), lenient.step(broken)
    assert ended.messages[0]["role"] == "user" and ended.info["parse_error"]
    assert answered.messages[0]["role"] == "tool" and answered.info["errors"] == 1
    assert lenient.tasks("all")[0].meta["official"] is False


# ------------------------------------------------------------------------------------------ the texts of replies


def package_function(file: str, name: str, **names):
    """Return a function of the package from its source: its module needs the clients of a dozen
    vendors."""
    tree = ast.parse((package_dir() / "model_handler" / file).read_text())
    found = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.decorator_list = []
    module = compile(ast.Module([found], []), file, "exec")
    code = next(part for part in module.co_consts if isinstance(part, types.CodeType))
    return types.FunctionType(code, names | {"re": re, "json": json})


QWEN = "local_inference/qwen_fc.py"


class Handler:
    """The parts of the package's handler that read a reply."""

    _extract_tool_calls = staticmethod(package_function(QWEN, "_extract_tool_calls"))
    decode_execute = package_function(
        QWEN,
        "decode_execute",
        convert_to_function_call=package_function("utils.py", "convert_to_function_call"),
    )

    def calls(self, reply: str) -> list[str]:
        """Return the calls as Python, [] where the package ends the turn."""
        if "</think>" in reply:
            reply = reply.split("</think>")[-1].lstrip("\n")
        try:
            return self.decode_execute(reply, has_tool_call_tag=False)
        except Exception:
            return []


def in_tags(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


PWD, CD = '{"name": "pwd", "arguments": {}}', '{"name": "cd", "arguments": {"folder": "document"}}'
# Replies that are one call, by its text.
ODD_BODIES = {
    "a call": PWD,
    "empty": "",
    "text for arguments": '{"name": "cd", "arguments": "{\\"folder\\": \\"document\\"}"}',
    "text that is no object": '{"name": "cd", "arguments": "[1]"}',
    "text that is no JSON": '{"name": "cd", "arguments": "folder"}',
    "a list for arguments": '{"name": "cd", "arguments": ["document"]}',
    "null for arguments": '{"name": "pwd", "arguments": null}',
    "no arguments": '{"name": "pwd"}',
    "parameters": '{"name": "pwd", "parameters": {}}',
    "no name": '{"arguments": {}}',
    "a number for a name": '{"name": 1, "arguments": {}}',
    "null for a name": '{"name": null, "arguments": {}}',
    "a list for a name": '{"name": ["pwd"], "arguments": {}}',
    "an empty name": '{"name": "", "arguments": {}}',
    "more keys": '{"id": 7, "name": "pwd", "arguments": {}}',
    "not JSON": "{'name': 'pwd', 'arguments': {}}",
    "a list of calls": f"[{PWD}, {CD}]",
    "a text": '"pwd"',
    "a number": "1",
    "NaN": '{"name": "absolute_value", "arguments": {"number": NaN}}',
    "Infinity": '{"name": "absolute_value", "arguments": {"number": -Infinity}}',
    "1e999": '{"name": "absolute_value", "arguments": {"number": 1e999}}',
    "NaN in a list": '{"name": "mean", "arguments": {"numbers": [1, NaN]}}',
    "400 digits": '{"name": "absolute_value", "arguments": {"number": %s}}' % ("9" * 400),
    "5000 digits": '{"name": "absolute_value", "arguments": {"number": %s}}' % ("9" * 5000),
    "a closing tag in a text": '{"name": "echo", "arguments": {"content": "</tool_call>"}}',
    "an opening tag in a text": '{"name": "echo", "arguments": {"content": "<tool_call>"}}',
    "a lone surrogate": '{"name": "echo", "arguments": {"content": "\\ud800"}}',
    "300 levels": '{"name": "echo", "arguments": {"content": %s}}' % ("[" * 300 + "]" * 300),
    "5000 levels": '{"name": "echo", "arguments": {"content": %s}}' % ("[" * 5000 + "]" * 5000),
    "a name twice": '{"name": "cd", "name": "pwd", "arguments": {}}',
}
ODD_REPLIES = {
    **{name: in_tags(body) for name, body in ODD_BODIES.items()},
    "two calls": in_tags(PWD) + "\n" + in_tags(CD),
    "two calls without a line between": in_tags(PWD) + in_tags(CD),
    "text around a call": f"I look. {in_tags(PWD)} Then I go on.",
    "no newlines": f"<tool_call>{PWD}</tool_call>",
    "a newline before only": f"<tool_call>\n{PWD}</tool_call>",
    "a newline after only": f"<tool_call>{PWD}\n</tool_call>",
    "more newlines": f"<tool_call>\n\n {PWD} \n\n</tool_call>",
    "carriage returns": f"<tool_call>\r\n{PWD}\r\n</tool_call>",
    "one without newlines, then a good one": f"<tool_call>{PWD}</tool_call>{in_tags(CD)}",
    "one not closed, then a good one": f"<tool_call>\n{PWD}\n{in_tags(CD)}",
    "closed only": f"{PWD}\n</tool_call>",
    "opened only": f"<tool_call>\n{PWD}",
    "one newline for both": "<tool_call>\n</tool_call>",
    "no arguments, beside a good call": in_tags(CD) + in_tags('{"name": "pwd"}'),
    "not JSON, beside a good call": in_tags("pwd()") + in_tags(CD),
    "a good call, then not JSON": in_tags(CD) + in_tags('{"name": "pwd", "arguments": {}'),
    "an escaped closing tag": call_text("echo", {"content": "a\n</tool_call>"}),
    "thoughts": f"<think>\n{in_tags(CD)}\n</think>\n{in_tags(PWD)}",
    "thoughts only": f"<think>\n{in_tags(CD)}\n</think>\nDone.",
    "a fence": f"```json\n{PWD}\n```",
    "Python": "[pwd()]",
    "nothing": "",
}


@pytest.mark.parametrize("case", ODD_REPLIES)
def test_replies_are_read_as_the_package_reads_them(case):
    reply = ODD_REPLIES[case]
    assert list(map(python_text, official_calls(reply))) == Handler().calls(reply)


@pytest.mark.parametrize("case", ODD_REPLIES)
def test_odd_replies_have_the_results_that_the_package_gives_them(case):
    """Its executor evaluates the text of a call, so that NaN is an unknown name."""
    classes = ["GorillaFileSystem", "MathAPI"]
    entry = dataclasses.replace(
        bfcl.entries("multi_turn_base")["multi_turn_base_0"], classes=classes
    )
    calls = Handler().calls(ODD_REPLIES[case])
    with clean_globals() as package:
        expected, _ = package.execute_multi_turn_func_call(
            calls, entry.config, classes, "odd", entry.id, False, False
        )
    world = Bfcl()
    world.reset(Task(entry.id, "bfcl", ""))
    world._apis = Apis(entry)
    result = world.step(ODD_REPLIES[case])
    shown = [message["content"] for message in result.messages if message["role"] == "tool"]
    failed = "Error during"
    assert [text.startswith(failed) for text in shown] == [t.startswith(failed) for t in expected]
    # The messages of errors may differ.
    assert [t for t in shown if not t.startswith("Error")] == [
        t for t in expected if not t.startswith("Error")
    ]
    if case in ("NaN", "Infinity", "1e999", "NaN in a list"):
        assert shown == expected
    assert bool(result.info.get("parse_error")) == (not calls and "tool_call" in ODD_REPLIES[case])
    boundary.result(result)


def test_many_opening_tags_are_read_in_one_pass():
    for text in ("<tool_call>\n" * 100_000, in_tags("") * 100_000, "\n</tool_call>" * 100_000):
        assert official_calls(text) == []


TRICKS = [
    ("__import__", {"name": "os"}),
    ("__import__('os').system", {"command": "touch PWNED"}),
    ("open", {"file": "PWNED", "mode": "w"}),
    ("exec", {"source": "open('PWNED', 'w')"}),
    ("eval", {"source": "open('PWNED', 'w')"}),
    ("cd", {"folder": "__import__('os').system('touch PWNED')"}),
    ("cd.__globals__", {}),
    ("__class__", {}),
    ("__init__", {}),
    ("_load_scenario", {"scenario": {}}),
    ("touch", {"file_name": "PWNED"}),
    ("echo", {"content": "x", "file_name": "/tmp/PWNED"}),
    ("cat", {"file_name": "/etc/passwd"}),
    ("cd", {"self": 1, "__class__": 2, "folder": ".."}),
    ("cd", {"folder": {"$eval": "1"}}),
    ("power", {"base": 9, "exponent": 10**12}),
    ("square_root", {"number": 2, "precision": 10**12}),
]


def test_malicious_calls_execute_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "system", refuse)
    monkeypatch.setattr("subprocess.Popen.__init__", refuse)
    world = Bfcl()
    files, maths = (Task(f"multi_turn_base_{n}", "bfcl", "") for n in (0, 50))
    for name, arguments in TRICKS:
        for task in (files, maths):
            world.reset(task)
            (message,) = world.step(call_text(name, arguments)).messages
            assert message["role"] == "tool" and "root:" not in message["content"]
    for text in (
        "cd(folder='..')",
        "[open('PWNED','w')]",
        "```python\nopen('PWNED','w')\n```",
        "\x00\ud800<tool_call>",
    ):
        world.reset(files)
        assert not world.step(text).info["calls"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "cd(__import__('os'))", "cd(folder=open('x'))", "a.b()", "cd(*x)", "cd"],
)
def test_ground_truth_is_read_not_run(text):
    with pytest.raises((ValueError, SyntaxError)):
        bfcl.read_call(text, {"cd": ["folder"]})


def test_positional_arguments_take_the_names_of_the_tool_doc():
    assert bfcl.read_call("f(1, c=[2])", {"f": ["a", "b", "c"]}) == Call("f", {"a": 1, "c": [2]})


def test_splits():
    assert bfcl.split_indices("train") == list(range(100))
    assert bfcl.split_indices("val") == list(range(100, 200))
    for scheme, size in (("100/100", 100), ("50/150", 50)):
        train, val = (bfcl.split_indices(split, scheme, seed=1) for split in ("train", "val"))
        assert len(train) == size and sorted(train + val) == list(range(200))
        assert train == bfcl.split_indices("train", scheme, seed=1)
        assert train != bfcl.split_indices("train", scheme, seed=2)
        counts = [sum(i // 50 == domain for i in train) for domain in range(4)]
        assert max(counts) - min(counts) <= 1
    # Fixed values, because results are not comparable if a split changes silently.
    assert bfcl.split_indices("train", "50/150")[:8] == [2, 9, 12, 13, 16, 31, 34, 35]
    with pytest.raises(ValueError, match="train, val"):
        bfcl.split_indices("validation")


def test_oracle_tools_are_few_seeded_sufficient_and_labelled():
    world = Bfcl("multi_turn_miss_func", tools="oracle+3")
    for task in world.tasks("val")[::10]:
        truth = bfcl.entries("multi_turn_miss_func")[task.id].truth
        needed = {call.name for call in itertools.chain(*truth)}
        first = world.reset(task, seed=1)
        assert len(first.tools) <= len(needed) + 3
        take_all(world, task.reference)
        assert world.evaluate().success
        assert world.reset(task, seed=1) == first
        assert task.meta["official"] is False
    assert Bfcl().tasks("val")[0].meta["official"] is True


def test_schemas_are_json_schema():
    known = {"object", "number", "integer", "string", "boolean", "array"}

    def types(node):
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                yield node["type"]
            for child in node.values():
                yield from types(child)

    world = Bfcl()
    for task in world.tasks("all")[::20]:
        tools = world.reset(task).tools
        assert json.loads(json.dumps(tools)) == tools
        for tool in tools:
            assert set(types(tool["function"]["parameters"])) <= known


def test_what_an_episode_does_is_gone_in_the_next_one():
    """The mentions of a tweet are the default of a parameter, which the package's methods share and
    change."""
    world, posted = Bfcl(), []
    task = Task("multi_turn_base_5", "bfcl", "Post something.", verifier={"calls": []})

    def shown(tool, **arguments):
        return world.step(call_text(tool, arguments)).messages[0]["content"]

    for _ in range(2):
        world.reset(task)
        shown("authenticate_twitter", username="dr_smith", password="securePass123")
        posted.append(json.loads(shown("post_tweet", content="hello")))
        mentioned = shown("mention", tweet_id=posted[-1]["id"], mentioned_usernames=["@bob"])
        assert "error" not in mentioned.lower()
    assert posted[0] == posted[1] and posted[0]["mentions"] == []


def test_a_synthetic_task_has_one_turn_and_its_own_ground_truth():
    world = Bfcl()
    calls = [{"name": "mkdir", "arguments": {"dir_name": "new"}}]
    verifier, meta = {"calls": calls}, {"entry": "multi_turn_base_0"}
    task = Task("made-1", "bfcl", "Make a directory called new.", verifier=verifier, meta=meta)
    assert world.reset(task).messages == [{"role": "user", "content": task.query}]
    world.step(call_text("mkdir", {"dir_name": "new"}))
    assert world.step("Done.").terminated and world.evaluate().success
    world.reset(task)
    world.step("Done.")
    assert not world.evaluate().success


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"category": "multi_turn"}, "multi_turn_base"),
        ({"splits": "80/20"}, "reference"),
        ({"tools": "oracle"}, r"oracle\+k"),
        ({"malformed": "raise"}, "'official' or 'error'"),
        ({"docs": "none"}, "'full' or 'brief'"),
        ({"classes": ["MathAPI", "Files"]}, r"no class \['Files'\]: choose from .*MathAPI"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Bfcl(**arguments)


def test_conversations_are_those_of_some_api_classes():
    files, both = Bfcl(classes="GorillaFileSystem"), Bfcl(classes=["GorillaFileSystem", "MathAPI"])
    assert len(files.tasks("all")) == 13 and len(both.tasks("all")) == 25
    names = set().union(*(names_of(both.reset(task).tools) for task in both.tasks("all")))
    assert {"mkdir", "logarithm"} <= names and not {"post_tweet", "get_stock_info"} & names


def test_brief_docs_and_short_conversations_are_labelled_unofficial():
    full, brief = Bfcl(), Bfcl(docs="brief", max_calls=3)
    few = brief.tasks("all")
    assert 20 < len(few) < 40 and all(0 < task.difficulty <= 3 for task in few)
    assert not any(task.meta["official"] for task in few)
    long, short = full.reset(few[0]).tools, brief.reset(few[0]).tools
    assert names_of(long) == names_of(short)
    assert '"description": "' not in json.dumps(short)
    assert len(json.dumps(short)) < len(json.dumps(long)) / 3
    properties = [set(tool["function"]["parameters"]["properties"]) for tool in long]
    assert properties == [set(tool["function"]["parameters"]["properties"]) for tool in short]


def test_demonstrations_succeed_more_often_the_more_careful_they_are():
    from envs.bfcl.demos import demonstrate

    arguments = {"tools": "oracle+1", "docs": "brief", "max_calls": 3}
    rates = []
    for care in (0.0, 0.5, 1.0):
        episodes, again = (
            [demonstrate(random.Random(seed), care=care, **arguments) for seed in range(60)]
            for _ in range(2)
        )
        assert episodes == again
        rates.append(sum(episode["success"] for episode in episodes) / len(episodes))
        for episode in episodes:
            roles = [message["role"] for message in episode["messages"]]
            assert roles[0] == "user" and roles[1] == "assistant" and roles[-1] == "assistant"
            assert episode["tools"] and not episode["hinted"]
    assert rates[0] < rates[1] < rates[2] == 1.0
    with pytest.raises(ValueError, match="hint"):
        demonstrate(random.Random(0), hint=0.2, **arguments)


def test_the_package_folder_is_unchanged():
    made = ("result", "score", ".file_locks")
    assert not [name for name in made if (package_dir().parent / name).exists()]
