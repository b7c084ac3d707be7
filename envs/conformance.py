"""The World contract as a suite of checks; `python -m envs.check` runs it.

A check is a generator. It gets `make`, which returns a new world, and some tasks, and yields a text for each problem.
Its docstring states the requirement and the reason, and is printed with each problem.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envs.toolcalls import call_text, parse
from envs.world import Evaluation, Observation, StepResult, Task, World

Make = Callable[[], World]
ROLES = ("system", "user", "assistant", "tool")
MAX_STEPS = 100

MALFORMED = (
    "",
    " \n",
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>\n{"name": 1, "arguments": []}\n</tool_call>',
    '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "__class__", "arguments": {"__init__": null}}\n</tool_call>',
    '<tool_call>\n{"name": "a", "arguments": ' + "[" * 2000 + "\n</tool_call>",
    "```python\nraise SystemExit\n```",
    "```python\n",
    "\x00 \ud800 \U0001f600 \r\n <|im_end|> %s {0} $(id) `id`",
    "x" * 100_000,
)


@dataclass
class Problem:
    """One violation of the contract: the check, the finding and the check's docstring."""

    check: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what}\n    {self.why}"


def run(make: Make, *, split: str = "train", limit: int = 5) -> tuple[list[str], list[Problem]]:
    """Run every check on up to `limit` tasks of `split`. Return the names of the checks and the problems."""
    problems = []
    try:
        world = make()
        try:
            tasks = world.tasks(split)
        finally:
            world.close()
    except Exception as error:
        return ["tasks"], [Problem("tasks", _raised(error), f"An environment lists the tasks of its split '{split}'.")]
    sample = random.Random(0).sample(tasks, min(limit, len(tasks)))
    for check in CHECKS:
        why = " ".join(check.__doc__.split())
        try:
            problems += [
                Problem(check.__name__, what, why) for what in check(make, tasks if check is lists_tasks else sample)
            ]
        except Exception as error:
            problems.append(Problem(check.__name__, _raised(error), why))
    return [check.__name__ for check in CHECKS], problems


# ---------------------------------------------------------------------------------------------- checks


def lists_tasks(make: Make, tasks: list[Task]) -> Iterator[str]:
    """A split is a non-empty list of tasks with unique ids and a query. It is the same each time and survives JSON,
    because results are grouped by id and compared across runs."""
    if not tasks:
        yield "the split has no tasks"
        return
    for task in tasks:
        if not isinstance(task, Task):
            yield f"a {type(task).__name__} instead of a Task"
            return
    ids = [task.id for task in tasks]
    repeated = sorted({id for id in ids if ids.count(id) > 1}) if len(set(ids)) < len(ids) else []
    if repeated:
        yield f"ids that are not unique: {', '.join(repeated[:5])}"
    yield from (f"task {task.id} has no query" for task in tasks[:1000] if not task.query)
    world = make()
    if [task.to_dict() for task in world.tasks(tasks[0].split)] != [_json(task.to_dict()) for task in tasks]:
        yield "another world lists other tasks, or tasks change in JSON (tuples, sets, keys that are not strings)"
    world.close()


def rejects_unknown_splits(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`tasks("no such split")` raises ValueError and names the splits, so that typos in a config are detected."""
    world = make()
    try:
        world.tasks("no such split")
        yield "it raised nothing"
    except ValueError:
        pass
    finally:
        world.close()


def resets_to_valid_observations(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`reset` returns messages with a role and a text, the last from the user, and tools in OpenAI's format, because
    the prompt is rendered from them."""
    world = make()
    for task in tasks:
        observation = world.reset(task, 0)
        if not isinstance(observation, Observation):
            yield f"reset returned a {type(observation).__name__} instead of an Observation"
            continue
        yield from (f"task {task.id}: {problem}" for problem in _messages(observation.messages))
        if not observation.messages or observation.messages[-1].get("role") != "user":
            yield f"task {task.id}: the last message is not the user's"
        yield from (f"task {task.id}: {problem}" for problem in _tools(observation.tools))
    world.close()


def is_deterministic(make: Make, tasks: list[Task]) -> Iterator[str]:
    """The same task, seed and actions give the same episode, in a new world and in a used one, because attribution,
    resuming and recovery replay episodes."""
    used = make()
    for task in tasks:
        actions = _actions(task)
        episodes = [_play(used, task, actions), _play(used, task, actions)]
        fresh = make()
        episodes.append(_play(fresh, task, actions))
        fresh.close()
        if episodes[0] != episodes[1]:
            yield f"task {task.id}: a used world plays it differently the second time ({_difference(*episodes[:2])})"
        elif episodes[0] != episodes[2]:
            yield f"task {task.id}: a new world plays it differently ({_difference(episodes[0], episodes[2])})"
    used.close()


def shares_no_state_between_worlds(make: Make, tasks: list[Task]) -> Iterator[str]:
    """Two worlds share no state, because the rollouts of a group play one task at the same time."""
    first, second = make(), make()
    for task in tasks:
        actions = _actions(task)
        alone = _play(first, task, actions)
        second.reset(task, 0)
        first.reset(task, 0)
        together = []
        over = False
        for action in actions:
            result = first.step(action)
            together.append(_json(result.to_dict()))
            if not over:
                other = second.step(call_text("no_such_tool", {}))
                over = other.terminated or other.truncated
            if result.terminated or result.truncated:
                break
        if together != alone["steps"] or _json(first.evaluate().to_dict()) != alone["evaluation"]:
            yield f"task {task.id}: using another world at the same time changes the episode"
    first.close()
    second.close()


def never_raises_in_step(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`step` never raises, whatever the text. It answers with an error for the model, or ends the episode."""
    world = make()
    for task in tasks[:2]:
        for text in MALFORMED:
            world.reset(task, 0)
            try:
                result = world.step(text)
                world.evaluate()
            except Exception as error:
                yield f"step({_short(text)}) {_raised(error)}"
                continue
            if not isinstance(result, StepResult):
                yield f"step({_short(text)}) returned a {type(result).__name__} instead of a StepResult"
                continue
            yield from (f"step({_short(text)}): {problem}" for problem in _result(result))
    world.close()


def evaluates_without_side_effects(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`evaluate` returns a score in [0, 1], the same when repeated, and does not change the episode, because it is
    also called in the middle of an episode. A `progress` component is 1 exactly on success."""
    world = make()
    for task in tasks:
        plain = _play(world, task, _actions(task))
        evaluated = _play(world, task, _actions(task), evaluate=True)
        if plain != evaluated:
            yield f"task {task.id}: an episode that is evaluated at each step differs from one that is not"
        for step in (0, 1, MAX_STEPS):
            _play(world, task, _actions(task)[:step])
            first, second = world.evaluate(), world.evaluate()
            if first != second:
                yield f"task {task.id}: evaluate returned {first}, then {second}"
            yield from (f"task {task.id}: {problem}" for problem in _evaluation(first))
    world.close()


def scores_references_one(make: Make, tasks: list[Task]) -> Iterator[str]:
    """A task's reference solution, if it has one, ends with success and score 1. Otherwise the task is unsolvable or
    the score is wrong."""
    world = make()
    for task in tasks:
        if not task.reference:
            continue
        played = _play(world, task, task.reference)
        if len(played["steps"]) < len(task.reference):
            yield f"task {task.id}: the episode ended before the reference did"
        if played["evaluation"]["score"] != 1.0 or not played["evaluation"]["success"]:
            yield f"task {task.id}: its reference scores {played['evaluation']}"
    world.close()


def scores_inaction_zero(make: Make, tasks: list[Task]) -> Iterator[str]:
    """An agent that does nothing scores 0. Otherwise policies are rewarded for inaction: subtract the score of doing
    nothing."""
    world = make()
    for task in tasks:
        evaluation = _play(world, task, ["I do nothing."] * MAX_STEPS)["evaluation"]
        if evaluation["score"] != 0.0 or evaluation["success"]:
            yield f"task {task.id}: doing nothing scores {evaluation}"
    world.close()


def restores_snapshots(make: Make, tasks: list[Task]) -> Iterator[str]:
    """A snapshot, if the environment has snapshots, is a JSON value from which any world continues the episode like
    the first one, because replay and branching depend on it."""
    world, other = make(), make()
    for task in tasks:
        actions = _actions(task)
        half = len(actions) // 2
        if len(_play(world, task, actions[:half])["steps"]) < half:
            continue
        try:
            snapshot = _json(world.snapshot())
        except NotImplementedError:
            break
        rest = [_json(world.step(action).to_dict()) for action in actions[half : half + 1]]
        score = world.evaluate()
        for name, target in (("another world", other), ("the same world", world)):
            target.restore(snapshot)
            again = [_json(target.step(action).to_dict()) for action in actions[half : half + 1]]
            if again != rest or target.evaluate() != score:
                yield f"task {task.id}: {name} continues differently from a snapshot"
    world.close()
    other.close()


def lists_functions(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`functions` lists what the code of an episode can call, in the format of tools and the same each time ([] if
    actions are calls of tools). `call_text` writes an action for each and rejects other names, because an explorer
    calls them by name."""
    world = make()
    for task in tasks[:2]:
        world.reset(task, 0)
        functions = world.functions()
        if not isinstance(functions, list) or _json(functions) != functions or world.functions() != functions:
            yield f"task {task.id}: functions() is not a list of JSON values, or differs when repeated"
            continue
        yield from (f"task {task.id}: {problem}" for problem in _tools(functions))
        for function in functions[:3]:
            name = function["function"]["name"]
            world.reset(task, 0)
            result = world.step(world.call_text(name, {}))
            if result.info.get("parse_error"):
                yield f"task {task.id}: step cannot read call_text({name!r}, {{}})"
        if functions:
            with contextlib.suppress(ValueError):
                yield f"task {task.id}: call_text of no function is {_short(world.call_text('no_such.function', {}))}"
    world.close()


def has_a_json_profile(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`profile` is a dict of JSON values ({} if there is none), and `close` may be called twice."""
    world = make()
    profile = world.profile()
    if not isinstance(profile, dict) or _json(profile) != profile:
        yield "profile() is not a dict, or changes in JSON"
    world.close()
    world.close()


CHECKS = (
    lists_tasks,
    rejects_unknown_splits,
    resets_to_valid_observations,
    is_deterministic,
    shares_no_state_between_worlds,
    never_raises_in_step,
    evaluates_without_side_effects,
    scores_references_one,
    scores_inaction_zero,
    restores_snapshots,
    lists_functions,
    has_a_json_profile,
)


# --------------------------------------------------------------------------------------------- helpers


def _actions(task: Task) -> list[str]:
    """Return the reference, or some invalid actions if there is none."""
    return list(task.reference) or [call_text("no_such_tool", {}), "Hello.", "Done."]


def _play(world: World, task: Task, actions: list[str], evaluate: bool = False) -> dict[str, Any]:
    """Reset, take the actions until the episode ends, and return everything observed."""
    seen: dict[str, Any] = {"first": _json(world.reset(task, 0).to_dict()), "steps": []}
    for action in actions:
        if evaluate:
            world.evaluate()
        result = world.step(action)
        seen["steps"].append(_json(result.to_dict()))
        if result.terminated or result.truncated:
            break
    return {**seen, "evaluation": _json(world.evaluate().to_dict())}


def _json(value: Any) -> Any:
    """Return the value after a round trip through JSON. Raises TypeError or ValueError if JSON cannot express it."""
    return json.loads(json.dumps(value, allow_nan=False))


def _messages(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list):
        yield "messages are not a list"
        return
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            yield f"the role of a message is not one of {', '.join(ROLES)}: {_short(message)}"
        elif not isinstance(message.get("content"), str):
            yield f"a message has no text: {_short(message)}"


def _tools(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list):
        yield "tools are not a list"
        return
    names = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield f'a tool is not {{"type": "function", "function": {{"name", ...}}}}: {_short(tool)}'
            continue
        names.append(function["name"])
        if function.get("parameters", {}).get("type") != "object":
            yield f"the parameters of {function['name']} are not a JSON schema of an object"
        if parse(call_text(function["name"], {})).errors:
            yield f"the name of {function['name']} does not survive a tool call"
    if len(set(names)) < len(names):
        yield "tools with the same name"


def _result(result: StepResult) -> Iterator[str]:
    yield from _messages(result.messages)
    if result.tools is not None:
        yield from _tools(result.tools)
    if not isinstance(result.terminated, bool) or not isinstance(result.truncated, bool):
        yield "terminated and truncated are not booleans"
    if not isinstance(result.info, dict) or _json(result.to_dict()) != result.to_dict():
        yield "info is not a dict of JSON values"
    if not result.messages and not result.terminated and not result.truncated:
        yield "the episode goes on without a message, so the model has nothing to answer"


def _evaluation(evaluation: Any) -> Iterator[str]:
    if not isinstance(evaluation, Evaluation):
        yield f"evaluate returned a {type(evaluation).__name__} instead of an Evaluation"
        return
    if not 0.0 <= evaluation.score <= 1.0 or any(not 0.0 <= part <= 1.0 for part in evaluation.components.values()):
        yield f"a score outside [0, 1]: {evaluation}"
    if not isinstance(evaluation.success, bool):
        yield "success is not a boolean"
    progress = evaluation.components.get("progress")
    if progress is not None and (progress == 1.0) != evaluation.success:
        yield f"progress is {progress} and success is {evaluation.success}"


def _difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    if a["first"] != b["first"]:
        return "at reset"
    for number, (x, y) in enumerate(zip(a["steps"], b["steps"])):
        if x != y:
            return f"at step {number}: {_short(x['messages'])} and {_short(y['messages'])}"
    return "in length or evaluation"


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {_short(str(error))}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return repr(text if len(text) <= 160 else text[:160] + "...")
