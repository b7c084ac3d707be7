"""Synthetic tasks can be solved, but not by doing nothing, are told in words that suffice, and are all different."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.toolcalls import parse
from envs.travel import Travel
from envs.world import Task, World
from evolver.questioning import Questioning, mixture
from evolver.questioning.explore import Explorer, probe_of
from evolver.questioning.filter import Duplicates, jaccard, unfeasible
from evolver.questioning.write import minimise
from evolver.traces import opening_words, text_of, values_used, words
from tests.evolver.toy import Library, attempt, call, task


class NoSnapshots(Library):
    snapshots = False


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
    return list(questioning.tasks.values())


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
                refused = any(step.info["errors"] for step in trajectory.steps)
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


class TestExplorer:
    def test_a_walk_is_what_the_world_did(self, seeds):
        explorer = Explorer(Travel().profile())
        world, again = Travel(), Travel()
        walks = [w for t in seeds[:6] for w in explorer.walks(world, probe_of(t), random.Random(3), hints=t.query)]
        assert len(walks) == 12
        for walk in walks:
            again.reset(walk.probe)
            for event in walk.events:
                before = again.difference()
                result = again.step(event.action)
                assert text_of(result.messages) == event.result
                assert bool(event.changed) == (again.difference() != before)

    def test_branches_share_their_breadth_phase(self):
        explorer = Explorer(Library().profile(), breadth=3, depth=5, branches=3)
        walks = list(explorer.walks(Library(), probe_of(task("")), random.Random(0)))
        assert [w.events[:3] for w in walks] == [walks[0].events[:3]] * 3
        assert all(len(w.events) == 8 for w in walks)

    def test_it_learns_what_makes_a_call_work(self, questioning):
        for tool in ("book", "move"):
            helped = questioning.explorer.knowledge.enables[f"{tool}: refused error quote the flight first"]
            assert max(helped, key=lambda remedy: helped[remedy][0]) == "quote"

    def test_it_gets_better_at_it(self, seeds):
        explorer = Explorer(Travel().profile())
        rates = []
        for n in range(4):
            walks = [w for t in seeds for w in explorer.walks(Travel(), probe_of(t), random.Random(n), hints=t.query)]
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
        assert len(found) == 24 and len(first.tasks) == 20
        first.record([(id, win) for id in list(first.tasks)[:3] for win in (True, False, True)])
        second = Questioning(Travel, seeds, capacity=20)
        second.load_state(json.loads(json.dumps(first.state())))
        assert second.state() == first.state()
        assert second.explore(seed=2, budget=16) == first.explore(seed=2, budget=16)
        draws = [q.mixture(seeds, step=3, n=8, ratio=0.5, seed=0, learnable=True) for q in (first, second)]
        assert draws[0] == draws[1]

    def test_the_books_add_up(self, seeds):
        made = Questioning(Travel, seeds)
        found = made.explore(seed=1, budget=16)
        figures = made.metrics()
        rejected = sum(value for name, value in figures.items() if name.startswith("questioning/rejected/"))
        assert figures["questioning/accepted"] == len(found) == figures["questioning/pool"]
        assert figures["questioning/tried"] == figures["questioning/accepted"] + rejected
        assert sum(v for name, v in figures.items() if name.startswith("questioning/difficulty/")) == len(found)
        assert made.metrics()["questioning/tried"] == 0

    def test_a_full_pool_lets_go_of_what_teaches_least(self, seeds):
        made = Questioning(Travel, seeds, capacity=8)
        first = made.explore(seed=1, budget=8)
        made.record([(first[0].id, True)] * 20 + [(first[1].id, False)] * 20)
        made.record([(t.id, win) for t in first[2:] for win in (True, False)])
        made.explore(seed=2, budget=2)
        assert len(made.tasks) == 8 and not {first[0].id, first[1].id} & set(made.tasks)


class TestMixture:
    ORIGINAL = [task(f"o{n}") for n in range(10)]
    SYNTHETIC = [task(f"s{n}") for n in range(7)]

    @given(st.integers(1, 10), st.integers(1, 12), st.integers(0, 2**32))
    def test_every_original_once_per_epoch_and_none_twice_in_a_step(self, n, size, seed):
        n = min(n, size)
        original = [task(f"o{k}") for k in range(size)]
        steps = [mixture(original, [], step=s, n=n, ratio=0.0, seed=seed) for s in range(3 * size)]
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
    def test_the_share_is_exact_and_the_draw_repeatable(self, n, ratio, step, seed):
        if round(ratio * n) > len(self.SYNTHETIC):
            return
        drawn = mixture(self.ORIGINAL, self.SYNTHETIC, step=step, n=n, ratio=ratio, seed=seed)
        assert drawn == mixture(self.ORIGINAL, self.SYNTHETIC, step=step, n=n, ratio=ratio, seed=seed)
        assert len({t.id for t in drawn}) == n
        assert sum(t in self.SYNTHETIC for t in drawn) == round(ratio * n)

    def test_weights_prefer_and_zero_comes_last(self):
        weights = [0.0, 1.0, 8.0, 1.0, 0.0, 1.0, 1.0]
        counts = Counter(
            t.query
            for step in range(300)
            for t in mixture([], self.SYNTHETIC, step=step, n=2, ratio=1.0, seed=0, weights=weights)
        )
        assert counts["s2"] > 2 * max(counts[f"s{n}"] for n in (1, 3, 5, 6))
        assert "s0" not in counts and "s4" not in counts
        every = mixture([], self.SYNTHETIC, step=0, n=7, ratio=1.0, seed=0, weights=weights)
        assert {t.query for t in every} == {t.query for t in self.SYNTHETIC}

    def test_too_few_tasks_is_said(self):
        with pytest.raises(ValueError, match="needs 8 synthetic tasks, there are 7"):
            mixture(self.ORIGINAL, self.SYNTHETIC, step=0, n=8, ratio=1.0, seed=0)
        with pytest.raises(ValueError, match="needs 11 original tasks, there are 10"):
            mixture(self.ORIGINAL, [], step=0, n=11, ratio=0.0, seed=0)
        with pytest.raises(ValueError, match="between 0 and 1"):
            mixture(self.ORIGINAL, [], step=0, n=1, ratio=1.5, seed=0)

    def test_tasks_solved_sometimes_are_worth_most(self, questioning, tasks):
        kinds: dict[str, list[str]] = {}
        for one in tasks:
            kinds.setdefault(one.meta["template"], []).append(one.id)
        (always, *_), (never, sibling, *_), (sometimes, *_), (untried, *_) = sorted(kinds.values(), key=len)[-4:]
        value = questioning.learnability
        assert value(sibling) == value(untried) == 1.0
        questioning.record([(always, True)] * 8 + [(never, False)] * 8 + [(sometimes, k % 2 == 0) for k in range(8)])
        questioning.record([("no such task", True)])
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
