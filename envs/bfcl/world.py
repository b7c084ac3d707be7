"""BFCL v3 multi-turn: eight simulated APIs, conversations of 1 to 7 user turns, scored on state and
results.

Needs `pip install --no-deps -r requirements/bfcl.txt`. The data, the API classes and the two checks
that decide the score come from the `bfcl-eval` package. The executor is our own: the package's
executor keeps its instances in module globals, so that rollouts of one task disturb each other, and
passes the model's text to `eval`. Here every episode owns its instances, and a call can only be a
documented method with JSON arguments.

The rules of turns and scoring are those of the package's `BaseHandler.inference_multi_turn_FC`,
`_evaluate_single_multi_turn_entry` and `multi_turn_checker`. A reply without calls ends the user's
turn, and more than 20 replies with calls in one turn end the episode as failed. After each turn
with a ground truth, the state must equal the ground truth's state, and the ground truth's results
must be among the results so far.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import math
import random
import threading
from collections.abc import Sequence
from typing import Any

from envs import toolcalls
from envs.bfcl.data import Entry, docs_of, entries, package, split_indices, tool_schema
from envs.bfcl.replies import misread, official_calls, recorded, unusable
from envs.profile import PREFERENCE, entity
from envs.toolcalls import Call
from envs.world import Evaluation, Message, Observation, ReplayWorld, StepResult, Task, Tool

MAX_DIGITS = 4300  # Python's limit for printing an integer; longer results fail in the package too
MAX_PRECISION = 10_000

_LOCK = threading.Lock()  # the package keeps mpmath's precision and one weather report in globals


# ---------------------------------------------------------------------------------------- execution


class Apis:
    """Instances of the API classes of one entry, owned by one episode."""

    def __init__(self, entry: Entry):
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        for class_name in entry.classes:
            instance = getattr(importlib.import_module(package().modules[class_name]), class_name)()
            if class_name not in package().stateless:
                scenario = copy.deepcopy(entry.config.get(class_name, {}))
                instance._load_scenario(scenario, long_context="long_context" in entry.category)
            self.instances[class_name] = instance
            self._methods |= {
                doc["name"]: getattr(instance, doc["name"]) for doc in docs_of(class_name)
            }

    def call(self, call: Call) -> tuple[str, bool]:
        """Run one documented method. Return the result as the package words it, and True if it is
        an error."""
        if not call.name and not call.arguments:
            return "()", False  # what Python, and so the package, makes of a call without a name
        if call.name not in self._methods:
            return f"Error during execution: name '{call.name}' is not defined", True
        if problem := next(filter(None, map(unusable, call.arguments.values())), "") or _too_large(
            call
        ):
            return f"Error during execution: {problem}", True
        try:
            # Some methods store the list that they are given, or a default that all episodes of the
            # process share and that other methods change (the mentions of a tweet), so they get
            # copies of both.
            method = self._methods[call.name]
            arguments = copy.deepcopy(_shared_defaults(method) | call.arguments)
            with _LOCK:
                result = method(**arguments)
                return _text(result), isinstance(result, dict) and "error" in result
        except Exception as error:  # like the package, answer any failure with its message
            return f"Error during execution: {error}", True


def _shared_defaults(method: Any) -> dict[str, Any]:
    """Return {parameter: default} of the lists and dictionaries among the defaults of a method."""
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, list | dict)}


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError, RecursionError):
            return str(result)
    return str(result)


def _too_large(call: Call) -> str:
    """Return an error for arguments with which a calculator tool would compute for days; "" if
    there are none."""
    precision = call.arguments.get("precision")
    if isinstance(precision, int | float) and precision > MAX_PRECISION:
        return f"a precision above {MAX_PRECISION} is not supported"
    base, exponent = call.arguments.get("base"), call.arguments.get("exponent")
    if (
        call.name == "power"
        and isinstance(base, int)
        and isinstance(exponent, int)
        and abs(base) > 1
    ):
        if exponent * math.log10(abs(base)) > MAX_DIGITS:
            return f"the result has more than {MAX_DIGITS} digits"
    return ""


# ----------------------------------------------------------------------------------------- episodes


class Bfcl(ReplayWorld):
    """One BFCL conversation at a time.

    category: one or several of CATEGORIES. classes: API classes to which the conversations are
    limited, () = all: one that uses another is left out. splits, split_seed: see `split_indices`.
    tools: "all", or "oracle+k" for the ground truth's tools and k random others. malformed:
    "official" reads replies as the package does, so that a call that cannot be read may end the
    turn; "error" answers it with an error and lets the model retry. docs: "full", or "brief" for
    names and types without descriptions. max_calls: skip conversations whose solution has more
    calls; 0 = none. The official benchmark is tools="all", malformed="official" and docs="full";
    `task.meta["official"]` records it. The other values are meant for small models.
    """

    name = "bfcl"

    def __init__(
        self,
        category: str | list[str] = "multi_turn_base",
        splits: str = "reference",
        split_seed: int = 0,
        tools: str = "all",
        malformed: str = "official",
        docs: str = "full",
        max_calls: int = 0,
        classes: str | Sequence[str] = (),
    ):
        self._categories = [category] if isinstance(category, str) else list(category)
        self._entries = {
            k: entry for name in self._categories for k, entry in entries(name).items()
        }
        if classes:
            wanted = {classes} if isinstance(classes, str) else set(classes)
            known = {name for entry in self._entries.values() for name in entry.classes}
            if unknown := sorted(wanted - known):
                raise ValueError(f"BFCL has no class {unknown}: choose from {sorted(known)}")
            self._entries = {
                k: entry for k, entry in self._entries.items() if wanted.issuperset(entry.classes)
            }
        split_indices("train", splits, split_seed)  # raises ValueError for an unknown scheme
        self._splits, self._split_seed, self._max_calls = splits, split_seed, max_calls
        self._distractors = _distractors(tools)
        if malformed not in ("official", "error"):
            raise ValueError(f"malformed must be 'official' or 'error', not '{malformed}'")
        if docs not in ("full", "brief"):
            raise ValueError(f"docs must be 'full' or 'brief', not '{docs}'")
        self._malformed, self._brief = malformed, docs == "brief"
        self._official = self._distractors is None and malformed == "official" and docs == "full"

    def tasks(self, split: str) -> list[Task]:
        indices = set(split_indices(split, self._splits, self._split_seed))
        chosen = [
            self._as_task(entry, split)
            for entry in self._entries.values()
            if entry.index in indices
        ]
        return [
            task for task in chosen if not self._max_calls or task.difficulty <= self._max_calls
        ]

    def _as_task(self, entry: Entry, split: str) -> Task:
        return Task(
            id=entry.id,
            env=self.name,
            query=entry.question[0][0]["content"],
            split=split,
            reference=reference_turns(entry),
            difficulty=sum(len(turn) for turn in entry.truth),
            meta={
                "category": entry.category,
                "domain": entry.domain,
                "turns": len(entry.question),
                "official": self._official,
            },
        )

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start the conversation. A task with `verifier={"calls": [{"name", "arguments"}]}`
        consists of one user turn, its query, in the initial state of the entry `meta["entry"]`,
        with those calls as ground truth. With `meta["open_query"]` the episode ends after the first
        turn. So does a synthetic task without a verifier, which something else has to check."""
        entry = self._entries.get(task.meta.get("entry", task.id))
        if entry is None:
            raise ValueError(f"BFCL has no task '{task.id}' in {', '.join(self._categories)}")
        if task.verifier or task.origin == "synthetic":
            entry = _synthetic(entry, task)
        self._begin(task, seed)
        self._entry = entry
        self._apis, self._truth = Apis(entry), Apis(entry)
        self._turn = 0
        self._replies = 0  # replies with calls in this turn
        self._turn_results: list[str] = []  # of those replies
        self._results: list[str] = []  # of all earlier turns
        self._failure = ""  # the package's error type for the first turn that failed
        self._failed_turn = len(entry.question)
        self._offered = self._choose_tools(entry, seed)
        return Observation(self._user_messages(), self._tools())

    def _take(self, action: str) -> StepResult:
        if self._malformed == "official":
            calls, errors = official_calls(action), []
        else:
            parsed = toolcalls.parse(action)
            calls, errors = parsed.calls, parsed.errors
        info: dict[str, Any] = {"calls": [recorded(call) for call in calls], "errors": 0}
        if misread(action, calls):
            info["parse_error"] = True
        if not calls and not errors:
            return self._end_turn(info)
        messages = []
        for call in calls:
            text, is_error = self._apis.call(call)
            messages.append({"role": "tool", "name": call.name, "content": text})
            self._turn_results.append(text)
            info["errors"] += is_error
        messages += [{"role": "tool", "content": f"Error: {error}"} for error in errors]
        info["errors"] += len(errors)
        self._replies += 1
        if self._replies > package().step_limit:
            self._over = True
            info["stop"] = f"more than {package().step_limit} replies with calls in one turn"
        return StepResult(messages, truncated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        """Score the episode. `score` is the official 0 or 1. `progress` is the share of the checked
        turns (those with a ground truth, and the last one) that passed before the first failure."""
        self._require_episode()
        truth = self._entry.truth
        checked = {turn for turn, calls in enumerate(truth) if calls} | {len(truth) - 1}
        passed = [turn for turn in checked if turn < min(self._turn, self._failed_turn)]
        success = len(passed) == len(checked)
        return Evaluation(float(success), success, {"progress": len(passed) / len(checked)})

    def profile(self) -> dict[str, Any]:
        classes = sorted({name for entry in self._entries.values() for name in entry.classes})
        return {
            "name": self.name,
            "entities": [
                entity(name, [_described(doc) for doc in docs_of(name)]) for name in classes
            ],
            "verifier": "calls",
            "task_preference": PREFERENCE,
        }

    # Helpers of `reset` and `step`.

    def _end_turn(self, info: dict[str, Any]) -> StepResult:
        if not self._failure:
            self._failure = self._check_turn()
            if self._failure:
                self._failed_turn = self._turn
        self._results += self._turn_results
        self._turn, self._replies, self._turn_results = self._turn + 1, 0, []
        open_query = self._require_episode().meta.get("open_query")
        if self._turn == len(self._entry.question) or open_query:
            self._over = True
            return StepResult([], reward=self.evaluate().score, terminated=True, info=info)
        tools = self._tools() if self._turn in self._entry.withheld else None
        return StepResult(self._user_messages(), tools=tools, info=info)

    def _check_turn(self) -> str:
        """Apply `multi_turn_checker` to the turn that just ended. Return its error type, "" if the
        turn passed."""
        calls = self._entry.truth[self._turn]
        expected = [self._truth.call(call)[0] for call in calls]
        if not calls:
            return ""
        if not self._turn_results:
            return "multi_turn:empty_turn_model_response"
        try:
            verdict = package().state_checker(self._apis.instances, self._truth.instances)
        except RecursionError:  # the model moved a directory into itself
            return "multi_turn:instance_state_mismatch"
        if verdict["valid"]:
            verdict = package().response_checker(
                self._results + self._turn_results, expected, self._turn
            )
        return "" if verdict["valid"] else verdict["error_type"]

    def _user_messages(self) -> list[Message]:
        if self._turn in self._entry.withheld:
            return [{"role": "user", "content": package().new_tools}]
        return [dict(message) for message in self._entry.question[self._turn]]

    def _choose_tools(self, entry: Entry, seed: int) -> set[str]:
        names = [doc["name"] for doc in entry.docs]
        if self._distractors is None:
            return set(names)
        needed = {call.name for turn in entry.truth for call in turn}
        needed |= {name for withheld in entry.withheld.values() for name in withheld}
        others = [name for name in names if name not in needed]
        rng = random.Random(f"bfcl tools {entry.id} {seed}")
        return needed | set(rng.sample(others, min(self._distractors, len(others))))

    def _tools(self) -> list[Tool]:
        later = {
            name
            for turn, names in self._entry.withheld.items()
            if turn > self._turn
            for name in names
        }
        offered = self._offered - later
        return [tool_schema(doc, self._brief) for doc in self._entry.docs if doc["name"] in offered]


def reference_turns(entry: Entry) -> list[str]:
    """Return the ground truth as assistant turns: per user turn one with its calls, then one
    without."""
    turns = []
    for calls in entry.truth:
        if calls:
            turns.append(
                "\n".join(toolcalls.call_text(call.name, call.arguments) for call in calls)
            )
        turns.append("Done." if calls else "I cannot do that yet: a tool or a detail is missing.")
    return turns


def _distractors(tools: str) -> int | None:
    if tools == "all":
        return None
    kind, _, count = tools.partition("+")
    if kind != "oracle" or not (count.isascii() and count.isdigit()):
        raise ValueError(f"tools must be 'all' or 'oracle+k', such as 'oracle+4', not '{tools}'")
    return int(count)


def _described(doc: dict[str, Any]) -> dict[str, Any]:
    """Return a doc without the introduction that all docs of a class share."""
    return {**doc, "description": doc["description"].split("Tool description: ")[-1]}


def _synthetic(entry: Entry, task: Task) -> Entry:
    calls = task.verifier.get("calls", [])
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls
    ):
        raise ValueError(
            f"task {task.id}: a BFCL verifier is {{'calls': [{{'name', 'arguments'}}, ...]}}"
        )
    return dataclasses.replace(
        entry,
        question=[[{"role": "user", "content": task.query}]],
        truth=[[Call(call["name"], call["arguments"]) for call in calls]],
        withheld={},
    )
