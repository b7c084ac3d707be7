"""AppWorld: the adapter with a fake engine, and the real engine on the mini data set if it is
installed."""

import ast
import itertools
import json
import os
import re

import pytest

from envs import make
from envs.appworld import AppWorld, prompt
from envs.appworld.mini import data, evaluation
from envs.appworld.mini.data import SPLITS
from envs.process import ROOT, Deadlines
from envs.source import Source
from envs.toolcalls import call_text
from envs.world import Task, text_of
from tests.envs.playing import assert_conforms, begin, take_all, told
from tests.envs.test_process import alone

# ------------------------------------------------------------------------------------------ extraction of code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I look.\n```python\nprint(1)\n```\nDone.", ("print(1)", "user")),
        ("```python\nprint(1)\n```\n```python\nprint(2)\n```", ("print(1)", "user")),
        ("```python\nprint(1)", ("print(1)", "user")),  # not closed
        ("```python  \r\n  x = 1\r\n```", ("x = 1", "user")),
        ("```python\n```", ("", "user")),
        ("```\nprint(1)\n```", (None, "user")),
        ("print(1)", (None, "user")),
        (call_text("appworld", {"code": "print(1)"}), ("print(1)", "tool")),
        (
            "Now.\n" + call_text("appworld", {"code": "s = '```python\\nno\\n```'"}),
            ("s = '```python\\nno\\n```'", "tool"),
        ),
        (call_text("other", {}) + call_text("appworld", {"code": "1"}), ("1", "tool")),
        (call_text("appworld", {"code": 1}), (None, "tool")),
        ("<tool_call>\nnot json\n</tool_call>", (None, "tool")),
        ("```python\nprint('<tool_call>')\n```", ("print('<tool_call>')", "user")),
    ],
)
def test_code_is_the_first_block_or_the_first_call(text, expected):
    assert prompt.code_of(text) == expected


# ------------------------------------------------------------------------------------------ a fake engine


def doc(description, *parameters):
    keys = ("name", "type", "required", "description", "default", "constraints")
    return {
        "description": description,
        "parameters": [dict(zip(keys, values)) for values in parameters],
    }


DOCS = {
    "phone": {
        "call": doc(
            "Call someone.",
            ("number", "string", True, "Whom.", None, ["length >= 5, <= 9", "value is odd"]),
            ("minutes", "integer", False, "How long.", 5, ["value >= 1.0, < 20.0"]),
            ("share", "number", False, "Share.", None, ["value > 0.0, <= 1.5"]),
            ("mail", "string", False, "Mail.", "", ["value is email address"]),
            ("mood", "string", False, "Mood.", "fine", ["value in ['fine', 'it\\'s bad']"]),
            ("notes", "list[string]", False, "Notes.", None, ["length >= 1"]),
            ("answer", "number | string", False, "Answer.", None, []),
        )
    },
    "venmo": {"pay": doc("Pay.")},
    "api_docs": {"show_api_doc": doc("Read.")},
    "supervisor": {"complete_task": doc("End."), "show_active_task": doc("The instruction.")},
}


class FakeEngine:
    """An engine whose sessions understand the lines `say X`, `set X`, `damage` and `done`. One open
    task at a time."""

    def __init__(self):
        self.opened: list[str] = []

    def open(self, root, task_id, timeout_s, memory_mb):
        self.opened.append(task_id)
        self._task, self._state, self._lines = task_id, set(), 0
        self._damage = self._done = False
        person = {"first_name": "Ada", "last_name": "Lane"}
        return {
            "instruction": f"Do {task_id}.",
            "supervisor": person | {"email": "ada@example.com", "phone_number": "555"},
            "apps": {"api_docs": "Docs.", "supervisor": "Tasks.", "phone": "Calls people."},
        }

    def run(self, code):
        self._lines += 1
        verb, _, rest = code.partition(" ")
        if verb == "say":
            return f"{rest} {self._lines}"
        if verb == "set":
            self._state.add(rest)
        elif verb == "damage":
            self._damage = True
        elif verb == "done":
            self._done = True
        else:
            return f"Execution failed. Traceback:\nno verb {verb}"
        return "Execution successful."

    def completed(self):
        return self._done

    def answer(self):
        return f"{self._lines} lines"

    def tests(self):
        needed = [("no_op_fail", part in self._state) for part in ("a", "b")]
        return [*needed, ("no_op_pass", not self._damage), ("no_op_pass", True)]

    def apis(self, root):
        return DOCS

    def close(self):
        pass


def block(code: str) -> str:
    return f"```python\n{code}\n```"


SOLUTION = [block("say hello"), block("set a"), block("set b"), block("done")]


class Played(AppWorld):
    """A world on official data, which has no solutions, with solutions for the fake engine."""

    def tasks(self, split):
        tasks = super().tasks(split)
        for task in tasks:
            task.reference = SOLUTION
        return tasks


@pytest.fixture
def official(tmp_path):
    """Return a maker of worlds over a folder with the layout of AppWorld's data."""
    for split, ids in {"train": ["0a1_1", "0a1_2", "0a1_3"], "dev": ["0b2_1"]}.items():
        path = tmp_path / "data" / "datasets" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(ids) + "\n")
        for id in ids:
            folder = tmp_path / "data" / "tasks" / id
            folder.mkdir(parents=True)
            (folder / "specs.json").write_text(json.dumps({"instruction": f"Do {id}."}))

    def made(kind=AppWorld, engine=None, **arguments):
        return kind("official", str(tmp_path), engine=engine or FakeEngine(), **arguments)

    return made


def said(world, code):
    """Return what the world says to a block of code."""
    return told(world, block(code))


def begun(world, id="0a1_1"):
    """Return a world with an episode."""
    world.reset(Task(id, "appworld", ""))
    return world


def test_the_adapter_conforms(official):
    engine = FakeEngine()
    assert_conforms(lambda: official(Played, engine))


def test_an_episode(official):
    world = official()
    task = world.tasks("train")[0]
    assert (task.id, task.query, task.meta["scenario"]) == ("0a1_1", "Do 0a1_1.", "0a1")
    start = world.reset(task)
    assert [message["role"] for message in start.messages] == ["system", "user"]
    assert start.tools == []
    for words in ("Ada Lane", "ada@example.com", "555", "- phone: Calls people.", "```python"):
        assert words in start.messages[0]["content"]
    result = world.step("First.\n" + block("say hello"))
    assert result.messages == [{"role": "user", "content": "Output:\n```\nhello 1\n```\n\n"}]
    result = world.step(call_text("appworld", {"code": "nonsense"}))
    assert result.messages[0]["role"] == "tool"
    assert result.info["errors"] == 1 and not result.info["parse_error"]
    result = world.step("I am thinking.")
    assert "nothing was run" in text_of(result.messages)
    assert result.info["parse_error"] and not result.terminated
    *_, result = map(world.step, SOLUTION[1:])
    assert result.terminated and result.reward == 1.0 and result.info["answer"].endswith(" lines")
    assert world.evaluate().success
    assert world.evaluate().components == {"progress": 1.0, "tests": 1.0}
    assert world.step(block("damage")).terminated and world.evaluate().success


def test_the_prompt_requests_calls_if_the_action_is_a_tool(official):
    task = Task("0a1_1", "appworld", "")
    start = official(action="tool").reset(task)
    assert start.tools == [prompt.TOOL] and start.messages[1]["content"] == "Do 0a1_1."
    assert "```" not in start.messages[0]["content"]
    short = official(example=False).reset(task)
    assert "--- you" not in short.messages[0]["content"]


def test_dense_reward_counts_the_tests_that_doing_nothing_fails(official):
    world, sparse = begun(official(reward="dense")), begun(official())
    scores = [world.evaluate().score]
    for code in ("set a", "set b", "damage"):
        world.step(block(code))
        scores.append(world.evaluate().score)
    assert scores == [0.0, 0.5, 1.0, 0.5] and not world.evaluate().success
    assert world.evaluate().components == {"progress": 0.5, "tests": 0.75}
    sparse.step(block("set a"))
    assert sparse.evaluate().score == 0.0 and sparse.evaluate().components["progress"] == 0.5


def test_instances_in_one_process_take_turns(official):
    engine = FakeEngine()
    first = begun(official(engine=engine))
    first.step(block("set a"))
    second = begun(official(engine=engine), "0a1_2")
    second.step(block("damage"))
    assert "hello 2" in said(first, "say hello")  # the second line of its session
    progress = [world.evaluate().components["progress"] for world in (first, second)]
    assert progress == [0.5, 0.0]
    assert engine.opened == ["0a1_1", "0a1_2", "0a1_1", "0a1_2"]


def test_a_synthetic_task_plays_in_the_world_of_its_entry(official):
    engine = FakeEngine()
    task = Task("synthetic-7", "appworld", "Set b.", origin="synthetic", meta={"entry": "0a1_3"})
    start = official(engine=engine).reset(task)
    assert engine.opened == ["0a1_3"] and start.messages[1]["content"] == "Set b."


def test_long_outputs_are_cut_with_a_note(official):
    world = begun(official(max_output=10))
    text = said(world, "say " + "x" * 50)
    assert "x" * 10 + "\n[42 more characters were cut off]" in text and "x" * 11 not in text


def test_errors_name_the_problem(official, tmp_path_factory, monkeypatch):
    with pytest.raises(ValueError, match="train"):
        official().tasks("test_normal")
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    empty = AppWorld("official", str(tmp_path_factory.mktemp("empty")), engine=FakeEngine())
    with pytest.raises(ValueError, match="appworld download data"):
        empty.tasks("train")
    for arguments in ({"data": "none"}, {"action": "mime"}, {"reward": "high"}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be"):
            AppWorld(**arguments, engine=FakeEngine())
    for use in (official().evaluate, official().functions):
        with pytest.raises(RuntimeError, match="reset"):
            use()


def test_the_profile_lists_apps_and_their_apis(official):
    phone, venmo = official().profile()["entities"]
    assert (phone["name"], venmo["name"]) == ("phone", "venmo")
    assert phone["operations"] == [{"name": "call", "description": "Call someone."}]


ODD = [
    'it\'s "odd"',
    "two\nlines \\",
    "```python\nx\n```",
    "\\```",
    "</tool_call><tool_call>",
    "Zürich \U0001f600 \x00{0} %s",
]
ODD += [None, True, -1.5, [[1, None], {"a`b": ["`" * 7]}]]


@pytest.fixture(params=["code", "tool"])
def started(official, request):
    """A world with an episode, for each format of an action."""
    return begun(official(action=request.param))


def test_functions_are_the_apis_of_the_tasks_apps(started):
    functions = {tool["function"]["name"]: tool["function"] for tool in started.functions()}
    assert list(functions) == ["supervisor.complete_task", "phone.call"]
    assert started.functions() == started.functions()
    assert functions["phone.call"]["description"] == "Call someone."
    assert functions["phone.call"]["parameters"] == {
        "type": "object",
        "properties": {
            "number": {"description": "Whom.", "type": "string", "minLength": 5, "maxLength": 9},
            "minutes": {
                "description": "How long.",
                "type": "integer",
                "default": 5,
                "minimum": 1,
                "exclusiveMaximum": 20,
            },
            "share": {
                "description": "Share.",
                "type": "number",
                "exclusiveMinimum": 0.0,
                "maximum": 1.5,
            },
            "mail": {"description": "Mail.", "type": "string", "default": "", "format": "email"},
            "mood": {
                "description": "Mood.",
                "type": "string",
                "default": "fine",
                "enum": ["fine", "it's bad"],
            },
            "notes": {
                "description": "Notes.",
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
            },
            "answer": {"description": "Answer.", "anyOf": [{"type": "number"}, {"type": "string"}]},
        },
        "required": ["number"],
    }


def test_the_text_of_a_call_is_code_that_prints_its_result(started):
    call = started.call_text("phone.call", {"number": "555", "minutes": 3})
    code = "print(apis.phone.call(number='555', minutes=3))"
    texts = {"code": block(code), "tool": call_text("appworld", {"code": code})}
    assert call == texts[started._action]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_code_passes_on_the_values_of_a_call(started, value):
    given = {"number": value, "notes": [value, value]}
    code, role = prompt.code_of(started.call_text("phone.call", given))
    assert role == {"code": "user", "tool": "tool"}[started._action]
    call = ast.parse(code).body[0].value.args[0]
    assert ast.unparse(call.func) == "apis.phone.call"
    assert {k.arg: ast.literal_eval(k.value) for k in call.keywords} == given


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("os.system", {}, "no function 'os.system'"),
        ("phone.call()) or (phone.call", {}, "no function"),
        ("venmo.pay", {}, "no function"),  # not among the task's apps
        ("api_docs.show_api_doc", {}, "no function"),
        ("supervisor.show_active_task", {}, "no function"),
        ("phone.call", {"number=1, x": 2}, "no parameter 'number=1, x'; it has number"),
        ("phone.call", {"number": float("nan")}, "JSON"),
        ("phone.call", {"number": {1, 2}}, "JSON"),
        ("phone.call", {"number": "\ud800"}, "JSON"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused(started, name, arguments, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        started.call_text(name, arguments)


# ------------------------------------------------------------------------------------------------- mini data


def test_mini_has_scenarios_of_three_over_five_apps_and_more():
    world = make("appworld", engine=FakeEngine())
    tasks = list(itertools.chain(*map(world.tasks, SPLITS)))
    assert len(tasks) == len({task.id for task in tasks}) == 48
    assert len(set(itertools.chain(*(task.meta["apps"] for task in tasks)))) >= 5
    scenarios = {task.meta["scenario"]: task.split for task in tasks}
    for scenario, split in scenarios.items():
        variants = [task for task in tasks if task.meta["scenario"] == scenario]
        assert {task.split for task in variants} == {split}
        assert {task.id for task in variants} == {f"{scenario}_{n}" for n in (1, 2, 3)}
        assert re.fullmatch(r"[0-9a-f]+", scenario)  # AppWorld's format of an id
    with pytest.raises(ValueError, match="test_normal"):
        world.tasks("test")


def test_doing_nothing_solves_no_mini_task():
    """Each task has an answer or changes, so that doing nothing fails one of its tests, and all
    tasks differ."""
    for task in data.tasks():
        private = {"changes": task.changes, "touched": task.touched}
        tests = evaluation.requirements(private, task.answer)
        assert any(test["label"] == "no_op_fail" for test in tests), task.id
        assert len({test["requirement"] for test in tests}) == len(tests), task.id
        assert all(code.strip() for code in task.solution)
    asked = [(task.person, task.instruction) for task in data.tasks()]
    assert len(set(asked)) == len(asked)


def test_mini_rows_refer_to_existing_rows():
    tables = data.tables()
    targets = dict.fromkeys(("user_id", "friend_id", "sender_id", "receiver_id"), "User") | {
        "song_id": "Song",
        "playlist_id": "Playlist",
        "artist_id": "Artist",
        "project_id": "Project",
        "global_text_message_id": "GlobalTextMessage",
    }
    for table, found in tables.items():
        app = table.split(".")[0]
        for row in found:
            for key in set(row) & set(targets):
                assert 1 <= row[key] <= len(tables[f"{app}.{targets[key]}"]), (table, row)


# ----------------------------------------------------------------------------------------- the real engine

PYTHON = os.environ.get("EVOLVER_APPWORLD_PYTHON", str(ROOT / ".venv-appworld" / "bin" / "python"))
installed = pytest.mark.skipif(not os.path.exists(PYTHON), reason="not installed: make appworld")
PATIENT = Deadlines(start=300.0, reset=300.0, step=300.0)


def real(test):
    """Mark a test that needs the package."""
    return pytest.mark.services(installed(test))


@pytest.fixture(scope="module")
def world():
    os.environ["EVOLVER_SECRET"] = "inherited"
    try:
        with alone("appworld", {"reward": "dense"}, python=PYTHON, deadlines=PATIENT) as world:
            yield world
    finally:
        del os.environ["EVOLVER_SECRET"]


def play(world, task, actions):
    world.reset(task)
    *_, result = map(world.step, actions)
    return result, world.evaluate()


@real
@pytest.mark.parametrize("split", SPLITS)
def test_solutions_score_one_and_nothing_else_does(world, split):
    success = {}
    for task in world.tasks(split):
        setup, find, act = task.reference
        end = block("apis.supervisor.complete_task()")
        result, nothing = play(world, task, [end])
        assert result.terminated and nothing.score == 0.0 and not nothing.success, task.id
        wrong = act.replace("answer=answer)", "answer='no such thing')")
        wrong = end if wrong == act else wrong
        assert not play(world, task, [setup, find, wrong])[1].success, task.id
        extra = block(
            'login = apis.simple_note.login(username=profile["email"], password=passwords["simple_note"])\n'
            'apis.simple_note.create_note(title="unasked", content="", access_token=login["access_token"])'
        )
        damaged = play(world, task, [setup, extra, find, act])[1]
        assert not damaged.success and damaged.score < 1.0, task.id
        result, solved = play(world, task, task.reference)
        assert result.terminated and result.info["errors"] == 0, task.id
        assert solved.score == 1.0, (task.id, solved)
        success[task.id] = solved.success
    assert all(success.values())


@real
@pytest.mark.parametrize("answer", ["10**400", "float('nan')", "'\\ud800'", "[[1]]"])
def test_an_answer_that_cannot_be_compared_scores_nothing(world, answer):
    task = next(task for task in world.tasks("train") if "answer=answer" in task.reference[-1])
    result, evaluation = play(
        world, task, [block(f"apis.supervisor.complete_task(answer={answer})")]
    )
    assert not evaluation.success and evaluation.score < 1.0, result.messages


@real
def test_the_real_engine_conforms(world):
    with Source("appworld", mode="worker", workers=1, python=PYTHON, deadlines=PATIENT) as source:
        assert_conforms(source.world, limit=2)


def shown(world, name, **arguments):
    """The JSON value that a call shows."""
    result = world.step(world.call_text(name, arguments))
    text = text_of(result.messages)
    assert result.info["errors"] == 0, text
    return json.loads(re.fullmatch(r"Output:\n```\n(.*)\n```\n\n", text, re.DOTALL)[1])


def logged_in(world, app):
    """The token of a login."""
    email = shown(world, "supervisor.show_profile")["email"]
    accounts = shown(world, "supervisor.show_account_passwords")
    passwords = {account["account_name"]: account["password"] for account in accounts}
    login = shown(world, f"{app}.login", username=email, password=passwords[app])
    return login["access_token"]


@real
def test_calls_can_be_made_with_what_earlier_answers_showed(world):
    """The account's password comes from one answer, its user name from another, the token from a
    third."""
    begin(world)
    listed = [tool["function"] for tool in world.functions()]
    functions = {function["name"]: function["parameters"] for function in listed}
    assert len(functions) == 452 and "api_docs.show_api_doc" not in functions
    assert functions["simple_note.login"]["required"] == ["username", "password"]
    assert functions["phone.show_alarms"]["properties"]["page_limit"]["maximum"] == 20
    token = logged_in(world, "simple_note")
    for odd in ODD:
        if isinstance(odd, str):
            text = {"title": odd, "content": odd, "tags": [odd]}
            made = shown(world, "simple_note.create_note", access_token=token, **text)
            call = {"note_id": made["note_id"], "access_token": token}
            note = shown(world, "simple_note.show_note", **call)
            assert {name: note[name] for name in text} == text


@real
def test_a_logout_ends_with_its_episode(world):
    """The tokens of two episodes of a task are equal, and the package remembers them in the
    process."""
    for _ in range(2):
        begin(world)
        token = logged_in(world, "todoist")
        assert shown(world, "todoist.show_projects", access_token=token)
        shown(world, "todoist.logout", access_token=token)
        again = world.call_text("todoist.show_projects", {"access_token": token})
        assert world.step(again).info["errors"] == 1


REFUSED = [  # {id}: of the task
    "print(open('/etc/hostname').read())",
    "import pathlib\nprint(pathlib.Path('/etc/hostname').read_text())",
    "import os\nprint(os.scandir('/'))",
    "print(__import__('os').system('true'))\nopen('/tmp/evolver-was-here', 'w')",
    "import os\nos.mkfifo('/tmp/evolver-was-here')",
    "print(__import__('socket').create_connection(('127.0.0.1', 9)))",
    "import os\nprint(os.environ['EVOLVER_SECRET'])",
    "import os\nos.sys.modules['envs.appworld.confine']._armed = False\nprint(open('/etc/hostname').read())",
    "import os\nprint(os.sys.modules['envs.appworld.mini.data'].tasks()[0].turns)",
    "import os\nprint(os.sys.modules['envs.appworld.world'].AppWorld._active._task.reference)",
    "import os\nos.sys.modules['envs.appworld.engine'].Engine.tests = lambda self: [('no_op_fail', True)]",
    "import appworld.task\nprint(appworld.task.Task.load(apis.supervisor.show_active_task and 'x_1').ground_truth)",
    "from appworld.ground_truth import GroundTruth\nprint(GroundTruth.load('{id}').answer)",
    "print(requester.client.get('admin/dbs'))",
    "print(apis.admin)",
    "raise SystemExit",
    "raise KeyboardInterrupt",
    "class Odd(BaseException): pass\nraise Odd",
    "input()",
    "(" * 300,
    "print('\\ud800')\n1/0",
    "x = '\0'",
    "x = [0] * 10**9",
]
IN_VAIN = [  # it changes a copy that nobody asks
    "import os\nos.sys.modules['envs.appworld.world']._score = lambda tests, reward: 1 / 0",
    "import os\nos.sys.modules['appworld.evaluator'].evaluate_task = lambda **_: 1 / 0",
]


@real
@pytest.mark.parametrize("code", [*REFUSED, *IN_VAIN])
def test_code_reaches_neither_files_nor_the_score_and_cannot_end_the_worker(world, code):
    """The process that runs code has no task, answer, engine or evaluator; and the next episode
    starts in another."""
    task = world.tasks("train")[0]
    world.reset(task)
    shown = said(world, code.replace("{id}", task.id))
    assert code in IN_VAIN or "Execution failed" in shown or "not allowed" in shown
    assert task.reference[0][20:60] not in shown and not os.path.exists("/tmp/evolver-was-here")
    assert world.evaluate().score == 0.0 and not world.evaluate().success
    assert "ok" in said(world, "print('ok')")
    take_all(world, task.reference)
    assert world.evaluate().success and play(world, task, task.reference)[1].success


@real
def test_a_session_that_ends_loses_its_variables_and_no_more(world):
    task = world.tasks("train")[0]
    world.reset(task)
    assert "The session ended" in said(world, "import os\nos.sys.modules['os'].abort()")
    *_, result = map(world.step, task.reference)
    assert result.terminated and world.evaluate().success


@real
def test_endless_code_is_stopped():
    with alone("appworld", {"timeout_s": 1}, python=PYTHON, deadlines=PATIENT) as world:
        task = world.tasks("train")[0]
        world.reset(task)
        assert "timed out" in said(world, "while True: pass")
        world.step(task.reference[0])
