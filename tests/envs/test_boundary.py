"""The boundary: whatever a world or a model hands over is made safe there, or blamed on the party
that wrote it."""

import copy
import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import boundary, values
from envs.toolcalls import CLOSE, OPEN, parse
from envs.values import MAX_DEPTH, Unsafe, json_value
from envs.world import Evaluation, Observation, StepResult, Task
from tests.envs.faulty import Twins

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.none() | st.tuples(st.text())
anything = st.recursive(
    scalars | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(lambda value: {"object": object(), "set": set(), "value": value}, inner)
    ),
    max_leaves=8,
)


def nested(depth):
    value = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def is_safe(value):
    """Check everything that is later done with a value: it is copied, written as UTF-8 and computed
    with."""
    written = json.dumps(copy.deepcopy(value), allow_nan=False, ensure_ascii=False).encode()
    assert json.loads(written) == value


@given(anything)
def test_a_value_is_made_safe_or_refused(value):
    try:
        safe = json_value(value)
    except Unsafe as error:
        assert len(str(error)) < 300
    else:
        is_safe(safe)
        assert json_value(safe) == safe


@pytest.mark.parametrize("goals", [(3, 4), (3, 3)], ids=["different", "equal"])
def test_tasks_that_share_an_id_are_refused(goals):
    with pytest.raises(Unsafe, match=r"3 ids of the split 'train' .* 'count-train-0'"):
        boundary.tasks(Twins(goals), "train")
    assert len(boundary.tasks(Twins(goals), "dev")) == 3


def test_ids_that_repair_makes_equal_are_refused():
    class World:
        def tasks(self, split):
            return [Task(id, "w", "Count.") for id in ("a\ud800", "a\ud801")]

    with pytest.raises(Unsafe, match="more than one task"):
        boundary.tasks(World(), "train")


def test_texts_are_repaired_and_nothing_else():
    assert values.text("a\ud800b") == "a\ufffdb" and values.text("\ud83d\ude00") == "\U0001f600"
    assert json_value({"\udc00": ("\ud800", 1)}) == {"\ufffd": ["\ufffd", 1]}
    assert json_value({2: None, True: 2.5, None: 0}) == {"2": None, "true": 2.5, "null": 0}
    same = {"a": [1, -2.5, None, True, "Zürich \U0001f600"]}
    assert json_value(same) == same and json_value(same) is not same


@pytest.mark.parametrize(
    "value, problem",
    [
        ({"a": [object()]}, "it.a[0] is of type object"),
        ({"a": {1}}, "it.a is of type set"),
        ({(1, 2): 3}, "a key of it is of type tuple"),
        ({"a": {1: 0, "1": 0}}, "it.a has different keys that are one key in JSON"),
        (dict.fromkeys(("\ud800", "\udc00")), "it has different keys that are one key"),
        (nested(MAX_DEPTH + 1), f"deeper than {MAX_DEPTH} levels"),
        (nested(50_000), f"deeper than {MAX_DEPTH} levels"),
        ([10**400], "it[0] is a number of more than 300 digits"),
        ([10**10_000], "more than 300 digits"),
        ([math.nan], "it[0] is nan"),
        ([-math.inf], "it[0] is -inf"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_what_cannot_be_made_safe_is_named(value, problem):
    with pytest.raises(Unsafe) as caught:
        json_value(value)
    assert problem in str(caught.value) and len(str(caught.value)) < 300


def test_the_limits_are_the_last_values_that_pass():
    is_safe(json_value(nested(MAX_DEPTH)))
    assert float(json_value(2**1023 - 1)) < math.inf


MESSAGE = {"role": "tool", "content": "ok"}
BAD_RESULTS = [
    (StepResult("text"), "messages are of type str"),
    (StepResult([7]), "messages[0] is of type int"),
    (StepResult([{"role": "tool", "content": None}]), "messages[0].content is of type NoneType"),
    (StepResult([{**MESSAGE, "name": object()}]), "messages[0].name is of type object"),
    (StepResult([MESSAGE], reward="1.0"), "the reward is of type str"),
    (StepResult([MESSAGE], reward=math.nan), "the reward is nan"),
    (StepResult([MESSAGE], reward=10**400), "the reward is a number of more"),
    (StepResult([MESSAGE], info=[1]), "info is of type list"),
    (StepResult([MESSAGE], info={"calls": {1}}), "info.calls is of type set"),
    (StepResult([MESSAGE], info={"calls": nested(900)}), "deeper than"),
    (StepResult([MESSAGE], tools=[{"function": object()}]), "tools[0].function is of type object"),
    ({"messages": []}, "a dict instead of a StepResult"),
    (StepResult([MESSAGE], tools=2 * [{"function": {"name": "a"}}]), "one tool has the name 'a'"),
]


@pytest.mark.parametrize("bad, problem", BAD_RESULTS, ids=[problem for _, problem in BAD_RESULTS])
def test_a_bad_answer_of_a_world_is_named(bad, problem):
    with pytest.raises(Unsafe, match=re.escape(problem)):
        boundary.result(bad)


@pytest.mark.parametrize(
    "bad, problem",
    [
        (Evaluation("1", True), "the score is of type str"),
        (Evaluation(math.nan, False), "the score is nan"),
        (Evaluation(10**400, True), "more than 300 digits"),
        (Evaluation(-0.1, False), "the score -0.1 is not in [0, 1]"),
        (Evaluation(2.0, True), "the score 2 is not in [0, 1]"),
        (Evaluation(11.0, True, {}, -10.0, 10.0), "the score 11 is not in [-10, 10]"),
        (Evaluation(0.0, True, {}, 1.0, 1.0), "the range of the score, [1, 1], is empty"),
        (Evaluation(1.0, "yes"), "success is of type str"),
        (Evaluation(1.0, True, {"progress": ...}), "components.progress is of type ellipsis"),
        (Evaluation(1.0, True, [1.0]), "components are of type list"),
        (1.0, "a float instead of an Evaluation"),
    ],
)
def test_a_bad_evaluation_is_refused(bad, problem):
    with pytest.raises(Unsafe, match=re.escape(problem)):
        boundary.evaluation(bad)


def test_good_answers_pass_unchanged():
    task = Task("a", "b", "c", reference=["d"], verifier={"e": [1]}, meta={"f": {}})
    for check, value in (
        (boundary.task, task),
        (boundary.observation, Observation([MESSAGE], [{"type": "function"}])),
        (boundary.result, StepResult([MESSAGE], 0.5, True, False, [{}], {"errors": 1})),
        (boundary.evaluation, Evaluation(0.5, False, {"progress": 0.5})),
    ):
        assert check(value) == value
        is_safe(dataclasses.asdict(check(value)))


def test_tasks_are_repaired_however_they_enter():
    odd = Task("a", "b", "say \ud800", reference=["\udc00"], meta={"m": ("\ud800",)})
    safe = Task("a", "b", "say \ufffd", reference=["\ufffd"], meta={"m": ["\ufffd"]})
    assert boundary.task(odd) == Task.from_dict(odd.to_dict()) == safe
    unsafe = ({"verifier": {"x": object()}}, {"meta": nested(900)})
    for bad in (*(Task("a", "b", "c", **changes) for changes in unsafe), "task"):
        with pytest.raises(Unsafe):
            boundary.task(bad)


# ------------------------------------------------------------------------------------------ the model's calls


def arguments(text):
    return f'{OPEN}\n{{"name": "a", "arguments": {{"x": {text}}}}}\n{CLOSE}'


@pytest.mark.parametrize("depth", [150, 500, 900, 990, 5000])
def test_a_call_that_is_nested_too_deep_is_an_error_of_the_model(depth):
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        turn = parse(arguments(text))
        assert not turn.calls and "nested too deep" in turn.errors[0]


@pytest.mark.parametrize(
    "number", ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e999", "NaN", "-Infinity"]
)
def test_a_number_out_of_range_is_an_error_of_the_model(number):
    turn = parse(arguments(number))
    assert not turn.calls and "number out of range" in turn.errors[0]


@given(anything)
def test_every_call_that_parses_is_safe(value):
    try:
        text = arguments(json.dumps(value))
    except (TypeError, ValueError):
        return
    is_safe([call.to_dict() for call in parse(text).calls])


def test_a_world_may_declare_the_range_of_its_scores():
    game = Evaluation(-3.5, False, {}, low=-10.0, high=10.0)
    assert boundary.evaluation(game) == game == Evaluation.from_dict(game.to_dict())
