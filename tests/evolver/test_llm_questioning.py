"""Self-questioning by language models: walks, written tasks, and the checks that decide which are
kept."""

import json

import pytest

from envs.bfcl import Bfcl
from envs.toolcalls import call_text, parse
from envs.travel import Travel
from envs.travel.data import CITIES
from envs.world import Evaluation, Observation, StepResult, Task, World, WorldError
from evolver.processes.interrupt import RunEnds
from evolver.questioning import is_verified
from evolver.questioning.calls import Event
from evolver.questioning.claims import unnamed_value
from evolver.questioning.llm import LlmExplorer
from evolver.questioning.profiles import preference_text, profile_text
from evolver.questioning.tasks import MASK
from evolver.transcripts import words
from tests.evolver.chat_server import asked
from tests.evolver.explorers import Questioning, library_script, proposal, solves, walking
from tests.evolver.toy import (
    BLUE,
    BOOKS,
    GREEN,
    LEND_15,
    LOST,
    TOOLS,
    WON,
    Library,
    call,
    task,
)

PLEASE_LEND = proposal("Please lend me Solaris.", 3, 4)
MARK_DUNE = proposal("Put a mark on Dune", 1, 5)
LENDING = [task(f"Lend {title}.", lent=[id]) for id, (title, _) in BOOKS.items()]


def bfcl_task():
    (start,) = [t for t in Bfcl().tasks("train") if t.id == "multi_turn_base_0"]
    return start


def exploring(chat, make_world=Library, seeds=LENDING[:1], **options):
    return Questioning(LlmExplorer, make_world, seeds, chat, **{"rounds": 1} | options)


class TestQuestioning:
    def make(self, chat_of, *ideas, breadth=2, depth=6):
        return exploring(chat_of(library_script(*ideas)), breadth=breadth, depth=depth)

    def test_tasks_are_made_of_steps_that_were_executed(self, chat_of):
        questioning = self.make(chat_of, PLEASE_LEND)
        (found,) = questioning.explore(0, 5)
        assert found.query == "Please lend me Solaris." and found.id.startswith("syn/")
        assert found.origin == "synthetic" and found.difficulty == 2 and found.reference == WON
        assert solves(Library(), found, WON) and not solves(Library(), found, LOST)
        assert not solves(Library(), found, [GREEN, LEND_15, call("mark", "B15"), "done"])
        figures = questioning.pool.metrics()
        assert figures["questioning/walks"] == 1 and figures["questioning/accepted"] == 1
        assert questioning.pool.tasks == {found.id: found}

    @pytest.mark.parametrize(
        "why,query,steps,answer",
        [
            ("reference fails", "Mark what is not there.", [3, 6], ""),
            ("nothing to check", "Look at the red ones.", [1], ""),
            ("answer in the query", "How many, 2?", [1], "2"),
            ("same words", "Lend Dune.", [1, 5], ""),
            ("not named in the query", "Lend Dune.", [3, 4], ""),  # it is Solaris that is lent
            ("not named in the query", "Lend a book.", [3, 4], ""),
            ("answer not shown", "How many red books are there?", [1], "7"),
            ("answer not shown", "Which red book has a number?", [1], "B15"),
            ("answer not shown", "What is there in green?", [3], "Solaris in the shelf"),
            ("answer not shown", "What is there?", [3], "Solaris green B15"),
            ("answer not shown", "Which number is it?", [3], "15"),
        ],
    )
    def test_what_is_turned_down(self, chat_of, why, query, steps, answer):
        questioning = self.make(chat_of, proposal(query, *steps, answer=answer))
        assert questioning.explore(0, 5) == []
        assert questioning.pool.metrics()[f"questioning/rejected/{why}"] == 1

    @pytest.mark.parametrize(
        "query,step,said,answer",
        [
            ("How many books stand on the red shelf?", 1, "2", "2"),
            ("Which book has the number B15?", 3, '"solaris".', "Solaris"),
        ],
    )
    def test_an_answer_is_a_value_that_a_step_showed(self, chat_of, query, step, said, answer):
        (found,) = self.make(chat_of, proposal(query, step, answer=said)).explore(0, 5)
        assert found.verifier["answer"]["value"] == answer == found.reference[-1]
        assert solves(Library(), found, found.reference)
        assert not solves(Library(), found, [*found.reference[:-1], "x"])

    @pytest.mark.parametrize(
        "idea,reference",
        [
            (proposal("Please lend me Solaris.", 4), WON),
            (proposal("Please lend me Solaris.", 1, 2, 3, 4), WON),
            (proposal("How many blue books?", 1, 2, answer="2"), [BLUE, "2"]),
        ],
    )
    def test_a_reference_has_the_calls_that_its_result_needs_and_no_others(
        self, chat_of, idea, reference
    ):
        (found,) = self.make(chat_of, idea).explore(0, 5)
        assert found.reference == reference and found.difficulty == len(reference) - 1

    @pytest.mark.parametrize(
        "ideas,why",
        [([proposal("Step into the void.", 99)], "no such steps"), ([], "nothing proposed")],
    )
    def test_a_poor_explorer_is_given_up_and_its_failures_are_counted(self, chat_of, ideas, why):
        options = {"breadth": 1, "depth": 1, "rounds": 100, "patience": 8, "parallel": 2}
        questioning = exploring(chat_of(library_script(*ideas)), seeds=LENDING, **options)
        assert questioning.explore(0, 5) == []
        # the last batch of a round has one seed
        assert questioning.pool.rejections() == f"9 walks, 0 tasks kept, rejected: 9 x {why}"

    @pytest.mark.parametrize("budget", [5, 1])
    def test_queries_alike_are_one_task_and_the_budget_holds(self, chat_of, budget):
        now, again = (proposal(f"Lend Solaris now{mark}", 3, 4) for mark in ".!")
        found = self.make(chat_of, now, again, MARK_DUNE).explore(0, budget)
        assert [t.query for t in found] == ["Lend Solaris now.", "Put a mark on Dune"][:budget]

    def test_an_explorer_knows_no_task_and_sees_a_window(self, chat_of):
        questioning = self.make(chat_of, breadth=2, depth=3)
        questioning.explore(0, 1)
        requests = questioning.explorer.chat.server.requests
        walk = [body["messages"] for _, _, body in requests[:5]]
        assert len(requests) == 6  # the last is the writer's
        assert "Lend Dune" not in json.dumps(walk)
        assert MASK in walk[0][1]["content"] and '"shelf"' in walk[0][0]["content"]
        first_phase = ["Phase 1" in messages[-1]["content"] for messages in walk]
        assert first_phase == [True] * 2 + [False] * 3
        # at most the last three turns
        assert list(map(len, walk)) == [2, 4, 6, 8, 8]

    def test_the_writer_is_told_what_there_is(self, chat_of):
        questioning = self.make(chat_of, PLEASE_LEND)
        questioning.explore(0, 1)
        questioning.explore(1, 1)
        assert "- Please lend me Solaris." in asked(questioning.explorer.chat)[-1]

    def test_the_same_seed_makes_the_same_tasks_and_state_survives(self, chat_of):
        one, other, fresh = (self.make(chat_of, PLEASE_LEND, MARK_DUNE) for _ in range(3))
        assert one.explore(3, 5) == other.explore(3, 5)
        fresh.pool.load_state(json.loads(json.dumps(one.pool.state())))
        assert fresh.pool.tasks == one.pool.tasks
        assert fresh.explore(4, 5) == []  # all of it is known

    def test_a_world_that_breaks_costs_its_walk(self, chat_of):
        class Breaks(Library):
            def step(self, action):
                raise WorldError("it broke")

        questioning = exploring(chat_of(library_script()), Breaks)
        assert questioning.explore(0, 3) == []
        assert questioning.pool.metrics()["questioning/rejected/the world broke"] == 1

    def test_tasks_paid_for_stay_where_the_budget_ends(self, chat_of):
        script = library_script(PLEASE_LEND)

        def dear(body, n):
            reply = script(body, n)
            reply.body = reply.body.replace(b'"completion_tokens": 5', b'"completion_tokens": 500')
            return reply

        options = {"breadth": 2, "depth": 6, "parallel": 1, "rounds": 9}
        chat = chat_of(dear, budget_tokens=10_000)
        questioning = exploring(chat, seeds=LENDING[:4], **options)
        with pytest.raises(RunEnds):
            questioning.explore(0, 99)
        assert 0 < len(questioning.pool.tasks) < 4

    @pytest.mark.parametrize("steps", [[2], [1, 2], [1, 2, 1]])
    def test_a_task_of_bfcl_is_checked_by_its_effect(self, chat_of, steps):
        look = call_text("ls", {})
        touch = call_text("touch", {"file_name": "note.txt"})
        chat = chat_of(walking([look, touch], proposal("I need an empty file note.txt.", *steps)))
        (found,) = exploring(chat, Bfcl, [bfcl_task()], breadth=2, depth=2).explore(0, 1)
        assert found.reference == [touch, "done"]  # a look-up is not demanded
        assert solves(Bfcl(), found, [look, touch, "done"])
        for actions in ([look, "done"], [touch.replace("note", "other"), "done"]):
            assert not solves(Bfcl(), found, actions)


class Subscriptions(World):
    """A world without a verifier. Its own task needs its own verifier, and its openings show the
    query."""

    name = "subscriptions"

    def __init__(self, *, shows="{query}"):
        self.shows = shows

    def reset(self, task, seed=0):
        self.goal = task.verifier["active"]
        self.moves = 0
        self.active = ["S15", "S17"]
        opening = self.shows.format(query=task.query)
        return Observation([{"role": "user", "content": opening}], TOOLS)

    def step(self, action):
        texts = [self.answer(made.name, made.arguments.get("id")) for made in parse(action).calls]
        messages = [{"role": "tool", "content": text} for text in texts]
        return StepResult(messages, terminated=not texts)

    def answer(self, name, id):
        self.moves += 1
        if name == "list":
            kinds = {"S15": "news", "S17": "music"}
            return "\n".join(f"{id} {kinds[id]}" for id in self.active)
        if name == "cancel" and id in self.active:
            self.active.remove(id)
            return f"{id} is over, call {self.moves}"
        return f"help, call {self.moves}"

    def evaluate(self):
        right = self.goal == self.active
        return Evaluation(float(right), right)


LIST = call_text("list", {})
HELP = call_text("help", {})
CANCEL = call_text("cancel", {"id": "S15"})


class TestWorldsWithoutVerifiers:
    VERIFIER = {"active": ["S15"]}
    META = {"kind": "home"}
    SEED = Task("s1", "subscriptions", "Stop the music.", verifier=VERIFIER, meta=META)

    def explore(self, chat_of, *ideas):
        chat = chat_of(walking([LIST, HELP, CANCEL], *ideas))
        questioning = exploring(chat, Subscriptions, [self.SEED], breadth=1, depth=2)
        return questioning.explore(0, 5), questioning.pool.metrics()

    def test_tasks_are_checked_by_what_the_world_shows(self, chat_of):
        ideas = [
            proposal("Cancel my newspaper with the news.", 3),
            proposal("What is S17?", 1, answer="music"),
        ]
        (cancel, ask), _ = self.explore(chat_of, *ideas)
        # which the world needs
        assert cancel.verifier["start"] == ask.verifier["start"] == self.SEED.verifier
        assert cancel.meta["kind"] == "home" and is_verified(cancel) and is_verified(ask)
        for made, right, wrong in (
            (cancel, [CANCEL, "done"], [LIST, "done"]),
            (ask, [LIST, "It is music."], [LIST, "news"]),
        ):
            assert solves(Subscriptions(), made, right)
            assert not solves(Subscriptions(), made, wrong)

    @pytest.mark.parametrize(
        "idea,why",
        [
            (proposal("Cancel my subscription.", 1, 2), "nothing to check"),
            (proposal("Cancel my subscription.", 1, 1), "nothing to check"),
            (proposal("What is S17?", 1, answer="video"), "answer not shown"),
        ],
    )
    def test_looking_is_no_solution(self, chat_of, idea, why):
        found, figures = self.explore(chat_of, idea)
        assert found == [] and figures[f"questioning/rejected/{why}"] == 1

    @pytest.mark.parametrize(
        "shows,why",
        [
            ("Stop the music.", "does not show that query"),
            ("{query} Stop the music.", "still shows the old query"),
        ],
    )
    def test_a_world_that_ignores_the_query_is_refused(self, shows, why):
        with pytest.raises(ValueError, match=why):
            exploring(object(), lambda: Subscriptions(shows=shows), [self.SEED])

    def test_a_world_that_fails_on_a_probe_is_refused(self):
        class Picky(Subscriptions):
            def reset(self, task, seed=0):
                if task.origin == "synthetic":
                    raise ValueError("only my own")
                return super().reset(task, seed)

        with pytest.raises(ValueError, match=r"ValueError: only my own\..*enabled=False"):
            exploring(object(), Picky, [self.SEED])


class TestNaming:
    """Which values of a reference a query names."""

    def unnamed(self, query, *exchanges, opening="cancel an order of a passenger", demanded=None):
        events = [Event("", {}, action, text) for action, text in exchanges]
        demanded = demanded or [action for action, _ in exchanges]
        return unnamed_value(query, events, words(opening), demanded)

    ORDERS = (call_text("orders", {"passenger": "P03"}), "O12 Oslo Monday 85\nO13 Rome Monday 70")
    PEOPLE = (call_text("passengers", {}), "P03 Ines Ek\nP04 Omar Ek")
    CANCEL = (call_text("cancel", {"order": "O12"}), "cancelled")

    @pytest.mark.parametrize(
        "query,value",
        [
            ("Cancel an order.", "p03"),
            ("Cancel the order of Ek.", "p03"),
            ("Cancel an order of Ines.", "o12"),
            ("Cancel the Monday order of Ines.", "o12"),
            ("Cancel the order of Ines to Oslo.", ""),
            ("Cancel the cheapest order of Ines.", ""),
            ("P03 wants O12 cancelled.", ""),
        ],
    )
    def test_a_query_leads_to_each_value(self, query, value):
        assert self.unnamed(query, self.PEOPLE, self.ORDERS, self.CANCEL) == value

    def test_only_what_the_verifier_demands_is_checked(self):
        calls = (self.ORDERS[0], "O12 Oslo Monday 85"), self.CANCEL
        rows = [["orders", "O12", "status", "booked", "cancelled"]]
        assert self.unnamed("Cancel an order.", *calls, demanded=rows) == "o12"
        assert self.unnamed("Cancel the flight to Oslo.", *calls, demanded=rows) == ""

    def test_records_of_json(self):
        files = (call_text("ls", {}), '{"files": ["note.txt", "plan.txt"]}')
        calls = files, (call_text("rm", {"name": "plan.txt"}), "{}")
        assert self.unnamed("Delete a file.", *calls, opening="") == "plan txt"
        assert self.unnamed("Delete the plan.", *calls, opening="") == ""


class TestProfiles:
    def test_travel_says_what_there_is(self):
        profile = Travel(n_train=12).profile()
        text = profile_text(profile)
        assert f"- city (flights), such as {CITIES[0]}, {CITIES[1]}" in text
        assert "- order (name, to, day, fare, window, aisle), such as O11" in text
        assert "(name)" in text and "book (flight, passenger)" in text
        preference = preference_text(profile)
        assert "1 to 6 calls" in preference and "hard" not in preference
        assert "hard" in preference_text({})
        assert "easy" in preference_text({"preference": {"relation_difficulty": 1}})

    def test_operations_of_other_worlds_are_left_out(self):
        profile = Bfcl().profile()
        text = profile_text(profile, Bfcl().reset(bfcl_task()).tools)
        assert "- GorillaFileSystem" in text and "TravelAPI" not in text and len(text) < 8000
        every = profile_text(profile, TOOLS, limit=10**6)  # tools that the profile does not know
        assert "TravelAPI" in every and len(text) < len(every) / 3
