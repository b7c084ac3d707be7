"""Reading what happened in an episode: which steps reached the world, and where the values of an action come from.

A call can only be made by someone who knows its arguments. Replays and minimised solutions that ignore this keep a
booking and drop the search that told its flight number, so both mechanisms ask these functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from envs.toolcalls import parse
from envs.world import Message, Observation
from rl.trajectory import Step, StopReason, Trajectory

_BROKEN = (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT, StopReason.CANCELLED)
_CUT = (StopReason.LENGTH, StopReason.CONTEXT_FULL)
_WORD = re.compile(r"\w+")
_INJECTED = re.compile(r"<EXP>.*?(?:</EXP>|$)\n?", re.DOTALL)


def broken(trajectory: Trajectory) -> bool:
    """Whether the environment or a deadline ended the episode: what it shows is not the policy's doing."""
    return trajectory.stop in _BROKEN


def played(trajectory: Trajectory) -> list[Step]:
    """The steps that reached the world: a last generation that was cut by its limit did not."""
    steps = trajectory.steps
    cut = trajectory.stop in _CUT and steps and steps[-1].completion.stop == "length"
    return steps[:-1] if cut else list(steps)


def words(text: str) -> str:
    """Lower-case words, one blank around each: `" a b " in words(text)` asks for whole words in sequence."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def text_of(messages: Sequence[Message]) -> str:
    """The contents of messages, one after the other."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def opening_words(observation: Observation) -> str:
    """What is known before the first action: the opening messages and the tool schemas."""
    return words(text_of(observation.messages) + "\n" + json.dumps(observation.tools))


def leaves(value: Any) -> list[Any]:
    """The strings and numbers inside a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [] if value is None or isinstance(value, bool) else [value]


def values_used(action: str) -> list[str]:
    """The values an assistant turn relies on, as `words`: the arguments of its calls, or without calls its text.

    Values of one character are left out: a "2" is found in any observation.
    """
    turn = parse(action)
    told = [str(leaf) for call in turn.calls for leaf in leaves(call.arguments)]
    if not turn.calls:
        told = _WORD.findall(turn.content)
    found = dict.fromkeys(words(value) for value in told)
    return [value for value in found if len(value) > 3]


def values_needed(actions: Sequence[str], observations: Sequence[str], opening: str) -> list[tuple[str, ...]]:
    """For each action the values it took from an earlier observation: used, not in the opening, and shown before it.

    `observations` and `opening` are `words`. A value that nothing before the action showed is no one's to give.
    """
    needed, shown = [], ""
    for action, observation in zip(actions, observations, strict=True):
        needed.append(tuple(value for value in values_used(action) if value not in opening and value in shown))
        shown += observation
    return needed


# --- for readers: people and language models -------------------------------------------------------------------------


def without_experience(text: str) -> str:
    """The text without injected experience, also where a policy repeats some of it."""
    return _INJECTED.sub("", text)


def shortened(text: str, limit: int) -> str:
    """At most about `limit` characters: the middle is left out at a visible mark."""
    if len(text) <= limit:
        return text
    head, tail = (2 * limit) // 3, limit - (2 * limit) // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[-tail:]}"


def transcript(steps: Sequence[tuple[str, str]], limit: int) -> str:
    """Numbered (action, observation) pairs between marks, each cut to `limit` characters."""
    blocks = []
    for number, (action, observation) in enumerate(steps, 1):
        told, shown = shortened(action, limit), shortened(observation, limit)
        blocks.append(f">>> STEP {number}\n<<ACTION>>\n{told}\n<<OBSERVATION>>\n{shown}\n<<END OF STEP {number}>>")
    return "\n\n".join(blocks) or "(no step was taken)"


def steps_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """(action, observation) of every step, injected experience removed."""
    return [(without_experience(s.action), without_experience(text_of(s.observation))) for s in trajectory.steps]


def rules_of(messages: Sequence[Message], limit: int) -> str:
    """The system messages of an opening: what the agent was told of its world."""
    told = [str(m.get("content") or "") for m in messages if m.get("role") == "system"]
    return shortened(without_experience("\n".join(told)), limit) or "(nothing but the task)"
