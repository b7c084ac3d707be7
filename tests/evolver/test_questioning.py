"""Synthetic tasks can be solved but not by doing nothing, their queries give enough information, and all differ."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from envs.toolcalls import parse
from envs.travel import Travel
from envs.world import Task, World
from evolver import plugs
from evolver.questioning import TaskPool, mixture, probe_of, synthetic_task
from evolver.questioning.curiosity import Curiosity
from evolver.questioning.tasks import Duplicates, jaccard, unfeasible
from evolver.questioning.walks import Walker
from evolver.questioning.write import minimise
from evolver.run import RunError, make_tasks
from evolver.tasks import explore
from evolver.traces import opening_words, text_of, values_used, words
from tests.evolver.toy import BOOKS, Library, attempt, call, task


class NoSnapshots(Library):
    snapshots = False


class Questioning:
    """A pool that the curiosity explorer fills."""

    def __init__(self, make_world, seeds, *, capacity=512, **options):
        self.make_world, self.pool = make_world, TaskPool(seeds, overlap=0.8, capacity=capacity)
        self.explorer = Curiosity(make_world, self.pool, **options)

    def explore(self, seed, budget):
        return self.pool.grow(self.explorer, self.make_world, budget, seed)


@pytest.fixture(scope="module")
def seeds():
    return Travel(n_train=24).tasks("train")


@pytest.fixture(scope="module")
def questioning(seeds):
    made = Questioning(Travel, seeds)
    made.explore(seed=7, budget=64)
    return made


@pytest.fixture(scope="module")
def tasks(questioning):
    return list(questioning.pool.tasks.values())


class TestTasks:
    def test_there_are_as_many_as_asked_for(self, tasks):
        assert len(tasks) == 64

    def test_they_come_from_most_of_the_worlds(self, tasks, seeds):
        assert len({the_task.seed for the_task in tasks}) > len(seeds) / 2

    def test_the_reference_solves_each_and_doing_nothing_none(self, tasks):
        world = Travel()
        for the_task in tasks:
            assert attempt(world, the_task, the_task.reference).evaluation.score == 1.0, the_task.query
            assert attempt(world, the_task, ["done"]).evaluation.score == 0.0, the_task.query
            assert attempt(world, the_task, []).evaluation.score == 0.0, the_task.query

    def test_no_call_of_a_reference_can_be_left_out(self, tasks):
        """Where only the end counts: without any one call another is refused, or the end is not reached."""
        world = Travel()
        for the_task in tasks:
            for n in range(len(the_task.reference) - 1):
                trajectory = attempt(world, the_task, the_task.reference[:n] + the_task.reference[n + 1 :])
                refused = any(step.info["errors"] for step in trajectory.turns)
                assert refused or not trajectory.evaluation.success or the_task.verifier["answer"], the_task.query

    def test_ids_are_unique_and_no_originals(self, tasks, seeds):
        ids = [the_task.id for the_task in tasks]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & {the_task.id for the_task in seeds}
        assert all(the_task.origin == "synthetic" and the_task.split == "train" for the_task in tasks)

    def test_goals_differ_from_each_other_and_from_the_originals(self, tasks, seeds):
        goals = [(t.seed, json.dumps(t.verifier, sort_keys=True)) for t in tasks + seeds]
        assert len(set(goals)) == len(goals)
        for one in tasks:
            for other in tasks:
                if one is not other and one.seed == other.seed:
                    assert jaccard(*(frozenset(re.findall(r"\w+", t.query.lower())) for t in (one, other))) < 0.8

    def test_everything_used_is_in_the_query_or_was_shown(self, tasks):
        world = Travel()
        for the_task in tasks:
            known = opening_words(world.reset(the_task))
            for action in the_task.reference:
                if parse(action).calls:
                    assert all(value in known for value in values_used(action)), (the_task.query, action)
                    known += words(text_of(world.step(action).messages))

    def test_queries_name_no_id_that_has_to_be_found_out(self, tasks):
        for the_task in tasks:
            assert not re.search(r"\b[FP]\d\d\b|\b\d[ABC]\b", the_task.query), the_task.query
            orders = re.findall(r"\bO\d\d\b", the_task.query)
            assert all(f"order {id}" in the_task.query for id in orders)
            assert all(f'"id": "{id}"' in "".join(the_task.reference) for id in orders), the_task.query

    def test_queries_do_not_give_the_answer_away(self, tasks):
        for the_task in tasks:
            answer = the_task.verifier["answer"]
            assert answer is None or words(answer) not in words(the_task.query), the_task.query

    def test_they_keep_to_the_preference_of_the_profile(self, tasks):
        fewest, most = Travel().profile()["preference"]["calls"]
        levels = Counter(the_task.difficulty for the_task in tasks)
        assert all(t.difficulty == len(t.reference) - 1 for t in tasks)
        assert min(levels) >= fewest and max(levels) <= most
        assert len(levels) >= 5 and max(levels.values()) < len(tasks) / 2

    def test_they_are_records(self, tasks):
        for the_task in tasks:
            assert Task.from_dict(json.loads(json.dumps(the_task.to_dict()))) == the_task

    @pytest.mark.parametrize("make_world", [Library, NoSnapshots])
    def test_another_world_needs_no_code_of_its_own(self, make_world):
        made = Questioning(make_world, [task("Lend Solaris.", lent=["B15"])], breadth=4, depth=8)
        found = made.explore(seed=1, budget=8)
        assert len(found) == 8
        assert all(unfeasible(make_world(), t) == "" for t in found)
        assert {t.meta["size"] for t in found} >= {"1 operations", "0 operations and an answer"}
        assert not any(re.search(r"B\d\d", t.query) for t in found)

    def test_a_world_that_cannot_be_explored_is_named_with_what_it_lacks(self):
        class Bare(World):
            name = "bare"

        with pytest.raises(ValueError, match=r"'bare'.*entities, operations, questions, difference\(\), describe\(\)"):
            Questioning(Bare, [task("x")])
        with pytest.raises(ValueError, match="there are none"):
            Questioning(Library, [])


class TestWalks:
    def test_a_walk_is_what_the_world_did(self, seeds):
        walker = Walker(Travel().profile(), breadth=6, depth=20, branches=2)
        world, again = Travel(), Travel()
        walks = [w for t in seeds[:6] for w in walker.walks(world, probe_of(t), random.Random(3), hints=t.query)]
        assert len(walks) == 12
        for walk in walks:
            again.reset(walk.probe)
            for event in walk.events:
                before = again.difference()
                result = again.step(event.action)
                assert text_of(result.messages) == event.result
                assert bool(event.changed) == (again.difference() != before)

    def test_branches_share_their_breadth_phase(self):
        walker = Walker(Library().profile(), breadth=3, depth=5, branches=3)
        walks = list(walker.walks(Library(), probe_of(task("")), random.Random(0)))
        assert [w.events[:3] for w in walks] == [walks[0].events[:3]] * 3
        assert all(len(w.events) == 8 for w in walks)

    def test_it_learns_what_makes_a_call_work(self, questioning):
        for tool in ("book", "move"):
            helped = questioning.explorer.walker.knowledge.enables[f"{tool}: refused error quote the flight first"]
            assert max(helped, key=lambda remedy: helped[remedy][0]) == "quote"

    def test_it_gets_better_at_it(self, seeds):
        walker = Walker(Travel().profile(), breadth=6, depth=20, branches=2)
        rates = []
        for n in range(4):
            walks = [w for t in seeds for w in walker.walks(Travel(), probe_of(t), random.Random(n), hints=t.query)]
            rates.append(sum(e.ok for w in walks for e in w.events) / sum(len(w.events) for w in walks))
        assert rates[-1] > rates[0] and rates[-1] > 0.4, rates


class TestResume:
    def test_the_seed_decides(self, seeds, tasks):
        again = Questioning(Travel, seeds)
        assert again.explore(seed=7, budget=64) == tasks
        assert [t.id for t in Questioning(Travel, seeds).explore(seed=8, budget=64)] != [t.id for t in tasks]

    def test_a_reloaded_state_goes_on_as_the_one_that_was_saved(self, seeds):
        first = Questioning(Travel, seeds, capacity=20)
        found = first.explore(seed=1, budget=24)
        assert len(found) == 24 and len(first.pool.tasks) == 20
        first.pool.record([(id, win) for id in list(first.pool.tasks)[:3] for win in (True, False, True)])
        second = Questioning(Travel, seeds, capacity=20)
        second.pool.load_state(json.loads(json.dumps(first.pool.state())))
        assert second.pool.state() == first.pool.state()
        assert second.explore(seed=2, budget=16) == first.explore(seed=2, budget=16)
        draws = [q.pool.mixture(seeds, step=3, n=8, share=0.5, seed=0, learnable=True) for q in (first, second)]
        assert draws[0] == draws[1]

    def test_the_books_add_up(self, seeds):
        made = Questioning(Travel, seeds)
        found = made.explore(seed=1, budget=16)
        figures = made.pool.metrics()
        rejected = sum(value for name, value in figures.items() if name.startswith("questioning/rejected/"))
        assert figures["questioning/accepted"] == len(found) == figures["questioning/pool"]
        assert figures["questioning/tried"] == figures["questioning/accepted"] + rejected
        assert sum(v for name, v in figures.items() if name.startswith("questioning/difficulty/")) == len(found)
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
                action = call(tool, rng.choice(["red", "blue", "green"] if tool == "shelf" else sorted(BOOKS)))
                if not world.step(action).info["errors"]:
                    actions.append(action)
            if rows := world.difference():
                yield synthetic_task(
                    start,
                    "Please " + ", ".join(f"set {key} of {BOOKS[id][0]}" for _, id, key, _, _ in rows) + ".",
                    identity=rows,
                    reference=[*actions, "done"],
                    verifier={"state": rows, "answer": None},
                    difficulty=len(actions),
                )


class TestPool:
    SEEDS = [task("Lend Solaris.", lent=["B15"])]

    def test_any_explorer_fits(self):
        pool = TaskPool(self.SEEDS, overlap=0.99, capacity=100)
        found = pool.grow(RandomWalk(), Library, 5, seed=0)
        assert len(found) == 5 and list(pool.tasks.values()) == found
        assert found == TaskPool(self.SEEDS, overlap=0.99, capacity=100).grow(RandomWalk(), Library, 5, seed=0)
        assert all(unfeasible(Library(), t) == "" for t in found)
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
                yield synthetic_task(seeds[0], "x", identity=[], reference=["done"], verifier=verifier)
                assert not world.step(call("lend", "B11")).info["errors"]

        pool = TaskPool(self.SEEDS, overlap=0.8, capacity=8)
        assert pool.grow(Continues(), Library, 1, seed=0) == []
        assert pool.metrics()["questioning/rejected/reference fails"] == 1

    def test_a_task_that_is_not_synthetic_is_refused(self):
        class Copies:
            def explore(self, world, seeds, budget, rng):
                return seeds

        with pytest.raises(ValueError, match="with origin 'original', not 'synthetic'"):
            TaskPool(self.SEEDS, overlap=0.8, capacity=8).grow(Copies(), Library, 1, seed=0)

    def test_given_tasks_are_the_initial_state(self):
        found = TaskPool(self.SEEDS, overlap=0.99, capacity=100).grow(RandomWalk(), Library, 3, seed=0)
        pool = TaskPool(self.SEEDS, overlap=0.99, capacity=100, tasks=found)
        assert list(pool.tasks.values()) == found and pool.duplicates.repeats(found[0]) == "same goal"

    @pytest.mark.parametrize("change", [{"verifier": {}}, {"meta": {"unverified": True}}])
    def test_given_tasks_that_the_world_cannot_check_need_a_judge(self, change):
        found = TaskPool(self.SEEDS, overlap=0.99, capacity=100).grow(RandomWalk(), Library, 3, seed=0)
        found[1] = dataclasses.replace(found[1], **change)
        config = base.get_config()
        config.questioning.enabled, config.questioning.tasks = True, "tasks.jsonl"
        with pytest.raises(RunError, match=rf"1 of 3 tasks have no verifier \({found[1].id}.*judge.name=reference"):
            make_tasks(config, self.SEEDS, [], found, {}, None)
        config.questioning.judge.name = "reference"
        assert list(make_tasks(config, self.SEEDS, [], found, {}, None).pool.tasks.values()) == found

    def test_a_pool_that_stays_too_small_says_why(self):
        class Fails:
            def explore(self, world, seeds, budget, rng):
                yield synthetic_task(seeds[0], "x", identity=[], reference=["done"], verifier=seeds[0].verifier)

        pool, config = TaskPool(self.SEEDS, overlap=0.8, capacity=8), base.get_config()
        tasks = types.SimpleNamespace(pool=pool, explorer=Fails())
        run = types.SimpleNamespace(
            config=config, tasks=tasks, make_world=Library, progress=types.SimpleNamespace(phase=print)
        )
        with pytest.raises(RunError, match=r"0 tasks kept, rejected: 1 x same goal\)") as caught:
            explore(run)
        assert "budget" not in str(caught.value)
        config.questioning.budget = 1
        with pytest.raises(RunError, match=r"raise config\.questioning\.budget"):
            explore(run)

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

        pool, other = (TaskPool(self.SEEDS, overlap=0.8, capacity=8) for _ in range(2))
        pool.grow(Counts(), Library, 1, seed=0)
        other.load_state(json.loads(json.dumps(pool.state())))
        other.grow(Counts(), Library, 1, seed=0)
        assert other.state()["explorer"] == {"rounds": 2}


class TestPlugs:
    @pytest.mark.parametrize("key", ["questioning.explorer", "questioning.judge"])
    def test_every_known_name_is_a_plug(self, key):
        for name in plugs.known(key):
            assert plugs.problems(key, name, {}) == []

    def test_the_rooms_need_no_http_client(self):
        rooms = "evolver.questioning, evolver.navigating, evolver.attributing"
        code = f"import sys, {rooms}; sys.exit('httpx' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0

    def test_the_verifier_keeps_the_worlds_own_evaluation(self):
        tries = [attempt(Library(), TestPool.SEEDS[0], [action]) for action in (call("shelf", "green"), "done")]
        judge = plugs.plug("questioning.judge", "verifier", {})()
        assert judge.score(tries) == [t.evaluation for t in tries] and not judge.replaces_outcome


class TestMixture:
    ORIGINAL = [task(f"o{n}") for n in range(10)]
    SYNTHETIC = [task(f"s{n}") for n in range(7)]

    @given(st.integers(1, 10), st.integers(1, 12), st.integers(0, 2**32))
    def test_every_original_once_per_epoch_and_none_twice_in_a_step(self, n, size, seed):
        n = min(n, size)
        original = [task(f"o{k}") for k in range(size)]
        steps = [mixture(original, [], step=s, n=n, share=0.0, seed=seed) for s in range(3 * size)]
        assert all(len({t.id for t in drawn}) == n for drawn in steps)
        # Within a step the order is shuffled, so epochs are compared where a step and an epoch end together.
        counts = Counter()
        for s, drawn in enumerate(steps, start=1):
            counts.update(t.id for t in drawn)
            assert max(counts.values()) - min(counts[t.id] for t in original) <= 2
            if s * n % size == 0:
                assert set(counts.values()) == {s * n // size}

    @given(st.integers(0, 10), st.floats(0, 1), st.integers(0, 100), st.integers(0, 2**32))
    @settings(max_examples=60)
    def test_the_share_is_exact_and_the_draw_repeatable(self, n, share, step, seed):
        if round(share * n) > len(self.SYNTHETIC):
            return
        drawn = mixture(self.ORIGINAL, self.SYNTHETIC, step=step, n=n, share=share, seed=seed)
        assert drawn == mixture(self.ORIGINAL, self.SYNTHETIC, step=step, n=n, share=share, seed=seed)
        assert len({t.id for t in drawn}) == n
        assert sum(t in self.SYNTHETIC for t in drawn) == round(share * n)

    def test_weights_prefer_and_zero_comes_last(self):
        weights = [0.0, 1.0, 8.0, 1.0, 0.0, 1.0, 1.0]
        counts = Counter(
            t.query
            for step in range(300)
            for t in mixture([], self.SYNTHETIC, step=step, n=2, share=1.0, seed=0, weights=weights)
        )
        assert counts["s2"] > 2 * max(counts[f"s{n}"] for n in (1, 3, 5, 6))
        assert "s0" not in counts and "s4" not in counts
        every = mixture([], self.SYNTHETIC, step=0, n=7, share=1.0, seed=0, weights=weights)
        assert {t.query for t in every} == {t.query for t in self.SYNTHETIC}

    def test_too_few_tasks_is_said(self):
        with pytest.raises(ValueError, match="needs 8 synthetic tasks, there are 7"):
            mixture(self.ORIGINAL, self.SYNTHETIC, step=0, n=8, share=1.0, seed=0)
        with pytest.raises(ValueError, match="needs 11 original tasks, there are 10"):
            mixture(self.ORIGINAL, [], step=0, n=11, share=0.0, seed=0)
        with pytest.raises(ValueError, match="between 0 and 1"):
            mixture(self.ORIGINAL, [], step=0, n=1, share=1.5, seed=0)

    def test_tasks_solved_sometimes_are_worth_most(self, questioning, tasks):
        kinds: dict[str, list[str]] = {}
        for one in tasks:
            kinds.setdefault(one.meta["template"], []).append(one.id)
        (always, *_), (never, sibling, *_), (sometimes, *_), (untried, *_) = sorted(kinds.values(), key=len)[-4:]
        pool, value = questioning.pool, questioning.pool.learnability
        assert value(sibling) == value(untried) == 1.0
        pool.record([(always, True)] * 8 + [(never, False)] * 8 + [(sometimes, k % 2 == 0) for k in range(8)])
        pool.record([("no such task", True)])
        assert value(sometimes) == value(untried) == 1.0
        assert value(always) == pytest.approx(value(never)) and 0.0 < value(always) < 0.5
        assert value(never) < value(sibling) < 1.0, "what is never solved speaks for the others of its kind"


class TestFilters:
    def test_what_is_no_use(self):
        world = Library()
        good = task("Lend Solaris.", lent=["B15"])
        good.reference = [call("shelf", "green"), call("lend", "B15"), "done"]
        assert unfeasible(world, good) == ""
        wrong = task("Lend Solaris.", lent=["B15"])
        wrong.reference = [call("lend", "B15"), "done"]
        assert unfeasible(world, wrong) == "reference fails"
        assert unfeasible(world, task("Lend Solaris.", lent=["B15"])) == "no reference"
        idle = task("Say done.", answer="done")
        idle.reference = ["done"]
        assert unfeasible(world, idle) == "solved by doing nothing"

    def test_repetitions(self):
        known = Duplicates(0.8, [task("lend the green book Solaris to me now", lent=["B15"])])
        assert known.repeats(task("hand Solaris out", lent=["B15"])) == "same goal"
        assert known.repeats(task("lend the green book Solaris to me please now", mark=["B15"])) == "same words"
        assert (
            known.repeats(task("lend the green book Solaris to me now", lent=["B15"], seed=1)) == "same goal"
        )  # its id
        assert known.repeats(task("mark Solaris", mark=["B15"])) == ""

    @given(st.frozensets(st.text(max_size=2)), st.frozensets(st.text(max_size=2)))
    def test_jaccard(self, a, b):
        assert jaccard(a, b) == jaccard(b, a)
        assert 0.0 <= jaccard(a, b) <= 1.0
        assert (jaccard(a, b) == 1.0) == (a == b)

    @given(st.sets(st.integers(0, 12)), st.integers(0, 2**32))
    def test_minimise_keeps_exactly_what_holds_needs(self, needed, seed):
        kept = minimise(list(range(13)), set(), lambda trial: needed <= set(trial), key=lambda n: (n * seed) % 7)
        assert kept == sorted(needed)
