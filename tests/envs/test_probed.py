"""Probes check what changed, nothing else, and leave the episode as it was, whatever the world
is."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.probed import (
    Probed,
    answered,
    cells,
    digest,
    features,
    judge,
    new_ids,
    possible_names,
    probed,
)  # fmt: skip
from envs.toolcalls import call_text
from envs.travel import Travel
from envs.world import Observation, StepResult, World
from tests.envs.playing import begin, take_all
from tests.evolver.toy import Library, NoSnapshots, attempt, call, task

IDS = ["B99"]


def shelf(colour):
    return {"tool": "shelf", "action": call("shelf", colour)}


def feature_list(text):
    return features(cells("shelf", text), IDS, {}, [])


def lend_b11(**changes):
    """Return a task to lend the first red book, which watches the other books."""
    red = "B11 Dune red\nB12 Emma red"
    verifier = {
        "start": {"state": [], "answer": None},
        "probes": [
            shelf("red") | {"before": feature_list(red), "after": feature_list("B11 Dune red lent\nB12 Emma red")},
            shelf("blue") | {"digest": digest(feature_list("B13 Ulysses blue\nB14 Kim blue"))},
        ],
        "ids": IDS, "known": ["B11", "B12", "B13", "B14", "B15"], "mask": [], "code": False, "answer": None,
    }  # fmt: skip
    return dataclasses.replace(task("Lend Dune."), verifier=verifier | changes)


SEEN = [call("shelf", "red"), call("lend", "B11")]
MARKED = [call("shelf", "blue"), call("mark", "B13")]  # a book that the task does not ask for


def evaluated(world, task, *actions):
    """Return the evaluation of an episode of these actions."""
    return attempt(Probed(world), task, list(actions)).evaluation


class Counted(NoSnapshots):
    resets = 0

    def reset(self, task, seed=0):
        self.resets += 1
        return super().reset(task, seed)


class Goes(NoSnapshots):
    """A text does not end the episode."""

    def step(self, action):
        return dataclasses.replace(super().step(action), terminated=False)


class Short(Library):
    """The episode ends after four turns, probes included."""

    def reset(self, task, seed=0):
        self.left = 4
        return super().reset(task, seed)

    def step(self, action):
        self.left -= 1
        if self.left < 0:
            return StepResult([], terminated=True)
        result = super().step(action)
        return dataclasses.replace(result, truncated=not self.left)

    def snapshot(self):
        return [super().snapshot(), self.left] if self.snapshots else super().snapshot()

    def restore(self, snapshot):
        super().restore(snapshot[0])
        self.left = snapshot[1]


class ShortNoSnapshots(Short):
    snapshots = False


some_actions = st.lists(
    st.sampled_from([*SEEN, call("shelf", "blue"), call("mark", "B13"), "done", "B11"]), max_size=6
)


# --- worlds without snapshots ---------------------------------------------------------------------


@given(some_actions, st.sampled_from([(Library, NoSnapshots), (Short, ShortNoSnapshots)]))
@settings(max_examples=150, deadline=None)
def test_a_world_without_snapshots_scores_as_with_them(actions, worlds):
    task = lend_b11(answer={"value": "B11", "others": ["B12"]})
    with_them, without = (attempt(Probed(world()), task, actions) for world in worlds)
    assert without.evaluation == with_them.evaluation
    assert [t.observation for t in without.turns] == [t.observation for t in with_them.turns]


def test_without_snapshots_an_episode_and_its_check_are_one_start():
    for actions in ([*SEEN, "done"], SEEN, ["done"]):
        world = Counted()
        attempt(Probed(world), lend_b11(), actions)
        assert world.resets == 1


def test_without_snapshots_the_episode_goes_on_after_a_text_that_does_not_end_it():
    plain, checked = Goes(), Probed(Goes())
    plain.reset(task("Lend Dune."))
    checked.reset(lend_b11())
    for action in ["done", call("lend", "B11"), *SEEN, "done", call("mark", "B13")]:
        assert checked.step(action).messages == plain.step(action).messages
    assert checked.evaluate().success


def test_without_snapshots_an_action_that_is_a_text_is_no_end():
    class Typed(Counted):
        def reset(self, task, seed=0):
            return Observation(super().reset(task, seed).messages)

    world = Typed()
    attempt(Probed(world), lend_b11(), ["look"])
    assert world.resets == 2  # the second is the check after the end


# --- checking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [Library, NoSnapshots])
def test_a_check_asks_for_the_change_and_for_nothing_else(world):
    def score(*actions):
        return evaluated(world(), lend_b11(), *actions)

    assert score(*SEEN, "done").success and score(*SEEN).success
    assert score("done").score == score().score == 0.0
    other = [call("shelf", "red"), call("lend", "B12")]
    assert score(*other, "done").score == 0.0
    both = score(*SEEN, *other)
    assert not both.success and both.score < 0.5
    beside = score(*SEEN, *MARKED)
    assert not beside.success and beside.components["state"] == 0.0


@pytest.mark.parametrize("world", [Library, NoSnapshots])
def test_the_episode_goes_on_where_it_was_before_its_check(world):
    plain, checked = world(), Probed(world())
    plain.reset(task("Lend Dune."))
    checked.reset(lend_b11())
    for action in [call("lend", "B11"), *SEEN, call("mark", "B13"), *MARKED]:
        before = checked.evaluate()
        assert checked.evaluate() == before
        assert checked.step(action).messages == plain.step(action).messages


def test_a_probe_of_an_unseen_book_does_not_help_the_agent():
    """The probes look at shelves; in the episode itself a book must still be seen before it is
    lent."""
    world = Probed(Library())
    world.reset(lend_b11())
    world.evaluate()
    assert world.step(call("lend", "B11")).info["errors"] == 1


def test_snapshots_hold_the_task():
    world, other = Probed(Travel(n_train=2)), Probed(Travel(n_train=2))
    begin(world)
    world.step(call_text("flights", {"to": "Rome"}))
    other.restore(json.loads(json.dumps(world.snapshot())))
    for action in world.tasks("train")[0].reference:
        assert world.step(action) == other.step(action)
    assert world.evaluate() == other.evaluate()


def test_tasks_without_probes_are_the_worlds_own():
    world, own = Probed(Travel(n_train=6)), Travel(n_train=6)
    for one in own.tasks("train"):
        scores = [attempt(w, one, one.reference).evaluation for w in (world, own)]
        assert scores[0] == scores[1]
    assert world.difference() == own.difference() and probed(world) is world


def test_an_answer_that_the_world_reports_counts_instead_of_the_text():
    class Computes(Library):
        def step(self, action):
            result = super().step(action)
            answer = {"answer": "Kim"} if result.terminated else {}
            return dataclasses.replace(result, info=result.info | answer)

    task = lend_b11(answer={"value": "Kim", "others": []})
    world = Probed(Computes())
    world.reset(task)
    take_all(world, [*SEEN, "print(name)"])
    assert world.evaluate().success
    later = Probed(Computes())
    later.restore(world.snapshot())
    assert later.evaluate().success
    assert not evaluated(Library(), task, *SEEN, "print(name)").success


def test_the_end_of_an_episode_by_a_call_is_checked_too():
    class Ends(Library):
        """Lending ends the episode, and after that nothing is shown."""

        over = False

        def reset(self, task, seed=0):
            self.over = False
            return super().reset(task, seed)

        def step(self, action):
            if self.over:
                return dataclasses.replace(super().step("over"), terminated=True)
            result = super().step(action)
            self.over = "lend" in action and not result.info["errors"]
            return dataclasses.replace(result, terminated=result.terminated or self.over)

    # What the last call changed cannot be seen.
    assert not evaluated(Ends(), lend_b11(), *SEEN).success
    marked = lend_b11()
    marked.verifier["probes"][0]["after"] = feature_list("B11 Dune red marked\nB12 Emma red")
    actions = [call("shelf", "red"), call("mark", "B11"), "done"]
    assert evaluated(Ends(), marked, *actions).success


def test_an_answer_counts_only_if_nothing_else_changed():
    def score(*actions):
        asked = lend_b11(answer={"value": "Dune", "others": ["Emma"]})
        return evaluated(Library(), asked, *SEEN, *actions)

    assert score("Dune").success and not score("Dune or Emma").success
    assert score("done").score < 0.5
    assert score(*MARKED, "Dune").score <= score("no").score


def test_a_verifier_is_json():
    assert json.loads(json.dumps(lend_b11().to_dict())) == lend_b11().to_dict()


# --- ids ------------------------------------------------------------------------------------------


def test_things_that_were_made_in_another_order_are_the_same():
    ids, views = ["O99"], []
    for rows in (["Ann Rome O77", "Ben Oslo O12"], ["Ann Rome O12", "Ben Oslo O77"]):
        readings = [cells("orders", row) for row in rows]
        names = new_ids(readings, ids, {"O11"})
        views.append([features(inner, ids, names, []) for inner in readings])
    assert views[0] == views[1]
    # An id that was there before is not renamed.
    assert list(new_ids(readings, ids, {"O77"})) == ["O12"]


def test_the_row_of_a_value_matters():
    a, b = (cells("orders", text) for text in ("O11 bag\nO12", "O11\nO12 bag"))
    assert features(a, ["O99"], {}, []) != features(b, ["O99"], {}, [])


def test_a_row_is_known_by_its_id_by_what_names_it_or_by_the_row_it_is_in():
    notes = [{"id": "n1", "tags": ["home"]}, {"id": "n2", "tags": []}]
    tagged = features(cells("notes", json.dumps(notes)), ["notes $[*].id"], {}, [])
    assert ["n1", "$[*].tags[*]", "home"] in tagged
    zones = cells("status", '{"hall": {"light": "off"}, "bath": {"light": "on"}}')
    named = features(zones, [], {}, [], ["status $[*].name"])
    assert ["hall", "$[*].light", "off"] in named and ["bath", "$[*].light", "on"] in named


def test_what_varies_by_itself_is_masked():
    a, b = (cells("now", f'{{"time": "10:{minute}", "state": 1}}') for minute in (31, 32))
    assert features(a, [], {}, ["now $.time"]) == features(b, [], {}, ["now $.time"])
    assert features(a, [], {}, []) != features(b, [], {}, [])


# --- cells ----------------------------------------------------------------------------------------


def test_a_mark_before_some_lines_is_a_value_of_theirs():
    now, then = "  main\n* dev\n  docs", "* main\n  dev\n  docs"
    shown = [features(cells("branches", text), ["branches@0"], {}, []) for text in (now, then)]
    assert ["dev", "", "*"] in shown[0] and ["main", "", "*"] in shown[1]
    for plain in ("* main\n* dev", "2 * 3\nmain", "*\nmain", "main"):
        assert "*" not in [cell.value for cell in cells("branches", plain)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_answer_has_cells(value):
    found = cells("tool", json.dumps(value))
    assert all(isinstance(cell.value, str) and cell.kinds for cell in found)
    features(found, [], {}, [])


@given(st.text())
def test_any_text_has_cells(text):
    assert cells("tool", text) == cells("tool", text)


def test_cells_have_paths_and_positions():
    (cell, _) = cells("list", '{"orders": [{"id": "O12", "paid": true}]}')
    assert (cell.row, cell.label, cell.value) == ("$.orders[0]", "$.orders[*].id", "O12")
    kinds = [cell.kinds for cell in cells("list", "Ann O12 gold")]
    assert kinds == [("list@0", "list@-3"), ("O99",), ("list@2", "list@-1")]


def test_the_fields_of_an_object_may_be_rows():
    zones = {"zones": {"hall": {"light": "off"}, "bath": {"light": "on"}}}
    found = [(c.row, c.label, c.value) for c in cells("status", json.dumps(zones))]
    assert found == [
        ("$.zones.hall", "$.zones[*].zone", "hall"),
        ("$.zones.hall", "$.zones[*].light", "off"),
        ("$.zones.bath", "$.zones[*].zone", "bath"),
        ("$.zones.bath", "$.zones[*].light", "on"),
    ]
    (name, fine) = cells("fines", '{"M12": 3}')
    assert (name.label, name.value, fine.label) == ("$[*].id", "M12", "$[*]")
    (light, _) = cells("status", '{"hall": {"light": "off"}, "pump": {"on": true}}')
    assert light.label == "$.hall.light"  # other fields: these are no rows


def test_a_table_has_columns():
    text = "| id | title |\n|---|---|\n| C1 | Fix login |"
    found = [(c.row, c.value, c.kinds) for c in cells("board", text)]
    assert found[-2:] == [("2", "C1", ("C9",)), ("2", "Fix login", ("board@1", "board@-1"))]
    assert len(found) == 4


def test_ids_of_one_form_that_name_fields_are_rows():
    found = cells("drawers", '{"A1": null, "B2": "pea"}')
    assert [(cell.row, cell.value) for cell in found] == [
        ("$.A1", "A1"), ("$.B2", "B2"), ("$.B2", "pea"),
    ]  # fmt: skip
    assert len(found[0].kinds) == 1 and found[0].kinds == found[1].kinds
    box = cells("box", '{"x1": 0, "y1": 5}')  # small letters: fields
    assert [cell.label for cell in box] == ["$.x1", "$.y1"]


def test_names_of_several_words_and_of_fields():
    for text, names in (
        ("Mr Bean: room 12\nAnn\n", ["Mr Bean", "room 12"]),
        ("Two:\n- red box (2 kg)\n1. tin\n2) old lamp, dim", ["red box", "2 kg", "old lamp"]),
        ('{"figs": 3, "pears": 0, "plums": 8}', ["figs", "pears", "plums"]),
        ('{"Sleep": [], "Party": ["x"]}', ["Sleep", "Party"]),
        (
            '{"plan": {"ann": "owner", "bo": "reader"}, "memo": {"cy": "owner"}}',
            ["plan", "memo", "ann", "bo", "cy"],
        ),
        ('{"plan": {"owner": "ann"}, "memo": {"owner": "bo"}}', []),  # a table, which has cells
        ('{"hall": {"light": "off"}, "pump": {"on": true}}', []),
        ('{"Ann": "paid", "Bo": "due"}', ["Ann", "Bo"]),
        (
            '{"kale": true, "pea": false, "leek": true, "beet": true}',
            ["kale", "pea", "leek", "beet"],
        ),
        ('{"kind": "pea", "state": "dry", "shelf": "low"}', []),  # fields of one thing
        ('{"x": 1, "y": 2}', []),
        ('{"a": 1, "b": 2, "c": "d"}', []),
        ("{", []),
        ("Mr Bean", []),
    ):
        assert [cell.value for cell in possible_names("tool", text)] == names


def test_deep_answers_do_not_break():
    assert [cell.value for cell in cells("tool", "[" * 100_000 + "x")] == ["x"]


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        ("gold", ["gold", "It is gold.", "GOLD"], ["golden", "silver", "gold or silver", ""]),
        ("3", ["There are 3."], ["3 or 4"]),
        ("6", ["6.0"], ["6.5", "O6", ""]),
        ("0.0", ["It is 0."], []),
        ("-5", ["-5"], ["5"]),
        ("5", [], ["2,5"]),
        ("140", ["$140"], []),
        ("9" * 401, [], ["9" * 400]),
    ],
)
def test_answers(value, right, wrong):
    for text in (*right, *wrong):
        assert answered(text, {"value": value, "others": ["silver", "blue"]}) is (text in right)


def test_no_probe_means_no_success():
    verifier = {"probes": [], "ids": [], "known": [], "mask": [], "answer": None}
    assert not judge(verifier, [], "done").success


def test_a_snapshot_needs_an_episode():
    with pytest.raises(RuntimeError, match="no episode"):
        Probed(Library()).snapshot()


def test_every_other_method_is_the_worlds():
    class Extra(World):
        name = "extra"

        def more(self):
            return 3

    assert Probed(Extra()).more() == 3
    with pytest.raises(AttributeError):
        Probed(Extra()).less()
