"""The travel agency: success depends on the final state and the answer only, and inaction never
succeeds."""

import collections
import itertools
import json
import random
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from envs.hints import hint_text, when_text
from envs.probed import cells
from envs.toolcalls import call_text, parse
from envs.travel import SYSTEM, Travel, plain, verify
from envs.travel.agency import TOOLS, arguments_of
from envs.travel.data import data, image
from envs.travel.demos import SLIPS, compositions, demonstrate, demonstration, odds, reserved
from envs.travel.profile import OPERATIONS, PROFILE, QUESTIONS, describe
from envs.travel.tasks import (
    HELD_OUT,
    LEVELS,
    TEMPLATES,
    WORLDS,
    Unfit,
    generate,
    is_training_world,
    task_of,
)
from envs.travel.verify import answers
from envs.world import Task

SPLITS = ("train", "dev", "test")
ARGUMENTS = arguments_of(TOOLS)
CHANGING = {"book", "cancel", "refund", "seat", "bag", "move"}


@pytest.fixture(scope="module")
def tasks():
    world = Travel()
    return {split: world.tasks(split) for split in SPLITS}


@pytest.fixture
def world():
    world = Travel()
    yield world
    world.close()


def every(tasks):
    return [task for split in tasks.values() for task in split]


def play(world, task, turns):
    world.reset(task)
    for turn in turns:
        if world.step(turn).terminated:
            break
    return world.evaluate()


def free_task(world_seed: int = 3) -> Task:
    """Return a task for trying out tools."""
    return Task("t", "travel", "q", seed=world_seed, verifier={"state": [], "answer": "85"})


class Session:
    """An episode in which tools are called like functions."""

    def __init__(self, world_seed: int = 3):
        self.world = Travel()
        self.world.reset(free_task(world_seed))
        self.data = data(world_seed)

    def __call__(self, tool: str, **arguments) -> str:
        (message,) = self.world.step(call_text(tool, arguments)).messages
        assert message["role"] == "tool"
        return message["content"]


# Tasks.


def test_every_reference_succeeds_and_nothing_less_does(world, tasks):
    for task in every(tasks):
        assert play(world, task, []).score == 0.0
        assert play(world, task, ["done"]).score == 0.0
        evaluation = play(world, task, task.reference)
        assert (
            evaluation.success
            and evaluation.score == 1.0
            and evaluation.components["progress"] == 1.0
        ), task
        assert evaluation == world.evaluate()
        assert (
            task.difficulty
            == len(task.reference) - 1
            == sum(len(parse(t).calls) for t in task.reference)
        )


def test_no_call_of_a_reference_can_be_left_out(world, tasks):
    for task in every(tasks):
        if not task.verifier["state"] or task.verifier["answer"]:
            continue
        for i in range(task.difficulty):
            assert not play(world, task, task.reference[:i] + task.reference[i + 1 :]).success, (
                task,
                i,
            )


def test_corrupted_references_fail(world, tasks):
    for task in every(tasks):
        calls = [parse(turn).calls[0] for turn in task.reference[:-1]]
        for i, call in enumerate(calls):
            if call.name not in CHANGING:
                continue
            assert not play(world, task, task.reference[:i] + task.reference[i + 1 :]).success
            others = (
                data(task.seed).orders if "order" in call.arguments else data(task.seed).flights
            )
            key = "order" if "order" in call.arguments else "flight"
            # Look up every order and flight, so that the wrong id is not refused because of a
            # missing look-up.
            looks = [call_text("order", {"id": id}) for id in data(task.seed).orders]
            for flight in data(task.seed).flights.values():
                looks += [
                    call_text("flights", {"to": flight.city}),
                    call_text("quote", {"flight": flight.id}),
                ]
            for other in list(others)[:2]:
                if other != call.arguments[key]:
                    wrong = call_text(call.name, call.arguments | {key: other})
                    turns = looks + task.reference[:i] + [wrong] + task.reference[i + 1 :]
                    assert not play(world, task, turns).success, (task, wrong)
        book = next((i for i, call in enumerate(calls) if call.name == "book"), None)
        if book is not None:
            again = task.reference[: book + 1] + task.reference[book:]
            assert not play(world, task, again).success
        if task.verifier["answer"]:
            assert not play(world, task, [*task.reference[:-1], "done"]).success
            assert not play(world, task, [*task.reference[:-1], ""]).success


def test_progress_grows_with_the_goal_and_shrinks_with_damage(world, tasks):
    task = next(
        task
        for task in every(tasks)
        if len(task.verifier["state"]) == 2 and task.verifier["answer"] is None
    )
    world.reset(task)
    seen = [world.evaluate().components["progress"]]
    for turn in task.reference:
        world.step(turn)
        seen.append(world.evaluate().components["progress"])
    assert seen == sorted(seen) and seen[0] == 0.0 and 0.5 in seen and seen[-1] == 1.0
    wrong = [["orders", "O00", "bag", 0, 1]]
    assert verify(task.verifier, task.verifier["state"] + wrong, None).components["progress"] == 0.5
    assert verify(task.verifier, wrong, None).components["progress"] == 0.0
    assert not verify(
        {"state": [], "answer": None}, [], "done"
    ).success  # a task without a goal never succeeds


def test_the_path_does_not_matter(world, tasks):
    for task in every(tasks):
        turns = task.reference[:-1]
        looks = [call_text("order", {"id": id}) for id in data(task.seed).orders]
        looks += [call_text("people", {"name": "Nobody"}), call_text("flights", {"to": "Rome"})]
        assert play(world, task, looks + task.reference).success
        one_turn = "\n".join(turns)
        assert play(world, task, [f"I will do this.\n{one_turn}", task.reference[-1]]).success
        if re.fullmatch(
            r"order[^+]*\+order[^+]*", task.meta["template"]
        ) and "flights" not in "".join(turns):
            first = set(parse(turns[0]).calls[0].arguments.values())
            of_first = [
                turn for turn in turns if first & set(parse(turn).calls[0].arguments.values())
            ]
            assert play(
                world, task, [turn for turn in turns if turn not in of_first] + of_first
            ).success


def test_two_bookings_in_either_order_make_the_same_difference():
    session = Session()
    flights, people = list(session.data.flights.values()), list(session.data.passengers.values())
    pairs = [(flights[0], people[0]), (flights[1], people[1])]
    differences = []
    for order in (pairs, pairs[::-1]):
        session = Session()
        for flight, passenger in order:
            session("flights", to=flight.city)
            session("people", name=passenger.name)
            session("quote", flight=flight.id)
            session("book", flight=flight.id, passenger=passenger.id)
        differences.append(session.world.difference())
    assert differences[0] == differences[1] and len(differences[0]) == 2


def test_splits_are_stable_graded_and_disjoint(tasks):
    assert {split: len(found) for split, found in tasks.items()} == {
        "train": 64,
        "dev": 48,
        "test": 96,
    }
    assert [task.id for task in tasks["train"]][3] == "travel/train/0003"
    assert len({task.id for task in every(tasks)}) == len(every(tasks))
    worlds = {split: {task.seed for task in found} for split, found in tasks.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not worlds[one] & worlds[other]
    assert all(is_training_world(seed) for seed in worlds["train"])
    assert not any(is_training_world(seed) for seed in worlds["dev"] | worlds["test"])
    for found in tasks.values():
        assert {task.difficulty for task in found} == set(LEVELS)
    held_out = {template for found in HELD_OUT.values() for template in found}
    assert not held_out & {template for found in TEMPLATES.values() for template in found}
    assert not held_out & {task.meta["template"] for task in tasks["train"]}
    for split in ("dev", "test"):
        share = sum(task.meta["template"] in held_out for task in tasks[split]) / len(tasks[split])
        assert 0.2 <= share <= 0.35
    # A smaller split is a prefix of a larger one, and another seed gives other tasks.
    assert Travel(n_train=10).tasks("train") == tasks["train"][:10]
    assert Travel(seed=1).tasks("train") != tasks["train"]
    with pytest.raises(ValueError, match="no split"):
        Travel().tasks("nope")


def test_queries_are_short_and_worded_in_several_ways(tasks):
    assert max(len(task.query.split()) for task in every(tasks)) <= 25
    rng = random.Random(0)
    for level in LEVELS:
        for template in TEMPLATES[level] + HELD_OUT[level]:
            queries = {when_text(generate(i % 40, rng, template=template).query) for i in range(30)}
            assert len(queries) >= 4, template
    for operation in OPERATIONS:
        assert len(operation["phrases"]) >= 4


def test_tasks_from_the_generator_are_deterministic_and_solvable(world):
    for seed in range(60):
        one, other = (generate(seed, random.Random(seed)) for _ in range(2))
        assert one == other
        assert Task.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        assert play(world, one, one.reference).success


# Episodes.


def test_an_episode_opens_with_a_short_system_message(world, tasks):
    task = tasks["dev"][0]
    observation = world.reset(task)
    assert observation.messages == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.query},
    ]
    assert [tool["function"]["name"] for tool in observation.tools] == list(ARGUMENTS)
    json.dumps(observation.to_dict())


def test_the_same_task_gives_the_same_episode(tasks):
    for task in tasks["train"][:12]:
        one, other = Travel(), Travel()
        assert one.reset(task, 0) == other.reset(task, 0)
        assert [one.step(turn) for turn in task.reference] == [
            other.step(turn) for turn in task.reference
        ]
        assert one.snapshot() == other.snapshot()


def test_snapshots_restore_in_any_instance(tasks):
    for task in tasks["dev"]:
        one = Travel()
        one.reset(task)
        for i, turn in enumerate(task.reference):
            saved = json.loads(json.dumps(one.snapshot()))
            other = Travel()
            other.restore(saved)
            assert other.evaluate() == one.evaluate() and other.difference() == one.difference()
            rest = [other.step(turn) for turn in task.reference[i:]]
            assert other.evaluate().success
            other.restore(saved)
            assert [other.step(turn) for turn in task.reference[i:]] == rest
            one.step(turn)
        finished = one.snapshot()
        one.reset(tasks["dev"][0])
        one.restore(finished)
        assert one.evaluate().success
        with pytest.raises(RuntimeError, match="over"):
            one.step("more")


def test_a_world_must_be_reset_first(tasks):
    for use in ("evaluate", "snapshot", "difference"):
        with pytest.raises(RuntimeError, match="reset"):
            getattr(Travel(), use)()
    with pytest.raises(RuntimeError, match="reset"):
        Travel().step("done")
    with pytest.raises(ValueError, match="verifier"):
        Travel().reset(Task("t", "travel", "q"))
    with pytest.raises(ValueError, match="malformed"):
        Travel(malformed="maybe")


def test_malformed_turns_are_answered_or_end_the_episode():
    broken = "<tool_call>\n{nope}\n</tool_call>"
    world = Travel()
    world.reset(free_task())
    result = world.step(broken + call_text("people", {"name": "x"}))
    assert [message["content"].split(":")[0] for message in result.messages] == ["error", "error"]
    assert result.info["parse_error"] and result.info["errors"] == 2 and not result.terminated
    assert len(result.info["calls"]) == 1
    strict = Travel(malformed="end")
    strict.reset(free_task())
    result = strict.step(broken)
    assert result.info["parse_error"] and result.terminated and result.messages
    many = world.step(call_text("people", {"name": "x"}) * 9)
    assert len(many.info["calls"]) == 8 and "at most" in many.messages[-1]["content"]


def test_wrong_calls_get_a_readable_error():
    session = Session()
    assert "no such tool" in session("fly")
    assert session("flights") == "error: flights needs to"
    assert session("flights", to="Rome", day="Monday") == "error: flights takes to only"
    assert session("flights", to=3) == "error: to must be a string"
    assert session("flights", to="Atlantis") == "no flights"
    assert "nobody" in session("people", name="Nobody")


words = st.sampled_from(
    ["O12", "P12", "F12", "Rome", "4A", "", "'; DROP TABLE orders; --", "\x00", "é", "rome"]
)
arguments = st.dictionaries(
    st.sampled_from(["to", "name", "flight", "passenger", "order", "id", "seat", "self"]),
    words | st.text(max_size=5) | st.none() | st.integers() | st.lists(words),
    max_size=3,
)
calls = st.builds(
    call_text, st.sampled_from([*ARGUMENTS, "call", "__init__", "rows", ""]), arguments
)
turns = st.lists(
    calls | st.text(max_size=10) | st.sampled_from(["<tool_call>", "</tool_call>"]), max_size=4
)


@given(st.lists(turns.map("\n".join), max_size=6))
def test_nothing_that_a_model_writes_raises(actions):
    world = Travel()
    world.reset(free_task())
    for action in actions:
        result = world.step(action)
        json.dumps(result.to_dict(), allow_nan=False)
        assert all(message["role"] == "tool" for message in result.messages)
        if result.terminated:
            break
    assert 0.0 <= world.evaluate().score <= 1.0
    world.close()


@settings(max_examples=20)
@given(st.data())
def test_random_calls_keep_the_database_consistent(draw):
    session = Session()
    start = session.data
    ids = [*start.orders, *start.flights, *start.passengers, *start.spare[:3], "4A"]
    names = [passenger.name for passenger in start.passengers.values()]
    cities = sorted({flight.city for flight in start.flights.values()})
    for _ in range(30):
        tool = draw.draw(st.sampled_from(sorted(ARGUMENTS)))
        pools = {"to": cities, "name": names}
        session(
            tool,
            **{name: draw.draw(st.sampled_from(pools.get(name, ids))) for name in ARGUMENTS[tool]},
        )
    rows = session.world.difference()
    assert len({(row[1], row[2]) for row in rows}) == len(rows)
    assert all(row[3] != row[4] for row in rows)


# Tools.


def test_a_booking_needs_search_quote_and_passenger():
    session = Session()
    flight, passenger = (
        next(iter(session.data.flights.values())),
        next(iter(session.data.passengers.values())),
    )
    book = {"flight": flight.id, "passenger": passenger.id}
    assert session("quote", flight=flight.id) == "error: search the flights first"
    assert session("book", **book) == "error: search the flights first"
    rows = session("flights", to=flight.city.upper()).split("\n")
    assert len(rows) <= 3
    assert any(
        row == f"{flight.city} {flight.price} {flight.fare} {flight.time} {flight.day} {flight.id}"
        for row in rows
    )
    prices = [int(row.split()[1]) for row in rows]
    assert prices == sorted(set(prices))
    assert session("book", **book) == "error: quote the flight first"
    assert session("quote", flight=flight.id) == f"{flight.id} {flight.price}"
    assert session("book", **book) == "error: look the passenger up first"
    assert session("orders", passenger=passenger.id) == "error: look the passenger up first"
    assert (
        session("people", name=passenger.name.lower())
        == f"{passenger.id} {passenger.name} {passenger.card}"
    )
    order = session.data.spare[0]
    assert (
        session("book", **book)
        == f"{passenger.name} {flight.day} {flight.fare} {flight.city} {order}"
    )
    assert session("bag", order=order) == f"{order} bag"  # a new booking counts as shown
    key = f"{passenger.id} {flight.id}"
    assert session.world.difference() == [
        ["orders", key, "bag", None, 1],
        ["orders", key, "status", None, "open"],
    ]


def test_an_order_must_be_shown_before_it_is_changed():
    session = Session()
    id, order = next((id, order) for id, order in session.data.orders.items() if not order.bag)
    for tool in ("bag", "cancel", "refund", "seats"):
        assert session(tool, order=id) == "error: look at the order first"
    assert session("seat", order=id, seat="4A") == "error: look at the order first"
    assert session("move", order=id, flight="F12") == "error: look at the order first"
    assert session("order", id="O00") == "error: no such order"
    name = session.data.passengers[order.passenger].name
    assert session("order", id=id).startswith(f"{name} ") and session("order", id=id).endswith(
        f" {id}"
    )
    assert session("bag", order=id) == f"{id} bag"
    assert session("bag", order=id) == "error: it has a bag"
    assert " bag" in session("order", id=id)
    assert session.world.difference() == [["orders", id, "bag", 0, 1]]


def test_orders_lists_the_open_orders_of_a_passenger():
    session = Session()
    for passenger in session.data.passengers.values():
        session("people", name=passenger.name)
        held = session.data.orders_of(passenger.id)
        listed = session("orders", passenger=passenger.id)
        assert sorted(re.findall(r"O\d\d$", listed, re.M)) == sorted(order.id for order in held)
        assert held or listed == "no orders"
        if held:
            assert (
                session("cancel", order=held[0].id) == f"{held[0].id} cancelled"
            )  # the list showed it
            assert held[0].id not in session("orders", passenger=passenger.id)
            assert session("order", id=held[0].id).split()[-3] == "cancelled"
            assert session("bag", order=held[0].id) == "error: the order is closed"


def test_only_a_flex_fare_is_refunded():
    session = Session()
    fares = set()
    for order in session.data.orders.values():
        fare = session.data.flights[order.flight].fare
        fares.add(fare)
        session("order", id=order.id)
        text = session("refund", order=order.id)
        if fare == "flex":
            assert text == f"{order.id} refunded"
            assert session("cancel", order=order.id) == "error: the order is closed"
        else:
            assert text == "error: a basic fare is not refunded"
            assert session("cancel", order=order.id) == f"{order.id} cancelled"
    assert fares == {"flex", "basic"}


def test_seats_must_be_listed_before_one_is_taken():
    session = Session()
    id, order = next((id, order) for id, order in session.data.orders.items() if not order.seat)
    session("order", id=id)
    seat = session.data.free_seat(order.flight, "window")
    assert session("seat", order=id, seat=seat) == "error: list the seats first"
    rows = session("seats", order=id).split("\n")
    assert f"window {seat}" in rows and len(rows) <= 3
    assert session("seat", order=id, seat="0Z") == "error: that seat is not free"
    assert session("seat", order=id, seat=seat) == f"{id} {seat}"
    assert f"window {seat}" not in session("seats", order=id)
    assert session.world.difference() == [["orders", id, "seat", "", seat]]
    # A moved order loses its seat and needs a new list of seats.
    flight = next(f for f in session.data.flights.values() if f.id != order.flight)
    assert session("move", order=id, flight=order.flight) == "error: it is on that flight"
    assert session("move", order=id, flight=flight.id) == "error: search the flights first"
    session("flights", to=flight.city)
    assert session("move", order=id, flight=flight.id) == "error: quote the flight first"
    session("quote", flight=flight.id)
    moved = session("move", order=id, flight=flight.id)
    assert f" {flight.day} " in moved and moved.endswith(f" {flight.city} {id}")
    assert session("seat", order=id, seat=seat) == "error: list the seats first"
    assert session.world.difference() == [["orders", id, "flight", order.flight, flight.id]]


def test_worlds_are_seeded_and_unambiguous():
    for seed in range(200):
        agency = data(seed)
        names = [passenger.name for passenger in agency.passengers.values()]
        assert len(set(names)) == len(names) == 12 and len(agency.orders) == 8
        assert 24 <= len(agency.flights) <= 36
        trips = [
            (order.passenger, agency.flights[order.flight].city) for order in agency.orders.values()
        ]
        assert (
            len(set(trips)) == len(trips)
            and max(collections.Counter(p for p, _ in trips).values()) <= 3
        )
        assert not set(agency.spare) & set(agency.orders)
        for flight in agency.flights:
            for kind in ("window", "aisle"):
                assert re.fullmatch(r"\d[AC]", agency.free_seat(flight, kind))
    assert image(1) != image(2)
    data.cache_clear()
    assert data(199) == agency


# Answers.


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("85", "85", True),
        ("It costs 85 euros.", "85", True),
        ("the flight to Rome costs $85!", "85", True),
        ("85 or 86", "85", False),
        ("185", "85", False),
        ("", "85", False),
        ("Order O42 is on Monday", "Monday", True),
        ("monday", "Monday", True),
        ("Monday or Tuesday", "Monday", False),
        ("Ann goes to Rome", "Rome", True),
        ("Rome Paris", "Rome", False),
        ("seat 4a", "4A", True),
        ("4A, 5A", "4A", False),
        ("order O42 has 2 bags", "2", True),
        ("the third one!", "The Third One", True),
        ("another", "The Third One", False),
    ],
)
def test_an_answer_names_one_value_of_its_type(text, expected, right):
    assert answers(text, expected) is right


# The profile.


def test_the_profile_covers_the_tools_and_its_slots_fit():
    json.dumps(PROFILE)
    kinds = {entity["name"]: entity for entity in PROFILE["entities"]}
    assert {operation["tool"] for operation in PROFILE["operations"]} == CHANGING - {
        "move"
    }  # which no task needs
    assert "phrases" not in json.dumps(
        PROFILE
    )  # explorers do not know the words of the hand-written tasks
    for operation in OPERATIONS:
        assert list(operation["arguments"]) == ARGUMENTS[operation["tool"]]
        assert set(operation["arguments"].values()) <= set(kinds)
        for phrase in operation["phrases"]:
            slots = {name for _, name, _, _ in string.Formatter().parse(phrase) if name}
            assert slots == set(operation["arguments"])
    for question in QUESTIONS:
        assert question["attribute"] in kinds[question["entity"]]["attributes"]
        assert set(question["tools"]) <= set(ARGUMENTS)
        assert all("{it}" in text for text in question["phrases"] + question["questions"])


def test_descriptions_name_one_entity_each():
    for seed in range(30):
        agency = data(seed)
        kinds = {"flight": agency.flights, "passenger": agency.passengers, "order": agency.orders}
        for kind, ids in kinds.items():
            texts = [
                phrase["text"] for id in ids for phrase in describe(agency, kind, id)["phrases"]
            ]
            assert len(set(texts)) == len(texts)
            attributes = next(entity for entity in PROFILE["entities"] if entity["name"] == kind)[
                "attributes"
            ]
            for id in ids:
                described = describe(agency, kind, id)
                assert set(attributes) <= set(described)
                assert kind == "order" or not any(
                    id in phrase["text"] for phrase in described["phrases"]
                )
    assert (
        describe(agency, "order", "O00") == {}
        and describe(agency, "seat", "9Z", {"order": "O00"}) == {}
    )


def test_orders_made_in_the_episode_are_named_relative_to_it():
    session = Session()
    flight, other = list(session.data.flights.values())[:2]
    passenger = next(iter(session.data.passengers.values()))
    session("people", name=passenger.name)
    for n, chosen in enumerate((flight, other)):
        session("flights", to=chosen.city)
        session("quote", flight=chosen.id)
        session("book", flight=chosen.id, passenger=passenger.id)
        phrases = describe(
            session.data, "order", session.data.spare[0], None, session.world._agency.orders()
        )["phrases"]
        expected = "it" if n == 0 else f"{passenger.name}'s new trip to {flight.city}"
        assert phrases == [{"text": expected, "via": ["book"]}]


# Demonstrations.


def demos(n, **kwargs):
    rng = random.Random(5)
    return [demonstration(rng.randrange(60), rng, **kwargs) for _ in range(n)]


def test_careful_demonstrations_succeed_and_careless_ones_mostly_do_not():
    assert all(demo["success"] for demo in demos(100, care=1.0))
    careless = demos(400)
    assert 0.2 <= sum(demo["success"] for demo in careless) / 400 <= 0.4
    by_level = collections.defaultdict(list)
    for demo in careless:
        by_level[demo["difficulty"]].append(demo["success"])
    assert set(by_level) == set(LEVELS) and all(any(found) for found in by_level.values())
    heeding = demos(200, hint=1.0)
    assert 0.55 <= sum(demo["success"] for demo in heeding) / 200 <= 0.8
    assert all(0 < p < 1 for p in odds(0.15, False).values()) and set(odds(0, True)) == set(SLIPS)


def test_all_pairs_of_goals_except_held_out_ones_are_demonstrated():
    held_out = {
        frozenset(template.split("+")) for templates in HELD_OUT.values() for template in templates
    }
    shown = {frozenset(template.split("+")) for template in compositions()}
    assert (
        not shown & held_out
        and {frozenset(t.split("+")) for level in LEVELS for t in TEMPLATES[level]} <= shown
    )
    found = [demonstrate(random.Random(i), care=1.0, plain=0.0) for i in range(300)]
    assert all(demo["success"] for demo in found) and {demo["difficulty"] for demo in found} == set(
        LEVELS
    )
    assert len({demo["template"] for demo in found}) > 80


def test_demonstrations_are_well_formed_and_limited_to_training_worlds():
    tools = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
    for demo in demos(100, hint=0.5):
        roles = [message["role"] for message in demo["messages"]]
        assert roles[:2] == ["system", "user"] and roles[2::2] == ["assistant"] * len(roles[2::2])
        assert set(roles[3::2]) <= {"tool"} and roles[-1] == "assistant"
        assert demo["hinted"] == demo["messages"][1]["content"].startswith("<EXP>When asked ")
        *acts, final = [
            message["content"] for message in demo["messages"] if message["role"] == "assistant"
        ]
        for act in acts:
            (call,) = parse(act).calls
            assert (
                act == call_text(call.name, call.arguments)
                and list(call.arguments) == tools[call.name]
            )
        assert not parse(final).calls and not parse(final).errors
    with pytest.raises(ValueError, match="not a training world"):
        demonstration(WORLDS, random.Random(0))


def test_no_task_of_the_splits_is_demonstrated(tasks):
    assert reserved() == {(task.seed, task.query) for task in every(tasks)}
    drawn = demonstration(7, random.Random(1))["messages"][1]["content"]
    assert demonstration(7, random.Random(1))["messages"][1]["content"] == drawn
    assert (
        demonstration(7, random.Random(1), exclude=frozenset({(7, drawn)}))["messages"][1][
            "content"
        ]
        != drawn
    )


def test_experience_text():
    assert when_text("Add a bag to order O12.") == "When asked to add a bag to order X"
    assert (
        when_text("Who travels on Ann's trip to Rome?") == "When asked who travels on X's trip to X"
    )
    described = "Take a seat for an order: order Ann Rome. Then get a quote for a flight: flight Oslo noon. Reply with it."
    assert when_text(described) == (
        "When asked to take a seat for an order order X X then get a quote for a flight flight X noon reply with it"
    )
    assert (
        hint_text(["order", "bag"], "When asked to add a bag")
        == "When asked to add a bag: order, bag."
    )


# Demonstrations in the words of the tools' descriptions.


def plain_drafts(n, seed=0):
    rng = random.Random(seed)
    while n:
        try:
            yield plain.draft(
                rng.randrange(WORLDS), rng, rng.choice(plain.templates(rng.choice(LEVELS)))
            )
            n -= 1
        except Unfit:
            continue


def test_a_plain_reference_solves_its_task_and_every_change_is_needed(world):
    for plan in plain_drafts(200):
        task = task_of(plan)
        assert play(world, task, task.reference).success, plan
        assert not play(world, task, [*task.reference[:-1], "nothing"]).success or plan.ask is None
        for i, call in enumerate(plan.calls):
            if call.tool in CHANGING:
                assert not play(
                    world, task, task.reference[:i] + task.reference[i + 1 :]
                ).success, (plan, i)
    assert {call.tool for plan in plain_drafts(200) for call in plan.calls} == set(ARGUMENTS)


def test_a_plain_query_names_what_its_calls_need_and_nothing_that_they_have_to_find():
    ids = re.compile(r"\b(?:[FPO]\d\d|\d[ABC])\b")
    for plan in plain_drafts(200, seed=1):
        known = set(ids.findall(plan.query))
        session = Session(plan.world)
        for call in plan.calls:
            assert known.issuperset(
                value for value in call.arguments.values() if ids.match(value)
            ), plan
            known |= set(ids.findall(session(call.tool, **call.arguments)))
        assert all(f" {value}" in plan.query for call in plan.calls for key, value in call.arguments.items()
                   if key in ("to", "name")), plan  # fmt: skip
        assert plan.answer is None or not re.search(rf"\b{plan.answer}\b", plan.query)
        assert plain.SUMMARIES[plan.calls[-1].tool].lower() in plan.query.lower()


def test_a_plain_query_is_worded_as_the_explorer_words_it(world):
    """The calls of a draft, as events of a walk, get the same query from the explorer."""
    from evolver.questioning.calls import Event, operations_of
    from evolver.questioning.goals import Goal
    from evolver.questioning.phrasing import Option, Phrasing

    operations = operations_of(world, world.reset(free_task()))
    phrasing = Phrasing(operations, {"F99", "P99", "O99", "9A", "9B", "9C"})
    assert phrasing.summaries.items() >= plain.SUMMARIES.items()
    phrasing.question = lambda event, query, rng, fits: Option(plan.ask[2], plan.answer, [])
    for plan in plain_drafts(100, seed=2):
        session = Session(plan.world)
        events = [
            Event(c.tool, c.arguments, "", session(c.tool, **c.arguments), ok=True)
            for c in plan.calls
        ]
        assert events[0].cells == cells(events[0].name, events[0].result)
        targets = [n for n, call in enumerate(plan.calls) if call.tool in CHANGING]
        goal = Goal(events, targets, len(events) - 1 if plan.ask else None)
        queries = {phrasing.query(goal, random.Random(seed))[0] for seed in range(8)}
        assert plan.query in queries, plan


def test_plain_demonstrations_combine_no_held_out_goals():
    held_out = {
        frozenset(template.split("+")) for templates in HELD_OUT.values() for template in templates
    }
    written = {
        "order.bag+same.order": "order.bag.name",
        "trip.refund+passenger.people": "trip.drop+passenger.card",
    }
    shown = {name for level in LEVELS for name in plain.templates(level)}
    for name, segments in written.items():
        assert frozenset(segments.split("+")) in held_out and plain.PREFIX + name not in shown
    assert not {f"{plain.PREFIX}order.{drop}+city.flights" for drop in ("cancel", "refund")} & shown
    assert (
        not {f"{plain.PREFIX}{pair}" for pair in ("order.seat+order.bag", "order.bag+order.seat")}
        & shown
    )
    assert {
        f"{plain.PREFIX}{pair}"
        for pair in ("order.bag+trip.seat", "trip.seat+order.bag", "book+book")
    } <= shown


def test_half_of_the_demonstrations_are_plain_and_their_agents_slip_alike():
    found = [demonstrate(random.Random(i), care=0.33) for i in range(150)]
    assert 0.4 < sum(demo["template"].startswith(plain.PREFIX) for demo in found) / 150 < 0.6
    assert not any(
        demonstrate(random.Random(i), plain=0.0)["template"].startswith(plain.PREFIX)
        for i in range(30)
    )
    careful = [demonstrate(random.Random(i), care=1.0, plain=1.0, hint=0.3) for i in range(80)]
    assert all(demo["success"] for demo in careful) and {
        demo["difficulty"] for demo in careful
    } == set(LEVELS)
    careless, heeding = (
        [demonstrate(random.Random(i), care=0.15, plain=1.0, hint=hint) for i in range(150)]
        for hint in (0.0, 1.0)
    )
    assert 0.2 <= sum(demo["success"] for demo in careless) / 150 <= 0.45
    assert 0.55 <= sum(demo["success"] for demo in heeding) / 150 <= 0.8
    ends = [
        demo["messages"][-1]["content"]
        for demo in careless
        if demo["template"] == "plain/passenger.people"
    ]
    assert {"done"} < set(ends) and any(end in ("gold", "silver", "blue") for end in ends)
    assert demonstrate(random.Random(3), plain=1.0, hint=0.5) == demonstrate(
        random.Random(3), plain=1.0, hint=0.5
    )
    for demo in heeding[:50]:
        hint, _, query = demo["messages"][1]["content"].partition("</EXP>\n")
        assert hint.startswith("<EXP>When asked ") and query[0].isupper()


def test_no_plain_task_of_the_splits_is_demonstrated():
    template = plain.PREFIX + "passenger.people"
    drawn = demonstration(7, random.Random(1), template=template)["messages"][1]["content"]
    assert drawn.startswith("Look a passenger up by first name: name ")
    other = demonstration(7, random.Random(1), template=template, exclude=frozenset({(7, drawn)}))
    assert other["messages"][1]["content"] != drawn


def test_the_registry_makes_it():
    assert isinstance(envs.make("travel", n_dev=6), Travel)
