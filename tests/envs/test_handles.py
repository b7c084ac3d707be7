"""What a world hands out anew in each episode has one name for whoever plays its tasks."""

import dataclasses
import json

import pytest

from envs import handles, make
from envs.probed import Probed, cells
from envs.toolcalls import call_text
from envs.world import StepResult, message, text_of
from tests.envs.playing import used

KIND = "login $.token"


def started(kinds=(KIND,), number=0):
    world = Probed(make("functions", module="tests.evolver.strangers.vault"))
    task = world.tasks("train")[number]
    task = dataclasses.replace(task, meta={handles.KEY: list(kinds)} if kinds else {})
    world.reset(task, task.seed)
    return world, task


def account(world, number=0):
    return json.loads(used(world, "show_accounts"))[number]


def login(world, number=0):
    """Return the name of the token that an account gets."""
    return json.loads(used(world, "login", **account(world, number)))["token"]


def test_the_same_login_gives_the_same_name_in_each_episode():
    first, second, third, unnamed = (login(started(kinds)[0]) for kinds in [(KIND,)] * 3 + [()])
    assert first == second == third != unnamed


def test_the_name_is_understood_and_other_accounts_have_other_names():
    world, _ = started()
    one, other = login(world, 0), login(world, 1)
    assert one != other
    assert used(world, "list_notes", token=one) != used(world, "list_notes", token=other)
    assert "not valid" in used(world, "list_notes", token="token_000000")
    assert login(world) == one and "note_id" in used(world, "list_notes", token=one)


def test_the_record_of_a_call_has_names_too():
    world, _ = started()
    result = world.step(call_text("login", account(world)))
    (made,) = result.info["calls"]
    assert made["result"] == text_of(result.messages)


def test_an_episode_goes_on_from_a_snapshot_with_the_tokens_of_its_own_logins():
    world, _ = started()
    token = login(world)
    (note, *_) = json.loads(used(world, "list_notes", token=token))
    snapshot = json.loads(json.dumps(world.snapshot()))
    other, _ = started(number=1)
    other.restore(snapshot)
    for playing in (world, other):
        assert used(playing, "lock_note", token=token, note_id=note["note_id"]) == "locked"
    world.restore(snapshot)
    shown = json.loads(used(world, "list_notes", token=token))
    assert not any(note["locked"] for note in shown)


def test_the_check_of_a_task_logs_in_by_itself():
    world, task = started()
    person, token = account(world), login(world)
    before = used(world, "list_notes", token=token)
    (note, *_) = json.loads(before)
    used(world, "lock_note", token=token, note_id=note["note_id"])
    after = used(world, "list_notes", token=token)
    ids = ["list_notes $[*].note_id"]
    entering = {"tool": "login", "action": call_text("login", person)}
    found = {"tool": "list_notes", "action": call_text("list_notes", {"token": token})}
    assert cells("list_notes", before) != cells("list_notes", after)

    def features(text):
        found = []
        for row in json.loads(text):
            fields = ((f"$[*].{field}", json.dumps(value)) for field, value in row.items())
            found += [[row["note_id"], label, value.strip('"')] for label, value in fields]
        return sorted(found)

    probe = found | {"before": features(before), "after": features(after)}
    known = [row["note_id"] for row in json.loads(before)]
    verifier = {
        "start": task.verifier, "probes": [entering, probe], "ids": ids, "known": known, "mask": [KIND],
        "code": False, "answer": None,
    }  # fmt: skip
    checked = dataclasses.replace(task, verifier=verifier)
    for locks in (True, False):
        world.reset(checked, task.seed)
        assert not world.evaluate().success
        assert used(world, "login", **person)
        if locks:
            used(world, "lock_note", token=token, note_id=note["note_id"])
        assert world.evaluate().success == locks
        assert world.evaluate() == world.evaluate()
        assert used(world, "list_notes", token=token) == (after if locks else before)
        world.step("done")
        assert world.evaluate().success == locks


@pytest.mark.parametrize("text", ["xtok_1", "tok_12", "tok_1"])
def test_only_whole_words_are_names(text):
    named = handles.Handles(["login $.token"])
    result = StepResult([message("tool", '{"token": "tok_1"}')])
    named.show(call_text("login", {}), result, cells)
    (name,) = named.real
    assert (named.meant(name) == "tok_1") and named.meant(f"x{name}") == f"x{name}"
    later = StepResult([message("tool", text)])
    named.show(call_text("look", {}), later, cells)
    assert text_of(later.messages) == (name if text == "tok_1" else text)
