"""Self-questioning by language models: walks, written tasks, and the checks that decide which are
kept."""

import importlib
import json
from pathlib import Path

import pytest

from envs.probed import probed
from envs.toolcalls import call_text, parse
from envs.travel import Travel
from envs.travel.data import CITIES
from envs.world import Evaluation, Observation, StepResult, Task, World, WorldError
from evolver.parts import Parts
from evolver.processes.interrupt import RunEnds
from evolver.questioning import TaskPool, is_verified
from evolver.questioning.calls import Event
from evolver.questioning.claims import unnamed_value
from evolver.questioning.llm import LlmExplorer
from evolver.questioning.profiles import preference_text, profile_text
from evolver.questioning.tasks import MASK
from evolver.transcripts import words
from tests.evolver.chat_server import answer, asked, said
from tests.evolver.toy import BOOKS, TOOLS, Library, attempt, call, task

LEND = task("Lend Solaris.", lent=["B15"])
GREEN, LEND_15 = call("shelf", "green"), call("lend", "B15")
WON, LOST = [GREEN, LEND_15, "done"], [GREEN, "done"]


def library_script(proposals):
    """An explorer that looks at shelves and lends, and a writer with fixed ideas."""
    colours = list(dict.fromkeys(colour for _, colour in BOOKS.values()))

    def script(body, n):
        last = body["messages"][-1]["content"]
        if "THE RECORD" in last:
            return answer({"tasks": proposals})
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        action = [
            *(call("shelf", colour) for colour in colours),
            LEND_15,
            call("mark", "B11"),
            call("mark", "B99"),
        ]
        return said("I wonder. " + action[turn] if turn < len(action) else "done")

    return script


def proposal(query, *steps, answer="", confidence=0.9):
    return {"query": query, "steps": list(steps), "answer": answer, "confidence": confidence}


def solves(world, task, actions):
    """Return True if the actions solve a task that is checked by what the world shows."""
    return attempt(probed(world), task, actions).evaluation.success


class Questioning:
    """A pool that the explorer fills."""

    def __init__(self, chat, make_world, seeds, **options):
        self.make_world, self.pool = make_world, TaskPool(seeds, overlap=0.8, capacity=512)
        self.explorer = LlmExplorer(
            Parts(make_world=make_world, client=chat, max_chars=2000, task_pool=self.pool),
            **options,
        )

    def explore(self, seed, budget):
        return self.pool.grow(self.explorer, self.make_world, budget, seed)


class TestQuestioning:
    def make(self, chat, **options) -> Questioning:
        seeds = [task("Lend Dune.", lent=["B11"])]
        return Questioning(
            chat, Library, seeds, **{"breadth": 2, "depth": 6, "rounds": 1, **options}
        )

    def test_tasks_are_made_of_steps_that_were_executed(self, chat_of):
        chat = chat_of(library_script([proposal("Please lend me Solaris.", 3, 4)]))
        questioning = self.make(chat)
        (found,) = questioning.explore(0, 5)
        assert (
            found.query == "Please lend me Solaris."
            and found.origin == "synthetic"
            and found.id.startswith("syn/")
        )
        assert found.reference == [GREEN, LEND_15, "done"] and found.difficulty == 2
        assert solves(Library(), found, found.reference) and not solves(
            Library(), found, [GREEN, "done"]
        )
        assert not solves(Library(), found, [GREEN, LEND_15, call("mark", "B15"), "done"])
        figures = questioning.pool.metrics()
        assert figures["questioning/walks"] == 1 and figures["questioning/accepted"] == 1
        assert questioning.pool.tasks == {found.id: found}

    @pytest.mark.parametrize(
        "bad,why",
        [
            (proposal("Mark what is not there.", 3, 6), "reference fails"),
            (proposal("Look at the red ones.", 1), "nothing to check"),
            (proposal("How many, 2?", 1, answer="2"), "answer in the query"),
            (proposal("Lend Dune.", 1, 5), "same words"),
            (proposal("Lend Dune.", 3, 4), "not named in the query"),  # it is Solaris that is lent
            (proposal("Lend a book.", 3, 4), "not named in the query"),
            (proposal("How many red books are there?", 1, answer="7"), "answer not shown"),
            (proposal("Which red book has a number?", 1, answer="B15"), "answer not shown"),
            (
                proposal("What is there in green?", 3, answer="Solaris in the shelf"),
                "answer not shown",
            ),
            (proposal("What is there?", 3, answer="Solaris green B15"), "answer not shown"),
            (proposal("Which number is it?", 3, answer="15"), "answer not shown"),
        ],
    )
    def test_what_is_turned_down(self, chat_of, bad, why):
        questioning = self.make(chat_of(library_script([bad])))
        assert questioning.explore(0, 5) == []
        assert questioning.pool.metrics()[f"questioning/rejected/{why}"] == 1

    @pytest.mark.parametrize(
        "query,said,answer",
        [
            ("How many books stand on the red shelf?", "2", "2"),
            ("Which book has the number B15?", '"solaris".', "Solaris"),
        ],
    )
    def test_an_answer_is_a_value_that_a_step_showed(self, chat_of, query, said, answer):
        steps = [1] if answer == "2" else [3]
        questioning = self.make(chat_of(library_script([proposal(query, *steps, answer=said)])))
        (found,) = questioning.explore(0, 5)
        assert found.verifier["answer"]["value"] == answer == found.reference[-1]
        assert solves(Library(), found, found.reference) and not solves(
            Library(), found, [*found.reference[:-1], "x"]
        )

    def test_a_reference_has_the_calls_that_its_steps_need(self, chat_of):
        (lend,) = self.make(
            chat_of(library_script([proposal("Please lend me Solaris.", 4)]))
        ).explore(0, 5)
        assert lend.reference == [GREEN, LEND_15, "done"]

    def test_a_reference_has_no_step_that_its_result_does_not_need(self, chat_of):
        ideas = [
            proposal("Please lend me Solaris.", 1, 2, 3, 4),
            proposal("How many blue books?", 1, 2, answer="2"),
        ]
        lend, count = self.make(chat_of(library_script(ideas))).explore(0, 5)
        assert lend.reference == [GREEN, LEND_15, "done"] and lend.difficulty == 2
        assert count.reference == [call("shelf", "blue"), "2"]

    def test_a_poor_explorer_is_given_up_and_its_failures_are_counted(self, chat_of):
        seeds = [task(f"Lend {title}.", lent=[id]) for id, (title, _) in BOOKS.items()]
        chat = chat_of(library_script([proposal("Step into the void.", 99)]))
        questioning = Questioning(
            chat, Library, seeds, breadth=1, depth=1, rounds=100, patience=8, parallel=2
        )
        assert questioning.explore(0, 5) == []
        reasons = questioning.pool.rejections()
        figures = questioning.pool.metrics()
        assert figures["questioning/walks"] == 8 + 1  # the last batch of a round has one seed
        assert reasons == "9 walks, 0 tasks kept, rejected: 9 x no such steps"
        silent = Questioning(
            chat_of(library_script([])), Library, seeds, breadth=1, depth=1, patience=1
        )
        silent.explore(0, 5)
        assert "nothing proposed" in silent.pool.rejections()

    def test_queries_alike_are_one_task_and_the_budget_holds(self, chat_of):
        ideas = [
            proposal("Lend Solaris now.", 3, 4),
            proposal("Lend Solaris now!", 3, 4),
            proposal("Put a mark on Dune", 1, 5),
        ]
        questioning = self.make(chat_of(library_script(ideas)))
        assert [t.query for t in questioning.explore(0, 5)] == [
            "Lend Solaris now.",
            "Put a mark on Dune",
        ]
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
        assert ["Phase 1" in messages[-1]["content"] for messages in walk] == [
            True,
            True,
            False,
            False,
            False,
        ]
        assert [len(messages) for messages in walk] == [
            2,
            4,
            6,
            8,
            8,
        ]  # at most the last three turns

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
        assert (
            fresh.pool.tasks == one.pool.tasks and fresh.explore(4, 5) == []
        )  # all of it is known

    def test_a_world_that_breaks_costs_its_walk(self, chat_of):
        class Breaks(Library):
            def step(self, action):
                raise WorldError("it broke")

        questioning = Questioning(chat_of(library_script([])), Breaks, [LEND], rounds=1)
        assert questioning.explore(0, 3) == []
        assert questioning.pool.metrics()["questioning/rejected/the world broke"] == 1

    def test_tasks_paid_for_stay_where_the_budget_ends(self, chat_of):
        seeds = [
            task(f"Lend {title}.", lent=[id]) for id, (title, _) in BOOKS.items() if id != "B15"
        ]
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
        assert 0 < len(questioning.pool.tasks) < len(seeds)

    @pytest.mark.parametrize("steps", [[2], [1, 2], [1, 2, 1]])
    def test_a_task_of_bfcl_is_checked_by_its_effect(self, chat_of, steps):
        from envs.bfcl import Bfcl

        action = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
        touch = (
            '<tool_call>\n{"name": "touch", "arguments": {"file_name": "note.txt"}}\n</tool_call>'
        )

        def script(body, n):
            if "THE RECORD" in body["messages"][-1]["content"]:
                return answer({"tasks": [proposal("I need an empty file note.txt.", *steps)]})
            turn = sum(m["role"] == "assistant" for m in body["messages"])
            return said([action, touch][turn] if turn < 2 else "done")

        (start,) = [t for t in Bfcl().tasks("train") if t.id == "multi_turn_base_0"]
        (found,) = Questioning(
            chat_of(script), Bfcl, [start], breadth=2, depth=2, rounds=1
        ).explore(0, 1)
        assert found.reference == [touch, "done"]  # a look-up is not demanded
        assert solves(Bfcl(), found, [action, touch, "done"]) and not solves(
            Bfcl(), found, [action, "done"]
        )
        assert not solves(Bfcl(), found, [touch.replace("note", "other"), "done"])


class Subscriptions(World):
    """A world without a verifier. Its own task needs its own verifier, and its openings show the
    query."""

    name = "subscriptions"

    def __init__(self, *, shows: str = "{query}"):
        self.shows = shows

    def reset(self, task, seed=0):
        self.goal, self.moves, self.active = task.verifier["active"], 0, ["S15", "S17"]
        return Observation(
            [{"role": "user", "content": self.shows.format(query=task.query)}], TOOLS
        )

    def step(self, action):
        texts = []
        for made in parse(action).calls:
            self.moves += 1
            id = made.arguments.get("id")
            if made.name == "cancel" and id in self.active:
                self.active.remove(id)
                texts.append(f"{id} is over, call {self.moves}")
            elif made.name == "list":
                texts.append(
                    "\n".join(f"{id} {'news' if id == 'S15' else 'music'}" for id in self.active)
                )
            else:
                texts.append(f"help, call {self.moves}")
        return StepResult(
            [{"role": "tool", "content": text} for text in texts], terminated=not texts
        )

    def evaluate(self):
        right = self.goal == self.active
        return Evaluation(float(right), right)


LIST, CANCEL, HELP = (
    call_text("list", {}),
    call_text("cancel", {"id": "S15"}),
    call_text("help", {}),
)


def walking(actions, *proposals):
    """A script whose explorer takes these actions, and whose writer has these ideas."""

    def script(body, n):
        if "THE RECORD" in body["messages"][-1]["content"]:
            return answer({"tasks": list(proposals)})
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        return said("Let me see. " + actions[turn] if turn < len(actions) else "done")

    return script


class TestWorldsWithoutVerifiers:
    SEED = Task(
        "s1",
        "subscriptions",
        "Stop the music.",
        verifier={"active": ["S15"]},
        meta={"kind": "home"},
    )

    def explore(self, chat_of, *ideas, actions=(LIST, HELP, CANCEL)):
        chat = chat_of(walking(actions, *ideas))
        questioning = Questioning(
            chat, Subscriptions, [self.SEED], breadth=1, depth=len(actions) - 1, rounds=1
        )
        return questioning.explore(0, 5), questioning.pool.metrics()

    def test_tasks_are_checked_by_what_the_world_shows(self, chat_of):
        ideas = [
            proposal("Cancel my newspaper with the news.", 3),
            proposal("What is S17?", 1, answer="music"),
        ]
        (cancel, ask), _ = self.explore(chat_of, *ideas)
        assert (
            cancel.verifier["start"] == ask.verifier["start"] == self.SEED.verifier
        )  # which the world needs
        assert cancel.meta["kind"] == "home" and is_verified(cancel) and is_verified(ask)
        assert solves(Subscriptions(), cancel, [CANCEL, "done"]) and not solves(
            Subscriptions(), cancel, [LIST, "done"]
        )
        assert solves(Subscriptions(), ask, [LIST, "It is music."]) and not solves(
            Subscriptions(), ask, [LIST, "news"]
        )

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
            Questioning(object(), lambda: Subscriptions(shows=shows), [self.SEED])

    def test_a_world_that_fails_on_a_probe_is_refused(self):
        class Picky(Subscriptions):
            def reset(self, task, seed=0):
                if task.origin == "synthetic":
                    raise ValueError("only my own")
                return super().reset(task, seed)

        with pytest.raises(ValueError, match=r"ValueError: only my own\..*enabled=False"):
            Questioning(object(), Picky, [self.SEED])

    def test_the_thermostat_of_the_docs(self, chat_of, tmp_path, monkeypatch):
        page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
        (tmp_path / "thermostat_of_the_docs.py").write_text(
            page.partition("```python\n")[2].partition("```")[0]
        )
        monkeypatch.syspath_prepend(tmp_path)
        kind = importlib.import_module("thermostat_of_the_docs").Thermostat
        room, warm = (
            call_text("read", {"room": "bath"}),
            call_text("set", {"room": "bath", "degrees": 21}),
        )
        ideas = [
            proposal("It is cold in the bath: 21 degrees, please.", 2),
            proposal("Cool the bath.", 1),
        ]
        chat = chat_of(walking([room, warm], *ideas))
        (found,) = Questioning(
            chat, kind, kind().tasks("train")[:1], breadth=1, depth=1, rounds=1
        ).explore(0, 5)
        assert found.reference == [warm, "done"] and solves(kind(), found, [room, warm, "done"])
        assert not solves(kind(), found, [warm.replace("21", "22"), "done"])


class TestNaming:
    """Which values of a reference a query names."""

    def unnamed(self, query, *exchanges, opening="cancel an order of a passenger", demanded=None):
        events = [Event("", {}, action, text) for action, text in exchanges]
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
        assert (
            "- order (name, to, day, fare, window, aisle), such as O11" in text and "(name)" in text
        )
        assert "book (flight, passenger)" in text
        assert "1 to 6 calls" in preference_text(profile) and "hard" not in preference_text(profile)
        assert "hard" in preference_text({}) and "easy" in preference_text(
            {"preference": {"relation_difficulty": 1}}
        )

    def test_operations_of_other_worlds_are_left_out(self):
        from envs.bfcl import Bfcl

        world = Bfcl()
        (start,) = [t for t in world.tasks("train") if t.id == "multi_turn_base_0"]
        tools = world.reset(start).tools
        text = profile_text(world.profile(), tools)
        assert "- GorillaFileSystem" in text and "TravelAPI" not in text and len(text) < 8000
        every = profile_text(
            world.profile(), TOOLS, limit=10**6
        )  # tools that the profile does not know
        assert "TravelAPI" in every and len(text) < len(every) / 3
