"""Tasks whose ids are renamed: what the agent reads and writes, and what the world understands."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from docs.examples.lending import Lending
from envs.probed import probed
from envs.renamed import KEY, meant, renamed, shown
from envs.toolcalls import call_text
from envs.world import Task
from evolver.replaying import play
from tests.envs.playing import take_all


def desk_task(reference):
    return Task("t/1", "desk", "Lend B34 to M12 on 2026-03-04, 2 times.", reference=reference)


TASK = desk_task([call_text("lend", {"book": "B34", "member": "M12"}), "done"])


def test_ids_are_other_ids_of_their_form_in_the_words_and_the_solution():
    task = renamed(replace(TASK, meta={"named": ["B34"], "source": "B34"}), "a")
    book, member = re.findall(r"[BM]\d\d", task.query)
    assert book != "B34" and task.meta["named"] == [book] and task.meta["source"] == "B34"
    assert task.query == f"Lend {book} to {member} on 2026-03-04, 2 times."
    assert task.reference == [call_text("lend", {"book": book, "member": member}), "done"]
    assert renamed(TASK, "a").query == task.query != renamed(TASK, "b").query
    without = desk_task([call_text("find", {"day": "2026-03-04"})])
    assert renamed(without, "a") is without


@example("B\u0663\u0664 B34", "")  # digits of another script
@given(st.text() | st.from_regex(r"([BM][0-9]{1,6}|[ ,\"-]){0,9}", fullmatch=True), st.text())
def test_every_word_means_one_word(text, key):
    task = renamed(desk_task([call_text("lend", {"book": "B34", "member": "M1234567"})]), key)
    assert meant(task)(shown(task)(text)) == text == shown(task)(meant(task)(text))


def test_an_episode_with_other_ids_is_the_same_episode():
    world = probed(Lending())
    for task in world.tasks("train")[:8]:
        other = renamed(task, task.id)
        assert other.query != task.query and KEY in other.meta
        before, after = (play(world, t, t.seed, t.reference) for t in (task, other))
        assert before["success"] and after["success"]
        assert not play(world, other, other.seed, task.reference)["success"]
        change = shown(other)
        said = [[m["content"] for m in played["messages"]] for played in (before, after)]
        assert said[1] == list(map(change, said[0]))


def test_an_episode_with_other_ids_goes_on_from_a_snapshot():
    world = probed(Lending())
    task = world.tasks("train")[1]
    other = renamed(task, task.id)
    world.reset(other, other.seed)
    *calls, last = other.reference[:-1]
    take_all(world, calls)
    snapshot = world.snapshot()
    world.reset(task, task.seed)
    world.restore(snapshot)
    world.step(last)
    assert world.step("done").terminated and world.evaluate().success


@pytest.mark.parametrize("content", ["Do {}: M12 waits.", "{}"])
def test_what_stands_beside_the_query_is_renamed_once(content):
    class Opening(Lending):
        def reset(self, task, seed=0):
            observation = super().reset(task, seed)
            observation.messages[-1]["content"] = content.format(task.query)
            return observation

    task = renamed(replace(Lending().tasks("train")[1], query="Lend B34."), "a")
    said = probed(Opening()).reset(task, task.seed).messages[-1]["content"]
    assert said == shown(task)(content.format("{}")).format(task.query)
