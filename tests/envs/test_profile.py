"""Profiles drafted from tool schemas: every tool and parameter appears, whatever the names look
like."""

import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import make, profile
from envs.process import ROOT
from evolver.parts import Parts
from tests.envs.playing import begin


def tool(name, *parameters, **more):
    properties = {parameter: {"type": "string"} for parameter in parameters}
    function = {"name": name, "parameters": {"properties": properties}} | more
    return {"type": "function", "function": function}


def grouped(drafted):
    entities = drafted["entities"]
    return {entity["name"]: {o["name"] for o in entity["operations"]} for entity in entities}


def test_tools_are_grouped_by_a_shared_noun():
    tools = [
        tool("book_flight", "city", "day", description="Book a seat."),
        tool("cancelFlight", "booking"),
        tool("list_flights", "city"),
        tool("send_message", "text"),
        tool("delete_message", "id"),
        tool("ping"),
    ]
    drafted = profile.draft("agency", tools)
    assert grouped(drafted) == {
        "flight": {"book_flight", "cancelFlight", "list_flights"},
        "message": {"send_message", "delete_message"},
        "agency": {"ping"},
    }
    flight = drafted["entities"][0]
    assert flight["attributes"] == ["booking", "city", "day"]
    assert flight["operations"][0] == {"name": "book_flight", "description": "Book a seat."}
    assert drafted["task_preference"] == profile.PREFERENCE


parameters = st.lists(st.text(min_size=1, max_size=5), max_size=3)


@given(st.lists(st.tuples(st.text(max_size=12), parameters), max_size=8))
def test_every_tool_is_an_operation_once_and_the_draft_is_json(named):
    drafted = profile.draft("world", [tool(name, *parameters) for name, parameters in named])
    operations = itertools.chain(*(entity["operations"] for entity in drafted["entities"]))
    assert sorted(o["name"] for o in operations) == sorted(name for name, _ in named)
    attributes = [entity["attributes"] for entity in drafted["entities"]]
    assert set().union(*attributes) == set().union(*(given for _, given in named))
    assert json.loads(json.dumps(drafted)) == drafted


def test_schemas_without_parameters_or_descriptions_are_drafted_too():
    bare = {"type": "function", "function": {"name": "go"}}
    none = tool("stop", description=None, parameters=None)
    assert grouped(profile.draft("w", [bare, none])) == {"w": {"go", "stop"}}
    assert profile.draft("w", [])["entities"] == []


def test_the_command_prints_the_worlds_own_profile_or_a_draft(capsys):
    assert profile.main(["travel"]) == 0
    assert json.loads(capsys.readouterr().out) == make("travel").profile()
    assert profile.main(["travel", "--draft"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    world = make("travel")
    offered = {t["function"]["name"] for t in begin(world).tools}
    groups = grouped(drafted)
    assert set().union(*groups.values()) == offered and {"order", "seat"} <= set(groups)
    done = subprocess.run(
        [sys.executable, "-m", "envs.profile", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--draft" in done.stdout


def test_an_explorer_drafts_a_missing_profile():
    from envs.travel import Travel
    from evolver.questioning import TaskPool
    from evolver.questioning.llm import LlmExplorer
    from evolver.questioning.profiles import profile_text

    class Silent(Travel):
        def profile(self):
            return {}

    tasks = Silent().tasks("train")[:3]
    pool = TaskPool(tasks, overlap=0.8, capacity=8)
    explorer = LlmExplorer(
        Parts(make_world=Silent, client=object(), max_chars=2000, task_pool=pool)
    )
    text = profile_text(explorer.profile)
    assert "- order (" in text and "    refund" in text
    with pytest.raises(KeyError):
        profile.draft("w", [{"type": "function"}])
