"""Helpers that read and replay episodes: which turns reached the world, and where the values of an action come from.

An agent can only make a call if it knows the arguments. A replay that ignores this keeps a booking but drops the search
that revealed its flight number. Self-questioning and self-attributing both use these functions to avoid that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envs.toolcalls import parse
from envs.world import Message, Observation, Task, World
from rl.trajectory import StopReason, Trajectory, Turn

_CUT = (StopReason.LENGTH, StopReason.CONTEXT_FULL)
_WORD = re.compile(r"\w+")
_INJECTED = re.compile(r"<EXP>.*?(?:</EXP>|$)\n?", re.DOTALL)


# --- replay ----------------------------------------------------------------------------------------------------------


def play(world: World, task: Task, actions: Iterable[str]) -> None:
    """Play `actions` from the start of `task` until they are used up or the episode ends."""
    world.reset(task, task.seed)
    for action in actions:
        result = world.step(action)
        if result.terminated or result.truncated:
            break


def snapshot_of(world: World) -> Any:
    """Return a snapshot of the episode, None if the world has no snapshots."""
    try:
        return world.snapshot()
    except NotImplementedError:
        return None


def renaming(before: Sequence[str], after: Sequence[str], same_kind: Callable[[str, str], bool]) -> dict[str, str]:
    """Return {old id: new id}: words that differ at the same position of two answers to one call.

    When an earlier call is left out of a replay, the world may hand out other ids. `same_kind(old, new)` says if two
    words can be ids of the same thing. Answers of different length give {}.
    """
    if len(before) != len(after):
        return {}
    return {a: b for a, b in zip(before, after, strict=True) if a != b and same_kind(a, b)}


def played(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that reached the world: all but a last generation that was cut by its token limit."""
    turns = trajectory.turns
    cut = trajectory.stop in _CUT and turns and turns[-1].completion.stop == "length"
    return turns[:-1] if cut else list(turns)


# --- words and values ------------------------------------------------------------------------------------------------


def words(text: str) -> str:
    """Return the lower-case words with one blank around each, so that `" a b " in words(text)` matches whole words."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def text_of(messages: Sequence[Message]) -> str:
    """Return the contents of messages, joined by newlines."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def opening_words(observation: Observation) -> str:
    """Return the `words` that are known before the first action: opening messages and tool schemas."""
    return words(text_of(observation.messages) + "\n" + json.dumps(observation.tools))


def leaves(value: Any) -> list[Any]:
    """Return the strings and numbers inside a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [] if value is None or isinstance(value, bool) else [value]


def values_used(action: str) -> list[str]:
    """Return the values an action relies on, as `words`: the arguments of its calls or, without calls, its text.

    Values of one character are left out, because a "2" occurs in almost any observation.
    """
    turn = parse(action)
    values = [str(leaf) for call in turn.calls for leaf in leaves(call.arguments)]
    if not turn.calls:
        values = _WORD.findall(turn.content)
    return [value for value in dict.fromkeys(words(value) for value in values) if len(value) > 3]


def values_needed(actions: Sequence[str], observations: Sequence[str], opening: str) -> list[tuple[str, ...]]:
    """Return, for each action, the values it took from an earlier observation: shown before it, not in the opening.

    `observations` and `opening` are `words`. A value that nothing showed before the action is left out.
    """
    needed, shown = [], ""
    for action, observation in zip(actions, observations, strict=True):
        needed.append(tuple(value for value in values_used(action) if value not in opening and value in shown))
        shown += observation
    return needed


# --- text for people and language models -----------------------------------------------------------------------------


def without_experience(text: str) -> str:
    """Return the text without injected experience, including parts of it that a policy repeats."""
    return _INJECTED.sub("", text)


def shortened(text: str, limit: int) -> str:
    """Return at most about `limit` characters: the middle is replaced by a visible mark."""
    if len(text) <= limit:
        return text
    head, tail = (2 * limit) // 3, limit - (2 * limit) // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[-tail:]}"


def transcript(exchanges: Sequence[tuple[str, str]], limit: int) -> str:
    """Number (action, observation) pairs and put them between marks, each text cut to `limit` characters."""
    blocks = []
    for number, (action, observation) in enumerate(exchanges, 1):
        action, observation = shortened(action, limit), shortened(observation, limit)
        blocks.append(
            f">>> STEP {number}\n<<ACTION>>\n{action}\n<<OBSERVATION>>\n{observation}\n<<END OF STEP {number}>>"
        )
    return "\n\n".join(blocks) or "(no step was taken)"


def exchanges_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return (action, observation) of every turn, without injected experience."""
    return [(without_experience(t.action), without_experience(text_of(t.observation))) for t in trajectory.turns]


def rules_of(messages: Sequence[Message], limit: int) -> str:
    """Return the system messages of an opening, which describe the environment to the agent."""
    rules = [str(m.get("content") or "") for m in messages if m.get("role") == "system"]
    return shortened(without_experience("\n".join(rules)), limit) or "(nothing but the task)"
