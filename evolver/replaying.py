"""Episodes that are played again: which turns reached the world, and which values an action took
from earlier observations.

An agent can only make a call if it knows the arguments. A replay that ignores this keeps a booking
but drops the search that revealed its flight number. Self-questioning and self-attributing both use
these functions to avoid that.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envs.toolcalls import Call, parse
from envs.world import Observation, StepResult, Task, World, text_of
from evolver.transcripts import words
from rl.trajectory import Completion, StopReason, Trajectory, Turn

_WORD = re.compile(r"\w+")


def replay(
    world: World, task: Task, actions: Sequence[str]
) -> tuple[Observation, list[StepResult]]:
    """Play `actions` from the start of `task` until they are used up or the episode ends.

    Return the opening and the result of every action that was played.
    """
    opening = world.reset(task, task.seed)
    results = []
    for action in actions:
        result = world.step(action)
        results.append(result)
        if result.terminated or result.truncated:
            break
    return opening, results


def attempt(world: World, task: Task, actions: Sequence[str], *, rollout: int = 0) -> Trajectory:
    """Play `actions` and return the trajectory that a rollout would record, without tokens."""
    opening, results = replay(world, task, actions)
    trajectory = Trajectory(task, rollout, 0, opening.messages, tools=opening.tools)
    trajectory.stop = StopReason.MAX_TURNS
    for action, result in zip(actions, results):
        completion = Completion([], [], "stop", 0)
        turn = Turn([], completion, action, result.messages, result.info, result.reward)
        trajectory.turns.append(turn)
        if result.terminated or result.truncated:
            trajectory.stop = StopReason.DONE
    trajectory.evaluation = world.evaluate()
    return trajectory


def calls_of(task: Task) -> list[Call]:
    """Return the calls of a task's solution."""
    return calls_in(task.reference)


def calls_in(actions: Iterable[str]) -> list[Call]:
    """Return all calls of actions."""
    return list(itertools.chain.from_iterable(parse(action).calls for action in actions))


def play(world: World, task: Task, seed: int, actions: Iterable[str]) -> dict[str, Any]:
    """Play actions and return the episode: {"messages", "tools", "success", "hinted", "ended"}."""
    opening = world.reset(task, seed)
    messages, ended = list(opening.messages), False
    for action in actions:
        messages.append({"role": "assistant", "content": action})
        result = world.step(action)
        if result.tools is not None:  # those that are listed from here on
            messages[-1]["tools"] = result.tools
        ended = result.terminated or result.truncated
        if ended:
            break
        messages += result.messages
    return {
        "messages": messages,
        "tools": opening.tools,
        "success": world.evaluate().success,
        "hinted": False,
        "ended": ended,
    }


def renaming(
    before: Sequence[str], after: Sequence[str], same_kind: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return {old id: new id}: words that differ at the same position of two answers to one call.

    When a replay leaves out an earlier call, the world may assign other ids. `same_kind(old, new)`
    returns True if both words can be ids of the same thing. Answers of different length give {}.
    """
    if len(before) != len(after):
        return {}
    return {old: new for old, new in zip(before, after) if old != new and same_kind(old, new)}


def executed_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that reached the world: all but a final one that the token limit cut, and
    those that answered the context template."""
    turns = trajectory.turns
    if turns and trajectory.stop in (StopReason.LENGTH, StopReason.CONTEXT_FULL):
        last = turns[-1]
        answered = last.observation or last.info  # `template.cut_turn=continue` plays cut turns
        if last.completion.stop == "length" and not answered:
            turns = turns[:-1]
    return [turn for turn in turns if not turn.info.get("managing")]


def opening_words(observation: Observation) -> str:
    """Return the `words` that are known before the first action: opening messages and tool
    schemas."""
    return words(text_of(observation.messages) + "\n" + json.dumps(observation.tools))


def leaves(value: Any) -> list[Any]:
    """Return the strings and numbers inside a JSON value, in order."""
    if isinstance(value, dict):
        return leaves(list(value.values()))
    if isinstance(value, list | tuple):
        return list(itertools.chain.from_iterable(map(leaves, value)))
    return [] if value is None or isinstance(value, bool) else [value]


def values_used(action: str) -> list[str]:
    """Return the values an action relies on, as `words`: the arguments of its calls or, without
    calls, its text.

    Words of one character are left out of a text, where they are articles and counts more often
    than ids.
    """
    turn = parse(action)
    if turn.calls:
        values = [str(leaf) for leaf in leaves([call.arguments for call in turn.calls])]
    else:
        values = [word for word in _WORD.findall(turn.content) if len(word) > 1]
    return [value for value in dict.fromkeys(map(words, values)) if value.strip()]


def executed_text(turn: Turn) -> str:
    """Return the part of an action that the world executed, for tracing its values.

    Without readable calls, these are the arguments that the world reports: the line of a text
    adventure or a block of code, without the thoughts around it, which may repeat any word that was
    shown.
    """
    calls = turn.info.get("calls")
    if parse(turn.action).calls or not calls:
        return turn.action
    return "\n".join(map(str, leaves([call["arguments"] for call in calls])))


def values_needed(
    actions: Sequence[str], observations: Sequence[str], opening: str
) -> list[tuple[str, ...]]:
    """Return, for each action, the values it took from an earlier observation: shown before it, not
    in the opening.

    `observations` and `opening` are `words`. A value that nothing showed before the action is left
    out.
    """
    needed, shown = [], ""
    for action, observation in zip(actions, observations, strict=True):
        used = values_used(action)
        needed.append(tuple(value for value in used if value not in opening and value in shown))
        shown += observation
    return needed
