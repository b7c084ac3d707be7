"""The travel agency: success depends on the final state and the answer only, and inaction never
succeeds. What it shares with other worlds is in test_desk.py."""

import base64
import collections
import functools
import json
import random
import re
import sqlite3
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.desk.plans import WORLDS
from envs.desk.tools import required
from envs.desk.verify import verify
from envs.hints import when_text
from envs.toolcalls import call_text
from envs.travel import Travel, demos, plain
from envs.travel.agency import Agency
from envs.travel.data import Order, changed, data, image, orders_in
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
from tests.envs.playing import calls_of, plain_plans, play, without

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
        assert play(world, task, []).score == play(world, task, ["done"]).score == 0.0
        evaluation = play(world, task, task.reference)
        assert evaluation == world.evaluate() and evaluation.success and evaluation.score == 1.0
        assert evaluation.components["progress"] == 1.0
        assert task.difficulty == len(task.reference) - 1 == len(calls_of(task))
        if task.verifier["answer"]:
            for answer in ("done", ""):
                assert not play(world, task, [*task.reference[:-1], answer]).success


def test_no_change_and_no_other_call_of_a_change_can_be_left_out_or_go_astray(world, tasks):
    for task in every(tasks):
        agency = data(task.seed)
        # Look up every order and flight, so that the wrong id is not refused because of a
        # missing look-up.
        looks = [call_text("order", {"id": id}) for id in agency.orders]
        for flight in agency.flights.values():
            looks.append(call_text("flights", {"to": flight.city}))
            looks.append(call_text("quote", {"flight": flight.id}))
        for i, call in enumerate(calls_of(task)):
            if call.name in CHANGING or (task.verifier["state"] and not task.verifier["answer"]):
                assert not play(world, task, without(task.reference, i)).success, (task, i)
            if call.name in CHANGING:
                key = "order" if "order" in call.arguments else "flight"
                for other in list(agency.orders if key == "order" else agency.flights)[:2]:
                    if other != call.arguments[key]:
                        wrong = call_text(call.name, call.arguments | {key: other})
                        turns = looks + task.reference[:i] + [wrong] + task.reference[i + 1 :]
                        assert not play(world, task, turns).success, (task, wrong)
            if call.name == "book":
                again = task.reference[: i + 1] + task.reference[i:]
                assert not play(world, task, again).success


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
        *turns, answer = task.reference
        looks = [call_text("order", {"id": id}) for id in data(task.seed).orders]
        looks += [call_text("people", {"name": "Nobody"}), call_text("flights", {"to": "Rome"})]
        assert play(world, task, looks + task.reference).success
        assert play(world, task, ["I will do this.\n" + "\n".join(turns), answer]).success
        two_orders = re.fullmatch(r"order[^+]*\+order[^+]*", task.meta["template"])
        if two_orders and "flights" not in "".join(turns):
            used = [set(call.arguments.values()) for call in calls_of(task)]
            of_first = [turn for turn, values in zip(turns, used) if used[0] & values]
            others = [turn for turn in turns if turn not in of_first]
            assert play(world, task, others + of_first).success


def test_two_bookings_in_either_order_make_the_same_difference():
    agency = data(3)
    pairs = list(zip(agency.flights.values(), agency.passengers.values()))[:2]
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
    assert [len(tasks[split]) for split in SPLITS] == [64, 48, 96]
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


# Episodes.


def test_an_episode_opens_with_a_short_system_message(world, tasks):
    opening = world.reset(tasks["dev"][0])
    said = [(message["role"], message["content"]) for message in opening.messages]
    assert said == [("system", "You are a travel agent."), ("user", tasks["dev"][0].query)]
    assert opening.tools == Agency.schemas


def test_malformed_turns_are_answered_or_end_the_episode():
    for malformed in ("error", "end"):
        world = Travel(malformed=malformed)
        world.reset(free_task())
        many = world.step(call_text("people", {"name": "x"}) * 9)
        assert len(many.info["calls"]) == 8 and not many.terminated
        broken = world.step("<tool_call>\n{nope}\n</tool_call>")
        assert broken.info["parse_error"] and broken.messages
        assert broken.terminated == (malformed == "end")
    with pytest.raises(ValueError, match="malformed"):
        Travel(malformed="maybe")
    with pytest.raises(RuntimeError, match="reset"):
        Travel().difference()


def test_wrong_calls_get_a_readable_error():
    session = Session()
    assert "no such tool" in session("fly")
    assert session("flights") == "error: flights needs to"
    assert session("flights", to="Rome", day="Monday") == "error: flights takes to only"
    assert session("flights", to=3) == "error: to must be a string"
    assert session("flights", to="Atlantis") == "no flights"
    for name in ("Nobody", "'; DROP TABLE orders; --", "\x00"):
        assert session("people", name=name) == "error: nobody has that name"


@settings(max_examples=20)
@given(st.data())
def test_random_calls_keep_the_database_consistent(draw):
    session = Session()
    start = session.data
    ids = [*start.orders, *start.flights, *start.passengers, *start.spare[:3], "4A"]
    names = [passenger.name for passenger in start.passengers.values()]
    pools = {"to": start.cities, "name": names}
    for _ in range(30):
        tool = draw.draw(st.sampled_from(sorted(ARGUMENTS)))
        drawn = [draw.draw(st.sampled_from(pools.get(name, ids))) for name in ARGUMENTS[tool]]
        session(tool, **dict(zip(ARGUMENTS[tool], drawn)))
    rows = session.world.difference()
    assert len({(row[1], row[2]) for row in rows}) == len(rows)
    assert all(row[3] != row[4] for row in rows)


# Tools.


def test_a_booking_needs_search_quote_and_passenger():
    session = Session()
    flight, *_ = session.data.flights.values()
    passenger, *_ = session.data.passengers.values()
    book = {"flight": flight.id, "passenger": passenger.id}
    assert session("quote", flight=flight.id) == "error: search the flights first"
    assert session("book", **book) == "error: search the flights first"
    rows = session("flights", to=flight.city.upper()).split("\n")
    prices = [int(row.split()[1]) for row in rows]
    assert len(rows) <= 3 and prices == sorted(set(prices))
    shown = f"{flight.city} {flight.price} {flight.fare} {flight.time} {flight.day} {flight.id}"
    assert shown in rows
    assert session("book", **book) == "error: quote the flight first"
    assert session("quote", flight=flight.id) == f"{flight.id} {flight.price}"
    assert session("book", **book) == "error: look the passenger up first"
    assert session("orders", passenger=passenger.id) == "error: look the passenger up first"
    found = session("people", name=passenger.name.lower())
    assert found == f"{passenger.id} {passenger.name} {passenger.card}"
    order, *_ = session.data.spare
    booked = f"{passenger.name} {flight.day} {flight.fare} {flight.city} {order}"
    assert session("book", **book) == booked
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
    assert re.fullmatch(rf"{name} .* {id}", session("order", id=id))
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
        for order in held[:1]:
            assert session("cancel", order=order.id) == f"{order.id} cancelled"  # it was shown
            assert order.id not in session("orders", passenger=passenger.id)
            assert session("order", id=order.id).split()[-3] == "cancelled"
            assert session("bag", order=order.id) == "error: the order is closed"


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
    take, move = (functools.partial(session, tool, order=id) for tool in ("seat", "move"))
    session("order", id=id)
    seat = session.data.free_seat(order.flight, "window")
    assert take(seat=seat) == "error: list the seats first"
    rows = session("seats", order=id).split("\n")
    assert f"window {seat}" in rows and len(rows) <= 3
    assert take(seat="0Z") == "error: that seat is not free"
    assert take(seat=seat) == f"{id} {seat}"
    assert f"window {seat}" not in session("seats", order=id)
    assert session.world.difference() == [["orders", id, "seat", "", seat]]
    # A moved order loses its seat and needs a new list of seats.
    flight = next(f for f in session.data.flights.values() if f.id != order.flight)
    assert move(flight=order.flight) == "error: it is on that flight"
    assert move(flight=flight.id) == "error: search the flights first"
    session("flights", to=flight.city)
    assert move(flight=flight.id) == "error: quote the flight first"
    session("quote", flight=flight.id)
    assert re.fullmatch(rf".* {flight.day} .* {flight.city} {id}", move(flight=flight.id))
    assert take(seat=seat) == "error: list the seats first"
    assert session.world.difference() == [["orders", id, "flight", order.flight, flight.id]]


def test_worlds_are_seeded_and_unambiguous():
    for seed in range(200):
        agency = data(seed)
        names = [passenger.name for passenger in agency.passengers.values()]
        assert len(set(names)) == len(names) == 12 and len(agency.orders) == 8
        assert 24 <= len(agency.flights) <= 36
        orders = agency.orders.values()
        trips = [(order.passenger, agency.flights[order.flight].city) for order in orders]
        assert len(set(trips)) == len(trips)
        assert max(collections.Counter(passenger for passenger, _ in trips).values()) <= 3
        assert not set(agency.spare) & set(agency.orders)
        for flight in agency.flights:
            for kind in ("window", "aisle"):
                assert re.fullmatch(r"\d[AC]", agency.free_seat(flight, kind))
    assert image(1) != image(2)
    data.cache_clear()
    assert data(199) == agency


def test_snapshots_are_those_of_a_database_that_was_changed_by_statements():
    first, second = list(data(3).orders.values())[:2]
    new = Order(data(3).spare[0], first.passenger, second.flight)
    bag, cancelled = first._replace(bag=1), second._replace(status="cancelled")
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(base64.b64decode(image(3)))
    connection.execute("UPDATE orders SET bag = 1 WHERE id = ?", [first.id])
    connection.execute("INSERT INTO orders VALUES (?, ?, ?, 0, '', 'open')", new[:3])
    connection.execute("UPDATE orders SET status = 'cancelled' WHERE id = ?", [second.id])
    assert base64.b64decode(changed(image(3), (bag, new, cancelled))) == connection.serialize()
    expected = data(3).orders | {order.id: order for order in (bag, new, cancelled)}
    assert {order.id: order for order in orders_in(changed(image(3), (bag, new, cancelled)))} == (
        expected
    )


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
    kinds = {entity["name"]: entity for entity in PROFILE["entities"]}
    # No task needs a move, and explorers do not know the words of the hand-written tasks.
    assert {operation["tool"] for operation in PROFILE["operations"]} == CHANGING - {"move"}
    assert "phrases" not in json.dumps(PROFILE)
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
        listed = {entity["name"]: set(entity["attributes"]) for entity in PROFILE["entities"]}
        entities = {"city": agency.cities, "passenger": agency.passengers, "order": agency.orders}
        for entity, ids in entities.items():
            assert all(listed[entity] <= set(attributes(agency, entity, id)) for id in ids)


def test_a_desk_call_needs_an_order_or_a_flight_and_a_house():
    house = Agency.family.house(0, 0.1)
    call = house.desk("bag"), {"id": "O00"}
    assert Agency(7, house).call(*call) == ("error: no such order or flight", False)
    assert Agency(7).call(*call)[0].startswith("error: no such tool")


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
    asked = (demo for demo in careless if demo["template"] == "plain/passenger.people")
    ends = {demo["messages"][-1]["content"] for demo in asked}
    assert not share or {"done"} < ends


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


def test_every_change_of_a_plain_solution_is_needed(world):
    found = list(plain_plans(Travel, 200))
    for one in found:
        task = Travel.desk.task_of(one)
        assert not play(world, task, [*task.reference[:-1], "nothing"]).success or not one.wanted
        for i, call in enumerate(one.calls):
            if call.tool in CHANGING:
                assert not play(world, task, without(task.reference, i)).success, (one, i)
            values = [call.arguments[key] for key in ("to", "name") if key in call.arguments]
            assert all(f" {value}" in one.query for value in values), one
    assert {tool for one in found for tool in one.tools} == set(ARGUMENTS)


def test_plain_demonstrations_combine_no_held_out_goals():
    shown = {name.removeprefix(plain.PREFIX) for level in LEVELS for name in plain.templates(level)}
    assert {frozenset(["order.bag.name"]), frozenset(["trip.drop", "passenger.card"])} <= held_out()
    kept_out = {"order.bag+same.order", "trip.refund+passenger.people"}
    kept_out |= {"order.cancel+city.flights", "order.refund+city.flights"}
    assert shown.isdisjoint(kept_out | {"order.seat+order.bag", "order.bag+order.seat"})
    assert {"order.bag+trip.seat", "trip.seat+order.bag", "book+book"} <= shown
