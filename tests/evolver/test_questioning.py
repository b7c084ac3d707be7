"""Synthetic tasks can be solved but not by doing nothing, their queries give enough information,
and all differ."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from configs import base
from envs.probed import Probed
from envs.toolcalls import call_text, parse
from envs.travel import Travel
from envs.travel.agency import FAMILY, Agency
from envs.travel.data import data
from envs.travel.profile import PHRASES
from envs.world import Evaluation, Task, World, text_of
from evolver.build import RunError, make_tasks
from evolver.config import plugs
from evolver.parts import Parts
from evolver.phases.tasks import explore, invent
from evolver.processes.interrupt import Interrupted, Stop
from evolver.questioning import TaskPool, probe_of, synthetic_task
from evolver.questioning.calls import Event, _renamed
from evolver.questioning.curiosity import Curiosity
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.tasks import infeasibility, jaccard
from evolver.questioning.values import SeenValues
from evolver.questioning.walks import Walker
from evolver.replaying import opening_words, values_used
from evolver.sampling import Draw, Epochs
from evolver.transcripts import words
from tests.evolver.toy import BOOKS, Library, attempt, call, task

SOLARIS = task("Lend Solaris.", lent=["B15"])


class NoSnapshots(Library):
    snapshots = False


@pytest.fixture(scope="module")
def thermostat(tmp_path_factory):
    """Return the class of the example in docs/environments.md."""
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    file = tmp_path_factory.mktemp("example") / "thermostat.py"
    file.write_text(re.search(r"```python\n(# thermostat.py\n.*?)```", text, re.DOTALL).group(1))
    return runpy.run_path(str(file))["Thermostat"]


class Bare(Travel):
    """The travel agency with nothing but its tools: no profile and no comparison of states."""

    profile = World.profile

    def __getattribute__(self, name):
        if name in ("difference", "describe"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def evaluate(self):
        return Evaluation(0.0, False)  # so that nothing but the probes can tell a success


class Questioning:
    """A pool that the curiosity explorer fills."""

    def __init__(self, make_world, seeds, *, capacity=512, **options):
        self.make_world, self.pool = make_world, TaskPool(seeds, overlap=0.8, capacity=capacity)
        self.explorer = Curiosity(Parts(task_pool=self.pool), **options)

    def explore(self, seed, budget):
        found = self.pool.grow(self.explorer, self.make_world, budget, seed)
        self.pool.shrink()
        return found


@pytest.fixture(scope="module")
def seeds():
    return Travel(n_train=24).tasks("train")


@pytest.fixture(scope="module")
def questioning(seeds):
    made = Questioning(Bare, seeds)
    made.explore(seed=7, budget=64)
    return made


@pytest.fixture(scope="module")
def tasks(questioning):
    return list(questioning.pool.tasks.values())


def calls_of(the_task):
    return [action for action in the_task.reference if parse(action).calls]


class TestTasks:
    def test_there_are_as_many_as_asked_for_from_most_of_the_worlds(self, tasks, seeds):
        assert len(tasks) == 64
        assert len({the_task.seed for the_task in tasks}) > len(seeds) / 2

    def test_the_reference_solves_each_and_doing_nothing_none(self, tasks):
        world = Probed(Bare())
        for the_task in tasks:
            for actions, score in ((the_task.reference, 1.0), (["done"], 0.0), ([], 0.0)):
                assert attempt(world, the_task, actions).evaluation.score == score, the_task.query

    def test_no_call_of_a_reference_can_be_left_out(self, tasks):
        """Without any one call another is refused, the end is not reached, or the answer is not
        known."""
        world = Probed(Travel())
        for the_task in tasks:
            for n in range(len(calls_of(the_task))):
                trajectory = attempt(
                    world, the_task, the_task.reference[:n] + the_task.reference[n + 1 :]
                )
                refused = any(step.info["errors"] for step in trajectory.turns)
                assert (
                    refused or not trajectory.evaluation.success or the_task.verifier["answer"]
                ), the_task.query

    def test_their_verifiers_agree_with_the_worlds_own_comparison(self, tasks):
        """Whatever is played, a task without a question is solved exactly if its solution changes
        the same. What the explorer never saw is not watched, so that a change of it passes now and
        then.

        Played are solutions of other tasks in the same world, and solutions with another change
        before them.
        """
        world, agreed = Probed(Travel()), Counter()
        for one in tasks:
            if one.verifier["answer"]:
                continue
            others = [calls_of(other) for other in tasks if other.seed == one.seed]
            for id in data(one.seed).orders:
                others.append(
                    [
                        call_text("order", {"id": id}),
                        call_text("bag", {"order": id}),
                        *calls_of(one),
                    ]
                )
                others.append([call_text("order", {"id": id}), call_text("cancel", {"order": id})])
            differences = []
            for actions in [calls_of(one), *others]:
                attempt(
                    world.world, dataclasses.replace(one, verifier=one.verifier["start"]), actions
                )
                differences.append(world.world.difference())
            for actions, difference in zip(others, differences[1:], strict=True):
                success = attempt(world, one, [*actions, "done"]).evaluation.success
                agreed[success == (difference == differences[0])] += 1
        assert agreed[True] > 100 and agreed[False] <= 0.05 * agreed.total(), agreed

    def test_ids_are_unique_and_no_originals(self, tasks, seeds):
        ids = [the_task.id for the_task in tasks]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & {the_task.id for the_task in seeds}
        assert all(
            the_task.origin == "synthetic" and the_task.split == "train" for the_task in tasks
        )

    def test_goals_differ_from_each_other(self, tasks):
        for one, other in itertools.combinations(tasks, 2):
            if one.seed == other.seed:
                assert (
                    jaccard(*(frozenset(re.findall(r"\w+", t.query.lower())) for t in (one, other)))
                    < 0.8
                )
                assert calls_of(one) != calls_of(other)

    def test_everything_used_is_in_the_query_or_was_shown(self, tasks):
        world = Probed(Travel())
        for the_task in tasks:
            known = opening_words(world.reset(the_task))
            for action in calls_of(the_task):
                assert all(value in known for value in values_used(action)), (
                    the_task.query,
                    action,
                )
                known += words(text_of(world.step(action).messages))

    def test_queries_name_no_id_that_has_to_be_found_out(self, tasks):
        for the_task in tasks:
            for id in re.findall(r"\b[FPO]\d\d\b|\b\d[ABC]\b", the_task.query):
                first = next(action for action in the_task.reference if id in action)
                shown = Probed(Travel())
                shown.reset(the_task)
                for action in the_task.reference[: the_task.reference.index(first)]:
                    assert id not in text_of(shown.step(action).messages), the_task.query

    def test_queries_do_not_give_the_answer_away(self, tasks):
        for the_task in tasks:
            answer = the_task.verifier["answer"]
            assert answer is None or words(answer["value"]) not in words(the_task.query), (
                the_task.query
            )

    def test_no_phrase_of_the_hand_written_tasks_is_known(self, tasks):
        phrases = itertools.chain(*PHRASES.values())
        wordings = {" ".join(re.sub(r"{\w+}", " ", phrase).split()[:3]) for phrase in phrases}
        descriptions = " ".join(tool["function"]["description"].lower() for tool in Agency.schemas)
        for wording in wordings:
            if wording not in descriptions:
                assert not any(wording in the_task.query.lower() for the_task in tasks), wording

    def test_they_keep_to_the_limits(self, tasks):
        levels = Counter(the_task.difficulty for the_task in tasks)
        assert all(t.difficulty == len(t.reference) - 1 for t in tasks)
        assert min(levels) >= 1 and max(levels) <= 6
        assert len(levels) >= 5 and max(levels.values()) < len(tasks) / 2

    def test_they_are_records(self, tasks):
        for the_task in tasks:
            assert Task.from_dict(json.loads(json.dumps(the_task.to_dict()))) == the_task

    @pytest.mark.parametrize("make_world", [Library, NoSnapshots])
    def test_another_world_needs_no_code_of_its_own(self, make_world):
        made = Questioning(make_world, [SOLARIS], breadth=4, depth=8)
        found = made.explore(seed=1, budget=8)
        assert len(found) == 8
        assert all(infeasibility(Probed(make_world()), t) == "" for t in found)
        assert {t.meta["template"] for t in found} >= {"lend", "mark", "?shelf"}
        assert not any(
            re.search(r"B\d\d", t.query) for t in found if "shelf" in "".join(t.reference)
        )

    def test_a_world_that_shows_its_own_tasks_only_is_refused(self):
        class Deaf(Library):
            def reset(self, task, seed=0):
                return super().reset(dataclasses.replace(task, query="Lend Solaris."), seed)

        with pytest.raises(
            ValueError, match=r"'library' cannot be explored.*does not show that query"
        ):
            Questioning(Deaf, [SOLARIS]).explore(seed=0, budget=1)
        with pytest.raises(ValueError, match="there are none"):
            Questioning(Library, [])

    def test_a_world_that_does_not_start_is_no_matter_of_its_queries(self):
        class Broken(Library):
            def reset(self, task, seed=0):
                raise RuntimeError("no licence is left")

        with pytest.raises(ValueError, match=r"cannot be explored.*no licence is left") as failure:
            Questioning(Broken, [SOLARIS]).explore(seed=0, budget=1)
        assert "task.query" not in str(failure.value)

    def test_a_few_worlds_where_every_tool_wants_an_id_give_tasks(self):
        made = Questioning(
            lambda: Bare(rules=2, seed=2), Travel(n_train=4, rules=2, seed=2).tasks("train")
        )
        assert len(made.explore(seed=3, budget=4)) == 4

    def test_a_world_without_tools_gives_nothing_and_ends(self):
        class Mute(Library):
            def reset(self, task, seed=0):
                return dataclasses.replace(super().reset(task, seed), tools=[])

        assert Questioning(Mute, [SOLARIS]).explore(seed=0, budget=3) == []


class TestRoles:
    def test_what_changes_the_world_is_found_out(self, questioning):
        stats = questioning.explorer.walker.stats
        tools = [tool["function"]["name"] for tool in Agency.schemas]
        changing = {"book", "cancel", "refund", "seat", "bag", "move"}
        assert {name for name in tools if stats.roles[name].changes} <= changing
        assert {name for name in tools if stats.roles[name].reads} == set(tools) - changing
        assert len({name for name in changing if stats.roles[name].changes}) >= 4

    def test_a_setter_that_can_be_repeated_changes_the_world(self, thermostat):
        made = Questioning(thermostat, thermostat().tasks("train"))
        found = made.explore(seed=0, budget=12)
        stats = made.explorer.walker.stats
        assert stats.roles["set"].changes and stats.roles["read"].reads
        assert len(found) == 12 and {t.meta["template"] for t in found} >= {"set", "set+set"}
        world = Probed(thermostat())
        one, other = [t for t in found if t.meta["template"] == "set"][:2]
        same_room = (
            calls_of(one)[0].partition("room")[2][:12]
            == calls_of(other)[0].partition("room")[2][:12]
        )
        assert (
            attempt(world, one, [*calls_of(other), *one.reference]).evaluation.success == same_room
        )

    def test_the_time_is_no_state(self):
        class Clock(Library):
            ticks = 0

            def step(self, action):
                result = super().step(action)
                Clock.ticks += 1
                for message in result.messages:
                    message["content"] += f"\nat {Clock.ticks} o'clock"
                return result

        made = Questioning(Clock, [SOLARIS], breadth=4, depth=8)
        found = made.explore(seed=1, budget=4)
        assert len(found) == 4
        for t in found:
            assert attempt(Probed(Clock()), t, t.reference).evaluation.success, t.query
            assert not attempt(Probed(Clock()), t, ["done"]).evaluation.success, t.query


class TestWalks:
    def test_a_walk_is_what_the_world_did(self, seeds):
        walker = Walker(breadth=6, depth=20, branches=2)
        world, again = Travel(), Travel()
        for start in map(probe_of, seeds[:6]):
            walks = list(walker.walks(world, start, random.Random(3), SeenValues()))
            assert len(walks) == 2
            for walk in walks:
                again.reset(start)
                for event in walk:
                    assert text_of(again.step(event.action).messages) == event.result

    def test_branches_share_their_breadth_phase(self):
        walker = Walker(breadth=3, depth=5, branches=3)
        walks = list(walker.walks(Library(), probe_of(SOLARIS), random.Random(0), SeenValues()))
        assert [walk[:3] for walk in walks] == [walks[0][:3]] * 3
        assert all(len(walk) == 8 for walk in walks)

    def test_it_learns_what_makes_a_call_work(self, questioning):
        remedies = questioning.explorer.walker.stats.remedies
        failure = next(
            name
            for name in remedies
            if name.startswith("seat: ") and "list the seats first" in name
        )
        assert max(remedies[failure], key=lambda remedy: remedies[failure][remedy][0]) == "seats"

    def test_it_gets_better_at_it(self, seeds):
        walker, known, rates = (
            Walker(breadth=6, depth=20, branches=2),
            {t.id: SeenValues() for t in seeds},
            [],
        )
        for n in range(4):
            rng = random.Random(n)
            walks = [
                w for t in seeds for w in walker.walks(Travel(), probe_of(t), rng, known[t.id])
            ]
            rates.append(sum(e.ok for w in walks for e in w) / sum(len(w) for w in walks))
        assert rates[-1] > 1.2 * rates[0], rates

    def test_lists_and_objects_are_filled(self):
        schema = {
            "type": "object",
            "properties": {
                "ids": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
                "who": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
                "kind": {"enum": ["a", "b"]},
                "sure": {"type": ["boolean", "null"]},
                "size": {
                    "anyOf": [{"type": "null"}, {"type": "number", "minimum": 3, "maximum": 4}]
                },
            },
        }
        tool = {
            "type": "function",
            "function": {"name": "send", "description": "", "parameters": schema},
        }

        class Sends(Library):
            def reset(self, task, seed=0):
                return dataclasses.replace(super().reset(task, seed), tools=[tool])

        (walk,) = Walker(breadth=8, depth=0, branches=1).walks(
            Sends(), probe_of(SOLARIS), random.Random(0), SeenValues()
        )
        for event in walk:
            jsonschema.validate(event.arguments, schema)
            assert set(event.arguments) == set(schema["properties"])


def test_a_number_is_renamed_to_numbers_only():
    arguments = {"order": 41, "orders": [41, "41", None, True]}
    assert _renamed(arguments, {"41": "39.99"}) == arguments | {"orders": [41, "39.99", None, True]}
    assert _renamed(arguments, {"41": "7"}) == {"order": 7, "orders": [7, "7", None, True]}


class TestHouseRules:
    """An agency in which no description and no error names what has to be done first."""

    @pytest.fixture(scope="class")
    def made(self):
        made = Questioning(lambda: Travel(rules=5), Travel(rules=5).tasks("train"), most=8)
        made.explore(seed=3, budget=150)
        return made

    def test_the_explorer_finds_the_desk_calls_of_every_kind_of_operation_on_the_way(self, made):
        here, found = FAMILY.house(5, 0.1), Counter()
        for one in made.pool.tasks.values():
            calls = [made_call for action in calls_of(one) for made_call in parse(action).calls]
            for n, this in enumerate(calls):
                if wanted := here.desk(this.name):
                    assert wanted in [before.name for before in calls[:n]], one.query
                    found[this.name] += 1
        assert {"bag", "cancel", "refund", "seat", "book"} <= set(found), found

    def test_no_task_asks_for_a_desk_call(self, made):
        words = {
            word
            for one in made.pool.tasks.values()
            for word in re.findall(r"\w+", one.query.lower())
        }
        assert not words & set(FAMILY.desk)

    def test_it_goes_on_from_a_saved_state_as_if_it_had_not_stopped(self, made):
        again = Questioning(made.make_world, made.pool.seeds, most=8)
        again.pool.load_state(json.loads(json.dumps(made.pool.state())))
        assert again.explore(seed=4, budget=4) == made.explore(seed=4, budget=4)


class TestStatistics:
    def test_an_operation_that_only_confirms_teaches_its_arguments_once_it_has_refused_some(self):
        stats = OperationStats()
        for n in range(8):
            confirmed = Event("stamp", {"id": f"O1{n}"}, "", "ok", ok=True)
            refused = Event("stamp", {"id": f"P1{n}"}, "", "error: no such order", ok=False)
            for event in (confirmed, refused):
                stats.learn(event, "", lambda value: [value[0] + "99"])
            stats.roles["stamp"].repeated = [1, 1]  # a repetition gave the same answer: it reads
        assert stats.kinds["stamp.id"]["O99"][0] >= 5 and stats.kinds["stamp.id"]["P99"][0] == 0

    def test_an_operation_that_always_finds_nothing_teaches_nothing(self):
        stats = OperationStats()
        stats.roles["flights"].repeated = [1, 1]
        for n in range(8):
            stats.learn(
                Event("flights", {"to": f"X{n}"}, "", "no flights", ok=True),
                "",
                lambda value: ["X9"],
            )
        assert stats.kinds["flights.to"]["X9"][0] <= 3

    def test_a_schema_is_believed_as_long_as_its_operation_has_not_worked(self):
        stats = OperationStats()
        for n in range(200):
            event = Event(
                "book",
                {"flight": f"F{n % 90 + 10}"},
                "",
                "error: search the flights first",
                ok=False,
            )
            stats.learn(event, "", lambda value: ["F99"])
        accepts = stats.acceptance("book.flight", frozenset(["F99"]))
        assert accepts["F99"] > 5 * accepts["word"]

    def test_what_helps_against_an_error_elsewhere_is_known(self):
        stats = OperationStats()
        stats.remedies = {
            "bag: refused error not cleared": {"scan": [4, 5], "people": [1, 9]},
            "seat: refused error list the seats first": {"seats": [9, 9]},
        }
        assert stats.helpers("book: refused error not cleared") == {"scan"}
        assert stats.helpers("bag: refused error not cleared") == set()


class TestClosedLoop:
    def test_it_goes_back_to_where_the_policy_fails(self, seeds):
        made = Questioning(Travel, seeds[:6])
        found = made.explore(seed=1, budget=12)
        failed = max(found, key=lambda t: t.difficulty)
        made.pool.record([(failed.id, False)] * 3 + [(failed.id, True)])
        first = made.explorer._order(seeds[:6], random.Random(0))[0]
        assert first.id == failed.meta["source"]
        start = types.SimpleNamespace(operations=["people", "orders", "order", "bag", "cancel"])
        beginnings = [made.explorer._beginning(start, first, random.Random(n)) for n in range(8)]
        names = [parse(action).calls[0].name for action in calls_of(failed)]
        known = [name for name in names if name in start.operations]
        assert all([name for name, _ in calls] == known[: len(calls)] for calls in beginnings)
        assert len(set(map(len, beginnings))) > 1

    def test_difficulty_rises_with_success(self, seeds):
        made = Questioning(Travel, seeds)
        first = made.explore(seed=1, budget=40)
        made.pool.record([(t.id, t.difficulty <= 2) for t in first for _ in range(8)])
        later = made.explore(seed=2, budget=40)
        assert sum(t.difficulty for t in later) / len(later) > sum(
            t.difficulty for t in first
        ) / len(first)


class TestResume:
    def test_the_seed_decides(self, seeds, tasks):
        again = Questioning(Travel, seeds)
        assert again.explore(seed=7, budget=64) == tasks
        assert [t.id for t in Questioning(Travel, seeds).explore(seed=8, budget=64)] != [
            t.id for t in tasks
        ]

    def test_a_reloaded_state_goes_on_as_the_one_that_was_saved(self, seeds):
        first = Questioning(Travel, seeds, capacity=20)
        found = first.explore(seed=1, budget=24)
        assert len(found) == 24 and len(first.pool.tasks) == 20
        first.pool.record(
            [(id, win) for id in list(first.pool.tasks)[:3] for win in (True, False, True)]
        )
        second = Questioning(Travel, seeds, capacity=20)
        second.pool.load_state(json.loads(json.dumps(first.pool.state())))
        assert second.pool.state() == first.pool.state()
        assert second.explore(seed=2, budget=16) == first.explore(seed=2, budget=16)
        draws = [
            Epochs(Parts(task_pool=q.pool)).draw(
                Draw(seeds, list(q.pool.tasks.values()), 8, 0.5, 3, 0, learnable=True)
            )
            for q in (first, second)
        ]
        assert draws[0] == draws[1]

    def test_rare_templates_are_drawn_as_often_as_common_ones(self, seeds):
        made = [synthetic_task(seeds[0], f"Task {n}.", identity=[n]) for n in range(100)]
        made = [
            dataclasses.replace(t, meta=t.meta | {"template": "rare" if n < 5 else "common"})
            for n, t in enumerate(made)
        ]
        pool = pool_of(*made, seeds=seeds, overlap=1.0)
        drawn = Counter(
            t.meta["template"]
            for step in range(200)
            for t in Epochs(Parts(task_pool=pool)).draw(
                Draw(seeds, made, 2, 1.0, step, 0, learnable=True)
            )
        )
        assert 0.4 < drawn["rare"] / drawn.total() < 0.6

    def test_the_books_add_up(self, seeds):
        made = Questioning(Travel, seeds)
        found = made.explore(seed=1, budget=16)
        figures = made.pool.metrics()
        rejected = sum(
            value for name, value in figures.items() if name.startswith("questioning/rejected/")
        )
        assert figures["questioning/accepted"] == len(found) == figures["questioning/pool"]
        assert figures["questioning/tried"] == figures["questioning/accepted"] + rejected
        assert sum(
            v for name, v in figures.items() if name.startswith("questioning/difficulty/")
        ) == len(found)
        assert made.pool.metrics()["questioning/tried"] == 0

    def test_a_full_pool_lets_go_of_what_teaches_least(self, seeds):
        made = Questioning(Travel, seeds, capacity=8)
        first = made.explore(seed=1, budget=8)
        made.pool.record([(first[0].id, True)] * 20 + [(first[1].id, False)] * 20)
        made.pool.record([(t.id, win) for t in first[2:] for win in (True, False)])
        made.explore(seed=2, budget=2)
        assert len(made.pool.tasks) == 8 and not {first[0].id, first[1].id} & set(made.pool.tasks)


class RandomWalk:
    """Calls random tools with values that it was shown; what a walk changed becomes a task."""

    def __init__(self, *, steps: int = 6):
        self.steps = steps

    def explore(self, world, seeds, budget, rng):
        for _ in range(20 * budget):
            start = rng.choice(seeds)
            probe, actions = probe_of(start), []
            world.reset(probe, probe.seed)
            for _ in range(self.steps):
                tool = rng.choice(["shelf", "lend", "mark"])
                action = call(
                    tool, rng.choice(["red", "blue", "green"] if tool == "shelf" else sorted(BOOKS))
                )
                if not world.step(action).info["errors"]:
                    actions.append(action)
            if rows := world.difference():
                yield synthetic_task(
                    start,
                    "Please "
                    + ", ".join(f"set {key} of {BOOKS[id][0]}" for _, id, key, _, _ in rows)
                    + ".",
                    identity=rows,
                    reference=[*actions, "done"],
                    verifier={"state": rows, "answer": None},
                    difficulty=len(actions),
                )


def pool_of(*tasks, seeds=(SOLARIS,), overlap=0.99, capacity=100):
    return TaskPool(seeds, overlap=overlap, capacity=capacity, tasks=tasks)


def walked(n):
    return pool_of().grow(RandomWalk(), Library, n, seed=0)


class TestPool:
    def test_any_explorer_fits(self):
        pool = pool_of()
        found = pool.grow(RandomWalk(), Library, 5, seed=0)
        assert len(found) == 5 and list(pool.tasks.values()) == found == walked(5)
        assert all(infeasibility(Library(), t) == "" for t in found)
        figures = pool.metrics()
        rejected = sum(n for name, n in figures.items() if name.startswith("questioning/rejected/"))
        assert figures["questioning/tried"] == 5 + rejected and figures["questioning/accepted"] == 5

    def test_the_check_has_a_world_of_its_own(self):
        """An explorer may go on in its episode after it proposed a task."""
        verifier = {"state": [["books", "B11", "lent", False, True]], "answer": None}

        class Continues:
            def explore(self, world, seeds, budget, rng):
                world.reset(seeds[0], 0)
                world.step(call("shelf", "red"))
                yield synthetic_task(
                    seeds[0], "x", identity=[], reference=["done"], verifier=verifier
                )
                assert not world.step(call("lend", "B11")).info["errors"]

        pool = pool_of()
        assert pool.grow(Continues(), Library, 1, seed=0) == []
        assert pool.metrics()["questioning/rejected/reference fails"] == 1

    def test_a_task_that_is_not_synthetic_is_refused(self):
        class Copies:
            def explore(self, world, seeds, budget, rng):
                return seeds

        with pytest.raises(ValueError, match="with origin 'original', not 'synthetic'"):
            pool_of().grow(Copies(), Library, 1, seed=0)

    def test_given_tasks_are_the_initial_state(self):
        found = walked(3)
        pool = pool_of(*found)
        assert list(pool.tasks.values()) == found
        assert pool.duplicates.repeats(found[0]) == "same goal"

    @pytest.mark.parametrize("change", [{"verifier": {}}, {"meta": {"unverified": True}}])
    def test_given_tasks_that_the_world_cannot_check_need_a_judge(self, change):
        found = walked(3)
        found[1] = dataclasses.replace(found[1], **change)
        config = base.get_config()
        config.questioning.enabled, config.questioning.tasks = True, "tasks.jsonl"
        with pytest.raises(
            RunError, match=rf"1 of 3 tasks have no verifier \({found[1].id}.*judge.name=reference"
        ):
            make_tasks(config, [SOLARIS], [], found, {})
        config.questioning.judge.name = "reference"
        pool = make_tasks(config, [SOLARIS], [], found, {}).pool
        assert list(pool.tasks.values()) == found

    def test_a_pool_that_stays_too_small_says_why(self):
        class Fails:
            def explore(self, world, seeds, budget, rng):
                yield synthetic_task(
                    seeds[0], "x", identity=[], reference=["done"], verifier=seeds[0].verifier
                )

        pool, config = pool_of(), base.get_config()
        config.questioning.enabled = True
        tasks = types.SimpleNamespace(pool=pool, explorer=Fails(), words=None)
        run = types.SimpleNamespace(
            config=config,
            tasks=tasks,
            make_world=Library,
            progress=types.SimpleNamespace(phase=print),
            stop=Stop(),
        )
        with pytest.raises(RunError, match=r"0 tasks kept, rejected: 1 x same goal\)") as caught:
            explore(run)
        assert "budget" not in str(caught.value)
        config.questioning.budget = 1
        with pytest.raises(RunError, match=r"raise config\.questioning\.budget"):
            explore(run)

    def test_a_world_that_swallows_a_signal_does_not_keep_exploring(self):
        class Swallows:
            def explore(self, world, seeds, budget, rng):
                with contextlib.suppress(BaseException):  # as a bare `except` does
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
                yield from ()
                pool.is_over()
                pytest.fail("it goes on")

        pool, config = pool_of(), base.get_config()
        with Stop() as stop:
            run = types.SimpleNamespace(config=config, make_world=Library, stop=stop)
            with pytest.raises(Interrupted):
                invent(run, pool, Swallows(), 0)

    def test_what_an_explorer_learnt_is_part_of_the_state(self):
        class Counts:
            rounds = 0

            def explore(self, world, seeds, budget, rng):
                self.rounds += 1
                return []

            def state(self):
                return {"rounds": self.rounds}

            def load_state(self, state):
                self.rounds = state["rounds"]

        pool, other = pool_of(), pool_of()
        pool.grow(Counts(), Library, 1, seed=0)
        other.load_state(json.loads(json.dumps(pool.state())))
        other.grow(Counts(), Library, 1, seed=0)
        assert other.state()["explorer"] == {"rounds": 2}

    def test_tasks_solved_sometimes_are_worth_most(self, questioning, tasks):
        kinds: dict[str, list[str]] = {}
        for one in tasks:
            kinds.setdefault(one.meta["template"], []).append(one.id)
        (always, *_), (never, sibling, *_), (sometimes, *_), (untried, *_) = sorted(
            kinds.values(), key=len
        )[-4:]
        pool, value = questioning.pool, questioning.pool.learnability
        assert value(sibling) == value(untried) == 1.0
        pool.record(
            [(always, True)] * 8
            + [(never, False)] * 8
            + [(sometimes, k % 2 == 0) for k in range(8)]
        )
        pool.record([("no such task", True)])
        assert value(sometimes) == value(untried) == 1.0
        assert value(always) == pytest.approx(value(never)) and 0.0 < value(always) < 0.5
        assert value(never) < value(sibling) < 1.0, (
            "what is never solved speaks for the others of its kind"
        )


class TestPlugs:
    @pytest.mark.parametrize(
        "key", ["questioning.explorer", "questioning.words", "questioning.judge"]
    )
    def test_every_known_name_is_a_plug(self, key):
        for name in plugs.known(key):
            assert plugs.problems(key, name, {}) == []

    def test_the_rooms_need_no_http_client(self):
        rooms = "evolver.questioning, evolver.navigating, evolver.attributing"
        code = f"import sys, {rooms}; sys.exit('httpx' in sys.modules)"
        assert (
            subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode
            == 0
        )

    def test_the_verifier_keeps_the_worlds_own_evaluation(self):
        tries = [
            attempt(Library(), SOLARIS, [action]) for action in (call("shelf", "green"), "done")
        ]
        judge = plugs.plug("questioning.judge", "verifier", {})(Parts())
        assert judge.score(tries) == [t.evaluation for t in tries] and not judge.replaces_outcome
