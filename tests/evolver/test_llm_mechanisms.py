"""The language-model versions of the mechanisms: their questions, their use of answers, and abstention."""

import json

import pytest

from envs.travel import Travel
from envs.world import Evaluation, WorldError
from evolver.attributing import ABSTAIN, BAD, GOOD, Label
from evolver.attributing.llm import LlmJudge, read_labels
from evolver.llm.client import Chat, Limits, Role, ServerDown
from evolver.llm.embedders import EndpointEmbedder, HashedNgrams
from evolver.llm.prompts import prompt
from evolver.navigating import Navigating, Pool, Unrefined, new_experience
from evolver.navigating.llm import LlmExtractor, Reranker, Rewriter
from evolver.questioning import TaskPool, verifier_kind
from evolver.questioning.judges import Naive, Principle, Reference
from evolver.questioning.llm import MASK, LlmExplorer, preference_text, profile_text
from evolver.stop import RunEnds
from rl.trajectory import StopReason
from tests.evolver.chat_server import Answer, ChatServer, refused, said
from tests.evolver.toy import BOOKS, Library, attempt, call, task

ROLES = ("explorer", "writer", "judge", "step_judge", "summariser", "reranker", "embedder")
LEND = task("Lend Solaris.", lent=["B15"])
GREEN, LEND_15 = call("shelf", "green"), call("lend", "B15")
WON, LOST = [GREEN, LEND_15, "done"], [GREEN, "done"]


@pytest.fixture
def chat_of():
    """A client whose every role is answered by a script."""
    open_ones = []

    def make(script, **limits) -> Chat:
        server = ChatServer(script).__enter__()
        options = {"first_wait": 0.01, "longest_wait": 0.02, "attempts": 2, "failures": 1000} | limits
        roles = {name: Role(server.url, "tiny", max_tokens=500) for name in ROLES}
        chat = Chat(roles, limits=Limits(**options), say=lambda text: None)
        open_ones.extend([chat, server])
        chat.server = server
        return chat

    yield make
    for thing in open_ones:
        thing.__exit__() if isinstance(thing, ChatServer) else thing.close()


def asked(chat: Chat) -> list[str]:
    """All that was said in each request."""
    return ["\n".join(m["content"] for m in body["messages"]) for _, _, body in chat.server.requests]


def answer(value) -> Answer:
    return said(json.dumps(value))


class TestPrompts:
    @pytest.mark.parametrize(
        "name",
        ["step_judge", "outcome_naive", "outcome_principle", "explore", "write_tasks", "extract", "validate", "refine"],
    )
    def test_each_has_a_version_and_fills_its_slots_with_data_only(self, name):
        text = prompt(name)
        assert text.version.startswith(name + "-")
        messages = text.messages(**dict.fromkeys(text.slots, "{{task}} {0} $1 \\1"))
        assert [m["role"] for m in messages] == ["system", "user"]
        assert messages[1]["content"].count("{{task}}") >= 1
        with pytest.raises(ValueError, match="no slot"):
            text.messages(**dict.fromkeys(text.slots, ""), other="x")


def labels(*words: str) -> Answer:
    return answer({"steps": [{"step": n, "analysis": f"why {n}", "label": word} for n, word in enumerate(words, 1)]})


def values(rows) -> list[list[int]]:
    return [[label.value for label in row] for row in rows]


class TestStepJudge:
    def test_one_question_per_trajectory_one_label_per_step(self, chat_of):
        chat = chat_of(lambda body, n: labels("GOOD", "bad", "UNSURE"))
        trajectories = [attempt(Library(), LEND, WON), attempt(Library(), LEND, [GREEN, GREEN, "done"])]
        judge = LlmJudge(chat, 2000)
        rows = judge.label(trajectories)
        assert rows == [[Label(GOOD, "why 1"), Label(BAD, "why 2"), Label(ABSTAIN, "why 3")]] * 2
        assert len(chat.server.requests) == 2
        figures = judge.metrics()
        assert figures["attributing/good_rate"] == pytest.approx(1 / 3) and figures["attributing/trajectories"] == 2
        text = next(text for text in asked(chat) if "1.00 of 1 (positive)" in text)
        assert "Lend Solaris." in text and LEND_15 in text and "B15 Solaris green" in text and ">>> STEP 3" in text
        assert any("0.00 of 1 (negative)" in text for text in asked(chat))

    def test_equal_trajectories_cost_one_call(self, chat_of):
        chat = chat_of(lambda body, n: labels("GOOD", "GOOD", "GOOD"))
        assert values(LlmJudge(chat, 2000).label([attempt(Library(), LEND, WON)] * 8)) == [[GOOD] * 3] * 8
        assert len(chat.server.requests) == 1

    @pytest.mark.parametrize(
        "reply",
        [
            said("Step 1 is good."),
            said('{"steps": [{"step": 1, "ana', finish="length"),
            labels("GREAT", "GOOD", "GOOD"),
            refused(400, "no"),
            refused(500, "boom"),
            Answer(b"{"),
        ],
    )
    def test_what_cannot_be_read_abstains_and_is_counted(self, chat_of, reply):
        judge = LlmJudge(chat_of(lambda body, n: reply), 2000)
        assert judge.label([attempt(Library(), LEND, WON)]) == [[Label(ABSTAIN, "the judge gave no usable answer")] * 3]
        assert judge.metrics()["attributing/unanswered"] == 1

    def test_steps_left_out_named_twice_or_not_there_abstain(self):
        def entries(*pairs):
            return {"steps": [{"step": n, "analysis": "so " * 200, "label": word} for n, word in pairs]}

        def read(answer, count):
            return values([read_labels(answer, count)])[0]

        assert read(entries((2, "GOOD")), 3) == [ABSTAIN, GOOD, ABSTAIN]
        assert read(entries((1, "GOOD"), (1, "BAD"), (2, "BAD"), (2, "BAD")), 2) == [ABSTAIN, BAD]
        assert read(entries((1, "GOOD"), (1, "BAD"), (1, "GOOD")), 1) == [ABSTAIN]
        assert read(entries((0, "GOOD"), (7, "BAD"), (-1, "BAD")), 2) == [ABSTAIN] * 2
        assert len(read_labels(entries((1, "GOOD")), 1)[0].reason) <= 200

    def test_broken_and_flat_ones_are_not_asked_about(self, chat_of):
        chat = chat_of(lambda body, n: labels("GOOD", "GOOD", "GOOD"))
        broken, flat = attempt(Library(), LEND, WON), attempt(Library(), LEND, WON)
        broken.stop = StopReason.ENV_ERROR
        rows = LlmJudge(chat, 2000, skip_flat=True).label([broken, flat])
        assert values(rows) == [[ABSTAIN] * 3] * 2 and rows[0][0].reason == "the environment ended the episode"
        assert not chat.server.requests

    def test_injected_experience_is_not_shown(self, chat_of):
        chat = chat_of(lambda body, n: labels("GOOD", "GOOD"))
        trajectory = attempt(Library(), LEND, [GREEN, "<EXP>secret advice</EXP> done"])
        trajectory.messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "<EXP>secret advice</EXP>\nLend Solaris."},
        ]
        LlmJudge(chat, 2000).label([trajectory])
        assert "secret" not in asked(chat)[0] and "Be kind." in asked(chat)[0]


def synthetic(actions) -> object:
    the_task = task("Lend Solaris.", lent=["B15"])
    the_task.origin, the_task.reference = "synthetic", [GREEN, LEND_15]
    return attempt(Library(), the_task, actions)


class TestOutcomeJudge:
    def test_the_score_is_the_outcome_and_trajectories_stay_as_they_are(self, chat_of):
        judge = Reference(chat_of(lambda body, n: answer({"analysis": "", "score": 85})), 2000)
        made = synthetic(LOST)
        (evaluation,) = judge.score([made])
        assert evaluation == Evaluation(0.85, True, {"judged": 0.85})
        assert made.outcome == 0.0 and not made.evaluation.success
        assert judge.calls_model and judge.roles == ("judge",)
        assert judge.metrics() == {
            "questioning/judge/judged": 1.0,
            "questioning/judge/unanswered": 0.0,
            "questioning/judge/agreed_rate": 0.0,
        }

    @pytest.mark.parametrize(
        "score,outcome,success", [(40, 0.4, False), (60, 0.6, True), (180, 1.0, True), (-3, 0.0, False)]
    )
    def test_bands(self, chat_of, score, outcome, success):
        judge = Reference(chat_of(lambda body, n: answer({"analysis": "", "score": score})), 2000)
        (evaluation,) = judge.score([synthetic(WON)])
        assert (evaluation.score, evaluation.success) == (outcome, success)

    @pytest.mark.parametrize("kind", [Naive, Principle, Reference])
    def test_each_kind_knows_what_it_should(self, chat_of, kind):
        chat = chat_of(lambda body, n: answer({"analysis": "", "score": 0}))
        kind(chat, 2000).score([synthetic(LOST)])
        (text,) = asked(chat)
        assert ("Relevance" in text) == (kind is not Naive)
        assert ("KNOWN TO WORK" in text and LEND_15 in text) == (kind is Reference)

    @pytest.mark.parametrize("reply", [said("good"), refused(500, "boom"), said('{"analysis": "", "score": NaN}')])
    def test_without_an_answer_there_is_no_outcome(self, chat_of, reply):
        judge = Reference(chat_of(lambda body, n: reply), 2000)
        (reason,) = judge.score([synthetic(WON)])
        assert isinstance(reason, str) and reason
        assert judge.metrics()["questioning/judge/unanswered"] == 1


def library_script(proposals):
    """An explorer that looks at shelves and lends, and a writer with fixed ideas."""
    colours = list(dict.fromkeys(colour for _, colour in BOOKS.values()))

    def script(body, n):
        last = body["messages"][-1]["content"]
        if "THE RECORD" in last:
            return answer({"tasks": proposals})
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        action = [*(call("shelf", colour) for colour in colours), LEND_15, call("mark", "B11"), call("mark", "B99")]
        return said("I wonder. " + action[turn] if turn < len(action) else "done")

    return script


def proposal(query, *steps, answer="", confidence=0.9):
    return {"query": query, "steps": list(steps), "answer": answer, "confidence": confidence}


class Questioning:
    """A pool that the explorer fills."""

    def __init__(self, chat, make_world, seeds, **options):
        self.make_world, self.pool = make_world, TaskPool(seeds, overlap=0.8, capacity=512)
        self.explorer = LlmExplorer(make_world, chat, 2000, self.pool, **options)

    def explore(self, seed, budget):
        return self.pool.grow(self.explorer, self.make_world, budget, seed)


class TestQuestioning:
    def make(self, chat, **options) -> Questioning:
        seeds = [task("Lend Dune.", lent=["B11"])]
        return Questioning(chat, Library, seeds, **{"breadth": 2, "depth": 6, "rounds": 1, **options})

    def test_tasks_are_made_of_steps_that_were_executed(self, chat_of):
        chat = chat_of(library_script([proposal("Please lend me Solaris.", 3, 4)]))
        questioning = self.make(chat)
        (found,) = questioning.explore(0, 5)
        assert found.query == "Please lend me Solaris." and found.origin == "synthetic" and found.id.startswith("syn/")
        assert found.verifier == {"state": [["books", "B15", "lent", False, True]], "answer": None}
        assert attempt(Library(), found, found.reference).evaluation.success
        figures = questioning.pool.metrics()
        assert figures["questioning/walks"] == 1 and figures["questioning/accepted"] == 1
        assert questioning.pool.tasks == {found.id: found}

    @pytest.mark.parametrize(
        "bad,why",
        [
            (proposal("Lend Solaris without looking.", 4), "reference fails"),
            (proposal("Mark what is not there.", 3, 6), "reference fails"),
            (proposal("Look at the red ones.", 1), "nothing to check"),
            (proposal("Step into the void.", 99), "no such steps"),
            (proposal("Nothing.", 0), "no such steps"),
            (proposal("Nothing."), "no such steps"),
            (proposal(" ", 1), "no query"),
            (proposal("How many, 2?", 1, answer="2"), "answer in the query"),
            (proposal("Lend Dune.", 3, 4), "same words"),
        ],
    )
    def test_what_is_turned_down(self, chat_of, bad, why):
        questioning = self.make(chat_of(library_script([bad])))
        assert questioning.explore(0, 5) == []
        assert questioning.pool.metrics()[f"questioning/rejected/{why}"] == 1

    def test_queries_alike_are_one_task_and_the_budget_holds(self, chat_of):
        ideas = [
            proposal("Lend Solaris now.", 3, 4),
            proposal("Lend Solaris now!", 3, 4),
            proposal("Put a mark on Dune", 1, 5),
        ]
        questioning = self.make(chat_of(library_script(ideas)))
        assert [t.query for t in questioning.explore(0, 5)] == ["Lend Solaris now.", "Put a mark on Dune"]
        assert len(self.make(chat_of(library_script(ideas))).explore(0, 1)) == 1

    def test_an_explorer_knows_no_task_and_sees_a_window(self, chat_of):
        chat = chat_of(library_script([]))
        self.make(chat, breadth=2, depth=3).explore(0, 1)
        walk = [
            body["messages"]
            for _, _, body in chat.server.requests
            if "THE RECORD" not in body["messages"][-1]["content"]
        ]
        assert len(walk) == 5
        assert all("Lend Dune" not in m["content"] for messages in walk for m in messages)
        assert MASK in walk[0][1]["content"] and '"shelf"' in walk[0][0]["content"]
        assert ["Phase 1" in messages[-1]["content"] for messages in walk] == [True, True, False, False, False]
        assert [len(messages) for messages in walk] == [2, 4, 6, 8, 8]  # at most the last three turns

    def test_the_writer_is_told_what_there_is(self, chat_of):
        chat = chat_of(library_script([proposal("Please lend me Solaris.", 3, 4)]))
        questioning = self.make(chat)
        questioning.explore(0, 1)
        questioning.explore(1, 1)
        assert "- Please lend me Solaris." in asked(chat)[-1]

    def test_the_same_seed_makes_the_same_tasks_and_state_survives(self, chat_of):
        ideas = [proposal("Please lend me Solaris.", 3, 4), proposal("Put a mark on Dune", 1, 5)]
        one, other = (self.make(chat_of(library_script(ideas))) for _ in range(2))
        assert one.explore(3, 5) == other.explore(3, 5)
        fresh = self.make(chat_of(library_script(ideas)))
        fresh.pool.load_state(json.loads(json.dumps(one.pool.state())))
        assert fresh.pool.tasks == one.pool.tasks and fresh.explore(4, 5) == []  # all of it is known

    @pytest.mark.parametrize("reply", [said("no idea"), refused(500, "boom")])
    def test_models_that_do_not_answer_make_no_tasks(self, chat_of, reply):
        script = library_script([])
        questioning = self.make(
            chat_of(lambda body, n: reply if "THE RECORD" in body["messages"][-1]["content"] else script(body, n))
        )
        assert questioning.explore(0, 3) == []
        assert questioning.pool.metrics()["questioning/rejected/nothing written"] == 1

    def test_a_world_that_breaks_costs_its_walk(self, chat_of):
        class Breaks(Library):
            def step(self, action):
                raise WorldError("it broke")

        questioning = Questioning(chat_of(library_script([])), Breaks, [LEND], rounds=1)
        assert questioning.explore(0, 3) == []
        assert questioning.pool.metrics()["questioning/rejected/the world broke"] == 1

    def test_tasks_paid_for_stay_where_the_budget_ends(self, chat_of):
        seeds = [task(f"Lend {title}.", lent=[id]) for id, (title, _) in BOOKS.items() if id != "B15"]
        ideas = [proposal("Please lend me Solaris.", 3, 4)]
        script = library_script(ideas)

        def dear(body, n):
            reply = script(body, n)
            reply.body = reply.body.replace(b'"completion_tokens": 5', b'"completion_tokens": 500')
            return reply

        chat = chat_of(dear, budget_tokens=10_000)
        questioning = Questioning(chat, Library, seeds, breadth=2, depth=6, parallel=1, rounds=9)
        with pytest.raises(RunEnds):
            questioning.explore(0, 99)
        assert len(questioning.pool.tasks) == 1

    def test_worlds_say_how_tasks_are_checked(self):
        from envs.bfcl import Bfcl

        assert verifier_kind(Library()) == verifier_kind(Travel(n_train=12)) == "state"
        assert verifier_kind(Bfcl()) == "calls"
        profile = Bfcl().profile()
        assert "GorillaFileSystem" in profile_text(profile) and "2 entities" in preference_text(profile)

    def test_bfcl_checks_the_calls_of_the_walk(self, chat_of):
        from envs.bfcl import Bfcl

        action = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
        touch = '<tool_call>\n{"name": "touch", "arguments": {"file_name": "note.txt"}}\n</tool_call>'

        def script(body, n):
            if "THE RECORD" in body["messages"][-1]["content"]:
                return answer({"tasks": [proposal("I need an empty file note.txt.", 2)]})
            turn = sum(m["role"] == "assistant" for m in body["messages"])
            return said([action, touch][turn] if turn < 2 else "done")

        (start,) = [t for t in Bfcl().tasks("train") if t.id == "multi_turn_base_0"]
        (found,) = Questioning(chat_of(script), Bfcl, [start], breadth=2, depth=2, rounds=1).explore(0, 1)
        assert found.verifier == {"calls": [{"name": "touch", "arguments": {"file_name": "note.txt"}}]}
        world = Bfcl()
        assert attempt(world, found, found.reference).evaluation.success
        assert not attempt(world, found, ["done"]).evaluation.success


EXPERIENCE = {"when": "When a book is to be lent", "content": "Look at its shelf first.", "confidence": 0.9}


def navigating_script(found, score=0.9, chosen=None):
    def script(body, n):
        text = body["messages"][-1]["content"]
        if "THE ATTEMPTS IT CAME FROM" in text:
            return answer({"reason": "", "score": score})
        return answer({"chosen": chosen} if "THE EXPERIENCES" in text else {"experiences": found})

    return script


def extractor_of(chat) -> LlmExtractor:
    return LlmExtractor(chat, 2000, ("train",))


def navigating_of(pool, extractor, refiner, top_k=1) -> Navigating:
    return Navigating(pool, extractor, refiner, share=0.5, top_k=top_k, min_similarity=0.1)


class TestExtraction:
    def test_the_best_success_and_the_worst_failure_are_contrasted(self, chat_of):
        chat = chat_of(navigating_script([EXPERIENCE]))
        trajectories = [attempt(Library(), LEND, a, rollout=n) for n, a in enumerate([[GREEN, *WON], WON, LOST])]
        (found,) = extractor_of(chat).extract(trajectories, step=3)
        assert (found.when, found.content, found.key) == (EXPERIENCE["when"], EXPERIENCE["content"], EXPERIENCE["when"])
        assert found.sources == [LEND.id] and found.step == 3
        text = asked(chat)[0]
        assert "ATTEMPT 1: success" in text and "ATTEMPT 2: failure" in text and "ATTEMPT 3" not in text
        assert text.count(GREEN) == 2  # the longer success is not shown

    @pytest.mark.parametrize("score,count", [(0.9, 1), (0.4, 0)])
    def test_what_is_not_valid_is_left_out(self, chat_of, score, count):
        extractor = extractor_of(chat_of(navigating_script([EXPERIENCE], score)))
        assert len(extractor.extract([attempt(Library(), LEND, LOST)], step=0)) == count
        assert extractor.metrics()["navigating/invalid"] == 1 - count

    def test_the_pool_keeps_it_and_counts_what_failed(self, chat_of):
        chat = chat_of(navigating_script([EXPERIENCE, EXPERIENCE]))
        navigating = navigating_of(Pool(HashedNgrams()), extractor_of(chat), Unrefined())
        assert len(navigating.learn([attempt(Library(), LEND, WON)], step=0)) == 1  # the second says the same
        assert navigating.retrieve(["A book is to be lent"])[0][0].content == EXPERIENCE["content"]
        silent = navigating_of(Pool(HashedNgrams()), extractor_of(chat_of(lambda body, n: said("?"))), Unrefined())
        assert silent.learn([attempt(Library(), LEND, WON)], step=0) == []
        assert silent.metrics()["navigating/unanswered"] == 1 and silent.metrics()["navigating/unanswered"] == 0

    def test_held_out_tasks_teach_nothing(self, chat_of):
        chat = chat_of(navigating_script([EXPERIENCE]))
        with pytest.raises(ValueError, match="split 'dev'"):
            extractor_of(chat).extract([attempt(Library(), task("Lend Dune.", lent=["B11"], split="dev"), WON)], step=0)
        assert not chat.server.requests


class TestRefining:
    def make(self, chat, refiner=Rewriter) -> Navigating:
        pool = Pool(HashedNgrams())
        pool.add([new_experience(f"Lend a book of shelf {word}", f"advice {word}", sources=["t"]) for word in "abcde"])
        return navigating_of(pool, extractor_of(chat), refiner(chat), top_k=2)

    def test_chosen_and_rewritten_under_the_same_id(self, chat_of):
        chosen = [{"number": 3, "content": "new words"}, {"number": 9, "content": "?"}, {"number": 1, "content": ""}]
        navigating = self.make(chat_of(navigating_script([], chosen=chosen)))
        (found,) = navigating.retrieve(["Lend a book of shelf"])
        assert found[0].content == "new words" and len(found) == 2
        assert navigating.pool[found[0].id].content != "new words"  # the pool keeps its own
        assert found[1].content == navigating.pool[found[1].id].content

    def test_nothing_fits_means_no_guidance(self, chat_of):
        navigating = self.make(chat_of(navigating_script([], chosen=[])))
        assert navigating.guide([LEND], 4, 0) == [[[]] * 4]

    def test_without_rewriting_the_content_stays(self, chat_of):
        chosen = [{"number": 2, "content": "made up"}]
        navigating = self.make(chat_of(navigating_script([], chosen=chosen)), Reranker)
        (found,) = navigating.retrieve(["Lend a book of shelf"])
        assert [e.content for e in found] == [navigating.pool[found[0].id].content]

    def test_without_an_answer_the_nearest_are_taken(self, chat_of):
        navigating = self.make(chat_of(lambda body, n: refused(500, "boom")))
        (found,) = navigating.retrieve(["Lend a book of shelf"])
        assert len(found) == 2 and navigating.metrics()["navigating/unrefined"] == 1


class TestEndpoint:
    def test_vectors_are_unit_and_searched(self, chat_of):
        def script(body, n):
            words = body["input"].split()
            return Answer({"data": [{"embedding": [float("book" in words), float("flight" in words), 0.1]}]})

        embedder = EndpointEmbedder(chat_of(script))
        assert embedder.dims == 3 and embedder([]).shape == (0, 3)
        pool = Pool(embedder)
        pool.add([new_experience("a book", "x", sources=[]), new_experience("a flight", "y", sources=[])])
        assert pool.search("this flight", 1)[0][0].content == "y"

    def test_a_server_that_does_not_answer_ends_the_run(self, chat_of):
        with pytest.raises(ServerDown, match="cannot be searched"):
            EndpointEmbedder(chat_of(lambda body, n: refused(500, "boom")))
