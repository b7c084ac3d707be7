"""The travel agency: success depends on the final state and the answer only, and inaction never
succeeds. What it shares with other worlds is in test_desk.py."""

import collections
import json
import random
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from envs.desk.plans import WORLDS, Unfit
from envs.desk.tools import required
from envs.desk.verify import verify
from envs.hints import when_text
from envs.toolcalls import call_text, parse
from envs.travel import Travel, demos, plain
from envs.travel.agency import Agency
from envs.travel.data import data, image
from envs.travel.demos import compositions, demonstrate, reserved
from envs.travel.profile import (
    PHRASES,
    PROFILE,
    QUESTIONS,
    attributes,
    flight_phrases,
    trip_phrases,
)
from envs.travel.tasks import HELD_OUT, TEMPLATES, held_out, plan
from envs.world import Task

SPLITS = ("train", "dev", "test")
ARGUMENTS = required(Agency.schemas)
LEVELS = tuple(TEMPLATES)
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
    state = task.verifier["state"]
    for reached, progress in ((state + wrong, 0.5), (wrong, 0.0)):
        graded = verify(state, None, reached, None, Travel.desk.answers)
        assert graded.components["progress"] == progress and not graded.success
    # A task without a goal never succeeds.
    assert not verify([], None, [], "done", Travel.desk.answers).success


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


def test_a_third_of_dev_and_test_is_held_out(tasks):
    assert {split: len(found) for split, found in tasks.items()} == {
        "train": 64,
        "dev": 48,
        "test": 96,
    }
    assert len({task.id for task in every(tasks)}) == len(every(tasks))
    for found in tasks.values():
        assert {task.difficulty for task in found} == set(LEVELS)
    held = {template for found in HELD_OUT.values() for template in found}
    assert not held & {template for found in TEMPLATES.values() for template in found}
    assert not held & {task.meta["template"] for task in tasks["train"]}
    for split in ("dev", "test"):
        share = sum(task.meta["template"] in held for task in tasks[split]) / len(tasks[split])
        assert 0.2 <= share <= 0.35


def test_all_tasks_may_be_of_one_level():
    for split in ("train", "dev"):
        found = Travel(n_train=8, n_dev=8, rules=0, level=4).tasks(split)
        assert {task.difficulty for task in found} == {4}
    with pytest.raises(ValueError, match="one of 1, 2, 3, 4, 5, 6, or 0 for all, not 7"):
        Travel(level=7)


def test_queries_are_short_and_worded_in_several_ways(tasks):
    assert max(len(task.query.split()) for task in every(tasks)) <= 25
    rng = random.Random(0)
    for level in LEVELS:
        for template in TEMPLATES[level] + HELD_OUT[level]:
            queries = {when_text(plan(i % 40, rng, template=template).query) for i in range(30)}
            assert len(queries) >= 4, template
    assert all(len(phrases) >= 4 for phrases in PHRASES.values())


def test_tasks_from_the_generator_are_deterministic_and_solvable(world):
    for seed in range(60):
        one, other = (Travel.desk.task_of(plan(seed, random.Random(seed))) for _ in range(2))
        assert one == other
        assert Task.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        assert play(world, one, one.reference).success


# Episodes.


def test_an_episode_opens_with_a_short_system_message(world, tasks):
    task = tasks["dev"][0]
    observation = world.reset(task)
    assert observation.messages == [
        {"role": "system", "content": "You are a travel agent."},
        {"role": "user", "content": task.query},
    ]
    assert [tool["function"]["name"] for tool in observation.tools] == list(ARGUMENTS)
    json.dumps(observation.to_dict())


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
    with pytest.raises(ValueError, match="malformed"):
        Travel(malformed="maybe")
    with pytest.raises(RuntimeError, match="reset"):
        Travel().difference()
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
    assert Travel.desk.answers.accept(text, expected) is right


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
    tools = {"drop": "cancel"}
    for operation, phrases in PHRASES.items():
        for phrase in phrases:
            slots = {name for _, name, _, _ in string.Formatter().parse(phrase) if name}
            assert slots == set(ARGUMENTS[tools.get(operation, operation)]) <= set(kinds)
    for (entity, attribute), texts in QUESTIONS.items():
        assert attribute in kinds[entity]["attributes"]
        assert all("{it}" in text for text in texts[0] + texts[1])


def test_phrases_name_one_entity_each():
    for seed in range(30):
        agency = data(seed)
        for ids, phrases in ((agency.flights, flight_phrases), (agency.orders, trip_phrases)):
            texts = [(id, text) for id in ids for text in phrases(agency, id)]
            assert len({text for _, text in texts}) == len(texts)
            assert not any(id in text for id, text in texts)
        entities = {"city": agency.cities, "passenger": agency.passengers, "order": agency.orders}
        for entity, ids in entities.items():
            named = next(e for e in PROFILE["entities"] if e["name"] == entity)["attributes"]
            assert all(set(named) <= set(attributes(agency, entity, id)) for id in ids)


def test_a_desk_call_needs_an_order_or_a_flight_and_is_remembered():
    house = Agency.family.house(0, 0.1)
    agency, desk = Agency(7, house), house.desk("bag")
    order = next(iter(agency.start.orders))
    assert agency.call(desk, {"id": "O00"}) == ("error: no such order or flight", False)
    agency.call("order", {"id": order})
    assert agency.call("bag", {"order": order}) == ("error: not cleared", False)
    assert agency.call(desk, {"id": order}) == ("ok", True)
    other = Agency.restored(agency.snapshot(), house)
    assert other.call("bag", {"order": order})[1]
    assert Agency(7).call(desk, {"id": order})[0].startswith("error: no such tool")


# Demonstrations.


def shown(n, **arguments):
    return [demonstrate(random.Random(i), **arguments) for i in range(n)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_careful_demonstrations_succeed_and_careless_ones_mostly_do_not(share):
    assert all(demo["success"] for demo in shown(80, care=1.0, plain=share, hint=0.3))
    careless, heeding = (shown(200, plain=share, hint=hint) for hint in (0.0, 1.0))
    assert 0.2 <= sum(demo["success"] for demo in careless) / 200 <= 0.45
    assert 0.55 <= sum(demo["success"] for demo in heeding) / 200 <= 0.8
    by_level = collections.defaultdict(list)
    for demo in careless:
        by_level[demo["difficulty"]].append(demo["success"])
    assert set(by_level) == set(LEVELS) and all(any(found) for found in by_level.values())
    ends = [
        demo["messages"][-1]["content"]
        for demo in careless
        if demo["template"] == "plain/passenger.people"
    ]
    assert not share or {"done"} < set(ends) <= {"done", "gold", "silver", "blue"} | set(ends)


def test_all_pairs_of_goals_except_held_out_ones_are_demonstrated():
    pairs = {frozenset(template.split("+")) for template in compositions()}
    own = {frozenset(template.split("+")) for level in LEVELS for template in TEMPLATES[level]}
    assert not pairs & held_out() and own <= pairs
    found = shown(300, care=1.0, plain=0.0)
    assert all(demo["success"] for demo in found)
    assert {demo["difficulty"] for demo in found} == set(LEVELS)
    assert len({demo["template"] for demo in found}) > 80


def test_no_task_of_the_splits_is_demonstrated(tasks, monkeypatch):
    assert reserved() == {(task.seed, task.query) for task in every(tasks)}
    for share, n in ((False, 2), (True, 1)):
        drawn, task = demos.AGENCIES.plan(random.Random(n), share, None)
        assert 0 <= drawn.seed < WORLDS and task.query == drawn.query
        pair = {(drawn.seed, drawn.query)}
        monkeypatch.setattr(demos, "reserved", lambda pair=pair: pair)
        other, _ = demos.AGENCIES.plan(random.Random(n), share, None)
        assert other.seed == drawn.seed and other.query != drawn.query


# Demonstrations in the words of the tools' descriptions.


def plain_plans(n):
    rng = random.Random(0)
    while n:
        template = rng.choice(plain.templates(rng.choice(LEVELS)))
        try:
            yield plain.plan(rng.randrange(WORLDS), rng, template)
            n -= 1
        except Unfit:
            continue


def test_every_change_of_a_plain_solution_is_needed(world):
    found = list(plain_plans(200))
    for one in found:
        task = Travel.desk.task_of(one)
        assert not play(world, task, [*task.reference[:-1], "nothing"]).success or not one.wanted
        for i, call in enumerate(one.calls):
            if call.tool in CHANGING:
                rest = task.reference[:i] + task.reference[i + 1 :]
                assert not play(world, task, rest).success, (one, i)
            values = [call.arguments[key] for key in ("to", "name") if key in call.arguments]
            assert all(f" {value}" in one.query for value in values), one
    assert {tool for one in found for tool in one.tools} == set(ARGUMENTS)


def test_plain_demonstrations_combine_no_held_out_goals():
    written = {
        "order.bag+same.order": "order.bag.name",
        "trip.refund+passenger.people": "trip.drop+passenger.card",
    }
    shown = {name for level in LEVELS for name in plain.templates(level)}
    for name, segments in written.items():
        assert frozenset(segments.split("+")) in held_out() and plain.PREFIX + name not in shown
    assert not {f"{plain.PREFIX}order.{drop}+city.flights" for drop in ("cancel", "refund")} & shown
    assert (
        not {f"{plain.PREFIX}{pair}" for pair in ("order.seat+order.bag", "order.bag+order.seat")}
        & shown
    )
    assert {
        f"{plain.PREFIX}{pair}"
        for pair in ("order.bag+trip.seat", "trip.seat+order.bag", "book+book")
    } <= shown


def test_the_registry_makes_it():
    assert isinstance(envs.make("travel", n_dev=6), Travel)
