"""Synthetic tasks that any world can check: by what it shows after the episode, and by the closing
text.

The verifier of such a task consists of JSON values:

    {"start": the verifier that the world itself needs for `reset`,
     "probes": [{"tool", "action", "before": features, "after": features}   what has to change
                {"tool", "action", "digest": text}                          what has to stay
                {"tool", "action"}],                                        what the next ones need
     "ids": [kinds of values that are ids], "known": [ids that exist at the start],
     "mask": [kinds of values that vary by themselves], "code": True if actions are code,
     "answer": {"value": text, "others": [values that it could be mistaken for]} or None}

If rows have no ids, "naming" lists the kinds of values that name them, such as that of a zone.

A probe of what has to change may have `"free": features`: those that do not count, because what has
to be done before changes them. `"places": [key and label of a feature]` do not count with any
value: there that call may have left another one.

Probes are calls that change nothing that another probe shows. They run in order after the actions
of the episode, so that the first ones may look up what the later ones need. `Probed` runs them in a
repetition of the episode, so that checking changes nothing. In a world without snapshots, where
each repetition is a new start, they run in the episode itself, before the text that closes it.

Answers are compared as multisets of features (key, label, value): `key` holds the ids in the
value's row, `label` its place in a JSON answer. Ids that the episode created are named by the order
in which the probes show them, because a world may number the same things differently after another
sequence of calls.
"""

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from envs import handles
from envs.renamed import KEY, meant, shown
from envs.toolcalls import parse
from envs.values import Json, mapped, parsed
from envs.world import (
    Evaluation,
    Observation,
    Proxy,
    StepResult,
    Task,
    World,
    snapshot_of,
    text_of,
)

# A word may be a path from the root.
_TOKEN = re.compile(r"(?:(?<![^\s\"'(\[])/)?(?:\w[\w.:@'/-]*\w|\w)")
_WORD = re.compile(r"\w+")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)")
# A name of a thing does not begin or end with one of these.
_FUNCTION_WORDS = set(
    re.findall(
        r"\w+",
        "a an the this that these those some any no not and or but if so as at by for from in into"
        " of off on onto out over to under up with you your yourself it its he she they them we i"
        " me my is are was were be been being has have had do does did can could will would may"
        " might must there here what which who when where how why very",
    )
)
_PART = re.compile(r"\w[\w'-]*|[^\w\s]")  # a word or a mark
_MARK = re.compile(r"\s*([*>✓✔✗✘☑☒→])\s+\w")  # before a line, of the current or a done thing
MARKED = "@mark"  # ends the kind of such a mark
_BULLET = re.compile(r"\s*(?:[-–•*]|\d+[.)])\s+")  # before a line of a list
_MARKS = re.compile(r"[:;,()\t]| - ")  # between the parts of a line
_NAME = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)+")  # a line that may be a name
_MOST_WORDS = 4  # of a name
_FEWEST_NUMBERS, _FEWEST_LISTS = 3, 2  # in an object whose fields may be names of things
_FEWEST_ALIKE = 2  # of them that have the same value, in the mean
_LAST_STEP = re.compile(r"\[\d+\]$|\.[^.]*$|.[^.\[]*$", re.DOTALL)  # of the path of a row
_ID_NAME = re.compile(r"[A-Za-z]*[-_#]?\d+")  # of an object's field, if it is no word
_FENCED = re.compile(
    r"\s*(?:\w+:)?\s*```\w*\n(.*?)\n?```\s*", re.DOTALL
)  # one block, as of an interpreter's output
_LONGEST = 400  # characters of a value; longer texts are compared by digest


# --- answers as values ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One value of an answer. row: its line or list element. label: its path in a JSON answer, ""
    in a text.

    kinds: names of what it may be, by which the same kind of value is recognised in another answer:
    the path; in a text the shape of an id ("O12" is an "O99") or the positions in the line, from
    both ends.
    """

    row: str
    label: str
    value: str
    kinds: tuple[str, ...]


def tokens(text: str) -> list[str]:
    """Return the words, numbers and ids in a text."""
    return _TOKEN.findall(text)


@functools.lru_cache(4096)
def cells(tool: str, text: str) -> tuple[Cell, ...]:
    """Return the values of a tool's answer in order. Text that is not JSON is split into lines and
    words.

    Of an answer that is one fenced block ("Output:" and three backticks) the inside counts."""
    if fenced := _FENCED.fullmatch(text):
        text = fenced[1]
    stripped = text.strip()
    if stripped[:1] in ("{", "["):
        try:
            return tuple(_json_cells(tool, json.loads(stripped)))
        except (ValueError, RecursionError):
            pass
    lines = text.splitlines()
    # "* main": of some lines, a mark is a value that they have. On all of them, it is decoration.
    marks = [_MARK.match(line) for line in lines]
    marked = not all(mark or not line.strip() for mark, line in zip(marks, lines))
    found: list[Cell] = []
    for n, (line, mark) in enumerate(zip(lines, marks)):
        if mark and marked:
            found.append(Cell(str(n), "", mark[1], (f"{tool}{MARKED}",)))
        found += _text_cells(tool, str(n), line)
    return tuple(found)


def _json_cells(
    tool: str, value: Any, path: str = "$", label: str = "$", row: str = ""
) -> Iterable[Cell]:
    if isinstance(value, dict) and _is_table(value):
        for name, inner in value.items():
            here = f"{path}.{name}"
            column = f"{label}[*].{_noun(label, name)}"
            yield Cell(here, column, _bounded(name), (f"{tool} {column}",))
            yield from _json_cells(tool, inner, here, f"{label}[*]", here)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _json_cells(tool, inner, f"{path}.{name}", f"{label}.{name}", row)
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from _json_cells(tool, inner, f"{path}[{n}]", f"{label}[*]", f"{path}[{n}]")
    elif value is not None:
        text = value if isinstance(value, str) else json.dumps(value)
        yield Cell(row, label, _bounded(text), (f"{tool} {label}",))


def _is_table(value: Json) -> bool:
    """Return True for an object whose names are those of rows and not of fields: several objects
    with the same fields, or names that look like ids of one form, such as A1 and B2."""
    inner = list(value.values())
    forms = {re.sub(r"[A-Z]", "A", re.sub(r"\d", "9", name)) for name in value}
    if len(forms) == 1 and _ID_NAME.fullmatch(forms.pop()):
        return True
    fields = {tuple(sorted(row)) for row in inner if isinstance(row, dict) and row}
    return len(inner) > 1 and len(fields) == 1 and all(isinstance(row, dict) for row in inner)


def _is_map(value: Json) -> bool:
    """Return True for an object of objects that have other fields each, all with one type of
    values: names may be those of things, as in {"plan": {"ann": "owner"}, "memo": {}}."""
    inner = list(value.values())
    if len(inner) < _FEWEST_LISTS or not all(isinstance(row, dict) for row in inner):
        return False
    held = itertools.chain(*(row.values() for row in inner))
    return not _is_table(value) and len(set(map(type, held))) == 1


def _sorts(value: Json) -> bool:
    """Return True for an object that gives things one text or truth value each, as in {"Ann":
    "paid", "Bo": "due"}: the names are capitalised, or many have the same value."""
    inner = [held for held in value.values() if held is not None]
    if not inner or {type(held) for held in inner} not in ({str}, {bool}):
        return False
    capitals = all(name[:1].isupper() for name in value)
    return capitals or len(inner) >= _FEWEST_ALIKE * len(set(inner))


def _noun(label: str, name: str) -> str:
    """Return the field that the name of a row stands for: "zone" in "zones", with "_id" for an
    id."""
    noun = label.rpartition(".")[2].removesuffix("[*]").strip("$")
    for plural, single in (("ies", "y"), ("ses", "s"), ("xes", "x"), ("hes", "h"), ("s", "")):
        if noun.endswith(plural):
            noun = noun.removesuffix(plural) + single
            break
    if any(c.isdigit() for c in name):
        return f"{noun}_id" if noun else "id"
    return noun or "name"


def _text_cells(tool: str, row: str, line: str) -> Iterable[Cell]:
    columns = [column.strip() for column in line.split("|")]
    in_table = len(columns) > 2  # | id | title |
    found = [c for c in columns if c.strip("-: ")] if in_table else tokens(line)
    for n, token in enumerate(found):
        if any(c.isdigit() for c in token) and not token.isdigit():
            kinds: tuple[str, ...] = (re.sub(r"\d", "9", token),)
        else:
            kinds = (f"{tool}@{n}", f"{tool}@{n - len(found)}")
        yield Cell(row, "", _bounded(token), kinds)


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST else digest(text)


@functools.lru_cache(4096)
def possible_names(tool: str, text: str) -> tuple[Cell, ...]:
    """Return what may be names of several words in an answer: between the marks of a line, as in
    "Mr Bean: room 12", one of several lines, if it has no numbers, and the fields of an object that
    counts, lists or sorts things, as in {"figs": 3, "pears": 0, "plums": 8}, {"Hall 1": 3, "Hall
    2": 0} or {"Ann": "paid"}."""
    record = parsed(text) if text.lstrip().startswith("{") else None
    if isinstance(record, dict):
        return tuple(Cell("", "", name, (f"{tool} $.<name>",)) for name in _names_in(record))
    found, lines = [], text.splitlines()
    for row, line in enumerate(lines):
        bullet = _BULLET.match(line)
        parts = _MARKS.split(line[bullet.end() :] if bullet else line)
        named = len(parts) > 1 or (len(lines) > 1 and _NAME.fullmatch(line.strip()))
        for n, part in enumerate(parts):
            if named and 2 <= len(part.split()) <= _MOST_WORDS:
                kinds = (f"{tool}#{n}", f"{tool}#{n - len(parts)}")
                found.append(Cell(str(row), "", " ".join(part.split()), kinds))
    return tuple(found)


@functools.lru_cache(4096)
def phrases(text: str) -> tuple[Cell, ...]:
    """Return the phrases of one to three words in a text of sentences, such as "red box". Their
    kinds are the words or marks around them ("a _ .", "a _"): this is how the names of things are
    told from other words."""
    found = []
    for n, line in enumerate(text.splitlines()):
        parts = _PART.findall(line)
        for start in range(len(parts)):
            for end in range(start + 1, min(start + 3, len(parts)) + 1):
                if not all(part[0].isalnum() for part in parts[start:end]):
                    break
                before = parts[start - 1].lower() if start else "^"
                after = parts[end].lower() if end < len(parts) else "$"
                if not _FUNCTION_WORDS.isdisjoint((parts[start].lower(), parts[end - 1].lower())):
                    continue
                kinds = (f"{before} _ {after}", f"{before} _")
                found.append(Cell(str(n), "", " ".join(parts[start:end]), kinds))
    return tuple(found)


def _names_in(record: Json) -> Iterable[str]:
    """Return the fields of an object that may be names of things."""
    if _is_map(record):
        return dict.fromkeys([*record, *itertools.chain(*record.values())])
    types = {type(value) for value in record.values()}
    # A name of several words is none of a field.
    words = any(" " in name for name in record)
    few = len(record) < (_FEWEST_LISTS if words or types == {list} else _FEWEST_NUMBERS)
    counts = not few and (types <= {int, float} or types == {list})
    return record if counts or _sorts(record) else ()


Feature = list[str]  # key, label, value


def features(
    cells: Sequence[Cell],
    ids: Collection[str],
    names: dict[str, str],
    mask: Collection[str],
    naming: Collection[str] = (),
) -> list[Feature]:
    """Return the sorted features of an answer, without values of the masked kinds.

    ids: kinds that are ids. names: {id created by the episode: its name}. naming: kinds that name
    the rows without ids. What stands in a list of a row, such as the tags of a note, has its key.
    """
    ids, mask, naming = set(ids), set(mask), set(naming)
    keys: dict[str, list[str]] = {}
    called: dict[str, list[str]] = {}
    for cell in cells:
        if not ids.isdisjoint(cell.kinds):
            keys.setdefault(cell.row, []).append(names.get(cell.value, cell.value))
        elif not naming.isdisjoint(cell.kinds):
            called.setdefault(cell.row, [cell.value])
    keys = called | keys

    of_row: dict[str, str] = {}
    for row in {cell.row for cell in cells}:
        nearest = row
        while nearest and nearest not in keys:
            nearest = _LAST_STEP.sub("", nearest)
        of_row[row] = " ".join(keys.get(nearest, ()))
    return sorted(
        [of_row[cell.row], cell.label, names.get(cell.value, cell.value)]
        for cell in cells
        if mask.isdisjoint(cell.kinds)
    )


def digest(value: Any) -> str:
    """Return a short digest of a JSON value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def new_ids(
    readings: Iterable[Sequence[Cell]], ids: Collection[str], known: Collection[str]
) -> dict[str, str]:
    """Return {id: name} of the ids that are not `known`, named by the order in which they are
    shown."""
    names: dict[str, str] = {}
    for reading in readings:
        for cell in reading:
            if cell.value not in known and not set(ids).isdisjoint(cell.kinds):
                names.setdefault(cell.value, f"<new {len(names) + 1}>")
    return names


def answered(text: str, answer: Json) -> bool:
    """Return True if `text` names the value of the answer and nothing that it could be mistaken
    for.

    For a number no other number may be named, otherwise none of `others`: a list of guesses is no
    answer. A world may write 6 as 6.0.
    """
    value, words = answer["value"].lower(), _WORD.findall(text.lower())
    if NUMBER.fullmatch(value):
        return {Decimal(number) for number in NUMBER.findall(text)} == {Decimal(value)}
    padded = f" {' '.join(words)} "

    def named(other: str) -> bool:
        wanted = " ".join(_WORD.findall(other.lower()))
        return bool(wanted) and f" {wanted} " in padded

    others = [other for other in answer["others"] if other.lower() != value]
    return named(value) and not any(map(named, others))


def judge(verifier: Json, readings: Sequence[Sequence[Cell]], answer: str | None) -> Evaluation:
    """Compare the answers to the probes and the closing text (None if there is none) with the
    verifier.

    progress = (features of the wanted change that are right - unwanted features - changed probes
    that had to stay the same + right answer) / (features of the wanted change + answer), clipped to
    [0, 1]. The score is 1 for success and otherwise half the progress. An answer counts towards
    progress only if nothing unwanted was changed.
    """
    ids, asked = set(verifier["ids"]), verifier["answer"] is not None
    names = new_ids(readings, ids, set(verifier["known"]))
    wanted = wrong = damage = 0
    for probe, reading in zip(verifier["probes"], readings, strict=True):
        free, places = probe.get("free", ()), probe.get("places", ())
        shown = features(reading, ids, names, verifier["mask"], verifier.get("naming", ()))
        now = [f for f in shown if f not in free and f[:2] not in places]
        if "after" not in probe:
            damage += "digest" in probe and digest(now) != probe["digest"]
            continue
        before, after = (Counter(map(tuple, probe[name])) for name in ("before", "after"))
        wanted += _distance(before, after)
        wrong += _distance(Counter(map(tuple, now)), after)
    right = asked and answer is not None and answered(answer, verifier["answer"])
    total = wanted + asked
    points = wanted - wrong - damage + (right and not damage)
    progress = min(max(points / total, 0.0), 1.0) if total else 0.0
    success = bool(total) and not wrong and not damage and right == asked
    components = {
        "state": float(not wrong and not damage), "answer": float(right or not asked),
        "progress": progress,
    }  # fmt: skip
    return Evaluation(1.0 if success else 0.5 * progress, success, components)


def _distance(a: Counter, b: Counter) -> int:
    return (a - b).total() + (b - a).total()


# --- the world ------------------------------------------------------------------------------------


def is_probed(task: Task) -> bool:
    """Return True if `Probed` checks the task, not its world."""
    return "probes" in task.verifier


class Probed(Proxy):
    """A world that checks tasks with probes, understands those whose ids are renamed
    (envs/renamed.py), names what is another in each episode (envs/handles.py), and leaves
    everything else to the world that it wraps."""

    def __init__(self, world: World):
        self.world, self.name = world, world.name
        self._begin(None, 0)
        self._handles = handles.Handles()
        self._has_tools = False
        self._has_snapshots: dict[str, bool] = {}  # by the name of a task's world

    def _begin(self, task: Task | None, seed: int) -> None:
        self._task, self._seed = task, seed
        self._record: Json | None = None  # the task as JSON values, for snapshots
        self._actions: list[str] = []
        self._over, self._answer = False, None
        self._evaluation: Evaluation | None = None
        self._readings: list[Sequence[Cell]] | None = None  # made before the closing text
        # [snapshot or None] if a check moved the world away from the episode
        self._left: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name == "world":  # not yet set, as in a copy
            raise AttributeError(name)
        return getattr(self.world, name)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._begin(task, seed)
        observation = self._start()
        self._has_tools = bool(observation.tools)
        if KEY in task.meta:
            for message in observation.messages:
                parts = str(message["content"]).split(task.query)  # which is renamed already
                message["content"] = task.query.join(map(shown(task), parts))
        return observation

    def step(self, action: str) -> StepResult:
        self._return()
        # The task, if its ids are others.
        task = self._task if self._task and KEY in self._task.meta else None
        action = meant(task)(action) if task else action
        self._evaluation, self._readings = None, None
        if self._probes_early(action):
            self._readings = self._read_here()
            if self._readings is None:
                self._left = [None]
                self._return()
        result = self._play(action)
        self._actions.append(action)
        self._over = result.over
        if self._readings is not None and not self._over:
            self._left, self._readings = [None], None
        self._answer = result.info.get("answer")
        if task:
            result.messages = mapped(result.messages, shown(task))
            result.info = mapped(result.info, shown(task))
        if self._over and self._task and is_probed(self._task):
            result.reward = self.evaluate().score
        return result

    def evaluate(self) -> Evaluation:
        """Score the episode. A task with probes is checked in a repetition of the episode."""
        if self._task is None or not is_probed(self._task):
            return self.world.evaluate()
        if self._evaluation is None:
            verifier, closing = self._task.verifier, self._closing()
            if self._readings is None:
                calls = self._actions if closing is None else self._actions[:-1]
                self._readings = self._read_all(calls)
            self._evaluation = judge(verifier, self._readings, closing)
        return self._evaluation

    def snapshot(self) -> Json:
        if self._left == [None] and not self._handles.kinds:
            raise NotImplementedError(f"{self.name} has no snapshots")
        self._return()
        if self._task is None:
            raise RuntimeError("no episode: reset the world first")
        self._record = self._record or self._task.to_dict()
        return {
            "task": self._record, "seed": self._seed, "actions": list(self._actions),
            "over": self._over, "answer": self._answer, "world": self.world.snapshot(),
        }  # fmt: skip

    def restore(self, snapshot: Json) -> None:
        record = snapshot["task"]  # in replays, nearly always that of the episode in progress
        running = self._task if record is self._record else None
        self._begin(running or Task.from_dict(record), snapshot["seed"])
        self._record = record
        self._actions, self._over = list(snapshot["actions"]), snapshot["over"]
        self._answer = snapshot["answer"]
        if self._task and handles.KEY in self._task.meta:
            self._repeat()
        else:
            self._handles = handles.Handles()
            self.world.restore(snapshot["world"])

    def _playing(self) -> World:
        return self.world

    def _start(self) -> Observation:
        assert self._task
        task = self._task
        self._handles = handles.Handles(task.meta.get(handles.KEY, ()))
        own = replace(task, verifier=task.verifier["start"]) if is_probed(task) else task
        return self.world.reset(own, self._seed)

    def _play(self, action: str) -> StepResult:
        if not self._handles.kinds:
            return self.world.step(action)
        result = self.world.step(self._handles.meant(action))
        self._handles.show(action, result, cells)
        return result

    def _closing(self) -> str | None:
        """Return the last action if it ended the episode and is a text without calls, or code; if
        the world reports the answer that it gave (`info["answer"]`), that answer."""
        if not self._over or not self._actions:
            return None
        if self._answer is not None:
            return self._answer
        turn = parse(self._actions[-1])
        return None if turn.calls or turn.errors else turn.content

    def _probes_early(self, action: str) -> bool:
        """Return True for a text that will end an episode whose world is slow to start again."""
        task = self._task
        if task is None or not is_probed(task) or self._over or not self._has_tools:
            return False
        turn = parse(action)
        if turn.calls or turn.errors or task.verifier.get("code"):
            return False
        if task.env not in self._has_snapshots:
            self._has_snapshots[task.env] = snapshot_of(self.world) is not None
        return bool(self._handles.kinds) or not self._has_snapshots[task.env]

    def _read_all(self, actions: Sequence[str]) -> list[Sequence[Cell]]:
        """Return the answers to the probes after the actions, empty ones if it shows none."""
        assert self._task
        probes = self._task.verifier["probes"]
        self._left = self._left or [None if self._handles.kinds else snapshot_of(self.world)]
        read = self._read_here() if self._left == [None] and not self._over else None
        # The second is for a last call that ended the episode: nothing is shown after it.
        for played in (actions, actions[:-1]):
            if read is None:
                read = self._read(probes, played)
        return [[] for _ in probes] if read is None else read

    def _read_here(self) -> list[Sequence[Cell]] | None:
        """Run the probes in the episode itself. Return None if they end it."""
        assert self._task
        readings, over = self._run(self._task.verifier["probes"])
        return None if over else readings

    def _run(self, probes: list[Json]) -> tuple[list[Sequence[Cell]], bool]:
        """Return the answers to the probes up to the end of the episode, and True if it ended."""
        readings: list[Sequence[Cell]] = []
        for probe in probes:
            result = self._play(probe["action"])
            readings.append(cells(probe["tool"], text_of(result.messages)))
            if result.over:
                return readings, True
        return readings, False

    def _read(self, probes: list[Json], actions: Sequence[str]) -> list[Sequence[Cell]] | None:
        """Repeat the actions from the start and run the probes. Return None if the episode ends
        before the probes.

        If it ends during the probes, because a world limits its steps, the others run in a further
        repetition.
        """
        readings: list[Sequence[Cell]] = []
        while True:
            self._start()
            for action in actions:
                result = self._play(action)
                if result.over:
                    return None
            readings += self._run(probes[len(readings) :])[0]
            if len(readings) == len(probes):
                return readings

    def _return(self) -> None:
        """Bring the world back to where the episode was before a check."""
        if not self._left:
            return
        (snapshot,), self._left = self._left, []
        if snapshot is None:
            self._repeat()
        else:
            self.world.restore(snapshot)

    def _repeat(self) -> None:
        """Play the episode again, where a snapshot is missing or would hold the handles of another
        login."""
        self._start()
        for action in self._actions:
            self._play(action)


def probed(world: World) -> Probed:
    """Return the world with support for tasks that are checked by probes."""
    return world if isinstance(world, Probed) else Probed(world)
