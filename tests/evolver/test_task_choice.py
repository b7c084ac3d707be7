"""A step draws its tasks evenly, and proposals that are no use or no news are filtered."""

import dataclasses
import types
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from evolver.parts import Parts
from evolver.phases.extraction import remember
from evolver.questioning import mixture, probe_of, synthetic_task
from evolver.questioning.goals import minimise
from evolver.questioning.pool import _in_epochs
from evolver.questioning.tasks import Duplicates, infeasibility, jaccard
from evolver.sampling import Epochs
from tests.evolver.explorers import pool_of
from tests.evolver.toy import LEND, WON, Library, task, tried


class TestMixture:
    def test_long_epochs_need_no_deep_recursion(self):
        assert len(set(_in_epochs(2001, 2000, step=1500, seed=0))) == 2000

    ORIGINAL = [task(f"o{n}") for n in range(10)]
    SYNTHETIC = [task(f"s{n}") for n in range(7)]

    @given(st.integers(1, 10), st.integers(1, 12), st.integers(0, 2**32))
    def test_every_original_once_per_epoch_and_none_twice_in_a_step(self, n, size, seed):
        n = min(n, size)
        original = [task(f"o{k}") for k in range(size)]
        steps = [mixture(original, [], step=s, n=n, share=0.0, seed=seed) for s in range(3 * size)]
        assert all(len({t.id for t in drawn}) == n for drawn in steps)
        # Within a step the order is shuffled, so epochs are compared where a step and an epoch end
        # together.
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
        drawn, again = (
            mixture(self.ORIGINAL, self.SYNTHETIC, step=step, n=n, share=share, seed=seed)
            for _ in range(2)
        )
        assert drawn == again
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
        for n, share, why in (
            (8, 1.0, "needs 8 synthetic tasks, there are 7"),
            (11, 0.0, "needs 11 original tasks, there are 10"),
            (1, 1.5, "between 0 and 1"),
        ):
            with pytest.raises(ValueError, match=why):
                mixture(self.ORIGINAL, self.SYNTHETIC, step=0, n=n, share=share, seed=0)

    def test_guided_rollouts_do_not_count(self):
        lend = dataclasses.replace(LEND, id="syn/1", origin="synthetic")
        pool = pool_of(lend)
        run = types.SimpleNamespace(
            config=base.get_config(),
            tasks=types.SimpleNamespace(pool=pool),
            sampler=Epochs(Parts(task_pool=pool)),
            navigating=None,
        )
        guided = tried(*WON, of=lend, experience=["e1"])
        assert guided.evaluation.success
        metrics = remember(run, [guided, tried(of=lend), tried(WON[0], of=lend)], step=1)
        assert pool.results == {"syn/1": [0, 2]} and metrics["questioning/learnable_rate"] == 0.0


class TestFilters:
    def test_what_is_no_use(self):
        for known, reference, why in (
            (LEND, WON, ""),
            (LEND, WON[1:], "reference fails"),
            (LEND, [], "no reference"),
            (task("Say done.", answer="done"), ["done"], "solved by doing nothing"),
        ):
            given = dataclasses.replace(known, reference=reference)
            assert infeasibility(Library(), given) == why

    def test_repetitions(self):
        original = task("lend the green book Solaris to me now", lent=["B15"])

        def repeats(query, *, start=original, meta=None, **goal):
            verifier = task(query, **goal).verifier
            return known.repeats(
                synthetic_task(start, query, identity=verifier, verifier=verifier, meta=meta)
            )

        known = Duplicates(0.8, [original])
        assert known.repeats(original) == "same goal"
        assert repeats("hand Solaris out", lent=["B15"]) == "same goal"
        assert repeats("lend the green book Solaris to me please now", mark=["B15"]) == "same words"
        assert repeats("mark Solaris", mark=["B15"]) == ""

        # BFCL and AppWorld give all their tasks seed 0, and each entry has a world of its own.
        other = task("lend Ulysses", lent=["B13"])
        for start in (other, dataclasses.replace(original, seed=1)):
            assert repeats("lend the green book Solaris to me now", start=start, lent=["B15"]) == ""
        same = {"start": other, "meta": {"entry": original.id}}
        assert repeats("hand Solaris out", **same, lent=["B15"]) == "same goal"
        verifier = original.verifier
        known.add(synthetic_task(probe_of(other), "hand it out", identity=[], verifier=verifier))
        assert repeats("give Solaris away", start=other, lent=["B15"]) == "same goal"

    @given(st.frozensets(st.text(max_size=2)), st.frozensets(st.text(max_size=2)))
    def test_jaccard(self, a, b):
        assert jaccard(a, b) == jaccard(b, a)
        assert 0.0 <= jaccard(a, b) <= 1.0
        assert (jaccard(a, b) == 1.0) == (a == b)

    @given(st.sets(st.integers(0, 12)), st.integers(0, 2**32))
    def test_minimise_keeps_exactly_what_holds_needs(self, needed, seed):
        every = list(range(13))
        key = lambda n: (n * seed) % 7
        assert minimise(every, set(), needed.issubset, key=key) == sorted(needed)
