"""Experience comes from training attempts, is searched by the query, is kept on disk and guides an
exact share."""

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from envs.hints import hint_text, when_text
from envs.hints import render as as_demonstrated
from envs.world import WorldError
from evolver.attributing import BAD, Label, TurnJudge
from evolver.config import plugs
from evolver.grading import Grader, grade
from evolver.llm.embedders import HashedNgrams, PolicyEmbedder, normalise
from evolver.navigating import Refiner, Unrefined, experience_pool, new_experience
from evolver.navigating.experience_pool import ExperiencePool
from evolver.navigating.extract import Contrast, Lesson, render
from evolver.navigating.guidance import Navigating, guided_rollouts
from evolver.navigating.llm import LlmExtractor
from evolver.parts import Parts
from evolver.phases import extraction
from evolver.phases.tasks import for_experience
from evolver.questioning import TaskPool, synthetic_task
from evolver.sampling import Epochs
from models.files import BrokenFile
from rl.trajectory import StopReason
from tests.evolver.toy import GREEN, LEND, LEND_15, MARK_11, RED, WON, Library, call, task, tried

BOTH = task("Lend Solaris and put a mark on Dune.", lent=["B15"], mark=["B11"])
BASE = "configs/assets/travel_base"
TEXTS = [
    "Lend the red book.", "Mark the blue book.", "Book a flight to Oslo for Ann.",
    "Cancel order O12.", "Which day is it?",
]  # fmt: skip
PARTS = Parts(make_world=Library, splits=("train",))


def lesson(when, content="Use shelf, then lend.", source="t"):
    return new_experience(when, content, sources=[source])


def pool_of(*experiences, dims=512):
    pool = ExperiencePool(HashedNgrams(dims=dims))
    pool.add(experiences)
    return pool


def loaded(folder):
    pool = pool_of()
    pool.load(folder)
    return pool


def test_records_of_experience_that_did_not_change_are_the_same_objects():
    pool = pool_of(lesson("look"), lesson("lend"))
    first, second = pool.state()["experiences"]
    pool.all()[0].sources.append("another")  # whoever changes one
    changed, same = pool.state()["experiences"]
    assert same is second and first["sources"] == ["t"] and changed["sources"] == ["t", "another"]


def nearest(pool, query, k=1, **options):
    return pool.search([query], k, **options)[0]


def extract(*trajectories, step=0, **options):
    return Contrast(PARTS, **options).extract(trajectories, step=step)


def navigating_of(*lessons, refiner=None, **settings):
    """Return self-navigating with a pool of these lessons."""
    settings = {"share": 0.5, "top_k": 1, "min_similarity": 0.3} | settings
    return Navigating(pool_of(*lessons), Contrast(PARTS), refiner or Unrefined(), **settings)


def retrieve(navigating, query):
    return navigating.retrieve([query])[0]


LESSONS: list[Lesson] = []


def keep_lesson(it):
    LESSONS.append(it)
    return " ".join(it.path)


def when_asked(query):
    return f"When asked to {query.lower()}"


KEEP = {"render": f"{__name__}:keep_lesson"}


class TestEmbedding:
    def test_vectors_are_of_length_one(self):
        embed = HashedNgrams(dims=64)
        vectors = embed(TEXTS)
        assert vectors.shape == (5, 64) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
        assert not embed(["", "  ?! "]).any() and embed([]).shape == (0, 64)
        # They are the same on every machine.
        assert float(vectors[0] @ np.arange(64)) == pytest.approx(5.84578, abs=1e-4)

    def test_names_and_numbers_say_which_and_not_what(self):
        queries = ["Book the flight to Oslo for Ann.", "Book the flight to Rome for Ben."]
        a, b, c = HashedNgrams()([*queries, "Cancel order O12."])
        assert a @ b == pytest.approx(1.0) and a @ c < 0.5
        words = normalise("Put Ann on F12 at 9:30, then order O7.")
        assert words == ["put", "A", "on", "0", "at", "0", "then", "order", "0"]

    def test_states_of_the_policy(self):
        embed = PolicyEmbedder(Parts(policy=BASE))
        vectors = embed([*TEXTS, ""])
        assert vectors.shape == (6, embed.dims) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors[:5], axis=1), 1.0, rtol=1e-5)
        assert not vectors[5].any() and embed([]).shape == (0, embed.dims)
        alone = embed(TEXTS[2:3])[0]  # whatever else is asked for
        np.testing.assert_allclose(alone, vectors[2], atol=1e-5)
        again = PolicyEmbedder(Parts(policy=""), path=BASE)
        short = PolicyEmbedder(Parts(policy=BASE), tokens=4)
        np.testing.assert_array_equal(again(TEXTS), vectors[:5])
        assert (short(TEXTS) != vectors[:5]).any()
        with pytest.raises(ValueError, match=r"set config\.model\.path or"):
            PolicyEmbedder(Parts(policy=""))

    def test_what_makes_no_embedder(self):
        (problem,) = plugs.problems("navigating.embedder", "ngrams", {"dims": 2})
        assert "dims=2 must be at least 8" in problem


actions = st.tuples(st.sampled_from(["add", "remove", "save"]), st.integers(0, 9))


class TestPool:
    def test_a_pool_that_grew_and_shrank_is_rarely_copied_and_finds_each_experience(self):
        pool = pool_of(dims=64)
        rows = set()
        for n in range(200):
            text = f"lesson {'abcdefghijklmnopqrst'[n % 20]}{'uvwxyzklmn'[n // 20]} of day"
            pool.add([lesson(text, text[::-1] + str(n))])
            rows.add(id(pool._vectors_ND.base))
        grown = len(pool)
        gone = [e.id for e in pool.all()[::3]]
        pool.remove(gone)
        pool.add([lesson("return all of it", "another")])
        assert grown > 150 and len(rows) < 10 and len(pool) == grown - len(gone) + 1
        assert not any(id in pool for id in gone)
        for experience in pool.all():
            (found, cosine), *_ = nearest(pool, experience.key)
            assert found is experience and cosine > 0.999
        with pytest.raises(KeyError):
            pool.remove(gone)

    def test_the_nearest_comes_first(self):
        pool = pool_of(*map(lesson, TEXTS))
        assert [found[0][0].when for found in pool.search(TEXTS, 3)] == TEXTS
        scores = [score for _, score in nearest(pool, TEXTS[0], 5, min_similarity=-1.0)]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert len(nearest(pool, TEXTS[0], 5, min_similarity=0.99)) == 1
        assert nearest(pool, TEXTS[0], 0) == [] == nearest(pool_of(), TEXTS[0], 3)

    def test_the_same_lesson_twice_is_one_with_the_sources_of_both(self):
        pool = pool_of(lesson("Book a flight to Oslo for Ann.", source="a"))
        again = [lesson("Book a flight to Oslo for Ann.", source=source) for source in "ba"]
        renamed = lesson("Book a flight to Rome for Ben.", source="c")  # names do not tell apart
        assert pool.add([*again, renamed]) == []
        assert [e.sources for e in pool.all()] == [["a", "b", "c"]]

    @pytest.mark.parametrize(
        "other", [{"when": "Book a flight and a bed for Ann."}, {"content": "Never use mark."}]
    )
    def test_another_occasion_or_other_advice_is_another_lesson(self, other):
        first = {"when": "Book a flight to Oslo for Ann.", "source": "a"}
        pool = pool_of(lesson(**first))
        assert len(pool.add([lesson(**first | other | {"source": "b"})])) == 1
        assert [e.sources for e in pool.all()] == [["a"], ["b"]]

    def test_useless_advice_is_deleted(self):
        pool = pool_of(*map(lesson, TEXTS[:4]))
        wins_little, helps_a_little, wins_much, hardly_used = (e.id for e in pool.all())
        for n in range(10):
            pool.record([wins_little], success=n < 2, expected=0.5)
            pool.record([helps_a_little], success=n < 4, expected=0.1)
            pool.record([wins_much, "no longer there"], success=n < 9, expected=0.9)
        pool.record([hardly_used], success=False, expected=1.0)
        assert pool.prune() == [wins_little]
        assert [e.id for e in pool.all()] == [helps_a_little, wins_much, hardly_used]

    @given(st.lists(actions, max_size=20))
    @settings(max_examples=40, deadline=None)
    def test_a_reloaded_pool_answers_as_the_one_that_was_saved(self, tmp_path_factory, actions):
        folder = tmp_path_factory.mktemp("pool")
        pool, from_disk, from_state = (pool_of(dims=64) for _ in range(3))
        pool.splits |= {"train", "mine"}
        for what, n in actions:
            known = lesson(f"{TEXTS[n % 5]} {'very ' * n}", f"{TEXTS[n // 2]} {n % 2}")
            if what == "add":
                pool.add([known])
            elif what == "remove" and known.id in pool:
                pool.remove([known.id])
            else:
                pool.save(folder)
        pool.save(folder)
        from_disk.load(folder)
        from_state.load_state(json.loads(json.dumps(pool.state())))
        from_state.save(folder / "resumed")
        for path in (folder / "resumed").iterdir():
            assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
        found = pool.search(TEXTS, 4, min_similarity=-1.0)
        for other in (from_disk, from_state):
            assert other.all() == pool.all() and other.splits == pool.splits == {"mine", "train"}
            assert other.search(TEXTS, 4, min_similarity=-1.0) == found


LINE_1 = "line 1: "
LINE_4 = "line 4: "


class TestDisk:
    @pytest.mark.parametrize("dies_at", [0, 1])
    def test_a_save_that_is_killed_leaves_the_pool_before_or_after(
        self, tmp_path, monkeypatch, dies_at
    ):
        pool = pool_of(lesson(TEXTS[0]))
        pool.save(tmp_path)
        before = pool.state()
        pool.add([lesson(TEXTS[1])])
        calls = []

        def killed(real):
            def step(*args, **kwargs):
                calls.append(real)
                if len(calls) > dies_at:
                    raise KeyboardInterrupt
                return real(*args, **kwargs)

            return step

        monkeypatch.setattr(os, "replace", killed(os.replace))
        monkeypatch.setattr(os, "fsync", killed(os.fsync))
        with pytest.raises(KeyboardInterrupt):
            pool.save(tmp_path)
        monkeypatch.undo()
        assert loaded(tmp_path).state() == before
        pool.save(tmp_path)
        assert loaded(tmp_path).state() == pool.state()
        assert sorted(p.suffix for p in tmp_path.iterdir()) == [".jsonl"]

    @pytest.mark.parametrize(
        "line, old, new, message",
        [
            (None, "", "", "its first line says nothing"),
            *((None, "", text, LINE_1) for text in ("hello\n", "[1]\n", "\ud800")),
            (None, "", '{"format": "something else"}\n', LINE_1),
            *((3, ".*", text, LINE_4) for text in ('{"id": "x"', '{"id": "x"}', "3")),
            (3, '"uses": 0', '"uses": "many"', LINE_4),
            (3, '"id": "', '"id": "\\\\ud800', LINE_4),
            (0, '"size"', '"sizes"', f"{LINE_1}size: Field required"),
            (0, '"splits"', '"s"', f"{LINE_1}it does not say which splits .* make the pool again"),
            (3, r"(?s).*", "", "cut or edited: 4 experiences, its first line says 5"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, tmp_path, line, old, new, message):
        pool_of(*map(lesson, TEXTS)).save(tmp_path)
        path = tmp_path / "experiences.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        if line is None:  # all of them
            lines = [new]
        else:
            lines[line] = re.sub(old, new, lines[line], count=1)
        path.write_bytes("".join(lines).encode(errors="surrogatepass"))
        with pytest.raises(BrokenFile, match=rf"experiences\.jsonl.*{message}"):
            loaded(tmp_path)
        path.unlink()
        with pytest.raises(BrokenFile, match=r"experiences\.jsonl does not exist"):
            loaded(tmp_path)

    def test_another_embedder_reads_it_too(self, tmp_path):
        pool = pool_of(*map(lesson, TEXTS))
        other = pool_of(dims=64)
        pool.save(tmp_path)
        other.load(tmp_path)
        assert other.all() == pool.all() and nearest(other, TEXTS[2])[0][0].when == TEXTS[2]


class TestExtraction:
    def test_the_shortest_success_is_the_lesson(self):
        tries = tried(RED, *WON), tried(*WON, rollout=1), tried(RED, rollout=2)
        (found,) = extract(*tries, step=3)
        assert found.when == found.key == LEND.query
        assert found.sources == [LEND.id] and found.step == 3
        (found,) = extract(*tries, when=f"{__name__}:when_asked")
        assert (found.when, found.key) == ("When asked to lend solaris.", LEND.query)
        assert found.content.startswith("Use shelf, then lend.")

    def test_what_failed_attempts_did_instead_is_told(self):
        LESSONS.clear()
        extract(tried(*WON), tried(LEND_15, "done"), tried(LEND_15, GREEN), **KEEP)
        errors = [("lend", "error: look at the shelf first")]
        assert LESSONS == [Lesson("Lend Solaris.", ["shelf", "lend"], (0, "lend"), errors)]
        assert render(LESSONS[0]) == (
            "Use shelf, then lend. First use shelf, not lend. "
            'lend fails with "error: look at the shelf first".'
        )

    def test_steps_judged_bad_are_no_lesson(self):
        trajectory = tried(RED, *WON)
        trajectory.turns[0].label = BAD
        assert extract(trajectory, **KEEP)[0].content == "shelf lend"

    def test_nothing_is_learnt_without_a_success_that_repeats(self):
        assert extract(tried(GREEN, "done")) == []
        trajectory = tried(*WON)
        assert len(extract(trajectory)) == 1
        trajectory.turns.pop(0)
        assert extract(trajectory) == []

    @pytest.mark.parametrize("kind", [Contrast, LlmExtractor])
    @pytest.mark.parametrize("split", ["dev", "test", "validation"])
    def test_held_out_tasks_teach_nothing(self, kind, split):
        """Nor is a language model asked about them: there is none here."""
        extractor = kind(replace(PARTS, client=object()))
        held_out = task("Lend Solaris.", lent=["B15"], split=split)
        with pytest.raises(ValueError, match=f"split '{split}'.*train tasks only"):
            extractor.extract([tried(*WON, of=held_out)], step=0)

    def test_injected_text_never_comes_back(self):
        plain = "Use SECRET, then lend."
        secret = f"<EXP>{plain}</EXP>\n"
        solved = tried(GREEN, secret + LEND_15, "done", experience=["exp/1"])
        solved.messages = [{"role": "user", "content": secret + LEND.query}]
        failed = tried(secret + call("lend", "B11"), "done", experience=["exp/1"])
        failed.turns[0].observation[0]["content"] = f"error: {secret}"
        also = tried(plain + MARK_11, "done", experience=["exp/1"])
        also.turns[0].observation[0]["content"] = f"error: no tool is named {plain}"
        solved.injected = failed.injected = also.injected = [plain]
        injected_call = tried(f"<EXP>{call('mark', 'B15')}</EXP>" + GREEN, LEND_15, "done")
        for experience in extract(solved, failed, also) + extract(injected_call):
            assert "SECRET" not in experience.when + experience.content
            assert "mark" not in experience.content

    def test_calls_behind_a_tag_of_experience_are_executed_and_learnt(self):
        hidden = tried("<EXP>" + GREEN, LEND_15, "done")
        assert extract(hidden, **KEEP)[0].content == "shelf lend"

    def test_wording_that_cannot_be_loaded_is_named(self):
        message = r"render='no\.such:thing' cannot be loaded: ModuleNotFoundError"
        with pytest.raises(ValueError, match=message):
            extract(render="no.such:thing")

    def test_experience_can_have_the_words_of_demonstrations(self):
        query = "Add a bag to order O12."
        path = ["order", "bag"]
        assert as_demonstrated(Lesson(query, path)) == hint_text(path, when_text(query))


class TestGuidance:
    @given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**40))
    def test_the_guided_share_is_exact(self, G, share, seed):
        guided = guided_rollouts(["a", "b", "c"], G, share, seed)
        assert guided.shape == (3, G) and guided.dtype == bool
        assert (guided.sum(1) == round(share * G)).all()
        assert (guided == guided_rollouts(["a", "b", "c"], G, share, seed)).all()
        assert (guided[1] == guided_rollouts(["b"], G, share, seed)[0]).all()

    def test_places_differ_between_tasks_and_seeds(self):
        tasks = [f"t{n}" for n in range(20)]
        assert len({row.tobytes() for row in guided_rollouts(tasks, 8, 0.5, 0)}) > 5
        assert len({guided_rollouts(["t"], 8, 0.5, n).tobytes() for n in range(20)}) > 5

    def test_guided_is_only_who_gets_something(self):
        tasks = [LEND, task("What time is it in Peru, and why do we ask?")]
        nobody = [[[]] * 4] * 2
        assert navigating_of().guide(tasks, 4, seed=0) == nobody
        assert navigating_of(lesson("Lend Dune."), share=0.0).guide(tasks, 4, seed=0) == nobody
        navigating = navigating_of(lesson("Lend Dune."), min_similarity=0.5)
        lists = navigating.guide(tasks, 4, seed=0)
        assert [sum(bool(found) for found in of_task) for of_task in lists] == [2, 0]
        figures = navigating.metrics()
        assert figures["navigating/guided_rate"] == 0.25 and figures["navigating/empty_rate"] == 0.5

    def test_an_empty_retrieval_is_one_that_the_refiner_leaves_empty(self):
        class Own(Unrefined):
            def refine(self, queries, candidates, top_k):
                return [[lesson("Lend Dune.")], []]

        navigating = navigating_of(refiner=Own())
        navigating.guide([LEND, task("What time is it?")], 4, seed=0)
        figures = navigating.metrics()
        assert figures["navigating/guided_rate"] == 0.25 and figures["navigating/empty_rate"] == 0.5

    def test_at_most_k_and_no_content_twice(self):
        lessons = [lesson("Lend Dune."), lesson("Lend Dune to me."), lesson("Lend Kim.", "Use b.")]
        contents = [e.content for e in retrieve(navigating_of(*lessons, top_k=3), "Lend Emma.")]
        assert len(contents) == 2 == len(set(contents))
        assert len(retrieve(navigating_of(*lessons), "Lend Emma.")) == 1

    def test_what_helped_is_preferred_among_equals(self, monkeypatch):
        monkeypatch.setattr(experience_pool, "DUPLICATE", 1.0)
        navigating = navigating_of(lesson("Lend Dune.", "Use a."), lesson("Lend Emma.", "Use b."))
        for _ in range(5):
            for n, experience in enumerate(navigating.pool.all()):
                navigating.pool.record([experience.id], success=n == 1, expected=0.5)
        assert retrieve(navigating, "Lend Kim.")[0].content == "Use b."

    def test_learning_keeps_what_is_new_and_deletes_what_never_helped(self):
        navigating = navigating_of(lesson("Lend Dune."))
        (id,) = (e.id for e in navigating.pool.all())
        solved = tried(*WON)
        navigating.learn([solved, tried(GREEN)], step=1)
        assert len(navigating.pool) == 1  # the same lesson again
        assert navigating.pool[id].sources == ["t", LEND.id]
        both = tried(GREEN, LEND_15, RED, MARK_11, "done", of=BOTH)
        navigating.learn([both], step=1)
        _, new = navigating.pool.all()
        assert new.when == BOTH.query
        for _ in range(5):
            navigating.record([tried(GREEN, experience=[id]), solved])
        navigating.learn([solved], step=2)
        assert id not in navigating.pool and navigating.metrics()["navigating/pruned"] == 1

    def test_guided_rollouts_are_compared_with_the_others_of_their_groups(self):
        navigating = navigating_of(lesson("Lend Dune."))
        (e,) = navigating.pool.all()
        group = [tried(*a, experience=[e.id]) for a in (WON, WON, WON, (GREEN,))]
        group += [tried(*WON), tried(GREEN)]
        other = [tried(GREEN, of=BOTH, experience=[e.id]), tried(GREEN, of=BOTH)]
        later = tried(*WON)  # another draw of the task: no comparison for the first
        later.draw = 1
        navigating.record([*group, *other, later])
        assert (e.uses, e.wins, e.expected) == (5, 3, 4 * 0.5 + 0)
        figures = navigating.metrics()
        assert figures["navigating/win_rate"] == 3 / 5
        assert figures["navigating/expected_rate"] == (4 * 0.5 + 0) / 5
        group[0].stop = StopReason.ENV_ERROR
        navigating.record(group)
        assert (e.uses, e.wins) == (8, 5)
        assert navigating.metrics()["navigating/win_rate"] == pytest.approx(2 / 3)
        navigating.record([later])
        assert not {"navigating/win_rate", "navigating/expected_rate"} & set(navigating.metrics())

    def test_uses_are_counted_in_steps_without_extraction(self):
        navigating = navigating_of(lesson("Lend Dune."))
        (e,) = navigating.pool.all()
        run = run_of([], [], every=0)
        run.navigating = navigating
        step = [tried(*WON, experience=[e.id]), tried()]
        assert extraction.remember(run, step, 1)["navigating/win_rate"] == 1.0
        assert (e.uses, e.wins, e.expected) == (1, 1, 0.0)

    def test_a_refiner_of_a_few_lines_sees_its_candidates(self):
        class Last(Refiner):
            candidates = 3

            def refine(self, queries, candidates, top_k):
                return [list(found)[-top_k:] for found in candidates]

        advice = ("Use shelf.", "Use mark of books.", "Use nothing at all.")
        lessons = [lesson("Lend Dune.", text) for text in advice]
        first, last = (navigating_of(*lessons, refiner=refiner) for refiner in (None, Last()))
        assert len(retrieve(last, "Lend Emma.")) == 1
        assert retrieve(last, "Lend Emma.") != retrieve(first, "Lend Emma.")
        assert last.metrics()["navigating/pool"] == 3


def run_of(originals, synthetic, share=None, **settings):
    """A run with no more parts than choosing tasks and filling the pool take. share: None = no
    self-questioning."""
    config = base.get_config()
    config.questioning.share = share or 0.0
    config.navigating.update(settings)
    pool = (
        None if share is None else TaskPool(originals, overlap=1.0, capacity=100, tasks=synthetic)
    )
    tasks = SimpleNamespace(originals=originals, pool=pool)
    sampler = Epochs(Parts(task_pool=pool))
    return SimpleNamespace(config=config, tasks=tasks, sampler=sampler, make_world=Library)


class TestFirstExperience:
    ORIGINALS = [task(f"Lend {word}.") for word in "abcdefghij"]
    SYNTHETIC = [synthetic_task(LEND, f"Mark {n}.", identity=[n]) for n in "abcdefghijkl"]

    @pytest.mark.parametrize(
        "share,wanted,originals,synthetic",
        [
            (None, 0, 10, 0),
            (0.0, 0, 10, 0),
            (0.0, 4, 4, 0),
            (1.0, 0, 0, 12),
            (1.0, 4, 0, 4),
            (1.0, 32, 0, 12),
            (0.75, 0, 10, 12),
            (0.75, 8, 2, 6),
            (0.75, 32, 4, 12),  # as many as the mixture allows
        ],
    )
    def test_it_comes_from_the_mixture_that_the_run_trains_on(
        self, share, wanted, originals, synthetic
    ):
        run = run_of(self.ORIGINALS, self.SYNTHETIC, share, tasks=wanted)
        chosen = for_experience(run)
        assert len({t.id for t in chosen}) == len(chosen) == originals + synthetic
        assert sum(t.origin == "synthetic" for t in chosen) == synthetic
        assert chosen == for_experience(run)

    @staticmethod
    def invented(*actions):
        query = f"Lend it by {len(actions)} actions."
        fields = {"verifier": LEND.verifier, "reference": list(actions)}
        return synthetic_task(LEND, query, identity=[query], **fields)

    @pytest.mark.parametrize("kind, label", [(Contrast, BAD), (LlmExtractor, 0)])
    def test_only_an_extractor_that_reads_labels_has_them_paid_for(self, kind, label, monkeypatch):
        class AllBad(TurnJudge):
            def label(self, trajectories):
                return [[Label(BAD)] * len(t.turns) for t in trajectories]

        def played(run, jobs, phase, grader):
            attempts = [tried(GREEN) for _ in jobs]
            grade(grader, attempts)
            return attempts, {}

        monkeypatch.setattr(extraction, "graded_rollouts", played)
        run = run_of([LEND], [], tasks=0, rollouts=2)
        run.grader = Grader(turns=AllBad())
        attempts = extraction.first_attempts(run, SimpleNamespace(extractor=kind))
        assert [[turn.label for turn in t.turns] for t in attempts] == [[label]] * 2

    def test_solutions_of_the_explorer_count_as_attempts_if_they_succeed(self):
        solved = self.invented(GREEN, LEND_15)
        failing = self.invented(RED)
        run = run_of([LEND], [solved, failing], 1.0, solutions=True, rollouts=0)
        (found,), counts = extraction.solutions(run)
        assert counts == {"navigating/solutions": 1, "navigating/solutions_failed": 1}
        assert found.task == solved and found.evaluation.success and not found.guided
        assert extract(found)[0].content == "Use shelf, then lend."
        run.config.navigating.solutions = False
        assert extraction.solutions(run) == ([], {})

    def test_a_world_that_breaks_costs_a_solution_and_not_the_run(self):
        class Breaks(Library):
            def step(self, action):
                raise WorldError("gone")

        solved = self.invented(GREEN, LEND_15)
        run = run_of([LEND], [solved], 1.0, solutions=True, rollouts=0)
        run.make_world = Breaks
        counts = {"navigating/solutions": 0, "navigating/solutions_failed": 1}
        assert extraction.solutions(run) == ([], counts)
