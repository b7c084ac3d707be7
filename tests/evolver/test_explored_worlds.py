"""The embedded explorer in worlds of other people: text adventures, MCP servers, and the real
packages."""

import dataclasses
import functools
import importlib.util
import json
import os
import random
from pathlib import Path
from unittest import mock

import pytest

from envs.act import ActionWorld, tool
from envs.mcp import McpWorld, _Session, _Start
from envs.probed import cells, phrases, probed
from envs.process import Deadlines
from envs.source import Source
from envs.toolcalls import call_text
from envs.wording import goal_text
from envs.world import Evaluation, Observation, StepResult, Task, World, tool_of
from evolver.questioning.calls import Event
from evolver.questioning.goals import goals_of
from evolver.questioning.kinds import start_state
from evolver.questioning.llm import LlmExplorer
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.phrasing import about_rows
from evolver.questioning.start_state import StartState
from evolver.questioning.values import SeenValues
from tests.evolver.explorers import Questioning, curious, proposal, solves, walking

ROOT = Path(__file__).parents[2]


def explored(make_world, budget, starts=None, **options):
    """Return the tasks that are kept, after checking again that their references pass and that
    idling fails."""
    made = curious(make_world, starts, overlap=0.9, **options)
    tasks = made.explore(0, budget)
    world = probed(make_world())
    for task in tasks[:5]:
        assert solves(world, task, task.reference) and not solves(world, task, []), task
    world.close()
    return tasks, made.explorer.walker.stats


# --- a text adventure that marks no refusals ------------------------------------------------------

REFUSAL = "You can't see any such thing."


class House(ActionWorld):
    """Two rooms and three things, after the manner of TextWorld: every answer is a text, refusals
    too."""

    name = "house"

    def __init__(self, max_steps: int = 200):
        super().__init__(max_steps)

    def tasks(self, split):
        return [Task("house/0", self.name, "Tidy up.", split)]

    def reset(self, task, seed=0):
        self._begin(task)
        self._places = {"red ball": "hall", "old lamp": "hall", "key": "cellar"}
        self._room = "hall"
        forms = (
            "look, inventory, take OBJ, drop OBJ, examine OBJ, go up, go down, go north, go east"
        )
        opening = {"role": "user", "content": f"{task.query}\n\n{self._look()}"}
        return Observation([opening], [tool("Act.", forms.split(", "))])

    def evaluate(self):
        return Evaluation(0.0, False)

    def _act(self, text):
        return text, self._answer(text), 0.0, False

    def _look(self):
        lines = [f"There is a {thing} here." for thing in self._at(self._room)]
        return "\n".join([f"You are in the {self._room}.", *lines])

    def _at(self, place):
        return [thing for thing, other in self._places.items() if other == place]

    def _answer(self, text):
        verb, _, thing = text.partition(" ")
        here = self._places.get(thing) in (self._room, "you")
        if verb == "go":
            room = {"up": "hall", "down": "cellar"}.get(thing, self._room)
            moved = room != self._room
            self._room = room
            return self._look() if moved else "You can't go that way."
        if text == "look":
            return self._look()
        if text == "inventory":
            return f"You carry {' and '.join(self._at('you')) or 'nothing'}."
        if not here:
            return REFUSAL
        if verb == "examine":
            return f"The {thing} is nothing special."
        carried = self._places[thing] == "you"
        if carried == (verb == "take"):
            return "You already have it." if carried else "You don't have it."
        self._places[thing] = "you" if verb == "take" else self._room
        return f"You {verb} the {thing}."


@pytest.fixture(scope="module")
def house():
    return explored(House, 8)


def test_a_text_world_without_marks_for_refusals_is_explored(house):
    tasks, stats = house
    assert len(tasks) >= 3
    assert {"take OBJ", "go down"} <= {name for name in stats.roles if stats.roles[name].changes}
    assert {"look", "inventory"} <= {name for name in stats.roles if stats.roles[name].reads}
    assert any("take" in task.query.lower() for task in tasks)
    assert not any("OBJ" in task.query or ": obj" in task.query for task in tasks)


def refuses(stats, answer):
    return stats.refuses(Event("", {}, result=answer))


def test_refusals_are_learnt_and_other_answers_are_not(house):
    _, stats = house
    assert refuses(stats, REFUSAL) and refuses(stats, "You can't go that way.")
    assert not refuses(stats, "You take the key.") and not refuses(stats, "You carry nothing.")
    assert not refuses(stats, "You are in the cellar.\nThere is a key here.")


def test_an_answer_that_goes_with_a_change_is_no_refusal(house):
    _, stats = house
    stats.sentences["Taken."] = {"take OBJ": ["key", "old lamp"]}
    assert refuses(stats, "Taken.")  # as long as it has not been tested
    stats.quiet["Taken."] = [1, 1]
    assert not refuses(stats, "Taken.")


def test_a_world_that_limits_its_steps_is_read_in_several_episodes():
    # A walk takes 24 steps, and there are more probes than 2.
    tasks, _ = explored(lambda: House(max_steps=26), 3, rounds=12)
    assert len(tasks) == 3
    task = max(tasks, key=lambda task: len(task.verifier["probes"]) + len(task.reference))
    most = len(task.verifier["probes"]) + len(task.reference)
    # The probes do not fit into one repetition.
    assert solves(House(max_steps=most - 1), task, task.reference)


def test_phrases_are_known_by_the_words_around_them():
    shown = phrases("You see a red box. The key is on the box.")
    found = {cell.value: cell.kinds for cell in shown}
    assert found["red box"] == ("a _ .", "a _") and found["key"] == ("the _ is", "the _")
    assert "the" not in found and "a red" not in found and "red box. The" not in found
    assert phrases("") == ()


def test_the_slots_of_a_form_are_filled_in():
    slots = {"obj": "red box", "obj 2": "table"}
    assert goal_text("put OBJ on OBJ", slots) == "put red box on table"
    assert goal_text("Cancel an order", {"order": "Ann"}) == "Cancel an order: order Ann"


def test_the_inside_of_one_fenced_block_counts():
    inside = cells("f", 'Output:\n```\n{\n  "a": [1, "x"]\n}\n```\n\n')
    assert [(cell.label, cell.value) for cell in inside] == [("$.a[*]", "1"), ("$.a[*]", "x")]
    for text, values in (
        ("Output:\n```\nno such note\n```\n", "no such note"),
        ("```\n1\n```\nand\n```\n2\n```", "1 and 2"),  # several blocks
    ):
        assert [cell.value for cell in cells("f", text)] == values.split()


# --- calls of which nothing shows that they were made ---------------------------------------------


def test_nothing_is_asked_about_calls_that_answer_by_their_arguments_alone():
    """A heating that repeats what it is told, and that nothing shows, looks like a reader."""
    stats = OperationStats()

    def compared(name, *answers):
        for start, shown in enumerate(answers):
            stats.compare(f"task {start}", Event(name, {"degrees": 21}, "", shown, ok=True))
        return stats.roles[name].blind

    assert not compared("heat", *3 * ["21 degrees"]) and compared("heat", *4 * ["21 degrees"])
    assert not compared("temperature", "18", "20", "20", "20", "20")
    for _ in range(9):
        stats.compare("task 0", Event("far", {}, "", "1", ok=True))
    # One start says nothing.
    assert not stats.roles["far"].blind and not stats.roles["unknown"].blind
    stats.roles["heat"].changes_shown = 1
    assert not stats.roles["heat"].blind


# --- a world whose actions are code ---------------------------------------------------------------

APPS = ("diary", "music", "parcels", "recipes", "rooms", "tickets")


def function(name, description, *required, optional=()):
    about = {
        "username": "Your email.",
        "access_token": f"Token obtained from {name.partition('.')[0]} app login.",
    }
    properties = {
        p: {"type": "string", "description": about.get(p, p)} for p in (*required, *optional)
    }
    return tool_of(name, description, properties, list(required))


def token_of(app):
    return f"{app}-" + "x7" * 40


class Desk(World):
    """Six apps of 20 functions each, after the manner of AppWorld: a token per login, and
    `desk.finish` to end."""

    name = "desk"

    def tasks(self, split):
        return [Task("desk/0", self.name, "Tidy up.", split)]

    def reset(self, task, seed=0):
        self._notes = {app: ["pay rent", "call Ann"] for app in APPS}
        self._over = False
        self._out = set()
        return Observation([{"role": "user", "content": task.query}], [])

    def evaluate(self):
        return Evaluation(0.0, False)

    def functions(self):
        made = [
            function("desk.who", "Show who you are."),
            function("desk.passwords", "Show all passwords."),
            function("desk.finish", "End the task.", optional=["answer"]),
        ]
        for app in APPS:
            made += [
                function(f"{app}.login", f"Login to {app}.", "username", "password"),
                function(f"{app}.list", f"List the entries of {app}.", "access_token"),
                function(f"{app}.add", f"Add an entry to {app}.", "title", "access_token"),
                function(f"{app}.logout", f"Log out of {app}.", "access_token"),
            ]
            made += [function(f"{app}.grep{n}", f"Search {app}, {n}.", "rule") for n in range(16)]
        return made

    def call_text(self, name, arguments):
        return f"{name} {json.dumps(arguments)}"

    def step(self, action):
        # a block between words, or code alone
        code = action.partition("```\n")[2].partition("\n```")[0] or action
        name, _, given = code.partition(" ")
        try:
            result = self._run(*name.split("."), **json.loads(given or "{}"))
            failed = False
        except (ValueError, TypeError) as error:
            result = f"Execution failed: {error}"
            failed = True
        info = {"calls": [{"name": "desk", "arguments": {"code": action}}], "errors": int(failed)}
        return StepResult([{"role": "user", "content": result}], terminated=self._over, info=info)

    def _run(self, app, function, title="", access_token="", **rest):
        if app == "desk":
            self._over = function == "finish"
            shown = {
                "who": {"email": "ann@example.com", "town": "Oslo"},
                "passwords": [{"account": a, "password": f"{a[:4]}-77"} for a in APPS[:2]],
                "finish": {"ok": 1},
            }
            return json.dumps(shown[function])
        if function == "login":
            right = {"username": "ann@example.com", "password": f"{app[:4]}-77"}
            if rest != right or app not in APPS[:2]:
                raise ValueError("invalid credentials")
            self._out.discard(app)
            return json.dumps({"access_token": token_of(app)})
        known = function in ("list", "add", "logout")
        if not known or app in self._out or access_token != token_of(app):
            raise ValueError("not authorized")
        if function == "logout":
            self._out.add(app)
            return json.dumps({"message": "see you"})
        if function == "add":
            self._notes[app].append(title)
            return json.dumps({"entries": len(self._notes[app])})
        entries = enumerate(self._notes[app], 1)
        return json.dumps([{"entry": n, "title": text} for n, text in entries])


def test_a_world_of_code_is_explored_past_its_logins():
    tasks, stats = explored(Desk, 12, breadth=12, depth=24, rehearsals=0)
    assert len(tasks) >= 6
    # It ends the episode with the answer.
    assert all(task.reference[-1].startswith("desk.finish") for task in tasks)
    assert any(".login " in action for task in tasks for action in task.reference)
    assert any("after" in probe for task in tasks for probe in task.verifier["probes"])  # a change
    assert not any("access token" in task.query for task in tasks)  # the account is clear
    assert "desk.finish" not in stats.roles  # it is known to end the episode before the first walk


def test_what_shows_a_change_is_found_although_no_walk_looked_at_it():
    """Logging out, which the desk offers too, must not hide it."""
    world = Desk()
    stats = OperationStats()
    (task,) = world.tasks("train")
    start = start_state(task, world, stats, random.Random(0), SeenValues())
    walk = start.open()
    token = token_of("diary")
    walk.call("desk.passwords", {})
    walk.call("diary.login", {"username": "ann@example.com", "password": "diar-77"})
    walk.call("diary.add", {"title": "buy milk", "access_token": token})
    walk.call("diary.logout", {"access_token": token})
    start.learn_roles(walk.events)
    start.extend(walk.events)
    witnesses = {name: role.witnesses for name, role in stats.roles.items() if role.changes}
    assert witnesses == {"diary.add": ["diary.list"], "diary.logout": []}
    goals = goals_of(walk.events, start, most=2)
    made = {goal.events[n].name for goal in goals for n in goal.targets}
    assert made == {"diary.add"}  # nothing shows a logout
    assert "diary.list" in [probe.event.name for probe in start.battery]


# --- language models as explorers of these worlds -------------------------------------------------


def written(chat_of, make_world, actions, *ideas):
    """Return the tasks of a language model that takes these actions and has these ideas, and the
    pool's metrics."""
    world = make_world, make_world().tasks("train"), chat_of(walking(actions, *ideas))
    options = {"breadth": 1, "depth": len(actions) - 1, "rounds": 1}
    made = Questioning(LlmExplorer, *world, **options)
    return made.explore(0, 5), made.pool.metrics()


def test_a_language_model_explores_a_text_world_in_its_own_words(chat_of):
    actions = ["look", "take red ball", "inventory", "go down", "drop red ball", "look", "fly away"]
    ideas = [proposal("Bring the red ball to the cellar.", 2, 4, 5), proposal("Fly away.", 7)]
    (task,), figures = written(chat_of, House, actions, *ideas)
    solution = ["take red ball", "go down", "drop red ball"]
    assert task.reference == [call_text("act", {"action": action}) for action in solution]
    assert solves(House(), task, solution)
    assert not solves(House(), task, ["take old lamp", "go down", "drop old lamp"])
    assert figures["questioning/rejected/nothing to check"] == 1


def test_a_language_model_explores_a_world_of_code(chat_of):
    login = 'music.login {"username": "ann@example.com", "password": "musi-77"}'
    given = {"access_token": token_of("music")}
    add = f"music.add {json.dumps({'title': 'buy milk'} | given)}"
    shown = f"music.list {json.dumps(given)}"
    ideas = [
        proposal("Add the entry buy milk to my music.", 4),
        proposal("Where do I live?", 1, answer="Oslo"),
        proposal("See.", 3),
    ]
    actions = [f"```\n{code}\n```" for code in ("desk.who {}", login, shown, add, shown)]
    (change, question), figures = written(chat_of, Desk, actions, *ideas)
    world = Desk()
    assert change.reference[-2:] == [f"```\n{add}\n```", "desk.finish {}"]
    assert question.verifier["answer"]["value"] == "Oslo"
    assert solves(world, change, [login, add, "desk.finish {}"])
    assert not solves(world, change, [login, add.replace("milk", "tea"), "desk.finish {}"])
    assert solves(world, question, ['desk.finish {"answer": "Oslo"}'])
    assert not solves(world, question, ['desk.finish {"answer": "Bergen"}'])
    assert figures["questioning/rejected/nothing to check"] == 1


def test_questions_about_rows_name_the_row():
    shown = [
        {"id": 1, "title": "Reed", "genre": "pop"},
        {"id": 2, "title": "Salt", "genre": "rock"},
    ]
    wanted = {}
    for n in range(20):
        options = about_rows(cells("f", json.dumps(shown)), random.Random(n))
        wanted |= {question: value for question, value, _ in options}
    assert wanted["the genre of Salt"] == "rock" and wanted["the title of rock"] == "Salt"


# --- an MCP server --------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None,
    reason="needs the MCP client: pip install -r requirements/mcp.txt",
)
def test_an_mcp_server_is_explored():
    from mcp.server.mcpserver import MCPServer

    def server():
        server = MCPServer("notes")
        notes = []

        @server.tool()
        def add_note(text: str) -> str:
            """Keep a note."""
            notes.append(text)
            return f"note {len(notes)}"

        @server.tool()
        def list_notes() -> str:
            """All notes, one per line."""
            return "\n".join(notes)

        return server

    class InMemory(McpWorld):
        """A server in this process, because starting one for each episode takes a second."""

        def _connect(self):
            self.close()
            self._session = _Session(_Start([], server(), None, 30.0, None, "", "", False))
            return self._session

    tasks, stats = explored(lambda: InMemory(["-"]), 4, [Task("mcp/0", "mcp", "Use the tools.")])
    assert len(tasks) == 4 and stats.roles["add_note"].changes and stats.roles["list_notes"].reads
    assert all(task.query.startswith("Keep a note: text ") for task in tasks)


# --- the real packages ----------------------------------------------------------------------------


@pytest.mark.services
def test_real_textworld_is_explored(tmp_path):
    if importlib.util.find_spec("textworld") is None:
        pytest.skip("needs TextWorld: pip install -r requirements/textworld.txt")
    from envs.textworld import TextWorld

    make_world = functools.partial(TextWorld, cache=str(tmp_path))
    tasks, stats = explored(make_world, 2, make_world().tasks("train")[:2], rehearsals=2)
    assert len(tasks) == 2 and refuses(stats, "You can't go that way.")


@pytest.mark.services
def test_real_appworld_is_explored():
    python = os.environ.get(
        "EVOLVER_APPWORLD_PYTHON", str(ROOT / ".venv-appworld" / "bin" / "python")
    )
    if not os.path.exists(python):
        pytest.skip("AppWorld is not installed: make appworld")
    patient = Deadlines(start=300.0, reset=300.0, step=300.0)
    with Source(
        "appworld", {}, deadlines=patient, mode="worker", workers=2, per_worker=1, python=python
    ) as source:
        world = source.world()
        starts = world.tasks("train")[:1]
        world.close()
        tasks, _ = explored(source.world, 3, starts, breadth=12, depth=24, rehearsals=0)
    assert len(tasks) == 3
    assert all("complete_task" in task.reference[-1] for task in tasks)


def test_calls_that_may_show_a_change_later_are_all_tried_in_the_same_start():
    """Replaying the walk for one of them must not change what the next one is told."""
    refused, empty = Event("show", {"id": 1}, "", ok=False), Event("notes", {"id": 1}, "", ok=True)
    added = Event("add", {"id": 1}, "", "ok", ok=True, changes=True)
    state = mock.Mock(slow=False, battery=[], about=lambda event: [refused, empty])

    def again(call):
        full = state._is_made_possible.called and call is empty
        return dataclasses.replace(call, result="shown 7" if full else "")

    state.open.return_value = mock.Mock(over=False, again=again)
    StartState._await(state, [added])
    assert [probe.event.name for probe in state.battery if probe.awaits] == ["show", "notes"]
