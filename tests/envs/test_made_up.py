"""Made-up worlds: every own task is solved by its reference, hidden rules hold, and what later
worlds are tested with is not shown."""

import itertools
import json
import random
import re

import pytest

from envs.call_formats import Hermes
from envs.made_up import MadeUp, demos, plan, words
from envs.made_up.demos import demonstrate, reading
from envs.made_up.plan import plan_of
from envs.made_up.tasks import own_task
from envs.made_up.world import STARTS, start_of, text_of
from envs.source import Source
from envs.wording import summaries
from models.tokenizer import Tokenizer
from rl.contexts import brief
from tests.envs.playing import assert_conforms, calls_of, play, without

NUMBERS = range(300)


def tasks():
    return [own_task(number * STARTS + number % 7) for number in NUMBERS]


@pytest.mark.parametrize("number", [0, 17, 4242])
def test_it_keeps_the_contract_of_an_environment(number):
    with Source("made_up", {"number": number}, mode="inprocess") as source:
        assert_conforms(source.world, limit=4)


def test_references_solve_the_tasks_and_nothing_less_does():
    for task in tasks():
        assert play(MadeUp(), task, task.reference).success, task
        if task.verifier["state"]:
            assert not play(MadeUp(), task, task.reference[-1:]).success, task


def schemas_of(number):
    return str([op.schema for op in plan_of(number).operations])


def found_by(call, entity):
    """Return whether a call lists entities, or finds this one by its name."""
    return not call.arguments or [entity["name"]] == list(call.arguments.values())


def test_a_query_tells_all_that_its_goals_need_and_no_id_that_has_to_be_looked_up():
    looked_up = 0
    for task in tasks():
        calls = calls_of(task)
        kinds = start_of(plan_of(task.seed // STARTS), task.seed).entities
        entities = dict(itertools.chain(*(kind.items() for kind in kinds)))
        for n, call in enumerate(calls):
            for value in map(text_of, call.arguments.values()):
                told = value in task.query or n in task.meta["needed"]
                known_by = entities[value].values() if not told else ()
                assert told or any(field in task.query for field in known_by), task
                looked_up += not told
                assert told or any(found_by(c, entities[value]) for c in calls[:n]), task
    assert looked_up > 100


def test_half_of_the_tasks_are_in_the_explorers_words():
    """They name a tool by its description, with its arguments behind it or inside it."""
    described = 0
    for task in tasks():
        plan_ = plan_of(task.seed // STARTS)
        texts = summaries({op.name: op.description for op in plan_.operations}).values()
        words_ = re.sub(r"^Please ", "", task.query).lower()
        described += any(words_.startswith(text.lower().split(" a ")[0][:9]) for text in texts)
    assert 100 < described < 200


def test_no_parameter_has_the_name_of_another():
    for number in NUMBERS:
        for op in plan_of(number).operations:
            roles = len(plan.ROLES[op.does].split())
            assert len(op.parameters) == roles - (
                op.kind.single and "entity" in plan.ROLES[op.does]
            )


def test_a_goal_is_refused_until_the_call_that_its_rule_needs():
    ruled = [task for task in tasks() if task.meta["needed"]]
    assert len(ruled) > 20
    for task in ruled:
        rest = without(task.reference, task.meta["needed"][0])
        assert not play(MadeUp(), task, rest).success, task


def test_worlds_differ_and_depend_on_their_number_alone():
    tools = set(map(schemas_of, NUMBERS))
    assert len(tools) == len(NUMBERS)
    plan_of.cache_clear()
    assert set(map(schemas_of, NUMBERS)) == tools


def test_some_demonstrations_find_a_rule_out():
    """They are refused, make the missing call, and repeat the refused one."""
    found = 0
    for n in range(430):  # 300 of them act, the others read lists
        said = [m["content"] for m in demonstrate(random.Random(n), care=1.0, hint=0.0)["messages"]]
        found += any(said.count(text) > 1 for text in said if text.startswith("<tool_call>"))
    assert 10 < found < 150


def test_exercises_in_reading_ask_for_what_stands_beside_the_name():
    for n in NUMBERS:
        asked, answer = [m["content"] for m in reading(random.Random(n), n * STARTS)["messages"]]
        *_, rows = asked.partition("\n") if ": " not in answer else ("", "", asked)
        pairs = (
            [line.split(": ", 1) for line in answer.split("\n")]
            if ": " in answer
            else (list(zip(asked.split("\n")[0].split(", "), answer.split(", "))))
        )
        if rows.startswith("["):
            rows = "\n".join(" ".join(map(str, entity.values())) for entity in json.loads(rows))
        for told, sought in pairs:
            assert any(told in row and sought in row for row in rows.split("\n")), (told, rows)


def test_the_text_that_introduces_tools_takes_few_tokens():
    introduction = brief.CALLS.format(Hermes.example)
    assert all(text in introduction for text in demos.TOKENS[len(plan.SYSTEMS) - 1 :])


def test_words_of_the_worlds_that_policies_are_tested_in_are_not_shown():
    pools = " ".join(str(value) for name, value in vars(words).items() if name.isupper())
    pools += str([schemas_of(number) for number in NUMBERS])
    known = "member book fine lend pay thermostat temperature degrees room kitchen Dune Hana"
    assert not set(known.lower().split()) & set(re.findall("[a-z]+", pools.lower()))


def test_the_reader_gives_a_word_the_same_ids_wherever_it_stands():
    """So a name of a tool or an id that it copies from a line, a query or JSON is the same ids."""
    tokenizer = Tokenizer.load("configs/assets/reader")
    for word in ("crate", "Oslo", "C44", "kelmo", "lending", "thermostat", "unlockDoor"):
        ids = tokenizer.encode(word)
        for before, after in ((" ", "."), ('"', '"'), ("(", ")"), ("_", ",")):
            assert tokenizer.encode(f"{before}{word}{after}")[1:-1] == ids, (before, word)
