"""A task keeps its meaning in other words, and a task that nobody can solve from its words is given
up."""

import dataclasses
import random
import types
from collections import Counter

import pytest

from envs.probed import cells
from envs.wording import alternatives, asked, distinguishing, goal_text, inlined, joined, summaries
from evolver.parts import Parts
from evolver.phases import tasks as phase
from evolver.questioning import synthetic_task
from evolver.questioning.calls import Event
from evolver.questioning.phrasing import Phrasing
from evolver.questioning.words import Asked, ByModel, Inlined, Plain, unfaithful
from tests.evolver.chat_server import answer
from tests.evolver.explorers import Proposing, pool_of, run_of
from tests.evolver.toy import LEND as START
from tests.evolver.toy import LEND_11, RED, changes, task

TASK = synthetic_task(
    task("x"),
    "Book a passenger on a flight: flight Rome Monday, passenger Ann.",
    identity=["book"],
    reference=["done"],
    verifier={"probes": [], "answer": {"value": "gold", "others": []}},
    meta={"named": ["Rome", "Monday", "Ann"], "hidden": ["F12", "P34"], "sibling": "Book Ben."},
)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("Ann wants to fly to Rome on Monday.", ""),
        ("Put ann on the Monday flight to ROME!", ""),
        ("", "empty"),
        ("Ann, Rome, Monday " * 60, "too long"),
        ("Ann wants to fly to Rome.", "a value is missing"),
        ("Ann wants to fly to Rome on Monday with F12.", "a hidden value"),
        ("Ann wants to fly to Rome on Monday, her card is gold.", "the answer"),
        ("Ann wants to fly to Rome on Monday at 10.", "another value"),
        ("Анна, Ann, Rome, Monday", "another script"),
    ],
)
def test_the_gate(query, reason):
    assert unfaithful(TASK, query) == reason


LEND = "Lend a book to a member: book Emma, member Hana"


@pytest.mark.parametrize(
    ("query", "named", "expected"),
    [
        (f"{LEND}.", ["Emma", "Hana"], "Lend Emma to Hana."),
        (
            "Pay the fine of a member: member Jana Low. Then lend a book to a member: book Emma, "
            "member M12. Reply with the last word.",
            ["Jana", "Low", "Emma", "M12"],
            "Pay the fine of Jana Low. Then lend Emma to M12. Reply with the last word.",
        ),
        ("Add the note: note Milk, eggs, day Monday.", ["Milk, eggs", "Monday"],
         "Add Milk, eggs: day Monday."),
        ("Show an order: order id 12.", ["12"], "Show 12."),
        ("Log in: user name Ann.", ["Ann"], "Log in: user name Ann."),
        ("Lend a book: book Other.", ["Emma"], "Lend a book: book Other."),
        ("Look.", ["x"], "Look."),
        ("Add a tag: tag a.b (c).", ["a.b (c)"], "Add a.b (c)."),
        (
            "Change the phone number of a patient: patient id Ann, phone 555-1234.",
            ["Ann", "555-1234"],
            "Change the phone number of Ann: phone 555-1234.",
        ),
        (
            "Set the light of a room, which takes power: room bath, light dim.",
            ["bath", "dim"],
            "Set the light of bath: light dim.",
        ),
        ("Book a room (Oak or Elm) for a team: room Oak, team Red.", ["Oak", "Red"], "Book Oak for Red."),
        ("Show a patient's phone number: patient Ann.", ["Ann"], "Show Ann's phone number."),
        (
            "Move a card to another column: todo, doing or done: card C1, column doing.",
            ["C1", "doing"],
            "Move C1 to doing.",
        ),
        ("Assign a card to kim, lee or max: card C1, owner lee.", ["C1", "lee"], "Assign C1 to lee."),
        ("Set the heat of a pot, 1 to 9: pot P1, heat 4.", ["P1", "4"], "Set the heat of P1: heat 4."),
        ("Take a thing that is here: thing cup.", ["cup"], "Take cup."),
        ("Give a dog its pill: dog Rex.", ["Rex"], "Give Rex its pill."),
        ("Take a crate out of a van: crate C4, van V2.", ["C4", "V2"], "Take C4 out of V2."),
        ("Look up an office: phone and head: city Rome.", ["Rome"],
         "Look up an office: phone and head: city Rome."),
    ],
)  # fmt: skip
def test_values_go_where_descriptions_name_their_parameters(query, named, expected):
    assert inlined(query, named) == expected


def worded(count, query, *named):
    """Return so many tasks of one query, by different ids."""
    meta = {"named": list(named), "hidden": []}
    return [dataclasses.replace(TASK, id=str(n), query=query, meta=meta) for n in range(count)]


def test_most_tasks_are_inlined_and_keep_their_values():
    tasks = worded(200, f"{LEND}.", "Emma", "Hana")
    words = Inlined(Parts())
    asked = Counter(task.query for task in words.reword(tasks, ""))
    assert set(asked) == {f"{LEND}.", "Lend Emma to Hana.", "Please lend Emma to Hana."}
    assert min(asked.values()) > 30 and words.metrics()["questioning/words/reworded"] > 120
    assert words.reword(tasks, "") == words.reword(tasks[::-1], "")[::-1]
    assert {task.query for task in Inlined(Parts(), share=0.0).reword(tasks, "")} == {f"{LEND}."}
    written = [dataclasses.replace(task, meta={}) for task in tasks]  # by a language model
    assert words.reword(written, "") == written


def ways(query, *named):
    """Return the ways in which people ask for something."""
    return {asked(query, named, random.Random(n)) for n in range(300)}


@pytest.mark.parametrize(
    ("query", "named", "some"),
    [
        ("Charge a car fully: plate A12.", ["A12"], {"Charge A12 fully.", "Now charge A12 fully."}),
        (
            "Set a temperature: room bath, degrees 21.",
            ["bath", "21"],
            {"Set bath to 21.", "Please let it be 21 degrees in bath.", "bath should have 21 degrees."},
        ),
        (
            "Set a temperature: room bath, degrees 21. Then read a meter: room hall. Reply with the id.",
            ["bath", "21", "hall"],
            {"Give bath 21 degrees, then read hall. Reply with the id."},
        ),
        ("Move money: from A, to B, sum 5.", ["A", "B", "5"], {"Move money with from A and to B and sum 5."}),
        ("Log in: user name Ann.", ["Ann"], {"Log in for Ann."}),
        (
            "Set the light of a room: room bath, light dim.",
            ["bath", "dim"],
            {"Set the light of bath to dim.", "Set the light of bath with light dim."},
        ),
        ("Sell some fruit: fruit figs, number 3.", ["figs", "3"], {"Sell figs with 3."}),
        ("Look.", ["x"], {"Look.", "Please look."}),
        (r"Find a path: name \1{x}.", [r"\1{x}"], {r"Find \1{x}."}),
    ],
)  # fmt: skip
def test_a_task_is_asked_for_in_many_ways_that_keep_its_values(query, named, some):
    found = ways(query, *named)
    assert some <= found
    for text in found:
        assert all(value in text for value in named) or query == "Look."
        assert text.endswith(".") and (" Reply with the id." in text) == ("Reply" in query)


def test_tasks_are_asked_for_inlined_or_in_the_explorers_words():
    tasks = worded(300, "Charge a car: plate A1.", "A1")
    words = Asked(Parts())
    asked_for = Counter(task.query for task in words.reword(tasks, ""))
    assert asked_for["Charge a car: plate A1."] > 50 and asked_for["Charge A1."] > 20
    assert len(asked_for) > 8 and words.reword(tasks, "") == words.reword(tasks[::-1], "")[::-1]


def by_model(chat_of, reply):
    """Return words of a language model that gives one answer to all."""
    return ByModel(Parts(client=chat_of(lambda body, n: answer(reply)), max_chars=1000))


def test_the_first_faithful_wording_is_taken(chat_of):
    wordings = [
        "Ann wants to fly.",
        "Please book Ann to Rome on Monday.",
        "Rome on Monday for Ann, please.",
    ]
    words = by_model(chat_of, {"queries": wordings})
    plain = dataclasses.replace(TASK, id="syn/2", meta={})
    one, other = words.reword([TASK, plain], "- book(flight, passenger)")
    assert (one.query, one.id, one.verifier) == (wordings[1], TASK.id, TASK.verifier)
    assert other == plain  # a task that does not say what it names is left alone
    figures = words.metrics()
    assert figures["questioning/words/a value is missing"] == 1
    assert figures["questioning/words/reworded"] == 1


@pytest.mark.parametrize("reply", ["no JSON", '{"queries": []}', '{"queries": ["F12", "Ann"]}'])
def test_without_a_faithful_wording_a_task_keeps_its_words(chat_of, reply):
    words = by_model(chat_of, reply)
    assert words.reword([TASK], "") == [TASK]
    assert sum(words.metrics().values()) >= 1


def test_plain_words_stay():
    assert Plain().reword([TASK], "") == [TASK]


def invented(query, **fields):
    fields = {"identity": [query], "verifier": START.verifier} | fields
    return synthetic_task(START, query, **fields)


class TestAttempts:
    def run_with(self, monkeypatch, new, solved=(), broken=lambda query, n: False):
        """Try tasks out, each in two attempts. Return the queries that stay, the metrics and what
        was played. solved: the queries that attempts solve. broken: by query and attempt."""
        played = []
        pool = pool_of(*new)

        def finished(job):
            query = job.task.query
            return types.SimpleNamespace(
                task=job.task, broken=broken(query, job.rollout), success=query in solved
            )

        def play(run, jobs, phase):
            played.extend(jobs)
            return list(map(finished, jobs))

        monkeypatch.setattr(phase, "gather_rollouts", play)
        phase.try_out(run_of(pool, attempts=2), pool, new, 0)
        return "".join(task.query for task in pool.tasks.values()), pool.metrics(), played

    NEW = [invented(query, meta={"sibling": other}) for query, other in ("ab", ("c", ""), "de")]

    def test_what_no_attempt_solves_is_removed(self, monkeypatch):
        kept, figures, played = self.run_with(monkeypatch, self.NEW, "ad")
        assert kept == "ad" and figures["questioning/rejected/no attempt solves it"] == 1
        assert Counter(job.task.query for job in played) == dict.fromkeys("abcde", 2)
        assert len({job.seed for job in played}) == len(played)
        assert not any(job.experience for job in played)

    def test_what_a_fault_of_the_environment_broke_was_not_tried(self, monkeypatch):
        kept, figures, _ = self.run_with(
            monkeypatch, self.NEW, broken=lambda query, n: query == "a" or n == 1
        )
        assert kept == "a" and figures["questioning/rejected/no attempt solves it"] == 2

    def test_what_another_query_solves_is_removed(self, monkeypatch):
        kept, figures, _ = self.run_with(monkeypatch, self.NEW, "acde")
        assert kept == "ac" and figures["questioning/rejected/solved from another query"] == 1

    def test_what_only_a_judge_can_score_is_not_attempted(self, monkeypatch):
        one = invented("a", meta={"unverified": True})
        kept, _, played = self.run_with(monkeypatch, [one])
        assert kept == "a" and not played


def test_reworded_tasks_are_compared_by_their_new_words_as_after_a_resume():
    class Says:
        def reword(self, tasks, tools):
            return [dataclasses.replace(t, query="Please lend the book Dune to me.") for t in tasks]

    one = invented("Lend Dune.")
    pool = pool_of(one, overlap=0.8)
    resumed = pool_of(overlap=0.8)
    pool.reword(Says(), [one.id], "")
    resumed.load_state(pool.state())
    for words in ("Lend Dune.", "Please lend the book Dune to me, now."):
        verifier = {"state": [], "answer": "x"}
        new = invented(words, identity=["b"], verifier=verifier)
        assert pool.duplicates.repeats(new) == resumed.duplicates.repeats(new)


def test_wordings_are_booked_in_the_metrics_of_a_run():
    class Counts(Plain):
        def metrics(self):
            return {"questioning/words/reworded": 3.0}

    verifier = {"state": changes(["B11"], []), "answer": None}
    found = invented("Lend Dune.", reference=[RED, LEND_11, "done"], verifier=verifier)
    run = run_of(pool_of(), Proposing(found), words=Counts(), budget=1, share=0.01)
    assert (
        phase.explore(run)["questioning/words/reworded"] == 3.0 and len(run.tasks.pool.tasks) == 1
    )
    shown = [call.args for call in run.progress.phase.call_args_list]
    assert shown == [("exploring",), ("exploring · 0 walks, 0 steps, 0/s · tasks", 1, 1)]


class TestWording:
    def test_shared_introductions_are_left_out(self):
        shared = "This tool belongs to the shop. It sells things. Tool description: "
        described = {
            "buy": f"{shared}Buy a thing. It is paid later.",
            "list_all": shared,
            "sell": "Sell a thing.",
        }
        assert summaries(described) == {
            "buy": "Buy a thing", "list_all": "list all", "sell": "Sell a thing"
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("told", "summary"),
        [
            ("Lists the cars.", "List the cars"),
            ("Fetches one row.", "Fetch one row"),
            ("Applies a coupon.", "Apply a coupon"),
            ("Passes a note.", "Pass a note"),
            ("Fixes an error.", "Fix an error"),
            ("Address a letter.", "Address a letter"),
            ("Focus the window.", "Focus the window"),
            ("Names of all cars.", "Names of all cars"),
            ("Is the door open?", "Is the door open"),
        ],
    )
    def test_what_a_tool_does_is_a_request(self, told, summary):
        assert summaries({"tool": told}) == {"tool": summary}

    def test_goals_and_questions(self):
        goals = [goal_text("Add a bag", {"order_id": "Ann Rome"}), goal_text("Show all", {})]
        query = joined(goals, "the last word", random.Random(0))
        assert query.startswith("Add a bag: order id Ann Rome") and query.endswith(
            "show all. Reply with the last word."
        )

    def test_the_fewest_words_that_tell_a_row_from_others(self):
        rows = cells(
            "orders",
            "Ann Monday flex Rome O11\nAnn Monday flex Oslo O12\nAnn Friday basic Oslo O13",
        )
        assert distinguishing(rows, "O11", []) == ["Rome"]
        assert distinguishing(rows, "O13", []) in (["Friday"], ["basic"])
        assert sorted(distinguishing(rows, "O12", [])) in (["Monday", "Oslo"], ["Oslo", "flex"])
        assert distinguishing(cells("seats", "window 4A\nwindow 5A"), "4A", []) is None
        assert distinguishing(cells("people", "P11 Ann gold"), "P11", []) == []
        listed = cells(
            "l", '[{"id": "x1", "paid": true, "n": 1}, {"id": "x2", "paid": false, "n": 1}]'
        )
        assert distinguishing(listed, "x1", []) == ["paid true"]


@pytest.mark.parametrize(
    "answer, words",
    [
        ('[{"ticket_id": "T1", "subject": "no wifi"}]', ["no wifi"]),
        ('[{"ticket_id": "T1"}]', ["ticket id"]),
        ('{"ticket_id": "T1", "subject": "no wifi"}', ["ticket id"]),
    ],
)
def test_the_only_entry_of_a_list_is_named_as_it_would_be_among_others(answer, words):
    event = Event("search", {}, result=answer)
    (ids,) = (set(cell.kinds) for cell in event.cells if cell.value == "T1")
    assert Phrasing({}, ids)._told([event], "", [], "T1", {"T1": 0}) == words


def test_what_a_call_creates_is_the_new_one_where_nothing_else_is_known_of_it():
    event = Event("new", {}, result='{"list_id": "L2"}', changes=True)
    ids = set(event.cells[0].kinds)
    assert Phrasing({}, ids)._told([event], "", [], "L2", {"L2": 0}) == ["the new one"]


def test_whom_a_call_is_for_stands_where_its_description_has_a_noun():
    assert any("end Rex home" in text for text in ways("Send an animal home: patient Rex.", "Rex"))


def test_nobody_is_asked_to_go_and_go():
    said = {"Go north.", "Please go north.", "I need you to go north.", "Now go north."}
    assert ways("Go north.") == said


def test_a_number_of_things_stands_before_them():
    assert all("7 hours pass" in text for text in ways("Let hours pass: hours 7.", "7"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Set the mode: grill, fan or bake.", ["grill", "fan", "bake"]),
        ("One of 'a', \"b\", or `c`.", ["a", "b", "c"]),
        ("the state (on or off)", ["on", "off"]),
        ("priority, low/high", ["low", "high"]),
        ("alpha or beta", ["alpha", "beta"]),
        ("one of low, normal, high", ["low", "normal", "high"]),
        ("name or id of a lamp", []),
        ("The id of an order or a flight, such as F12.", []),
        ("Show the phone number and the name.", []),
    ],
)
def test_alternatives_that_a_description_offers(text, words):
    assert alternatives(text) == words
