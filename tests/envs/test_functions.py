"""A module of plain functions as a world."""

import json
import os
import re
import sys
import uuid
from pathlib import Path

import pytest

from envs import check, make
from envs.functions import Functions
from envs.toolcalls import call_text
from envs.world import Task
from tests.envs.playing import assert_conforms, begin

DOCUMENT = Path(__file__).parents[2] / "docs/environments.md"
MODULE = '''
import enum, dataclasses, random, threading
from random import randint
from typing import Any, Literal, Optional

class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"

@dataclasses.dataclass
class Box:
    size: Size
    items: list

lock = threading.Lock()
boxes = {}
same = boxes
draws: list[int] = []
_count = 0

def reset(seed: int) -> None:
    boxes["start"] = Box(Size.SMALL, [seed % 7])

def pack(name: str, size: Size = Size.LARGE, items: list[int | str] | None = None) -> Box:
    """Pack a box
    with items.

    Args:
        name: what is written on it
        items (list): what is in it

    Returns:
        the box: packed
    """
    global _count
    _count += 1
    same[name] = Box(size, items or [])
    return boxes[name]

def count(unit: Literal["boxes", 12] = "boxes", scale: float = 1.0) -> float:
    return _count * scale

def draw() -> int:
    with lock:
        draws.append(random.randint(0, 10**9))
    return draws[-1]

def anything(value: Any, *, deep: Optional[dict[str, bool]] = None) -> Any:
    """:param value: of any kind"""
    return value

def breaks(how: str) -> str:
    if how == "exit":
        raise SystemExit
    if how == "say":
        return "Error: no"
    raise KeyError(how)

def table(kind: Literal["numbers", "keys", "frame"]) -> Any:
    import numpy
    class Frame:
        to_string = lambda self: "all rows"
        tolist = None
    return {"numbers": {"row": numpy.arange(2000)}, "keys": {1: "a", "1": "b"}, "frame": Frame()}[kind]

def _private():
    pass
'''


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a module which can be imported, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(code, name=""):
        name = name or f"module_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(code)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def module(written):
    return written(MODULE)


@pytest.fixture
def pantry(written):
    found = re.search(r"```python\n(# pantry.py\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found.group(1).count("\n") < 30
    return written(found.group(1), "pantry")


def say(world, tool, **arguments):
    result = world.step(call_text(tool, arguments))
    assert result.info["errors"] == (not result.info["calls"][0]["ok"])
    return result.messages[0]["content"]


def started(name, start=0, seed=0):
    world = Functions(name)
    begin(world, start, seed=seed)
    return world


def parameters_of(name):
    """Return {tool: {parameter: schema}}, and all that is said of the tools."""
    tools = [tool["function"] for tool in begin(Functions(name)).tools]
    assert json.loads(json.dumps(tools)) == tools
    return {tool["name"]: tool["parameters"]["properties"] for tool in tools}, tools


def test_the_documented_module_is_a_correct_world(pantry):
    assert_conforms(lambda: make("functions", module=pantry))
    world = started(pantry)
    assert say(world, "take", good="rice") == "error: the pantry is locked"
    assert say(world, "unlock", code=4711) == "open"
    assert say(world, "take", good="rice", amount=2) == "3"
    assert json.loads(say(world, "look")) == {"flour": 2, "rice": 3, "salt": 0}
    assert "does not fit" in say(world, "take", good="sugar")
    assert len(world.tasks("train")) == 1 and world.tasks("dev") == []
    verifier = {"calls": [{"name": "unlock", "arguments": {"code": 4711}}]}
    world.reset(Task("t", "functions", "Open it.", verifier=verifier))
    say(world, "unlock", code=4711)
    assert world.step("It is open.").reward == 1.0 and world.evaluate().success


def test_a_module_is_a_correct_world_in_a_worker_too():
    kwargs = json.dumps({"module": "tests.evolver.strangers.television"})
    assert check.main(["functions", "--kwargs", kwargs, "--modes", "worker"]) == 0


def test_a_module_with_a_reset_is_a_correct_world_with_many_starts(module):
    assert_conforms(lambda: Functions(module))
    assert len({say(started(module, i), "pack", name=str(i)) for i in range(3)}) == 1
    assert len(Functions(module, n_train=5).tasks("train")) == 5


def test_schemas_come_from_signatures_and_docstrings(module):
    found, (pack, *_) = parameters_of(module)
    assert list(found) == ["pack", "count", "draw", "anything", "breaks", "table"]
    assert pack["description"] == "Pack a box with items."
    assert pack["parameters"]["required"] == ["name"]
    items = {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}
    described = {"default": None, "description": "what is in it"}
    assert found["pack"] == {
        "name": {"type": "string", "description": "what is written on it"},
        "size": {"enum": ["s", "l"], "default": "l"},
        "items": {"anyOf": [items, {"type": "null"}]} | described,
    }
    assert found["count"]["unit"]["enum"] == ["boxes", 12]
    assert found["anything"]["value"] == {"description": "of any kind"}


@pytest.mark.parametrize(
    "tool, arguments, said",
    [
        ("pack", {"name": "a", "size": "s", "items": [1, "x"]}, '{"size": "s", "items": [1, "x"]}'),
        ("pack", {}, "name is missing"),
        ("pack", {"name": "a", "colour": "red"}, "it has no 'colour'"),
        ("pack", {"name": 3}, "name is 3, which does not fit"),
        ("pack", {"name": "a", "size": "SMALL"}, "does not fit"),
        ("pack", {"name": "a", "items": [1, None]}, "does not fit"),
        ("pack", {"name": "a", "items": [True]}, "does not fit"),
        ("count", {"scale": 2}, "0"),
        ("count", {"scale": True}, "does not fit"),
        ("count", {"unit": 12}, "0"),
        ("count", {"unit": "12"}, "does not fit"),
        ("anything", {"value": {"a": [1.5, None]}}, '{"a": [1.5, null]}'),
        ("anything", {"value": None}, "done"),
        ("table", {"kind": "keys"}, '[[1, "a"], ["1", "b"]]'),
        ("anything", {"value": 1, "deep": {"x": 1}}, "does not fit"),
        ("breaks", {"how": "exit"}, "error: SystemExit"),
        ("breaks", {"how": "key"}, "error: 'key'"),
        ("breaks", {"how": "say"}, "Error: no"),
        ("_private", {}, "there is no tool"),
        ("reset", {"seed": 1}, "there is no tool"),
    ],
)
def test_calls_are_checked_and_exceptions_are_read(module, tool, arguments, said):
    assert said in say(started(module), tool, **arguments)


def test_arrays_and_tables_are_shown_whole(module):
    shown = say(started(module), "table", kind="numbers")
    assert json.loads(shown) == {"row": list(range(2000))}
    assert say(started(module), "table", kind="frame") == '"all rows"'


def test_worlds_share_a_module_and_no_state(module):
    one, other = started(module), started(module, 1)
    say(one, "pack", name="mine")
    assert say(other, "count") == "0.0" and say(one, "count") == "1.0"
    drawn = [say(one, "draw"), say(other, "draw"), say(one, "draw")]
    again = started(module)
    assert [say(again, "draw"), say(again, "draw")] == [drawn[0], drawn[2]]
    assert len(set(drawn)) == 3 and say(started(module, 0, seed=1), "draw") != drawn[0]
    assert sys.modules[module].boxes == {} and sys.modules[module]._count == 0
    say(again, "pack", name="mine")
    begin(again)
    assert say(again, "count") == "0.0"


def test_a_snapshot_goes_on_elsewhere(module):
    world = started(module)
    say(world, "pack", name="a")
    say(world, "draw")
    snapshot = json.loads(json.dumps(world.snapshot()))
    other = Functions(module)
    other.restore(snapshot)
    assert say(other, "draw") == say(world, "draw") and say(other, "count") == "1.0"


RECORDS = """
import asyncio, dataclasses, datetime
from typing import Annotated, NotRequired, TypedDict
from pydantic import BaseModel, Field

class Line(TypedDict):
    sku: str
    gift: NotRequired[bool]

@dataclasses.dataclass
class Address:
    city: str
    zip: int = 0

class Person(BaseModel):
    name: str = Field(description="first and last name")
    age: int = Field(default=1, ge=0)

orders = []

async def order(
    lines: Annotated[list[Line], "what is bought"],
    to: Address,
    when: datetime.date | None = None,
    size: tuple[int, int] = (1, 1),
) -> list:
    \"\"\"Order.\"\"\"
    await asyncio.sleep(0)
    orders.append([lines, to.city, when and when.year, size[0] + size[1]])
    return orders

def sign(person: Person, tags: set[str] = frozenset(), more: tuple[int, ...] = ()) -> Person:
    return Person(name=person.name + "".join(sorted(tags)), age=person.age + sum(more))
"""


def test_records_are_arguments(written):
    order, sign = parameters_of(written(RECORDS))[0].values()
    line = {"sku": {"type": "string"}, "gift": {"type": "boolean"}}
    assert order["lines"]["items"] == {"type": "object", "properties": line, "required": ["sku"]}
    assert order["lines"]["description"] == "what is bought"
    assert order["to"]["required"] == ["city"]
    assert order["when"]["anyOf"][0] == {"type": "string", "format": "date"}
    name = {"type": "string", "description": "first and last name"}
    assert sign["person"]["properties"]["name"] == name
    assert sign["person"]["required"] == ["name"]


@pytest.mark.parametrize(
    "tool, arguments, said",
    [
        ("order", {"lines": [{"sku": "a"}], "to": {"city": "Rome"}, "when": "2026-03-01"}, "2026, 2]"),
        ("order", {"lines": [{"sku": "a", "gift": True}], "to": {"city": "R", "zip": 1}}, "true"),
        ("order", {"lines": [{}], "to": {"city": "Rome"}}, "does not fit"),
        ("order", {"lines": [{"sku": "a", "x": 1}], "to": {"city": "Rome"}}, "does not fit"),
        ("order", {"lines": [], "to": {"town": "Rome"}}, "to is"),
        ("order", {"lines": [], "to": {"city": "Rome"}, "when": "soon"}, "does not fit"),
        ("order", {"lines": [], "to": {"city": "Rome"}, "size": [1]}, "does not fit"),
        ("sign", {"person": {"name": "A"}, "tags": ["x"], "more": [2, 3]}, '{"name": "Ax", "age": 6}'),
        ("sign", {"person": {"name": "A", "age": -1}}, "greater than or equal to 0"),
        ("sign", {"person": {"name": 1}}, "does not fit"),
    ],
)  # fmt: skip
def test_records_are_checked(written, tool, arguments, said):
    assert said in say(started(written(RECORDS)), tool, **arguments)


RECURSIVE = """
from dataclasses import dataclass
@dataclass
class A:
    a: "A"
def f(x: A): pass
"""


@pytest.mark.parametrize(
    "code, said",
    [
        ("x = 1", "no public functions"),
        ("def f(x: bytes): pass", "the parameter x of f has the type"),
        ("def f(x: list[complex]): pass", "the parameter x of f has the type"),
        (RECURSIVE, "contains"),
        ('def f(x: "Missing"): pass', "in an annotation of f, name 'Missing'"),
        ("def f(*x): pass", "cannot be given by its name"),
        ("def f(x, /): pass", "cannot be given by its name"),
        ("def f(): yield", "f is a generator"),
        ("async def f(): yield", "f is a generator"),
    ],
)
def test_a_module_that_is_unclear_is_refused(written, code, said):
    with pytest.raises(ValueError, match=said):
        Functions(written(code))


HANDED_OUT = """
from __future__ import annotations
import secrets, uuid
from decimal import Decimal
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from elsewhere import Receipt

prices: dict[uuid.UUID, Decimal] = {}

def _checked(function):
    def inner(price: Decimal) -> Receipt:
        return function(price)
    return inner

@_checked
def sell(price: Decimal) -> Receipt:
    made = uuid.uuid4()
    prices[made] = price
    return made

async def ticket() -> str:
    return secrets.token_hex(4)

def refund(id: uuid.UUID) -> Decimal:
    return prices.pop(id)
"""


def test_ids_that_are_handed_out_at_random_are_the_same_in_each_episode(written):
    name = written(HANDED_OUT)
    episodes = []
    for world in (started(name), started(name)):
        sold, ticket = json.loads(say(world, "sell", price=2.5)), say(world, "ticket")
        assert say(world, "refund", id=sold) == '"2.5"'  # a Decimal
        assert "does not fit" in say(world, "refund", id="x")
        episodes.append((sold, ticket, say(world, "sell", price=3)))
    assert episodes[0] == episodes[1] and len(set(episodes[0])) == 3
    assert os.urandom(8) != os.urandom(8) and uuid.uuid4() != uuid.uuid4()


def test_a_tool_has_the_name_that_its_module_gives_it(written):
    tools = begin(Functions(written(HANDED_OUT))).tools
    assert [tool["function"]["name"] for tool in tools] == ["sell", "ticket", "refund"]
