"""The explorer in worlds of a stranger: modules of plain functions, each with something that an
explorer may overlook, and with a rule that no description mentions."""

import json
import random
import re
import time

import pytest

from docs.examples.lending import Lending
from envs import make
from envs.probed import possible_names, probed
from envs.toolcalls import call_text
from envs.world import StepResult
from evolver.questioning.calls import Event, Operation, required_of, succeeded
from evolver.questioning.goals import Goal
from evolver.questioning.operation_stats import OperationStats
from evolver.questioning.phrasing import Phrasing
from evolver.questioning.start_state import is_clock
from evolver.questioning.values import NEW_TEXTS, guessed
from evolver.replaying import calls_of, replay
from tests.evolver.explorers import curious, learnt, needs, solves
from tests.evolver.strangers.pages import PAGES
from tests.evolver.strangers.printshop import JOBS
from tests.evolver.strangers.tickets import PEOPLE

# {module: (goals that have to be found, a call and the later one that is refused without it)}. That
# an account is a transfer's source, nothing in the bank says: its rule stays unknown.
STRANGERS = {
    "garage": ("book_car charge_car check_licence", "check_licence book_car"),
    "garage_by_driver": ("book_car charge_car", "check_licence book_car"),
    "bank": ("deposit ?show_balance unfreeze", ""),
    "tickets": ("assign_ticket close_ticket set_priority", "assign_ticket close_ticket"),
    # an object whose fields are rows, errors that are texts, changes that take no arguments
    "greenhouse": ("set_temperature set_light open_vent water start_pump", "start_pump water"),
    # names of two words in lines of text, and values that a description alone tells
    "robot": ("go take drop", ""),  # refusals that are sentences like all others
    "hotel": ("check_in clean_room charge set_heating", "clean_room check_in"),
    "vault": ("lock_note delete_note rename_note", ""),  # tokens of a login
    # answers by id; calls that set what mostly is set, and repeat it
    "locker": ("put_parcel collect pay unblock", "collect put_parcel"),
    # names of two words, a line each; few different answers; yes or no
    "aquarium": ("heat switch_light ?measure", ""),
    # objects whose fields are people and drawers, with one text each; a single start
    "seedbank": ("dry renew lend", ""),
    # a list of objects as an argument
    "cart": ("add_to_cart set_address", "add_to_cart apply_coupon"),
}
BUDGET = 60
# To stop a pump that does not run is no task, and is tried with every other goal. A seed bank has
# one start.
ROUNDS = {"greenhouse": 16, "seedbank": 16}


def world_of(name):
    return make("functions", module=f"tests.evolver.strangers.{name}")


def questioning(name, **options):
    return curious(lambda: world_of(name), world_of(name).tasks("train")[:16], **options)


def explored(name, budget, **options):
    """Return the tasks of a world, and (task, call) of all their solutions."""
    tasks = questioning(name, **options).explore(seed=0, budget=budget)
    return tasks, [(task, call) for task in tasks for call in calls_of(task)]


def goals_of(tasks):
    return set().union(*(task.meta["template"].split("+") for task in tasks))


# The default run has the harder of the two garages.
SLOW = {"garage": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, ())) for name in STRANGERS]
)
def test_a_strangers_world_gives_tasks_and_its_hidden_rule(name):
    tasks, _ = explored(name, BUDGET, rounds=ROUNDS.get(name, 4))
    assert len(tasks) >= 0.7 * BUDGET
    wanted, rule = STRANGERS[name]
    assert goals_of(tasks) >= {*wanted.split()}
    if not rule:
        return
    first, later = rule.split()
    hidden = [task for task in tasks if first in task.meta["prerequisites"]]
    assert len(hidden) >= 2
    for task in hidden:
        assert later in task.meta["template"] and needs(first, world_of(name), task)


def test_a_world_that_shows_nothing_before_a_change_gives_tasks_which_leave_that_change_out():
    tasks, _ = explored("counter", 20)
    assert len(tasks) == 20
    assert {"pay", "change_order"} <= {task.meta["template"] for task in tasks}
    for task in tasks:
        assert "duty" not in task.query and needs("start_duty", world_of("counter"), task)


def test_refusals_that_repeat_what_was_asked_are_told_from_answers():
    tasks, calls = explored("printshop", BUDGET, rounds=100)
    assert len(tasks) >= 10
    assert {"start", "refill"} <= goals_of(tasks)
    assert {call.arguments["job"] for _, call in calls if call.name == "start"} <= JOBS.keys()


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("There is no room called {}.", True),  # whatever it is called, also "no" and "room"
        ("The {} is not here.", True),
        ("The {} is open.", False),  # it says so of real rooms alone
    ],
)
def test_a_sentence_that_says_the_same_of_a_made_up_value_may_be_a_refusal(words, refused):
    stats = OperationStats()
    real = ("kitchen", "no", "room", "not")
    for name in (*real, *["birch"] * refused):
        learnt(stats, "look", {"room": name}, words.format(name), kinds=["kind"][: name in real])
    events = [learnt(stats, "look", {"room": n}, words.format(n), kinds=["kind"]) for n in real]
    assert all(stats.refuses(event) == refused for event in events)


def test_nothing_is_booked_to_be_cancelled_beside_another_goal():
    tasks, calls = explored("clinic", 24)
    assert len(tasks) == 24
    assert not [task for task, call in calls if call.name == "cancel_visit"]


@pytest.mark.parametrize("name", ["tickets", "hotel"])
def test_rehearsals_of_slow_tools_leave_time_for_tasks(name):
    made, steps = questioning(name, rounds=64), 2000  # 0.2 s each, in less than seven minutes
    made.pool.spent = lambda: made.pool.counted("env_steps") / steps
    made.pool.is_over = lambda: made.pool.spent() > 1
    assert len(made.explore(seed=0, budget=BUDGET)) >= 5


def test_whom_a_ticket_is_assigned_to_before_it_is_closed_does_not_count():
    tasks, _ = explored("tickets", 20)
    closing = [task for task in tasks if "assign_ticket" in task.meta["prerequisites"]]
    ways = 0
    for task in closing:
        made = [(call.name, call.arguments) for call in calls_of(task)]
        closed = [given["ticket_id"] for name, given in made if name == "close_ticket"]
        # The goal may assign another ticket itself, to whom it says.
        n, arguments = next(
            (n, given)
            for n, (name, given) in enumerate(made)
            if name == "assign_ticket" and given["ticket_id"] in closed
        )
        for agent in PEOPLE:
            other = call_text("assign_ticket", arguments | {"agent": agent})
            actions = [*task.reference[:n], other, *task.reference[n + 1 :]]
            _, results = replay(probed(world_of("tickets")), task, actions)
            if not any(result.info["errors"] for result in results):  # the agent is on duty
                assert solves(world_of("tickets"), task, actions)
                ways += 1
    assert ways >= 3 * len(closing) >= 3


def test_a_prerequisite_whose_answer_names_whom_it_was_done_for_stays_hidden():
    # "M12 owes nothing": to pay for M34 instead is no other way of lending to M12.
    tasks = curious(Lending, Lending().tasks("train")[:16]).explore(seed=0, budget=BUDGET)
    hidden = [task for task in tasks if "pay" in task.meta["prerequisites"]]
    assert len(hidden) >= BUDGET / 6
    assert all(needs("pay", Lending(), task) for task in hidden)


def test_texts_that_a_world_takes_as_they_are_make_sense_and_are_named_as_they_are():
    _, calls = explored("planner", 100)
    given = {"date": [], "time": []}
    for task, call in calls:
        if call.name in ("create_meeting", "move_meeting"):
            for name, values in given.items():
                assert str(call.arguments[name]) in task.query
                values.append(call.arguments[name])
    fit = {"date": r"2026-03-\d\d", "time": r"\d\d:00"}
    for name, values in given.items():
        right = [v for v in values if re.fullmatch(fit[name], v) or set(v.split()) <= {*NEW_TEXTS}]
        # What takes anything is not known at once.
        assert len(values) >= 30 and len(right) >= 0.8 * len(values)


def test_what_is_written_to_a_new_file_is_read_there_and_its_path_looks_like_one():
    _, calls = explored("folder", 60)
    new = [(t, call.arguments) for t, call in calls if call.name == "write"]
    others = [given for _, given in new if given["path"] != given["text"]]
    assert len(new) >= 20 and len(others) >= 0.8 * len(new)
    for task, given in new:
        verifier = json.dumps(task.verifier)
        assert json.dumps(given["path"]) in task.query or given["path"] in task.query
        assert all(word in verifier for word in given["text"].split())
    later = [given["path"] for _, given in new][len(new) // 2 :]
    likely = [path for path in later if re.fullmatch(r"/(\w+/)?\w+\.\w+", path)]
    assert len(likely) >= 0.7 * len(later)


def test_what_a_folder_lists_is_found_by_its_path():
    made = questioning("pages")
    tasks = made.explore(seed=0, budget=12)
    assert made.explorer.walker.stats.roles["read"].practised
    read = [task for task in tasks if any(page in task.query for page in PAGES)]
    assert read and all("Read a page" in task.query for task in read)


def test_nobody_is_asked_for_the_token_of_a_login_and_none_is_needed_twice():
    tasks, calls = explored("vault", 40)
    assert len(tasks) >= 30
    given = {call.arguments["token"] for _, call in calls if "token" in call.arguments}
    logins = {json.dumps(call.arguments) for _, call in calls if call.name == "login"}
    assert 10 <= len(given) <= len(logins)
    for task in tasks:
        assert "token" not in task.query
        assert solves(world_of("vault"), task, task.reference)


def test_tasks_hold_at_any_time_of_the_day(monkeypatch):
    clock = time.time() // 86400 * 86400 + 40000.5
    strftime = time.strftime
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(time, "gmtime", lambda at=None, of=time.gmtime: of(at or clock))
    monkeypatch.setattr(time, "localtime", time.gmtime)
    monkeypatch.setattr(time, "strftime", lambda form, at=None: strftime(form, at or time.gmtime()))
    tasks, _ = explored("jotter", 12)
    assert len(tasks) >= 10
    clock += 100000
    for task in tasks:
        assert solves(world_of("jotter"), task, task.reference)
        assert not solves(world_of("jotter"), task, task.reference[-1:])


def test_the_time_of_now_is_told_from_appointments(monkeypatch):
    now = 1_800_000_007.25
    monkeypatch.setattr(time, "time", lambda: now)
    for value in (now, int(now), round(1000 * now), now - 30):
        assert is_clock(str(value))
    shown = time.strftime("%H:%M:%S", time.gmtime(now))
    for value in (shown, f"2027-01-15T{shown}Z", f"2027-01-15 {shown}.123+00:00"):
        assert is_clock(value)
    for value in ("1700000000", "08:00:00", "08:00", shown[:5], "4711", "12:34:56:07", "now"):
        assert not is_clock(value)


def test_a_number_that_may_be_any_is_no_name_of_a_thing():
    tasks, calls = explored("television", 18)
    levels = [(task, call.arguments["level"]) for task, call in calls if call.name == "set_volume"]
    assert len(levels) >= 3
    assert all(re.search(rf"\b{level}\b", task.query) for task, level in levels)
    assert any("Select the picture source: hdmi" in task.query for task in tasks)


def test_what_every_answer_says_is_not_asked_for():
    tasks, _ = explored("lamps", 40)
    asked = [task.query.partition(". Reply with ")[2] for task in tasks]
    assert asked.count("the on.") >= 3 and "the unit." not in asked[len(asked) // 2 :]


def test_where_nothing_else_names_a_thing_its_id_does_and_no_look_up_is_wanted():
    _, calls = explored("locker", 60)
    named = 0
    for task, call in calls:
        goals = task.meta["template"].split("+")
        made = {c.name for t, c in calls if t is task}
        if call.name != "put_parcel" or goals.count("put_parcel") > 1 or "unblock" in made:
            continue
        if re.search(rf"\b{call.arguments['box_id']}\b", task.query):
            assert "list_boxes" not in made or "?list_boxes" in goals
            named += 1
    assert named >= 4


def test_the_lines_of_an_order_are_told_with_their_fields_and_none_twice():
    _, calls = explored("cart", 40)
    lines = [(task, call.arguments["lines"]) for task, call in calls if call.name == "add_to_cart"]
    named = [(t, given) for t, given in lines if "add_to_cart" in t.meta["template"]]
    assert len(named) >= 5
    for task, given in named:
        assert len({json.dumps(line) for line in given}) == len(given)
        if "add_to_cart" not in task.meta["prerequisites"]:
            assert all(f"quantity {line['quantity']}" in task.query for line in given)


@pytest.mark.parametrize(
    ("answer", "fails"),
    [
        ('{"error": "no such room"}', True),
        ('{"success": false, "n": 1}', True),
        ('{"status": "failed"}', True),
        ('{"error": null, "n": 1}', False),
        ('{"status": "open"}', False),
        ("{", False),
        ("[]", False),
    ],
)
def test_a_record_of_a_failure_is_a_refusal_and_no_other_is(answer, fails):
    for info in ({}, {"calls": [{"ok": True}]}):
        result = StepResult([{"role": "tool", "content": answer}], info=info)
        assert succeeded(result) != fails


@pytest.mark.parametrize(
    ("schema", "required"),
    [
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, ["b"]),
        ({"properties": {"a": {}, "b": {"default": None}}}, ["a"]),  # as pydantic writes it
        ({"properties": {"a": {}}, "required": []}, []),
        ({}, []),
    ],
)
def test_arguments_that_a_schema_wants(schema, required):
    assert required_of(schema) == required


def test_a_change_that_needs_another_one_is_found():
    made = questioning("aquarium")
    made.explore(seed=0, budget=30)
    assert made.explorer.walker.stats.roles["draw_chart"].changes


@pytest.mark.parametrize("on, said", [(True, "on"), (False, "not on")])
def test_a_query_says_whether_something_is_to_be_so(on, said):
    operations = {"switch": Operation("switch", "Switch a lamp.", {}, [], str)}
    event = Event("switch", {"lamp": "hall", "on": on}, ok=True)
    goal = Goal([event], [0], None)
    query, _ = Phrasing(operations, set()).query(goal, random.Random(0))
    assert query == f"Switch a lamp: lamp hall, {said}."


def test_a_number_is_guessed_from_the_range_that_its_description_says():
    rng = random.Random(0)

    def guesses(**schema):
        return {int(guessed({"type": "integer", **schema}, rng)) for _ in range(300)}

    assert guesses(description="The floor, from 0 to 8.") == set(range(9))
    assert guesses(description="between -1 and 1") == {-1, 0, 1}
    assert guesses(description="from 0 to 8", minimum=7) == {7, 8}
    assert max(guesses(description="a number such as 12-34-56")) > 60


def test_answers_of_which_several_are_common_tell_states_apart():
    def says_nothing(*answers):
        stats = OperationStats()
        stats.roles["state"].repeated = [1, 1]
        for number, answer in enumerate(answers):
            event = learnt(stats, "state", {"door": f"D{number}"}, answer)
        return stats.says_nothing(event)

    assert not says_nothing(*["open", "closed"] * 4)
    assert says_nothing(*["found D9"], *["nothing"] * 4)


def test_a_line_may_be_a_name():
    def names(text):
        return [cell.value for cell in possible_names("list", text)]

    assert names("Old Harbor\nAnn-Marie Holt\nEcho") == ["Old Harbor", "Ann-Marie Holt"]
    assert not names("nothing was found")
    assert not names("window 3A\naisle 4C")
    assert names('{"Hall 1": 3, "Hall 2": 0}') == ["Hall 1", "Hall 2"]
    assert not names('{"width": 3, "height": 0}')
