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

import contextlib
import copy
import dataclasses
import importlib
import inspect
import itertools
import json
import math
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

from envs import toolcalls
from envs.bfcl.data import Entry, docs_of, entries, package, split_indices, tool_schema
from envs.bfcl.replies import misread, official_calls, recorded, unusable
from envs.profile import PREFERENCE, entity
from envs.toolcalls import Call
from envs.toolworld import required_calls
from envs.values import Json
from envs.world import (
    Evaluation,
    Message,
    Observation,
    ReplayWorld,
    StepResult,
    Task,
    Tool,
    message,
)

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
        problems = (*map(unusable, call.arguments.values()), _too_large(call))
        if problem := next(filter(None, problems), ""):
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
    if isinstance(result, dict):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(result)
    return str(result)


def _too_large(call: Call) -> str:
    """Return an error for arguments with which a calculator tool would compute for days; "" if
    there are none."""
    precision, base, exponent = map(call.arguments.get, ("precision", "base", "exponent"))
    if isinstance(precision, int | float) and precision > MAX_PRECISION:
        return f"a precision above {MAX_PRECISION} is not supported"
    if call.name == "power" and isinstance(base, int) and isinstance(exponent, int):
        if abs(base) > 1 and exponent * math.log10(abs(base)) > MAX_DIGITS:
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
        self._entries: dict[str, Entry] = {}
        for name in self._categories:
            self._entries |= entries(name)
        if classes:
            wanted = {classes} if isinstance(classes, str) else set(classes)
            known = self._classes()
            if unknown := sorted(wanted.difference(known)):
                raise ValueError(f"BFCL has no class {unknown}: choose from {known}")
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
        indices = split_indices(split, self._splits, self._split_seed)
        chosen = [entry for entry in self._entries.values() if entry.index in indices]
        most = self._max_calls or math.inf
        return [self._as_task(entry, split) for entry in chosen if entry.calls <= most]

    def _as_task(self, entry: Entry, split: str) -> Task:
        return Task(
            id=entry.id,
            env=self.name,
            query=entry.question[0][0]["content"],
            split=split,
            reference=reference_turns(entry),
            difficulty=entry.calls,
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
        self._passed, self._failed = 0, False  # turns before the first that failed; one has
        self._offered = self._choose_tools(entry, seed)
        return Observation(self._user_messages(), self._tools())

    def _take(self, action: str) -> StepResult:
        if self._malformed == "official":
            calls, errors = official_calls(action), []
        else:
            parsed = toolcalls.parse(action)
            calls, errors = parsed.calls, parsed.errors
        info: Json = {"calls": [recorded(call) for call in calls], "errors": 0}
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
        passed = sum(turn < self._passed for turn in checked)
        success = passed == len(checked)
        return Evaluation(float(success), success, {"progress": passed / len(checked)})

    def profile(self) -> Json:
        return {
            "name": self.name,
            "entities": [
                entity(name, list(map(_described, docs_of(name)))) for name in self._classes()
            ],
            "verifier": "calls",
            "task_preference": PREFERENCE,
        }

    def _classes(self) -> list[str]:
        return sorted(set(itertools.chain(*(entry.classes for entry in self._entries.values()))))

    # Helpers of `reset` and `step`.

    def _end_turn(self, info: Json) -> StepResult:
        if not self._failed and not self._passes():
            self._failed = True
        self._passed += not self._failed
        self._results += self._turn_results
        self._turn, self._replies, self._turn_results = self._turn + 1, 0, []
        open_query = self._require_episode().meta.get("open_query")
        if self._turn == len(self._entry.question) or open_query:
            self._over = True
            return StepResult([], reward=self.evaluate().score, terminated=True, info=info)
        tools = self._tools() if self._turn in self._entry.withheld else None
        return StepResult(self._user_messages(), tools=tools, info=info)

    def _passes(self) -> bool:
        """Apply `multi_turn_checker` to the turn that just ended."""
        expected = [self._truth.call(call)[0] for call in self._entry.truth[self._turn]]
        if not expected or not self._turn_results:
            return not expected
        try:
            state = package().state_checker(self._apis.instances, self._truth.instances)
        except RecursionError:  # the model moved a directory into itself
            return False
        results = self._results + self._turn_results
        check = package().response_checker
        return state["valid"] and check(results, expected, self._turn)["valid"]

    def _user_messages(self) -> list[Message]:
        if self._turn in self._entry.withheld:
            return [message("user", package().new_tools)]
        return [dict(said) for said in self._entry.question[self._turn]]

    def _choose_tools(self, entry: Entry, seed: int) -> set[str]:
        names = [doc["name"] for doc in entry.docs]
        if self._distractors is None:
            return set(names)
        needed = {call.name for call in itertools.chain(*entry.truth)}
        needed.update(*entry.withheld.values())
        others = [name for name in names if name not in needed]
        rng = random.Random(f"bfcl tools {entry.id} {seed}")
        return needed | set(rng.sample(others, min(self._distractors, len(others))))

    def _tools(self) -> list[Tool]:
        offered = set(self._offered)
        for turn, names in self._entry.withheld.items():
            if turn > self._turn:
                offered.difference_update(names)
        return [tool_schema(doc, self._brief) for doc in self._entry.docs if doc["name"] in offered]


def reference_turns(entry: Entry) -> list[str]:
    """Return the ground truth as assistant turns: per user turn one with its calls, then one
    without."""
    turns = []
    for calls in entry.truth:
        if calls:
            texts = [toolcalls.call_text(call.name, call.arguments) for call in calls]
            turns += ["\n".join(texts), "Done."]
        else:
            turns.append("I cannot do that yet: a tool or a detail is missing.")
    return turns


def _distractors(tools: str) -> int | None:
    if tools == "all":
        return None
    if found := re.fullmatch(r"oracle\+([0-9]+)", tools):
        return int(found[1])
    raise ValueError(f"tools must be 'all' or 'oracle+k', such as 'oracle+4', not '{tools}'")


def _described(doc: Json) -> Json:
    """Return a doc without the introduction that all docs of a class share."""
    return {**doc, "description": doc["description"].split("Tool description: ")[-1]}


def _synthetic(entry: Entry, task: Task) -> Entry:
    return dataclasses.replace(
        entry,
        question=[[message("user", task.query)]],
        truth=[required_calls(task, "a BFCL verifier")],
        withheld={},
    )
