"""Formats of the files of a workdir: the one validation of rollouts, their indexes and the record
of a run, for whoever reads them.

A file may be cut short, edited, or made by somebody who means harm. Values are checked as JSON: a
whole number is as good as a float, but neither a text nor a truth value is a number. Nested values
have at most about 200 levels, so that whatever walks over them ends.
"""

import reprlib
from typing import Annotated, Any, Literal, NotRequired

import pydantic
from pydantic import Field, JsonValue
from typing_extensions import TypedDict

from evolver.config.values import STRICT

POOL_FORMAT = "evolver-experience-pool-3"
LARGEST = 2**53  # of the whole numbers that every reader of JSON takes for what they are

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Whole = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
Numbers = list[Number | None]  # None: one was not finite
Label = Annotated[int, Field(ge=-1, le=1)]
Messages = list[dict[str, JsonValue]]
Record = dict[str, Any]  # a JSON object of a file, such as a line of it


@pydantic.with_config(STRICT)
class Checked(TypedDict):
    """An object whose values have exactly their types; it may have further ones."""


@pydantic.with_config(STRICT | {"extra": "forbid"})
class Closed(TypedDict):
    """An object whose values have exactly their types, without further ones."""


class ShownExperience(Checked):
    """An experience that was put into a prompt."""

    id: str
    content: str


class TurnRecord(Checked):
    """A generation of the policy and what answered it. Without a default: what an index needs."""

    action: str
    label: Label
    reason: str
    advantage: Number | None  # None: it was not finite
    outcome_advantage: NotRequired[Number | None]
    advantages: NotRequired[Numbers]
    given: NotRequired[bool]
    reward: NotRequired[Number]
    observation: Messages
    prompt: list[Count]
    tokens: list[Count]
    info: NotRequired[dict[str, JsonValue]]
    stop: NotRequired[str]
    version: NotRequired[Whole]
    continues: NotRequired[bool]
    logprobs: NotRequired[Numbers]
    gap: NotRequired[Numbers]
    ratio: NotRequired[Numbers]


class RolloutRecord(Checked):
    """A line of a file of rollouts, see `evolver.files.rollout_files.record_of`."""

    task: str
    rollout: Count
    draw: Whole
    origin: str
    world: NotRequired[str]
    difficulty: Whole
    query: str
    expected: NotRequired[str]
    given: NotRequired[str]
    stop: str
    score: Number | None
    success: bool
    reward: NotRequired[float]
    components: dict[str, Number | None]
    fate: str
    experience: list[ShownExperience]
    error: str
    seed: int
    messages: Messages
    turns: list[TurnRecord]


class Columns(Closed):
    """One value per rollout of what lists, filters and tables show."""

    task: list[str]
    draw: list[Whole]
    rollout: list[Count]
    origin: list[str]
    world: NotRequired[list[str]]
    difficulty: list[Whole]
    stop: list[str]
    score: Numbers
    success: list[bool]
    fate: list[str]
    experience: list[list[str]]
    error: list[str]
    turns: list[Count]
    tokens: list[Count]
    good: list[Count]
    bad: list[Count]
    judged: Numbers
    verified: Numbers
    advantage: Numbers
    abstained: list[list[str]]


class Index(Closed):
    """The index beside a file of rollouts. members: (offset, bytes, rollouts) of each gzip member;
    bytes: of the file."""

    format: str
    count: Count
    columns: Columns
    queries: dict[str, str]
    members: list[tuple[Count, Count, Count]]
    bytes: Count


@pydantic.with_config(STRICT | {"extra": "allow"})
class RunRecord(TypedDict):
    """`config.json`, see `evolver.files.workdir.Workdir.claim`."""

    config: dict[str, JsonValue]
    seed: NotRequired[int | None]
    git: NotRequired[str | None]


class PoolHeader(Checked):
    """The first line of `experience/experiences.jsonl`. splits: of the tasks that the experience
    comes from."""

    format: Literal["evolver-experience-pool-3"]
    size: Count
    splits: list[str]


class ExperienceRecord(Closed):
    """Another line of it, see `evolver.navigating.Experience`."""

    id: str
    when: str
    content: str
    key: str
    sources: list[str]
    step: Whole
    uses: Count
    wins: Count
    expected: Number


Price = Annotated[float, Field(ge=0)]
JSON_OBJECT = pydantic.TypeAdapter(dict[str, JsonValue])
PRICES = pydantic.TypeAdapter(dict[str, tuple[Price, Price]], config=STRICT)
ROLLOUT = pydantic.TypeAdapter(RolloutRecord)
INDEX = pydantic.TypeAdapter(Index)
RUN = pydantic.TypeAdapter(RunRecord)
POOL = pydantic.TypeAdapter(PoolHeader)
EXPERIENCE = pydantic.TypeAdapter(ExperienceRecord)


def found(config: Any, key: str) -> Any:
    """Return the value at "a.b.c" of nested dicts, None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def valid(kind: pydantic.TypeAdapter[Any], value: Any) -> Any:
    """Return a JSON value, or JSON as bytes, in a format. Raises ValueError, which says where it
    differs from the format and what is there."""
    try:
        if isinstance(value, bytes):
            return kind.validate_json(value)
        return kind.validate_python(value)
    except pydantic.ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    first = faults[0]
    more = len(faults) - 1
    text = f"{'.'.join(map(str, first['loc'][:5]))}: {first['msg']}"
    if first["type"] != "missing":
        text += f" (given: {reprlib.repr(first['input'])})"
    raise ValueError(f"{text}, and {more} more faults" if more else text)
