"""The checks of the World contract, which envs/conformance.py runs.

A check is a generator. It gets `make`, which returns a new world, and some tasks, and yields a text
for each problem. Its docstring states the requirement and the reason, and is printed with each
problem.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from envs import boundary, values
from envs.toolcalls import call_text, parse
from envs.values import Json
from envs.world import StepResult, Task, World, repeated

Make = Callable[[], World]
Check = Callable[[Make, list[Task]], Iterator[str]]
ROLES = ("system", "user", "assistant", "tool")
MAX_STEPS = 100
MAX_IDLE = 200  # turns
MAX_ODD = 400  # calls
LEAK_MB = 2.0  # of a reset
HELD_OUT = ("dev", "val", "test", "test_normal", "test_challenge")
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2.5, 10**400, 1e308, "", "no such value", "\x00", [], [["a"]], {},
    {"a": {"b": None}},
)  # fmt: skip

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


def each_task(check: Callable[[World, Task], Iterator[str]]) -> Check:
    """Make a check of tasks of a check of one. One world plays them all, and each problem names its
    task."""

    @functools.wraps(check)
    def of_all(make: Make, tasks: list[Task]) -> Iterator[str]:
        world = make()
        for task in tasks:
            for problem in check(world, task):
                yield f"task {task.id}: {problem}"

    return of_all


def lists_tasks(make: Make, tasks: list[Task]) -> Iterator[str]:
    """A split is a non-empty list of tasks with unique ids and a query. It is the same each time
    and survives JSON, because results are grouped by id and compared across runs."""
    if not tasks:
        yield "the split has no tasks"
        return
    for task in tasks:
        if not isinstance(task, Task):
            yield f"a {type(task).__name__} instead of a Task"
            return
    if twice := repeated(tasks):
        yield f"ids that are not unique: {', '.join(twice[:5])}"
    yield from (f"task {task.id} has no query" for task in tasks[:1000] if not task.query)
    again = [task.to_dict() for task in make().tasks(tasks[0].split)]
    if again != [as_json(task.to_dict()) for task in tasks]:
        yield (
            "another world lists other tasks, or tasks change in JSON (tuples, sets, keys that are"
            " not strings)"
        )


def rejects_unknown_splits(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`tasks("no such split")` raises ValueError and names the splits, so that typos in a config
    are detected."""
    world = make()
    with contextlib.suppress(ValueError):
        world.tasks("no such split")
        yield "it raised nothing"


@each_task
def resets_to_valid_observations(world: World, task: Task) -> Iterator[str]:
    """`reset` returns messages with a role and a text, the last from the user, and tools in
    OpenAI's format, because the prompt is rendered from them."""
    observation = world.reset(task, 0)
    if problem := _unsafe(boundary.observation, observation):
        yield f"reset returned {problem}"
        return
    yield from _messages(observation.messages)
    if not observation.messages or observation.messages[-1].get("role") != "user":
        yield "the last message is not the user's"
    yield from _tools(observation.tools)


def is_deterministic(make: Make, tasks: list[Task]) -> Iterator[str]:
    """The same task, seed and actions give the same episode, in a new world and in a used one,
    because attribution, resuming and recovery replay episodes."""
    used = make()
    for task in tasks:
        first, second = (play(used, task, actions_of(task)) for _ in range(2))
        fresh = make()
        unused = play(fresh, task, actions_of(task))
        fresh.close()
        for other, how in (
            (second, "a used world plays it differently the second time"),
            (unused, "a new world plays it differently"),
        ):
            if first != other:
                yield f"task {task.id}: {how} ({difference(first, other)})"
                break


def shares_no_state_between_worlds(make: Make, tasks: list[Task]) -> Iterator[str]:
    """Two worlds share no state, because rollouts of the same task, and of others, are played at
    the same time."""
    first, second = make(), make()
    for number, task in enumerate(tasks):
        alone = play(first, task, actions_of(task))
        for other in [task, tasks[number - 1]] if number else [task]:
            if _beside(first, task, second, other) != alone:
                yield f"task {task.id}: playing {other.id} in another world changes the episode"


def _beside(first: World, task: Task, second: World, other: Task) -> Json:
    """Play a task in one world while another one is ahead of it in its own: that takes two actions
    for one, the first of which is refused, and starts again."""
    play(second, other, actions_of(other))
    start, steps = as_json(first.reset(task, 0).to_dict()), []
    second.reset(other, 0)
    ahead = iter([call_text("no_such_tool", {}), *actions_of(other)])
    for action in actions_of(task):
        for _ in range(2):
            theirs = next(ahead, None)
            if theirs is not None and second.step(theirs).over:
                ahead = iter(())
        result = first.step(action)
        steps.append(as_json(result.to_dict()))
        if result.over:
            break
    second.reset(other, 0)
    return {"first": start, "steps": steps, "evaluation": as_json(first.evaluate().to_dict())}


def never_raises_in_step(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`step` never raises, whatever the text. It answers with an error for the model, or ends the
    episode."""
    world = make()
    for task in tasks:
        for text in MALFORMED:
            world.reset(task, 0)
            try:
                result = world.step(text)
                world.evaluate()
            except Exception as error:
                yield f"step({short(text)}) {raised(error)}"
                continue
            yield from (f"step({short(text)}): {problem}" for problem in _result(result))


@each_task
def takes_odd_arguments(world: World, task: Task) -> Iterator[str]:
    """`step` never raises on a call of the world's own tools, whatever the arguments: missing or
    unknown ones, and values of another type (a list where a name is looked up, a number that no
    float holds). Models write all of them.
    """
    tools = world.reset(task, 0).tools or world.functions()[:5]
    calls = list(_odd_calls(tools, task))
    calls = calls if len(calls) <= MAX_ODD else random.Random(0).sample(calls, MAX_ODD)
    found = set()
    for name, changed, arguments in calls:
        try:
            text = world.call_text(name, arguments)
        except ValueError:  # a world whose actions are code may refuse to write this one
            continue
        try:
            result = world.step(text)
        except Exception as error:
            if (name, type(error)) not in found:
                found.add((name, type(error)))
                yield f"{name} with {changed} {raised(error)}"
            world.reset(task, 0)
            continue
        yield from (f"{name} with {changed}: {problem}" for problem in _result(result))
        if result.over:
            world.evaluate()
            world.reset(task, 0)
    world.evaluate()


def answers_with_valid_results(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`step` returns JSON values: messages with texts that UTF-8 can express, and a reward that is
    a number. The run ends an episode in which it does not."""
    world = make()
    for task in tasks:
        world.reset(task, 0)
        for number, action in enumerate(actions_of(task)):
            result = world.step(action)
            problems = list(_result(result))
            yield from (f"task {task.id}, step {number}: {problem}" for problem in problems)
            if problems or result.over:
                break


@each_task
def ends_its_episodes(world: World, task: Task) -> Iterator[str]:
    """An episode ends by itself: with its reference, or if the agent says that it is done.
    Otherwise every rollout is cut off at the limit of turns, and a model cannot learn to stop."""
    world.reset(task, 0)
    if not task.reference and world.functions():
        return  # a call that is not known here ends it
    for action in [*task.reference, *["I am done."] * MAX_IDLE]:
        if world.step(action).over:
            return
    yield f"it goes on {MAX_IDLE} turns after its last action"


@each_task
def evaluates_without_side_effects(world: World, task: Task) -> Iterator[str]:
    """`evaluate` returns a score in its range, the same when repeated, and does not change the
    episode, because it is also called in the middle of an episode. A `progress` component is 1
    exactly on success."""
    plain = play(world, task, actions_of(task))
    if plain != play(world, task, actions_of(task), evaluate=True):
        yield "evaluating the episode at each step changes it"
    for step in (0, 1, MAX_STEPS):
        play(world, task, actions_of(task)[:step])
        first, second = world.evaluate(), world.evaluate()
        if first != second:
            yield f"evaluate returned {first}, then {second}"
        yield from _evaluation(first)


@each_task
def scores_references_one(world: World, task: Task) -> Iterator[str]:
    """A task's reference solution, if it has one, ends with success and the highest score.
    Otherwise the task is unsolvable or the score is wrong."""
    if not task.reference:
        return
    played = play(world, task, task.reference)
    if len(played["steps"]) < len(task.reference):
        yield "the episode ended before the reference did"
    evaluation = played["evaluation"]
    if evaluation["score"] != evaluation["high"] or not evaluation["success"]:
        yield f"its reference scores {evaluation}"


@each_task
def scores_inaction_zero(world: World, task: Task) -> Iterator[str]:
    """An agent that does nothing has the lowest score. Otherwise policies are rewarded for
    inaction: subtract the score of doing nothing."""
    evaluation = play(world, task, ["I do nothing."] * MAX_STEPS)["evaluation"]
    if evaluation["score"] != evaluation["low"] or evaluation["success"]:
        yield f"doing nothing scores {evaluation}"


def keeps_splits_apart(make: Make, tasks: list[Task]) -> Iterator[str]:
    """No task of the split "train" is also in one to evaluate on, because the score would measure
    memory, and no two tasks of such a split share an id."""
    world = make()
    splits = {}
    for name in ("train", *HELD_OUT):
        with contextlib.suppress(ValueError):
            splits[name] = world.tasks(name)
    train = splits.pop("train", [])
    ids, contents = {task.id for task in train}, {_content(task) for task in train}
    for name, held_out in splits.items():
        if twice := repeated(held_out):
            yield f"ids of {name} that are not unique: {', '.join(twice[:5])}"
        if both := [task.id for task in held_out if task.id in ids or _content(task) in contents]:
            shared = ", ".join(both[:3])
            yield f"{len(both)} of the {len(held_out)} tasks of {name} are in train: {shared}"


def frees_its_episodes(make: Make, tasks: list[Task]) -> Iterator[str]:
    """A world that starts an episode frees the one before, because a run starts thousands."""
    world = make()
    sizes = []
    for _ in range(3 if tasks and _memory_mb() else 0):
        for _ in range(5):
            world.reset(tasks[0], 0)
        gc.collect()
        sizes.append(_memory_mb())
    # The least of the windows, as caches fill in the first.
    growth = min((b - a for a, b in itertools.pairwise(sizes)), default=0.0) / 5
    if growth >= LEAK_MB:
        yield f"task {tasks[0].id}: each reset keeps {growth:.0f} MB"


def restores_snapshots(make: Make, tasks: list[Task]) -> Iterator[str]:
    """A snapshot, if the environment has snapshots, is a JSON value from which any world continues
    the episode like the first one, because replay and branching depend on it."""
    world, other = make(), make()
    for task in tasks:
        actions = actions_of(task)
        half = len(actions) // 2
        if len(play(world, task, actions[:half])["steps"]) < half:
            continue
        try:
            snapshot = as_json(world.snapshot())
        except NotImplementedError:
            break
        rest = _steps(world, actions[half : half + 1])
        score = world.evaluate()
        for name, target in (("another world", other), ("the same world", world)):
            target.restore(snapshot)
            again = _steps(target, actions[half : half + 1])
            if again != rest or target.evaluate() != score:
                yield f"task {task.id}: {name} continues differently from a snapshot"


@each_task
def lists_functions(world: World, task: Task) -> Iterator[str]:
    """`functions` lists what the code of an episode can call, in the format of tools and the same
    each time ([] if actions are calls of tools). `call_text` writes an action for each and rejects
    other names, because an explorer calls them by name."""
    world.reset(task, 0)
    functions = world.functions()
    same = isinstance(functions, list) and as_json(functions) == functions
    if not same or world.functions() != functions:
        yield "functions() is no list of JSON values, or differs when repeated"
        return
    yield from _tools(functions)
    for function in functions[:3]:
        name = function["function"]["name"]
        world.reset(task, 0)
        result = world.step(world.call_text(name, {}))
        if result.info.get("parse_error"):
            yield f"step cannot read call_text({name!r}, {{}})"
    if functions:
        with contextlib.suppress(ValueError):
            text = world.call_text("no_such.function", {})
            yield f"call_text of no function is {short(text)}"


def has_a_json_profile(make: Make, tasks: list[Task]) -> Iterator[str]:
    """`profile` is a dict of JSON values ({} if there is none), and `close` may be called twice."""
    world = make()
    profile = world.profile()
    if not isinstance(profile, dict) or as_json(profile) != profile:
        yield "profile() is not a dict, or changes in JSON"
    world.close()  # as `run` does again


CHECKS: tuple[Check, ...] = (
    lists_tasks,
    rejects_unknown_splits,
    resets_to_valid_observations,
    is_deterministic,
    shares_no_state_between_worlds,
    never_raises_in_step,
    takes_odd_arguments,
    answers_with_valid_results,
    ends_its_episodes,
    evaluates_without_side_effects,
    scores_references_one,
    scores_inaction_zero,
    keeps_splits_apart,
    frees_its_episodes,
    restores_snapshots,
    lists_functions,
    has_a_json_profile,
)
# The others look at a sample of the tasks.
OF_ALL_TASKS: tuple[Check, ...] = (lists_tasks, keeps_splits_apart)
OF_TWO_TASKS: tuple[Check, ...] = (never_raises_in_step, takes_odd_arguments, lists_functions)


# ------------------------------------------------------------------------------------------ helpers


def actions_of(task: Task) -> list[str]:
    """Return the reference, or some invalid actions if there is none."""
    return list(task.reference) or [call_text("no_such_tool", {}), "Hello.", "Done."]


def _odd_calls(tools: list[Json], task: Task) -> Iterator[tuple[str, str, Json]]:
    """Yield (tool, what is odd about the call, arguments), starting from the reference's arguments
    if it has some."""
    turns = (parse(action).calls for action in task.reference)
    known = {call.name: call.arguments for call in itertools.chain(*turns)}
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters", {})
        properties = schema.get("properties", {})
        required = schema.get("required", properties)
        usual = known.get(name) or {key: _usual(properties.get(key, {})) for key in required}
        yield name, "no arguments", {}
        yield name, "an unknown argument", {**usual, "no_such_argument": 1}
        for key in properties:
            yield name, f"no {key}", {k: v for k, v in usual.items() if k != key}
            for value in ODD_VALUES:
                yield name, f"{key}={short(value)}", {**usual, key: value}


def _usual(schema: Json) -> Any:
    """Return a value that a parameter may have."""
    if schema.get("enum"):
        return schema["enum"][0]
    return {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}.get(
        str(schema.get("type")), "x"
    )


def _content(task: Task) -> str:
    shown = [task.query, task.seed, task.reference, task.verifier]
    return json.dumps(shown, sort_keys=True, default=repr)


def _memory_mb() -> float:
    """Return the memory of this process in MB, touched or not; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def play(world: World, task: Task, actions: list[str], evaluate: bool = False) -> Json:
    """Reset, take the actions until the episode ends, and return everything observed."""
    first = as_json(world.reset(task, 0).to_dict())
    steps = _steps(world, actions, evaluate)
    return {"first": first, "steps": steps, "evaluation": as_json(world.evaluate().to_dict())}


def _steps(world: World, actions: list[str], evaluate: bool = False) -> list[Json]:
    """Take the actions until the episode ends, and return the answers."""
    seen = []
    for action in actions:
        if evaluate:
            world.evaluate()
        result = world.step(action)
        seen.append(as_json(result.to_dict()))
        if result.over:
            break
    return seen


def as_json(value: Any) -> Any:
    """Return the value after a round trip through JSON. Raises TypeError or ValueError if JSON
    cannot express it."""
    return json.loads(json.dumps(value, allow_nan=False))


def _messages(messages: list[Json]) -> Iterator[str]:
    for message in messages:
        if message["role"] not in ROLES:
            yield f"the role of a message is not one of {', '.join(ROLES)}: {short(message)}"


def _tools(tools: list[Any]) -> Iterator[str]:
    names = []
    for tool in tools:
        is_function = isinstance(tool, dict) and tool.get("type") == "function"
        function = tool.get("function") if is_function else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name", ...}}'
            yield f"a tool is not {form}: {short(tool)}"
            continue
        names.append(function["name"])
        if function.get("parameters", {}).get("type") != "object":
            yield f"the parameters of {function['name']} are not a JSON schema of an object"
        if parse(call_text(function["name"], {})).errors:
            yield f"the name of {function['name']} does not survive a tool call"
    if len(set(names)) < len(names):
        yield "tools with the same name"


def _unsafe(check: Callable[[Any], Any], value: Any) -> str:
    """Return what is wrong with a record of a world by a check of envs/boundary.py, "" if nothing
    is."""
    try:
        safe = check(value)
    except values.Unsafe as error:
        return str(error)
    if safe.to_dict() != value.to_dict():
        return "texts with lone surrogates, tuples, or keys that are not texts"
    return ""


def _result(result: StepResult) -> Iterator[str]:
    if problem := _unsafe(boundary.result, result):
        yield problem
        return
    yield from _messages(result.messages)
    if result.tools is not None:
        yield from _tools(result.tools)
    if not isinstance(result.terminated, bool) or not isinstance(result.truncated, bool):
        yield "terminated and truncated are not booleans"
    if not result.messages and not result.over:
        yield "the episode goes on without a message, so the model has nothing to answer"


def _evaluation(evaluation: Any) -> Iterator[str]:
    if problem := _unsafe(boundary.evaluation, evaluation):
        yield f"{problem}: {short(repr(evaluation))}"
        return
    if any(not 0.0 <= part <= 1.0 for part in evaluation.components.values()):
        yield f"a component outside [0, 1]: {evaluation}"
    progress = evaluation.components.get("progress")
    if progress is not None and (progress == 1.0) != evaluation.success:
        yield f"progress is {progress} and success is {evaluation.success}"


def difference(a: Json, b: Json) -> str:
    """Return where two results of `play` differ."""
    if a["first"] != b["first"]:
        return "at reset"
    for number, (x, y) in enumerate(zip(a["steps"], b["steps"])):
        if x != y:
            return f"at step {number}: {short(x['messages'])} and {short(y['messages'])}"
    return "in length or evaluation"


def raised(error: Exception) -> str:
    """Return the words for an exception of a world."""
    return f"raised {type(error).__name__}: {short(str(error))}"


def short(value: Any) -> str:
    """Return a value as a text of bounded length."""
    text = repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 160 else text[:160] + "..."
