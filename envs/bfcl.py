"""BFCL v3 multi-turn: eight simulated APIs, conversations of 1 to 7 user turns, scored on state and results.

Needs `pip install --no-deps -r requirements/bfcl.txt`. The data, the API classes and the two checks that
decide the score come from the `bfcl-eval` package; the executor is ours, because the package's own keeps its
instances in module globals (rollouts of one task disturb each other) and passes what the model wrote to
`eval`. Here every episode owns its instances and a call is a documented method with JSON arguments.

Turn rules and scoring are those of `BaseHandler.inference_multi_turn_FC`, `_evaluate_single_multi_turn_entry`
and `multi_turn_checker` in that package: a reply without calls ends the user's turn, more than 20 replies
with calls in one turn end the episode as failed, and after each turn with a ground truth the state must equal
the state of the ground truth and its results must be among the results so far.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import json
import math
import pathlib
import random
import threading
import types
from dataclasses import dataclass, field
from typing import Any

from envs import toolcalls
from envs.toolcalls import Call
from envs.world import Evaluation, Message, Observation, StepResult, Task, Tool, World

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
DOMAINS = ("files", "vehicle", "trading", "travel")  # tasks 0-49, 50-99, 100-149, 150-199 of each category
ENTRIES = 200
SCHEMES = {"reference": 100, "100/100": 100, "50/150": 50}  # name -> number of training tasks per category
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
MAX_DIGITS = 4300  # what Python agrees to print of an integer; a longer result is an error either way
MAX_PRECISION = 10_000

_SHARED = threading.Lock()  # the package keeps mpmath's precision and one weather report in globals


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Entry:
    """One conversation of the benchmark. `withheld` maps a turn to the tools that appear in it."""

    id: str
    category: str
    question: list[list[Message]]
    truth: list[list[Call]]
    config: dict[str, Any]
    classes: list[str]
    docs: list[dict[str, Any]]
    withheld: dict[int, list[str]] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return int(self.id.rsplit("_", 1)[1])

    @property
    def domain(self) -> str:
        return DOMAINS[self.index * len(DOMAINS) // ENTRIES]


def _package_dir() -> pathlib.Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "BFCL needs the package bfcl-eval: pip install --no-deps -r requirements/bfcl.txt", name="bfcl_eval"
        )
    return pathlib.Path(spec.submodule_search_locations[0])


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


@functools.cache
def _package() -> types.SimpleNamespace:
    """What the adapter uses of the package, imported at first use. None of it writes files or wants a vendor's SDK."""
    from bfcl_eval.constants import default_prompts as prompts
    from bfcl_eval.constants import executable_backend_config as backend
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

    return types.SimpleNamespace(
        doc_files=backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING,
        modules=backend.CLASS_FILE_PATH_MAPPING,
        stateless=backend.STATELESS_CLASSES,
        step_limit=prompts.MAXIMUM_STEP_LIMIT,
        new_tools=prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC,
        state_checker=checker.state_checker,
        response_checker=checker.response_checker,
    )


@functools.cache
def _docs(class_name: str) -> list[dict[str, Any]]:
    return _lines(_package_dir() / "data" / "multi_turn_func_doc" / _package().doc_files[class_name])


@functools.cache
def entries(category: str) -> dict[str, Entry]:
    """The 200 entries of one category by id. Reads the package's JSON and writes nothing."""
    if category not in CATEGORIES:
        raise ValueError(f"BFCL has no category '{category}'; it has {', '.join(CATEGORIES)}")
    data = _package_dir() / "data"
    name = f"BFCL_v4_{category}.json"
    truths = {row["id"]: row["ground_truth"] for row in _lines(data / "possible_answer" / name)}
    found = {}
    for row in _lines(data / name):
        docs = [doc for class_name in row["involved_classes"] for doc in _docs(class_name)]
        parameters = {doc["name"]: list(doc["parameters"]["properties"]) for doc in docs}
        found[row["id"]] = Entry(
            id=row["id"],
            category=category,
            question=row["question"],
            truth=[[read_call(call, parameters) for call in turn] for turn in truths[row["id"]]],
            config=row["initial_config"],
            classes=row["involved_classes"],
            docs=docs,
            withheld={int(turn): names for turn, names in row.get("missed_function", {}).items()},
        )
    if len(found) != ENTRIES:
        raise ValueError(f"{name} holds {len(found)} entries instead of {ENTRIES}: another version of bfcl-eval?")
    return found


def read_call(text: str, parameters: dict[str, list[str]]) -> Call:
    """Read a ground-truth call such as `sort('a.txt')` without running it.

    `parameters` maps each tool to its parameter names in order, for positional arguments. Raises ValueError
    on anything but a plain call of a known tool with literal arguments.
    """
    node = ast.parse(text.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in parameters:
        raise ValueError(f"not a call of a known tool: {text}")
    names = parameters[node.func.id]
    if len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"arguments without a name: {text}")
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args)}
    arguments |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return Call(node.func.id, arguments)


def split_indices(split: str, scheme: str = "reference", seed: int = 0) -> list[int]:
    """Which of the 200 indices belong to `split`: "train", "val" (also "dev" or "test") or "all".

    `reference` is the reference implementation's: 0-99 train, 100-199 val, so that no domain is in both. The
    others are drawn with `seed`, the same number from each domain up to one. All categories share the
    indices: entry 7 of `miss_func` is entry 7 of `base` with a tool taken away.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"BFCL has no splits '{scheme}'; it has {', '.join(SCHEMES)}")
    size = SCHEMES[scheme]
    if scheme == "reference":
        train = set(range(size))
    else:
        rng = random.Random(f"bfcl {scheme} {seed}")
        width = ENTRIES // len(DOMAINS)
        sizes = [size // len(DOMAINS) + (d < size % len(DOMAINS)) for d in range(len(DOMAINS))]
        train = {i for d, n in enumerate(sizes) for i in rng.sample(range(d * width, (d + 1) * width), n)}
    members = {
        "train": train,
        "val": set(range(ENTRIES)) - train,
        "all": set(range(ENTRIES)),
    }
    members |= {"dev": members["val"], "test": members["val"]}
    if split not in members:
        raise ValueError(f"BFCL has no split '{split}'; it has train, val (= dev = test) and all")
    return sorted(members[split])


def tool_schema(doc: dict[str, Any]) -> Tool:
    """The package's function doc as an OpenAI tool; what the function returns is not part of it."""

    def convert(node: dict[str, Any]) -> dict[str, Any]:
        node = dict(node)
        if "type" in node:
            node["type"] = SCHEMA_TYPES.get(node["type"], node["type"])
        if "properties" in node:
            node["properties"] = {name: convert(child) for name, child in node["properties"].items()}
        if "items" in node:
            node["items"] = convert(node["items"])
        return node

    function = {"name": doc["name"], "description": doc["description"], "parameters": convert(doc["parameters"])}
    return {"type": "function", "function": function}


# ------------------------------------------------------------------------------------------ execution


class Apis:
    """Instances of the API classes of one entry, owned by one episode."""

    def __init__(self, entry: Entry):
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        for class_name in entry.classes:
            instance = getattr(importlib.import_module(_package().modules[class_name]), class_name)()
            if class_name not in _package().stateless:
                scenario = copy.deepcopy(entry.config.get(class_name, {}))
                instance._load_scenario(scenario, long_context="long_context" in entry.category)
            self.instances[class_name] = instance
            self._methods |= {doc["name"]: getattr(instance, doc["name"]) for doc in _docs(class_name)}

    def call(self, call: Call) -> tuple[str, bool]:
        """Run one documented method. Returns the package's text of the result and whether it is an error."""
        if call.name not in self._methods:
            return f"Error during execution: name '{call.name}' is not defined", True
        if problem := _too_large(call):
            return f"Error during execution: {problem}", True
        try:
            # Arguments are copied because some methods keep the very list they were given.
            with _SHARED:
                result = self._methods[call.name](**copy.deepcopy(call.arguments))
                return _text(result), isinstance(result, dict) and "error" in result
        except Exception as error:  # the package answers any failure of a call with its message
            return f"Error during execution: {error}", True


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
    """Two calculator tools would compute for days on a large argument; the package lets them."""
    precision = call.arguments.get("precision")
    if isinstance(precision, int | float) and precision > MAX_PRECISION:
        return f"a precision above {MAX_PRECISION} is not supported"
    base, exponent = call.arguments.get("base"), call.arguments.get("exponent")
    if call.name == "power" and isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if exponent * math.log10(abs(base)) > MAX_DIGITS:
            return f"the result has more than {MAX_DIGITS} digits"
    return ""


# -------------------------------------------------------------------------------------------- episodes


class Bfcl(World):
    """One BFCL conversation at a time.

    category: one of CATEGORIES, or several. splits, split_seed: see `split_indices`.
    tools: "all" is the benchmark; "oracle+k" offers the ground truth's tools and k seeded others, for small
    models: not official, and `task.meta["official"]` says so. malformed: "end" is the benchmark (what cannot
    be read is no call, so it may end the turn); "error" tells the model what was wrong and lets it try again.
    """

    name = "bfcl"

    def __init__(
        self,
        category: str | list[str] = "multi_turn_base",
        splits: str = "reference",
        split_seed: int = 0,
        tools: str = "all",
        malformed: str = "end",
    ):
        self._categories = [category] if isinstance(category, str) else list(category)
        self._entries = {k: entry for name in self._categories for k, entry in entries(name).items()}
        split_indices("train", splits, split_seed)  # so that a wrong name is reported here
        self._splits, self._split_seed = splits, split_seed
        self._distractors = _distractors(tools)
        if malformed not in ("end", "error"):
            raise ValueError(f"malformed is 'end' or 'error', not '{malformed}'")
        self._malformed = malformed
        self._official = self._distractors is None and malformed == "end"
        self._task: Task | None = None

    def tasks(self, split: str) -> list[Task]:
        indices = set(split_indices(split, self._splits, self._split_seed))
        return [self._as_task(entry, split) for entry in self._entries.values() if entry.index in indices]

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
        """Start the conversation. A task with `verifier={"calls": [{"name", "arguments"}]}` has one user turn,
        its query, in the world of the entry `meta["entry"]`, and those calls as its ground truth. With
        `meta["open_query"]` the episode ends after the first turn: no one listens afterwards."""
        entry = self._entries.get(task.meta.get("entry", task.id))
        if entry is None:
            raise ValueError(f"BFCL has no task '{task.id}' in {', '.join(self._categories)}")
        if task.verifier:
            entry = _synthetic(entry, task)
        self._task, self._seed, self._entry = task, seed, entry
        self._actions: list[str] = []
        self._apis, self._truth = Apis(entry), Apis(entry)
        self._turn, self._turn_steps, self._turn_results = 0, 0, []
        self._results: list[str] = []  # of all turns so far
        self._failure = ""  # the package's error type, at the end of the first turn that fails
        self._failed_turn = len(entry.question)
        self._over = False
        self._offered = self._choose_tools(entry, seed)
        return Observation(self._user_messages(), self._tools())

    def step(self, action: str) -> StepResult:
        if self._task is None:
            raise RuntimeError("step before reset")
        if self._over:
            return StepResult([], terminated=True, info={"calls": [], "errors": 0, "over": True})
        self._actions.append(action)
        parsed = toolcalls.parse(action)
        answered = parsed.errors if self._malformed == "error" else []
        info = {"calls": [{"name": call.name, "arguments": call.arguments} for call in parsed.calls], "errors": 0}
        if parsed.errors and not parsed.calls:
            info["parse_error"] = True
        if not parsed.calls and not answered:
            return self._end_turn(info)
        messages = []
        for call in parsed.calls:
            text, is_error = self._apis.call(call)
            messages.append({"role": "tool", "name": call.name, "content": text})
            self._turn_results.append(text)
            info["errors"] += is_error
        messages += [{"role": "tool", "content": f"Error: {error}"} for error in answered]
        info["errors"] += len(answered)
        self._turn_steps += 1
        if self._turn_steps > _package().step_limit:
            self._over = True
            info["stop"] = f"more than {_package().step_limit} replies with calls in one turn"
        return StepResult(messages, truncated=self._over, info=info)

    def evaluate(self) -> Evaluation:
        """`score` is the official 0 or 1. `progress` counts the turns that passed before the first that failed,
        of those with a ground truth and the last one."""
        if self._task is None:
            raise RuntimeError("evaluate before reset")
        truth = self._entry.truth
        checked = {turn for turn, calls in enumerate(truth) if calls} | {len(truth) - 1}
        passed = [turn for turn in checked if turn < min(self._turn, self._failed_turn)]
        success = len(passed) == len(checked)
        return Evaluation(float(success), success, {"progress": len(passed) / len(checked)})

    def snapshot(self) -> dict[str, Any]:
        if self._task is None:
            raise RuntimeError("snapshot before reset")
        return {"task": self._task.to_dict(), "seed": self._seed, "actions": list(self._actions)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Replays the actions: an episode takes under a millisecond, and the APIs are deterministic."""
        self.reset(Task.from_dict(snapshot["task"]), snapshot["seed"])
        for action in snapshot["actions"]:
            self.step(action)

    def profile(self) -> dict[str, Any]:
        classes = sorted({name for entry in self._entries.values() for name in entry.classes})
        return {
            "name": self.name,
            "entities": [
                {
                    "name": class_name,
                    "attributes": sorted({p for doc in _docs(class_name) for p in doc["parameters"]["properties"]}),
                    "operations": [
                        {"name": doc["name"], "description": doc["description"].split("Tool description: ")[-1]}
                        for doc in _docs(class_name)
                    ],
                }
                for class_name in classes
            ],
            "task_preference": {"num_entities": 2, "num_operations": 3, "relation_difficulty": 3},
        }

    # The rest of a turn.

    def _end_turn(self, info: dict[str, Any]) -> StepResult:
        if not self._failure:
            self._failure = self._check_turn()
            if self._failure:
                self._failed_turn = self._turn
        self._results += self._turn_results
        self._turn, self._turn_steps, self._turn_results = self._turn + 1, 0, []
        if self._turn == len(self._entry.question) or self._task.meta.get("open_query"):
            self._over = True
            return StepResult([], reward=self.evaluate().score, terminated=True, info=info)
        tools = self._tools() if self._turn in self._entry.withheld else None
        return StepResult(self._user_messages(), tools=tools, info=info)

    def _check_turn(self) -> str:
        """`multi_turn_checker` for the turn that just ended: "" or its error type."""
        calls = self._entry.truth[self._turn]
        expected = [self._truth.call(call)[0] for call in calls]
        if not calls:
            return ""
        if not self._turn_results:
            return "multi_turn:empty_turn_model_response"
        try:
            verdict = _package().state_checker(self._apis.instances, self._truth.instances)
        except RecursionError:  # the model moved a directory into itself
            return "multi_turn:instance_state_mismatch"
        if verdict["valid"]:
            verdict = _package().response_checker(self._results + self._turn_results, expected, self._turn)
        return "" if verdict["valid"] else verdict["error_type"]

    def _user_messages(self) -> list[Message]:
        if self._turn in self._entry.withheld:
            return [{"role": "user", "content": _package().new_tools}]
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
        later = {name for turn, names in self._entry.withheld.items() if turn > self._turn for name in names}
        return [
            tool_schema(doc) for doc in self._entry.docs if doc["name"] in self._offered and doc["name"] not in later
        ]


def reference_turns(entry: Entry) -> list[str]:
    """The ground truth as assistant turns: per user turn one with its calls, then one without."""
    turns = []
    for calls in entry.truth:
        if calls:
            turns.append("\n".join(toolcalls.call_text(call.name, call.arguments) for call in calls))
        turns.append("Done." if calls else "I cannot do that yet: a tool or a detail is missing.")
    return turns


def _distractors(tools: str) -> int | None:
    if tools == "all":
        return None
    kind, _, count = tools.partition("+")
    if kind != "oracle" or not (count.isascii() and count.isdigit()):
        raise ValueError(f"tools is 'all' or 'oracle+k', such as 'oracle+4', not '{tools}'")
    return int(count)


def _synthetic(entry: Entry, task: Task) -> Entry:
    calls = task.verifier.get("calls")
    if not isinstance(calls, list) or not all(isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls):
        raise ValueError(f"task {task.id}: a BFCL verifier is {{'calls': [{{'name', 'arguments'}}, ...]}}")
    return Entry(
        id=entry.id,
        category=entry.category,
        question=[[{"role": "user", "content": task.query}]],
        truth=[[Call(call["name"], call["arguments"]) for call in calls]],
        config=entry.config,
        classes=entry.classes,
        docs=entry.docs,
    )
