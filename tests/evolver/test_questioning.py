"""Synthetic tasks can be solved but not by doing nothing, their queries give enough information,
and all differ."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import signal
import statistics
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
from envs.world import Evaluation, World, text_of, tool_of
from evolver.build import RunError, make_tasks
from evolver.config import plugs
from evolver.parts import Parts
from evolver.phases.tasks import explore, invent
from evolver.processes.interrupt import Interrupted, Stop
from evolver.questioning import probe_of, synthetic_task
from evolver.questioning.calls import _renamed
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.tasks import infeasibility
from evolver.questioning.values import SeenValues, typed
from evolver.questioning.walks import Walker
from evolver.replaying import calls_of, opening_words, values_used
from evolver.sampling import Draw, Epochs
from evolver.transcripts import words
from tests.evolver.explorers import Proposing, RandomWalk, curious, learnt, pool_of, run_of, solves
from tests.evolver.toy import (
    LEND,
    LEND_11,
    RED,
    Library,
    NoSnapshots,
    attempt,
    call,
    changes,
    tried,
)


class Bare(Travel):
    """The travel agency with nothing but its tools: no profile and no comparison of states."""

    profile = World.profile

    def __getattribute__(self, name):
        if name in ("difference", "describe"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def evaluate(self):
        return Evaluation(0.0, False)  # so that nothing but the probes can tell a success


@pytest.fixture(scope="module")
def seeds():
    return Travel(n_train=24).tasks("train")


@pytest.fixture(scope="module")
def questioning(seeds):
    made = curious(Bare, seeds)
    made.explore(seed=7, budget=64)
    return made


@pytest.fixture(scope="module")
def tasks(questioning):
    return list(questioning.pool.tasks.values())


def acting(task):
    return [action for action in task.reference if parse(action).calls]


class TestTasks:
    def test_there_are_as_many_as_asked_for_from_most_of_the_worlds(self, tasks, seeds):
        assert len(tasks) == 64
        assert len({task.seed for task in tasks}) > len(seeds) / 2

    def test_the_reference_solves_each_and_doing_nothing_none(self, tasks):
        world = Probed(Bare())
        for task in tasks:
            for actions, score in ((task.reference, 1.0), (["done"], 0.0), ([], 0.0)):
                assert attempt(world, task, actions).evaluation.score == score, task.query

    def test_no_call_of_a_reference_can_be_left_out(self, tasks):
        """Without any one call another is refused, the end is not reached, or the answer is not
        known."""
        world = Probed(Travel())
        for task in tasks:
            for n in range(len(acting(task))):
                trajectory = attempt(world, task, task.reference[:n] + task.reference[n + 1 :])
                refused = any(step.info["errors"] for step in trajectory.turns)
                assert refused or not trajectory.evaluation.success or task.verifier["answer"], (
                    task.query
                )

    def test_their_verifiers_agree_with_the_worlds_own_comparison(self, tasks):
        """Whatever is played, a task without a question is solved exactly if its solution changes
        the same. What the explorer never saw is not watched, so that a change of it passes now and
        then.

        Played are solutions of other tasks in the same world, and solutions with another change
        before them.
        """
        world = Probed(Travel())
        agreed = Counter()
        for one in tasks:
            if one.verifier["answer"]:
                continue
            others = [acting(other) for other in tasks if other.seed == one.seed]
            for id in data(one.seed).orders:
                look = call_text("order", {"id": id})
                given = {"order": id}
                others.append([look, call_text("bag", given), *acting(one)])
                others.append([look, call_text("cancel", given)])
            differences = []
            bare = dataclasses.replace(one, verifier=one.verifier["start"])
            for actions in [acting(one), *others]:
                attempt(world.world, bare, actions)
                differences.append(world.world.difference())
            for actions, difference in zip(others, differences[1:], strict=True):
                success = attempt(world, one, [*actions, "done"]).evaluation.success
                agreed[success == (difference == differences[0])] += 1
        assert agreed[True] > 100 and agreed[False] <= 0.05 * agreed.total(), agreed

    def test_everything_used_is_in_the_query_or_was_shown(self, tasks):
        world = Probed(Travel())
        for task in tasks:
            known = opening_words(world.reset(task))
            for action in acting(task):
                assert all(value in known for value in values_used(action)), (
                    task.query,
                    action,
                )
                known += words(text_of(world.step(action).messages))

    def test_queries_name_no_id_that_has_to_be_found_out(self, tasks):
        for task in tasks:
            for id in re.findall(r"\b[FPO]\d\d\b|\b\d[ABC]\b", task.query):
                first = next(action for action in task.reference if id in action)
                shown = Probed(Travel())
                shown.reset(task)
                for action in task.reference[: task.reference.index(first)]:
                    assert id not in text_of(shown.step(action).messages), task.query

    def test_queries_do_not_give_the_answer_away(self, tasks):
        for task in tasks:
            answer = task.verifier["answer"]
            assert answer is None or words(answer["value"]) not in words(task.query), task.query

    def test_no_phrase_of_the_hand_written_tasks_is_known(self, tasks):
        phrases = itertools.chain(*PHRASES.values())
        wordings = {" ".join(re.sub(r"{\w+}", " ", phrase).split()[:3]) for phrase in phrases}
        descriptions = " ".join(tool["function"]["description"].lower() for tool in Agency.schemas)
        for wording in wordings:
            if wording not in descriptions:
                assert not any(wording in task.query.lower() for task in tasks), wording

    def test_they_keep_to_the_limits(self, tasks):
        levels = Counter(t.difficulty for t in tasks)
        assert {(t.origin, t.split) for t in tasks} == {("synthetic", "train")}
        assert all(t.difficulty == len(t.reference) - 1 for t in tasks)
        assert min(levels) >= 1 and max(levels) <= 6
        assert len(levels) >= 5 and max(levels.values()) < len(tasks) / 2

    @pytest.mark.parametrize("make_world", [Library, NoSnapshots])
    def test_another_world_needs_no_code_of_its_own(self, make_world):
        made = curious(make_world, [LEND], breadth=4, depth=8)
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
            curious(Deaf, [LEND]).explore(seed=0, budget=1)
        with pytest.raises(ValueError, match="there are none"):
            curious(Library, [])

    def test_a_few_worlds_where_every_tool_wants_an_id_give_tasks(self):
        made = curious(lambda: Bare(n_train=4, rules=2, seed=2))
        assert len(made.explore(seed=3, budget=4)) == 4

    def test_a_world_without_tools_gives_nothing_and_ends(self):
        class Mute(Library):
            def reset(self, task, seed=0):
                return dataclasses.replace(super().reset(task, seed), tools=[])

        assert curious(Mute, [LEND]).explore(seed=0, budget=3) == []


class TestRoles:
    def test_what_changes_the_world_is_found_out(self, questioning):
        stats = questioning.explorer.walker.stats
        tools = [tool["function"]["name"] for tool in Agency.schemas]
        changing = {"book", "cancel", "refund", "seat", "bag", "move"}
        assert {name for name in tools if stats.roles[name].changes} <= changing
        assert {name for name in tools if stats.roles[name].reads} == set(tools) - changing
        assert len({name for name in changing if stats.roles[name].changes}) >= 4

    def test_the_time_is_no_state(self):
        class Clock(Library):
            ticks = 0

            def step(self, action):
                result = super().step(action)
                Clock.ticks += 1
                for message in result.messages:
                    message["content"] += f"\nat {Clock.ticks} o'clock"
                return result

        made = curious(Clock, [LEND], breadth=4, depth=8)
        found = made.explore(seed=1, budget=4)
        assert len(found) == 4
        for t in found:
            assert solves(Clock(), t, t.reference) and not solves(Clock(), t, ["done"]), t.query


def walks(walker, world, task, rng, seen=None):
    return list(walker.walks(world, probe_of(task), random.Random(rng), seen or SeenValues()))


class TestWalks:
    def test_a_walk_is_what_the_world_did(self, seeds):
        walker = Walker(breadth=6, depth=20, branches=2)
        world = Travel()
        again = Travel()
        for start in seeds[:6]:
            made = walks(walker, world, start, 3)
            assert len(made) == 2
            for walk in made:
                again.reset(probe_of(start))
                for event in walk:
                    assert text_of(again.step(event.action).messages) == event.result

    def test_branches_share_their_breadth_phase(self):
        walker = Walker(breadth=3, depth=5, branches=3)
        made = walks(walker, Library(), LEND, 0)
        assert [walk[:3] for walk in made] == [made[0][:3]] * 3
        assert all(len(walk) == 8 for walk in made)

    def test_it_learns_what_makes_a_call_work(self, questioning):
        remedies = questioning.explorer.walker.stats.remedies.items()
        failure = re.compile("seat: .*list the seats first")
        counts = next(counts for name, counts in remedies if failure.match(name))
        assert max(counts, key=lambda remedy: counts[remedy][0]) == "seats"

    def test_it_gets_better_at_it(self, seeds):
        walker = Walker(breadth=6, depth=20, branches=2)
        rates = []
        known = {t.id: SeenValues() for t in seeds}
        for n in range(4):
            rng = random.Random(n)
            events = []
            for t in seeds:
                for walk in walker.walks(Travel(), probe_of(t), rng, known[t.id]):
                    events += walk
            rates.append(statistics.mean(event.ok for event in events))
        assert rates[-1] > 1.2 * rates[0], rates

    def test_lists_and_objects_are_filled(self):
        properties = {
            "ids": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            "who": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
            "kind": {"enum": ["a", "b"]},
            "sure": {"type": ["boolean", "null"]},
            "size": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 3, "maximum": 4}]},
        }
        tool = tool_of("send", "", properties, list(properties))

        class Sends(Library):
            def reset(self, task, seed=0):
                return dataclasses.replace(super().reset(task, seed), tools=[tool])

        (walk,) = walks(Walker(breadth=8, depth=0, branches=1), Sends(), LEND, 0)
        for event in walk:
            jsonschema.validate(event.arguments, tool["function"]["parameters"])
            assert event.arguments.keys() == properties.keys()


def test_a_number_is_given_as_it_was_shown():
    number = {"type": "number"}
    whole = {"type": "integer"}
    for text, schema in (("3", number), ("-3", number), ("2.50", number), ("3", whole)):
        value = typed(text, schema)
        assert str(value) == text.removesuffix("0") and value == float(text)
    assert typed("x", number) is typed("2.5", whole) is None


def test_a_number_is_renamed_to_numbers_only():
    arguments = {"order": 41, "orders": [41, "41", None, True]}
    assert _renamed(arguments, {"41": "39.99"}) == arguments | {"orders": [41, "39.99", None, True]}
    assert _renamed(arguments, {"41": "7"}) == {"order": 7, "orders": [7, "7", None, True]}


class TestHouseRules:
    """An agency in which no description and no error names what has to be done first."""

    @pytest.fixture(scope="class")
    def made(self):
        made = curious(lambda: Travel(rules=5), most=8)
        made.explore(seed=3, budget=150)
        return made

    def test_the_explorer_finds_the_desk_calls_of_every_kind_of_operation_on_the_way(self, made):
        here = FAMILY.house(5, 0.1)
        found = Counter()
        for one in made.pool.tasks.values():
            calls = calls_of(one)
            for n, this in enumerate(calls):
                if wanted := here.desk(this.name):
                    assert wanted in [before.name for before in calls[:n]], one.query
                    found[this.name] += 1
        assert {"bag", "cancel", "refund", "seat", "book"} <= set(found), found

    def test_no_task_asks_for_a_desk_call(self, made):
        queries = " ".join(task.query.lower() for task in made.pool.tasks.values())
        assert not set(re.findall(r"\w+", queries)) & set(FAMILY.desk)


class TestStatistics:
    def test_an_operation_that_only_confirms_teaches_its_arguments_once_it_has_refused_some(self):
        stats = OperationStats()
        for n in range(8):
            learnt(stats, "stamp", {"id": f"O1{n}"}, "ok", kinds=["O99"])
            learnt(stats, "stamp", {"id": f"P1{n}"}, "no such order", ok=False, kinds=["P99"])
            stats.roles["stamp"].repeated = [1, 1]  # a repetition gave the same answer: it reads
        found = stats.kinds["stamp.id"]
        assert found["O99"][0] >= 5 and found["P99"][0] == 0

    def test_an_operation_that_always_finds_nothing_teaches_nothing(self):
        stats = OperationStats()
        stats.roles["flights"].repeated = [1, 1]
        for n in range(8):
            learnt(stats, "flights", {"to": f"X{n}"}, "no flights", kinds=["X9"])
        assert stats.kinds["flights.to"]["X9"][0] <= 3

    def test_a_schema_is_believed_as_long_as_its_operation_has_not_worked(self):
        stats = OperationStats()
        for n in range(200):
            given = {"flight": f"F{n % 90 + 10}"}
            learnt(stats, "book", given, "search the flights first", ok=False, kinds=["F99"])
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
        made = curious(Travel, seeds[:6])
        found = made.explore(seed=1, budget=12)
        failed = max(found, key=lambda t: t.difficulty)
        made.pool.record([(failed.id, False)] * 3 + [(failed.id, True)])
        first = made.explorer._order(seeds[:6], random.Random(0))[0]
        assert first.id == failed.meta["source"]
        start = types.SimpleNamespace(operations=["people", "orders", "order", "bag", "cancel"])
        beginnings = [made.explorer._beginning(start, first, random.Random(n)) for n in range(8)]
        known = [call.name for call in calls_of(failed) if call.name in start.operations]
        assert all([name for name, _ in calls] == known[: len(calls)] for calls in beginnings)
        assert len(set(map(len, beginnings))) > 1

    def test_difficulty_rises_with_success(self, seeds):
        made = curious(Travel, seeds)
        first = made.explore(seed=1, budget=40)
        made.pool.record(8 * [(t.id, t.difficulty <= 2) for t in first])
        later = made.explore(seed=2, budget=40)
        before, after = (statistics.mean(t.difficulty for t in found) for found in (first, later))
        assert after > before


class TestResume:
    def test_the_seed_decides(self, seeds, tasks):
        assert curious(Travel, seeds).explore(seed=7, budget=64) == tasks
        others = curious(Travel, seeds).explore(seed=8, budget=64)
        assert [t.id for t in others] != [t.id for t in tasks]

    def test_a_reloaded_state_goes_on_as_the_one_that_was_saved(self, seeds):
        first = curious(Travel, seeds, capacity=20)
        found = first.explore(seed=1, budget=24)
        assert len(found) == 24 and len(first.pool.tasks) == 20
        attempted = list(first.pool.tasks)[:3]
        first.pool.record(itertools.product(attempted, (True, False, True)))
        second = curious(Travel, seeds, capacity=20)
        second.pool.load_state(json.loads(json.dumps(first.pool.state())))
        assert second.pool.state() == first.pool.state()
        assert second.explore(seed=2, budget=16) == first.explore(seed=2, budget=16)
        one, other = (
            Epochs(Parts(task_pool=pool)).draw(
                Draw(seeds, list(pool.tasks.values()), 8, 0.5, 3, 0, learnable=True)
            )
            for pool in (first.pool, second.pool)
        )
        assert one == other

    def test_rare_templates_are_drawn_as_often_as_common_ones(self, seeds):
        kinds = 5 * ["rare"] + 95 * ["common"]
        made = [
            synthetic_task(seeds[0], f"Task {n}.", identity=[n], meta={"template": kind})
            for n, kind in enumerate(kinds)
        ]
        sampler = Epochs(Parts(task_pool=pool_of(*made, seeds=seeds, overlap=1.0)))
        drawn = Counter()
        for step in range(200):
            found = sampler.draw(Draw(seeds, made, 2, 1.0, step, 0, learnable=True))
            drawn.update(t.meta["template"] for t in found)
        assert 0.4 < drawn["rare"] / drawn.total() < 0.6

    def test_the_books_add_up(self, seeds):
        made = curious(Travel, seeds)
        found = made.explore(seed=1, budget=16)
        figures = made.pool.metrics()

        def total(kind):
            names = [name for name in figures if name.startswith(f"questioning/{kind}")]
            return sum(figures[name] for name in names)

        assert total("accepted") == total("pool") == total("difficulty/") == len(found)
        assert total("tried") == len(found) + total("rejected/")
        assert made.pool.metrics()["questioning/tried"] == 0

    def test_a_full_pool_lets_go_of_what_teaches_least(self, seeds):
        made = curious(Travel, seeds, capacity=8)
        first = made.explore(seed=1, budget=8)
        made.pool.record([(first[0].id, True)] * 20 + [(first[1].id, False)] * 20)
        made.pool.record([(t.id, win) for t in first[2:] for win in (True, False)])
        made.explore(seed=2, budget=2)
        assert len(made.pool.tasks) == 8 and not {first[0].id, first[1].id} & set(made.pool.tasks)


def walked(n):
    return pool_of().grow(RandomWalk(), Library, n, seed=0)


def idle_task(verifier):
    return synthetic_task(LEND, "x", identity=[], reference=["done"], verifier=verifier)


class TestPool:
    def test_any_explorer_fits(self):
        pool = pool_of()
        found = pool.grow(RandomWalk(), Library, 5, seed=0)
        assert len(found) == 5 and list(pool.tasks.values()) == found == walked(5)
        assert all(infeasibility(Library(), t) == "" for t in found)

    def test_the_check_has_a_world_of_its_own(self):
        """An explorer may go on in its episode after it proposed a task."""

        class Continues:
            def explore(self, world, seeds, budget, rng):
                world.reset(seeds[0], 0)
                world.step(RED)
                yield idle_task({"state": changes(["B11"], []), "answer": None})
                assert not world.step(LEND_11).info["errors"]

        pool = pool_of()
        assert pool.grow(Continues(), Library, 1, seed=0) == []
        assert pool.metrics()["questioning/rejected/reference fails"] == 1

    def test_where_too_few_are_found_those_of_nearly_the_same_words_are_kept(self):
        """A world with one start has no others."""

        one, other = (
            synthetic_task(
                LEND, f"Please find the book {book} and lend it to me", identity=[book],
                reference=[RED, call("lend", book), "done"],
                verifier={"state": changes([book], []), "answer": None},
            )
            for book in ("B11", "B12")
        )  # fmt: skip
        lists = Proposing(one, other, one)
        for budget, kept in ((1, 1), (5, 2)):
            pool = pool_of(overlap=0.8)
            assert len(pool.grow(lists, Library, budget, seed=0)) == kept
            assert pool.metrics()["questioning/accepted"] == kept
        few = pool_of(overlap=0.8)
        few.spent = lambda: 2.0  # the time is long over
        assert len(few.grow(lists, Library, 5, seed=0)) == 1
        assert few.metrics()["questioning/rejected/same words"] == 1

    def test_a_task_that_is_not_synthetic_is_refused(self):
        with pytest.raises(ValueError, match="with origin 'original', not 'synthetic'"):
            pool_of().grow(Proposing(LEND), Library, 1, seed=0)

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
        config.questioning.enabled = True
        config.questioning.tasks = "tasks.jsonl"
        message = rf"1 of 3 tasks have no verifier \({found[1].id}.*judge.name=reference"
        with pytest.raises(RunError, match=message):
            make_tasks(config, [LEND], [], found, {})
        config.questioning.judge.name = "reference"
        pool = make_tasks(config, [LEND], [], found, {}).pool
        assert list(pool.tasks.values()) == found

    def test_a_pool_that_stays_too_small_says_why(self):
        run = run_of(pool_of(), Proposing(idle_task(LEND.verifier)), enabled=True)
        with pytest.raises(RunError, match=r"0 tasks kept, rejected: 1 x same goal\)") as caught:
            explore(run)
        assert "budget" not in str(caught.value)
        run.config.questioning.budget = 1
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

        pool = pool_of()
        with Stop() as stop, pytest.raises(Interrupted):
            invent(run_of(pool, stop=stop), pool, Swallows(), 0)

    def test_tasks_solved_sometimes_are_worth_most(self, questioning, tasks):
        kinds: dict[str, list[str]] = {}
        for one in tasks:
            kinds.setdefault(one.meta["template"], []).append(one.id)
        (always, *_), (never, sibling, *_), (sometimes, *_), (untried, *_) = sorted(
            kinds.values(), key=len
        )[-4:]
        pool = questioning.pool
        value = questioning.pool.learnability
        assert value(sibling) == value(untried) == 1.0
        results = [(always, True), (never, False)] * 2 + [(sometimes, True), (sometimes, False)]
        pool.record(4 * results + [("no such task", True)])
        assert value(sometimes) == value(untried) == 1.0
        assert value(always) == pytest.approx(value(never)) and 0.0 < value(always) < 0.5
        assert value(never) < value(sibling) < 1.0, (
            "what is never solved speaks for the others of its kind"
        )


class TestPlugs:
    def test_the_rooms_need_no_http_client(self):
        rooms = "evolver.questioning, evolver.navigating, evolver.attributing"
        code = f"import sys, {rooms}; sys.exit('httpx' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)

    def test_the_verifier_keeps_the_worlds_own_evaluation(self):
        tries = [tried(RED), tried("done")]
        judge = plugs.plug("questioning.judge", "verifier", {})(Parts())
        assert judge.score(tries) == [t.evaluation for t in tries] and not judge.replaces_outcome
