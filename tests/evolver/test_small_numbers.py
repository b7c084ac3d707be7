"""Queries in worlds whose ids are small numbers, which other arguments take too."""

import json
import random

from evolver.questioning.calls import Event, Operation
from evolver.questioning.goals import Goal
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.phrasing import Phrasing

ORDERS = json.dumps({"page": 1, "orders": [{"id": 1, "dish": "soup"}, {"id": 2, "dish": "stew"}]})
IDS = {"orders $.orders[*].id", "new Oslo $.id"}


def call(name, arguments, result="ok", tool=""):
    action = json.dumps({"name": tool or name, "arguments": arguments})
    given = {} if tool else arguments
    return Event(name, given, f"<tool_call>\n{action}\n</tool_call>", result, ok=True)


def query(*events, ids=("id",)):
    """Return the query that asks for the last call. ids: arguments that are ids."""
    operations = {e.name: Operation(e.name, e.name, {}, [], str) for e in events}
    phrasing = Phrasing(operations, IDS, makes_sense=lambda operation, path, value: path[-1] in ids)
    return phrasing.query(Goal(events, [len(events) - 1], None), random.Random(0))[0]


def test_a_thing_is_not_named_by_another_one_with_the_same_number():
    assert "id soup" in query(call("orders", {}, ORDERS), call("serve", {"id": 1}))
    assert "table 2" in query(call("orders", {}, ORDERS), call("clean", {"table": 2}))


def test_the_number_that_a_look_up_takes_is_named_with_its_field():
    shown = json.dumps({"orders": [{"id": 7, "dish": "stew"}]})
    assert "page 3" in query(call("orders", {"page": 3}, shown), call("serve", {"id": 7}))


def test_what_a_choice_has_made_is_named_by_the_choice():
    made = call("new Oslo", {"to": "Oslo"}, json.dumps({"id": 5}), tool="new")
    assert "id Oslo" in query(made, call("send", {"id": 5}))


def test_an_argument_with_the_name_of_an_ids_field_takes_ids():
    stats = OperationStats()
    stats.kinds = {
        "cancel.visit_id": {"visits $[*].visit_id": [9, 10], "cancel@1": [9, 9]},
        "move.dock": {"visits $[*].visit_id": [1, 1]},
        "rent.dock": {"visits $[*].visit_id": [8, 8], "docks $[*].place": [8, 8]},
    }
    places = ("cancel.visit_id", "move.dock", "rent.dock")
    assert [stats.prefers_ids(place) for place in places] == [True, False, False]
