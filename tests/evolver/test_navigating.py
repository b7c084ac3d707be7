"""Experience comes from training attempts, is searched by the query, is kept on disk and guides an
exact share."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base
from envs.world import WorldError
from evolver.attributing import BAD, Label
from evolver.config import plugs
from evolver.grading import Grader
from evolver.llm.embedders import HashedNgrams, PolicyEmbedder, normalise
from evolver.navigating import (
    Experience,
    Navigating,
    Pool,
    PoolError,
    Refiner,
    Unrefined,
    new_experience,
    plan,
)
from evolver.navigating import pool as pools
from evolver.navigating.extract import Contrast, Lesson, render
from evolver.navigating.llm import LlmExtractor
from evolver.parts import Parts
from evolver.phases import extraction
from evolver.phases.tasks import for_experience
from evolver.questioning import TaskPool, synthetic_task
from models import hf
from rl.trajectory import StopReason
from tests.evolver.toy import Library, attempt, call, task

LEND = task("Lend Solaris.", lent=["B15"])
BOTH = task("Lend Solaris and put a mark on Dune.", lent=["B15"], mark=["B11"])
GREEN, RED, LENDING = call("shelf", "green"), call("shelf", "red"), call("lend", "B15")
TEXTS = [
    "Lend the red book.",
    "Mark the blue book.",
    "Book a flight to Oslo for Ann.",
    "Cancel order O12.",
    "Which day is it?",
]


def lesson(when: str, content: str = "Use shelf, then lend.", source: str = "t") -> Experience:
    return new_experience(when, content, sources=[source])


def pool_of(*experiences: Experience) -> Pool:
    pool = Pool(HashedNgrams())
    pool.add(experiences)
    return pool


def extract(trajectories, *, step=0, **options) -> list[Experience]:
    return Contrast(Parts(make_world=Library, splits=("train",)), **options).extract(
        trajectories, step=step
    )


def navigating_of(
    pool: Pool, *, share=0.5, top_k=1, min_similarity=0.3, refiner=None
) -> Navigating:
    extractor = Contrast(Parts(make_world=Library, splits=("train",)))
    return Navigating(
        pool,
        extractor,
        refiner or Unrefined(),
        share=share,
        top_k=top_k,
        min_similarity=min_similarity,
    )


def retrieve(navigating: Navigating, query: str) -> list[Experience]:
    return navigating.retrieve([query])[0]


LESSONS: list[Lesson] = []


def keep_lesson(it: Lesson) -> str:
    LESSONS.append(it)
    return " ".join(it.path)


def when_asked(query: str) -> str:
    return f"When asked to {query.lower()}"


class TestEmbedding:
    def test_vectors_are_of_length_one(self):
        vectors = HashedNgrams(dims=64)(TEXTS)
        assert vectors.shape == (5, 64) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
        assert not HashedNgrams(dims=64)(["", "  ?! "]).any()
        assert HashedNgrams(dims=64)([]).shape == (0, 64)

    def test_they_are_the_same_on_every_machine(self):
        vector = HashedNgrams(dims=64)(["Lend the red book."])[0]
        assert float(vector @ np.arange(64)) == pytest.approx(5.84578, abs=1e-4)

    def test_names_and_numbers_say_which_and_not_what(self):
        a, b, c = HashedNgrams()(
            [
                "Book the flight to Oslo for Ann.",
                "Book the flight to Rome for Ben.",
                "Cancel order O12.",
            ]
        )
        assert a @ b == pytest.approx(1.0) and a @ c < 0.5
        assert normalise("Put Ann on F12 at 9:30, then order O7.") == [
            "put",
            "A",
            "on",
            "0",
            "at",
            "0",
            "then",
            "order",
            "0",
        ]

    def test_states_of_the_policy(self, tmp_path):
        embed = PolicyEmbedder(Parts(policy="configs/assets/travel_base"))
        vectors = embed([*TEXTS, ""])
        assert vectors.shape == (6, embed.dims) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors[:5], axis=1), 1.0, rtol=1e-5)
        assert not vectors[5].any() and embed([]).shape == (0, embed.dims)
        np.testing.assert_allclose(
            embed(TEXTS[2:3])[0], vectors[2], atol=1e-5
        )  # whatever else is asked for
        assert (
            embed.name == PolicyEmbedder(Parts(policy=""), path="configs/assets/travel_base").name
        )
        assert (
            embed.name != PolicyEmbedder(Parts(policy="configs/assets/travel_base"), tokens=4).name
        )
        shape, params = hf.load("configs/assets/travel_base")
        params["layers"]["o"] = (
            params["layers"]["o"].at[0, 0, 0, 0].add(1e-3)
        )  # the same table of embeddings
        hf.save(tmp_path, shape, params, tokenizer="configs/assets/travel_base")
        assert embed.name != PolicyEmbedder(Parts(policy=str(tmp_path))).name
        with pytest.raises(ValueError, match=r"set config\.model\.path or"):
            PolicyEmbedder(Parts(policy=""))

    def test_what_makes_no_embedder(self):
        (problem,) = plugs.problems("navigating.embedder", "ngrams", {"dims": 2})
        assert "dims=2 must be >= 8" in problem


class TestPool:
    def test_the_nearest_comes_first(self):
        pool = pool_of(*map(lesson, TEXTS))
        for text in TEXTS:
            assert pool.search(text, 3)[0][0].when == text
        scores = [score for _, score in pool.search(TEXTS[0], 5, min_similarity=-1.0)]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert pool.search("Lend the red book.", 5, min_similarity=0.99)[0][0].when == TEXTS[0]
        assert pool.search(TEXTS[0], 0) == [] == Pool(HashedNgrams()).search(TEXTS[0], 3)

    def test_the_same_lesson_twice_is_one_with_the_sources_of_both(self):
        pool = pool_of(lesson("Book a flight to Oslo for Ann.", source="a"))
        again = [lesson("Book a flight to Oslo for Ann.", source=source) for source in "ba"]
        assert (
            pool.add([*again, lesson("Book a flight to Rome for Ben.", source="c")]) == []
        )  # names do not tell apart
        assert [e.sources for e in pool.all()] == [["a", "b", "c"]]

    @pytest.mark.parametrize(
        "other", [{"when": "Book a flight and a bed for Ann."}, {"content": "Never use mark."}]
    )
    def test_another_occasion_or_other_advice_is_another_lesson(self, other):
        first = {"when": "Book a flight to Oslo for Ann.", "source": "a"}
        pool = pool_of(lesson(**first))
        assert len(pool.add([lesson(**first | other | {"source": "b"})])) == 1
        assert [e.sources for e in pool.all()] == [["a"], ["b"]]

    def test_what_is_removed_is_not_found(self):
        pool = pool_of(*map(lesson, TEXTS))
        gone = pool.search(TEXTS[1], 1)[0][0]
        pool.remove([gone.id])
        assert gone.id not in pool and all(
            e.id != gone.id for e, _ in pool.search(TEXTS[1], 9, min_similarity=-1.0)
        )
        with pytest.raises(KeyError):
            pool.remove([gone.id])
        assert pool.add([gone]) == [gone.id] and pool.search(TEXTS[1], 1)[0][0] == gone

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

    @given(
        st.lists(
            st.tuples(st.sampled_from(["add", "remove", "save"]), st.integers(0, 9)), max_size=20
        )
    )
    @settings(max_examples=40, deadline=None)
    def test_a_reloaded_pool_answers_as_the_one_that_was_saved(self, tmp_path_factory, actions):
        folder = tmp_path_factory.mktemp("pool")
        pool = Pool(HashedNgrams(dims=64))
        pool.splits |= {"train", "mine"}
        known = [
            lesson(f"{TEXTS[n % 5]} {'very ' * n}", f"{TEXTS[n // 2]} {n % 2}") for n in range(10)
        ]
        for what, n in actions:
            if what == "add":
                pool.add([known[n]])
            elif what == "remove" and known[n].id in pool:
                pool.remove([known[n].id])
            else:
                pool.save(folder)
        pool.save(folder)
        from_disk, from_state = Pool(HashedNgrams(dims=64)), Pool(HashedNgrams(dims=64))
        from_disk.load(folder)
        from_state.load_state(json.loads(json.dumps(pool.state())))
        from_state.save(folder / "resumed")
        for path in (folder / "resumed").iterdir():
            assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
        for other in (from_disk, from_state):
            assert other.all() == pool.all() and other.splits == pool.splits == {"mine", "train"}
            for text in TEXTS:
                assert other.search(text, 4, min_similarity=-1.0) == pool.search(
                    text, 4, min_similarity=-1.0
                )


class TestDisk:
    @pytest.mark.parametrize("dies_at", [0, 1, 2, 3, 4])
    def test_a_save_that_is_killed_leaves_the_pool_before_or_after(
        self, tmp_path, monkeypatch, dies_at
    ):
        pool = pool_of(lesson(TEXTS[0]))
        pool.save(tmp_path)
        before = pool.state()
        pool.add([lesson(TEXTS[1])])
        calls = []

        def killed(name, real):
            def step(*args, **kwargs):
                calls.append(name)
                if len(calls) > dies_at:
                    raise KeyboardInterrupt
                return real(*args, **kwargs)

            return step

        monkeypatch.setattr(os, "replace", killed("replace", os.replace))
        monkeypatch.setattr(os, "fsync", killed("fsync", os.fsync))
        with pytest.raises(KeyboardInterrupt):
            pool.save(tmp_path)
        monkeypatch.undo()
        found = Pool(HashedNgrams())
        found.load(tmp_path)
        assert found.state() == before
        pool.save(tmp_path)
        found.load(tmp_path)
        assert found.state() == pool.state()
        assert sorted(p.suffix for p in tmp_path.iterdir()) == [".jsonl", ".usearch"]

    def test_files_that_are_no_pool_are_named(self, tmp_path):
        pool = Pool(HashedNgrams())
        with pytest.raises(PoolError, match=r"experiences.jsonl does not exist"):
            pool.load(tmp_path)
        for text in ("", "hello\n", "[1]\n", '{"format": "something else"}\n'):
            (tmp_path / "experiences.jsonl").write_text(text)
            with pytest.raises(PoolError, match=r"experiences.jsonl is not an experience pool"):
                pool.load(tmp_path)
        (tmp_path / "experiences.jsonl").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(PoolError, match="is not an experience pool"):
            pool.load(tmp_path)

    def test_a_broken_line_is_named_with_its_number(self, tmp_path):
        pool_of(*map(lesson, TEXTS)).save(tmp_path)
        path = tmp_path / "experiences.jsonl"
        lines = path.read_text().splitlines()
        half = lines[3].replace('"id": "', '"id": "\\ud800')
        for broken in (
            '{"id": "x"',
            '{"id": "x"}',
            "3",
            lines[3].replace('"uses": 0', '"uses": "many"'),
            half,
        ):
            path.write_text("\n".join([*lines[:3], broken, *lines[4:]]) + "\n")
            with pytest.raises(PoolError, match=r"experiences.jsonl, line 4: "):
                Pool(HashedNgrams()).load(tmp_path)
        path.write_text("\n".join(lines[:3]) + "\n")
        with pytest.raises(PoolError, match=r"cut or edited: 2 experiences, its first line says 5"):
            Pool(HashedNgrams()).load(tmp_path)

    @pytest.mark.parametrize("key", ["embedder", "index", "size"])
    def test_a_damaged_first_line_is_one_message(self, tmp_path, key):
        pool_of(lesson(TEXTS[0])).save(tmp_path)
        path = tmp_path / "experiences.jsonl"
        path.write_text(path.read_text().replace(f'"{key}"', f'"{key}s"', 1))
        with pytest.raises(
            PoolError, match=rf"experiences.jsonl: its first line is damaged: {key} is missing"
        ):
            Pool(HashedNgrams()).load(tmp_path)

    def test_a_damaged_index_is_refused_before_it_is_read(self, tmp_path):
        pool_of(*map(lesson, TEXTS)).save(tmp_path)
        (index,) = tmp_path.glob("*.usearch")
        data = index.read_bytes()
        index.write_bytes(data[: len(data) // 2])
        with pytest.raises(PoolError, match="is damaged"):
            Pool(HashedNgrams()).load(tmp_path)
        index.unlink()
        with pytest.raises(PoolError, match="is missing"):
            Pool(HashedNgrams()).load(tmp_path)

    def test_another_embedder_is_refused(self, tmp_path):
        pool = pool_of(lesson(TEXTS[0]))
        pool.save(tmp_path)
        other = Pool(HashedNgrams(dims=64))
        for load, what in ((other.load, tmp_path), (other.load_state, pool.state())):
            with pytest.raises(
                PoolError, match=r"'hashed-ngrams-512.* this run embeds by 'hashed-ngrams-64"
            ):
                load(what)
        assert len(other) == 0


class TestExtraction:
    SOLVED = (GREEN, LENDING, "done")

    def test_the_shortest_success_is_the_lesson(self):
        tries = [
            attempt(Library(), LEND, a, rollout=n)
            for n, a in enumerate([(RED, *self.SOLVED), self.SOLVED, (RED,)])
        ]
        (found,) = extract(tries, step=3)
        assert (
            found.when == found.key == LEND.query and found.sources == [LEND.id] and found.step == 3
        )
        (found,) = extract(tries, when=f"{__name__}:when_asked")
        assert (found.when, found.key) == ("When asked to lend solaris.", LEND.query)
        assert found.content.startswith("Use shelf, then lend.")

    def test_what_failed_attempts_did_instead_is_told(self):
        tries = [
            attempt(Library(), LEND, actions)
            for actions in (self.SOLVED, (LENDING, "done"), (LENDING, GREEN))
        ]
        LESSONS.clear()
        extract(tries, render=f"{__name__}:keep_lesson")
        assert LESSONS[0] == Lesson(
            "Lend Solaris.",
            ["shelf", "lend"],
            (0, "lend"),
            [("lend", "error: look at the shelf first")],
        )
        assert render(LESSONS[0]) == (
            'Use shelf, then lend. First use shelf, not lend. lend fails with "error: look at the shelf first".'
        )

    def test_steps_judged_bad_are_no_lesson(self):
        trajectory = attempt(Library(), LEND, (RED, *self.SOLVED))
        trajectory.turns[0].label = -1
        assert extract([trajectory], render=f"{__name__}:keep_lesson")[0].content == "shelf lend"

    def test_nothing_is_learnt_without_a_success(self):
        assert extract([attempt(Library(), LEND, (GREEN, "done"))]) == []
        assert extract([attempt(Library(), LEND, self.SOLVED)]) != []

    def test_held_out_tasks_teach_nothing(self):
        for split in ("dev", "test", "validation"):
            held_out = task("Lend Solaris.", lent=["B15"], split=split)
            with pytest.raises(ValueError, match=f"split '{split}'.*train tasks only"):
                extract([attempt(Library(), held_out, self.SOLVED)])

    def test_injected_text_never_comes_back(self):
        secret = "<EXP>Use SECRET, then lend.</EXP>\n"
        plain = "Use SECRET, then lend."
        solved = attempt(Library(), LEND, (GREEN, secret + LENDING, "done"), experience=["exp/1"])
        solved.messages = [{"role": "user", "content": secret + LEND.query}]
        failed = attempt(
            Library(), LEND, (secret + call("lend", "B11"), "done"), experience=["exp/1"]
        )
        failed.turns[0].observation[0]["content"] = f"error: {secret}"
        also = attempt(Library(), LEND, (plain + call("mark", "B11"), "done"), experience=["exp/1"])
        also.turns[0].observation[0]["content"] = f"error: no tool is named {plain}"
        solved.injected = failed.injected = also.injected = [plain]
        injected_call = attempt(
            Library(),
            LEND,
            (f"<EXP>{call('mark', 'B15')}</EXP>" + GREEN, LENDING, "done"),
            rollout=1,
        )
        for experience in extract([solved, failed, also]) + extract([injected_call]):
            assert (
                "SECRET" not in experience.when + experience.content
                and "mark" not in experience.content
            )

    def test_calls_behind_a_tag_of_experience_are_executed_and_learnt(self):
        hidden = attempt(Library(), LEND, ("<EXP>" + GREEN, LENDING, "done"))
        assert extract([hidden], render=f"{__name__}:keep_lesson")[0].content == "shelf lend"

    def test_a_success_that_does_not_repeat_is_dropped(self):
        trajectory = attempt(Library(), LEND, self.SOLVED)
        assert len(extract([trajectory])) == 1
        trajectory.turns.pop(0)
        assert extract([trajectory]) == []

    def test_wording_that_cannot_be_loaded_is_named(self):
        with pytest.raises(
            ValueError, match=r"render='no\.such:thing' cannot be loaded: ModuleNotFoundError"
        ):
            extract([], render="no.such:thing")

    def test_experience_can_have_the_words_of_demonstrations(self):
        from envs.hints import hint_text, when_text
        from envs.hints import render as as_demonstrated

        query = "Add a bag to order O12."
        assert as_demonstrated(Lesson(query, ["order", "bag"])) == hint_text(
            ["order", "bag"], when_text(query)
        )


class TestGuidance:
    @given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**40))
    def test_the_guided_share_is_exact(self, G, share, seed):
        guided = plan(["a", "b", "c"], G, share, seed)
        assert guided.shape == (3, G) and guided.dtype == bool
        assert (guided.sum(1) == round(share * G)).all()
        assert (guided == plan(["a", "b", "c"], G, share, seed)).all()
        assert (guided[1] == plan(["b"], G, share, seed)[0]).all()

    def test_places_differ_between_tasks_and_seeds(self):
        assert len({plan([f"t{n}"], 8, 0.5, 0).tobytes() for n in range(20)}) > 5
        assert len({plan(["t"], 8, 0.5, n).tobytes() for n in range(20)}) > 5
        with pytest.raises(ValueError, match="between 0 and 1"):
            plan(["t"], 8, 1.2, 0)

    def test_guided_is_only_who_gets_something(self):
        tasks = [LEND, task("What time is it in Peru, and why do we ask?")]
        empty = navigating_of(Pool(HashedNgrams()))
        assert empty.guide(tasks, 4, seed=0) == [[[]] * 4] * 2
        navigating = navigating_of(pool_of(lesson("Lend Dune.")), min_similarity=0.5)
        lists = navigating.guide(tasks, 4, seed=0)
        assert [sum(bool(found) for found in of_task) for of_task in lists] == [2, 0]
        figures = navigating.metrics()
        assert figures["navigating/guided_rate"] == 0.25 and figures["navigating/empty_rate"] == 0.5
        assert (
            navigating_of(pool_of(lesson("Lend Dune.")), share=0.0).guide(tasks, 4, seed=0)
            == [[[]] * 4] * 2
        )

    def test_at_most_k_and_no_content_twice(self):
        pool = pool_of(
            lesson("Lend Dune."), lesson("Lend Dune to me."), lesson("Lend Dune now.", "Use mark.")
        )
        contents = [e.content for e in retrieve(navigating_of(pool, top_k=3), "Lend Emma.")]
        assert len(contents) == 2 == len(set(contents))
        assert len(retrieve(navigating_of(pool), "Lend Emma.")) == 1

    def test_what_helped_is_preferred_among_equals(self, monkeypatch):
        monkeypatch.setattr(pools, "DUPLICATE", 1.0)
        pool = Pool(HashedNgrams())
        pool.add([lesson("Lend Dune.", "Use a."), lesson("Lend Emma.", "Use b.")])
        for _ in range(5):
            pool.record([pool.all()[0].id], success=False, expected=0.5)
            pool.record([pool.all()[1].id], success=True, expected=0.5)
        assert retrieve(navigating_of(pool), "Lend Kim.")[0].content == "Use b."

    def test_learning_keeps_what_is_new_and_deletes_what_never_helped(self):
        navigating = navigating_of(pool_of(lesson("Lend Dune.")))
        (id,) = (e.id for e in navigating.pool.all())
        solved = attempt(Library(), LEND, (GREEN, LENDING, "done"))
        assert (
            navigating.learn([solved, attempt(Library(), LEND, (GREEN,))], step=1) == []
        )  # the same lesson again
        assert navigating.pool[id].sources == ["t", LEND.id]
        both = attempt(Library(), BOTH, (GREEN, LENDING, RED, call("mark", "B11"), "done"))
        (new,) = navigating.learn([both], step=1)
        assert navigating.pool[new].when == BOTH.query
        for _ in range(5):
            navigating.record([attempt(Library(), LEND, (GREEN,), experience=[id]), solved])
        navigating.learn([solved], step=2)
        assert id not in navigating.pool and navigating.metrics()["navigating/pruned"] == 1

    def test_guided_rollouts_are_compared_with_the_others_of_their_groups(self):
        navigating = navigating_of(pool_of(lesson("Lend Dune.")))
        (e,) = navigating.pool.all()
        won, lost = (GREEN, LENDING, "done"), (GREEN,)
        group = [attempt(Library(), LEND, a, experience=[e.id]) for a in (won, won, won, lost)]
        group += [attempt(Library(), LEND, a) for a in (won, lost)]
        other = [attempt(Library(), BOTH, lost, experience=[e.id]), attempt(Library(), BOTH, lost)]
        later = [
            attempt(Library(), LEND, won)
        ]  # another draw of the task: no comparison for the first
        later[0].draw = 1
        navigating.record([*group, *other, *later])
        assert (e.uses, e.wins, e.expected) == (5, 3, 4 * 0.5 + 0)
        figures = navigating.metrics()
        assert (figures["navigating/win_rate"], figures["navigating/expected_rate"]) == (
            3 / 5,
            (4 * 0.5 + 0) / 5,
        )
        group[0].stop = StopReason.ENV_ERROR
        navigating.record(group)
        assert (e.uses, e.wins) == (8, 5) and navigating.metrics()[
            "navigating/win_rate"
        ] == pytest.approx(2 / 3)
        navigating.record(later)
        assert not {"navigating/win_rate", "navigating/expected_rate"} & set(navigating.metrics())

    def test_uses_are_counted_in_steps_without_extraction(self):
        navigating = navigating_of(pool_of(lesson("Lend Dune.")))
        (e,) = navigating.pool.all()
        config = run_of([], [], every=0).config
        run = SimpleNamespace(
            config=config, navigating=navigating, tasks=SimpleNamespace(pool=None)
        )
        step = [
            attempt(Library(), LEND, (GREEN, LENDING, "done"), experience=[e.id]),
            attempt(Library(), LEND, ()),
        ]
        assert extraction.remember(run, step, 1)["navigating/win_rate"] == 1.0
        assert (e.uses, e.wins, e.expected) == (1, 1, 0.0)

    def test_a_reloaded_state_goes_on_as_the_one_that_was_saved(self):
        first = navigating_of(pool_of(*map(lesson, TEXTS)), top_k=2)
        first.pool.record([first.pool.all()[0].id], success=True, expected=0.5)
        second = navigating_of(Pool(HashedNgrams()), top_k=2)
        second.load_state(json.loads(json.dumps(first.state())))
        assert second.state() == first.state()
        assert second.guide([LEND], 8, seed=3) == first.guide([LEND], 8, seed=3)

    def test_a_refiner_of_a_few_lines_sees_its_candidates(self):
        class Last(Refiner):
            candidates = 3

            def refine(self, queries, candidates, top_k):
                return [list(found)[-top_k:] for found in candidates]

        pool = pool_of(
            *(
                lesson("Lend Dune.", f"Use {word}.")
                for word in ("shelf", "mark of books", "nothing at all")
            )
        )
        plain, last = (
            navigating_of(pool, min_similarity=0.1, refiner=refiner) for refiner in (None, Last())
        )
        assert len(retrieve(last, "Lend Emma.")) == 1 != len(pool)
        assert retrieve(last, "Lend Emma.") != retrieve(plain, "Lend Emma.")
        assert "navigating/pool" in last.metrics()


def run_of(originals, synthetic, share=None, **settings) -> SimpleNamespace:
    """A run with no more parts than choosing tasks and filling the pool take. share: None = no
    self-questioning."""
    config = base.get_config()
    config.questioning.share = share or 0.0
    config.navigating.update(settings)
    pool = (
        None if share is None else TaskPool(originals, overlap=1.0, capacity=100, tasks=synthetic)
    )
    tasks = SimpleNamespace(originals=originals, pool=pool)
    return SimpleNamespace(config=config, tasks=tasks, navigating=None, grader=None)


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

    @pytest.mark.parametrize("reads", [True, False])
    def test_only_an_extractor_that_reads_labels_has_them_paid_for(self, reads, monkeypatch):
        class Turns:
            def label(self, trajectories):
                return [[Label(BAD, "") for _ in t.turns] for t in trajectories]

            def metrics(self):
                return {}

        monkeypatch.setattr(
            extraction,
            "play",
            lambda run, jobs, phase: [attempt(Library(), j.task, (GREEN,)) for j in jobs],
        )
        run = run_of([LEND], [], tasks=0, rollouts=2)
        run.grader, run.navigating = (
            Grader(turns=Turns()),
            SimpleNamespace(extractor=SimpleNamespace(reads_labels=reads)),
        )
        attempts = extraction.first_attempts(run)
        assert [[turn.label for turn in t.turns] for t in attempts] == [[-1 if reads else 0]] * 2

    def test_solutions_of_the_explorer_count_as_attempts_if_they_succeed(self):
        solved = synthetic_task(
            LEND, "Lend it.", identity=[1], verifier=LEND.verifier, reference=[GREEN, LENDING]
        )
        failing = synthetic_task(
            LEND, "Lend that.", identity=[2], verifier=LEND.verifier, reference=[RED]
        )
        run = run_of([LEND], [solved, failing], 1.0, solutions=True, rollouts=0)
        run.make_world = Library
        (found,), counts = extraction.solutions(run)
        assert counts == {"navigating/solutions": 1, "navigating/solutions_failed": 1}
        assert found.task == solved and found.evaluation.success and not found.guided
        (experience,) = Contrast(Parts(make_world=Library, splits=("train",))).extract(
            [found], step=0
        )
        assert "shelf" in experience.content and "lend" in experience.content
        run.config.navigating.solutions = False
        assert extraction.solutions(run) == ([], {})

    def test_a_world_that_breaks_costs_a_solution_and_not_the_run(self):
        class Breaks(Library):
            def step(self, action):
                raise WorldError("gone")

        run = run_of([LEND], self.SYNTHETIC, 1.0, solutions=True, rollouts=0)
        solved = synthetic_task(
            LEND, "Lend it.", identity=[1], verifier=LEND.verifier, reference=[GREEN, LENDING]
        )
        run.tasks.pool.tasks = {solved.id: solved}
        run.make_world = Breaks
        assert extraction.solutions(run) == (
            [],
            {"navigating/solutions": 0, "navigating/solutions_failed": 1},
        )

    def test_extractors_say_whether_they_read_labels(self):
        assert (
            Contrast(Parts(make_world=Library, splits=("train",))).reads_labels
            and not LlmExtractor.reads_labels
        )


class TestPlugs:
    @pytest.mark.parametrize(
        "key",
        ["navigating.extractor", "navigating.embedder", "navigating.refine", "attributing.judge"],
    )
    def test_every_known_name_is_a_plug(self, key):
        for name in plugs.known(key):
            assert plugs.problems(key, name, {}) == []
