"""Helpers that read and replay episodes: which turns reached the world, and where the values of an
action come from.

An agent can only make a call if it knows the arguments. A replay that ignores this keeps a booking
but drops the search that revealed its flight number. Self-questioning and self-attributing both use
these functions to avoid that.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envs.toolcalls import parse
from envs.world import Message, Observation, Task, Tool, World
from rl.trajectory import Completion, StopReason, Trajectory, Turn

_CUT = (StopReason.LENGTH, StopReason.CONTEXT_FULL)
_WORD = re.compile(r"\w+")
_PART = re.compile(
    r"(?<=\d[.:])\w\b|(?<=\w['/-])\w\b|\b\w(?=[.:]\d|['/-]\w|,\d{3}\b)"
)  # the 3 and the 7 of 3.7
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
# the beginning of a line that could pass for a mark of a transcript or a heading of a prompt
_MARK = re.compile(
    r"\W*(?:>>>|<<|===|(?i:overall\W+outcome|(?:end\W+of\W+)?step\W*\d|attempt\W*\d))"
    r"|\s*[A-Z][A-Z']*\s+(?:[A-Z]{2}|\d+\s+[A-Z]{2})"
)
COPIED = "[experience]"  # replaces sentences that a policy copied from the experience it was given


# --- replay ---------------------------------------------------------------------------------------


def play(world: World, task: Task, actions: Iterable[str]) -> None:
    """Play `actions` from the start of `task` until they are used up or the episode ends."""
    world.reset(task, task.seed)
    for action in actions:
        result = world.step(action)
        if result.terminated or result.truncated:
            break


def attempt(
    world: World,
    task: Task,
    actions: Iterable[str],
    *,
    rollout: int = 0,
    experience: Sequence[str] = (),
) -> Trajectory:
    """Play `actions` and return the trajectory that a rollout would record, without tokens."""
    opening = world.reset(task, task.seed)
    trajectory = Trajectory(
        task, rollout, 0, opening.messages, experience=list(experience), tools=opening.tools
    )
    trajectory.stop = StopReason.MAX_TURNS
    for action in actions:
        result = world.step(action)
        trajectory.turns.append(
            Turn([], Completion([], [], "stop", 0), action, result.messages, result.info)
        )
        if result.terminated or result.truncated:
            trajectory.stop = StopReason.DONE
            break
    trajectory.evaluation = world.evaluate()
    return trajectory


def snapshot_of(world: World) -> Any:
    """Return a snapshot of the episode, None if the world has no snapshots."""
    try:
        return world.snapshot()
    except NotImplementedError:
        return None


def renaming(
    before: Sequence[str], after: Sequence[str], same_kind: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return {old id: new id}: words that differ at the same position of two answers to one call.

    When a replay leaves out an earlier call, the world may assign other ids. `same_kind(old, new)`
    returns True if both words can be ids of the same thing. Answers of different length give {}.
    """
    if len(before) != len(after):
        return {}
    return {a: b for a, b in zip(before, after, strict=True) if a != b and same_kind(a, b)}


def played(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that reached the world: all but a final one that the token limit cut, and
    those that answered the context template."""
    turns = trajectory.turns
    cut = trajectory.stop in _CUT and turns and turns[-1].completion.stop == "length"
    cut = cut and not (
        turns[-1].observation or turns[-1].info
    )  # `template.cut_turn=continue` sends it to the world
    return [turn for turn in (turns[:-1] if cut else turns) if not turn.info.get("managing")]


# --- words and values -----------------------------------------------------------------------------


def words(text: str) -> str:
    """Return the lower-case words with one space around each, so that `" a b " in words(text)`
    matches whole words.

    A single character inside a number, a date or a hyphenated word gets a "_", so that " 7 " does
    not match 3.7.
    """
    marked = _PART.sub(r"_\g<0>", text.lower())
    return f" {' '.join(_WORD.findall(marked))} "


def text_of(messages: Sequence[Message]) -> str:
    """Return the contents of messages, joined by newlines."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def opening_words(observation: Observation) -> str:
    """Return the `words` that are known before the first action: opening messages and tool
    schemas."""
    return words(text_of(observation.messages) + "\n" + json.dumps(observation.tools))


def leaves(value: Any) -> list[Any]:
    """Return the strings and numbers inside a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in leaves(inner)]
    return [] if value is None or isinstance(value, bool) else [value]


def values_used(action: str) -> list[str]:
    """Return the values an action relies on, as `words`: the arguments of its calls or, without
    calls, its text.

    Words of one character are left out of a text, where they are articles and counts more often
    than ids.
    """
    turn = parse(action)
    values = [str(leaf) for call in turn.calls for leaf in leaves(call.arguments)]
    if not turn.calls:
        values = [word for word in _WORD.findall(turn.content) if len(word) > 1]
    return [value for value in dict.fromkeys(map(words, values)) if value.strip()]


def executed(turn: Turn) -> str:
    """Return the part of an action that the world executed, for tracing its values. Without
    readable calls, these are
    the arguments that the world reports: the line of a text adventure or a block of code, without
    the thoughts around it, which may repeat any word that was shown."""
    calls = turn.info.get("calls") or ()
    if parse(turn.action).calls or not calls:
        return turn.action
    return "\n".join(str(leaf) for call in calls for leaf in leaves(call["arguments"]))


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
        needed.append(
            tuple(value for value in values_used(action) if value not in opening and value in shown)
        )
        shown += observation
    return needed


# --- text for people and language models ----------------------------------------------------------


def exchanges_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return (action, observation) of every turn, as they were: what a judge has to see.

    Experience is injected into the opening only. An `<EXP>` in a turn was written by the policy or
    the world, so removing it would hide executed calls.
    """
    return [(turn.action, text_of(turn.observation)) for turn in trajectory.turns]


def unguided(
    exchanges: Sequence[tuple[str, str]], injected: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the exchanges with COPIED in place of the sentences that the policy copied from
    `injected`.

    Otherwise an extractor would learn its own experience again. Sentences of fewer than four words
    are kept, because
    they are too common to be copies. So are those that only the world wrote: experience may have
    quoted them.
    """
    sentences = [sentence.split() for text in injected for sentence in _SENTENCE.split(text)]
    patterns = [
        re.compile(r"\s+".join(map(re.escape, words))) for words in sentences if len(words) >= 4
    ]
    patterns = [
        pattern for pattern in patterns if any(pattern.search(action) for action, _ in exchanges)
    ]

    def without(text: str) -> str:
        for pattern in patterns:
            text = pattern.sub(COPIED, text)
        return text

    return [(without(action), without(observation)) for action, observation in exchanges]


def shortened(text: str, limit: int) -> str:
    """Return about `limit` characters of a longer text: its middle is replaced by a visible
    mark."""
    if len(text) <= limit:
        return text
    head, tail = (2 * limit) // 3, limit - (2 * limit) // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[-tail:]}"


def quoted(text: str) -> str:
    """Return the text with "| " before each line that looks like a mark of a transcript or a
    heading of a prompt."""
    lines = text.splitlines(keepends=True)
    return "".join(f"| {line}" if _MARK.match(_bare(line)) else line for line in lines)


def _bare(line: str) -> str:
    """Return a line with compatibility characters (NFKC) replaced and invisible ones removed."""
    return "".join(
        c
        for c in unicodedata.normalize("NFKC", line)
        if c == "\t" or unicodedata.category(c)[0] != "C"
    )


def transcript(exchanges: Sequence[tuple[str, str]], limit: int) -> str:
    """Return (action, observation) pairs as numbered text, between marks that the pairs cannot
    forge.

    Each text is cut to about `limit` characters.
    """
    blocks = []
    for number, texts in enumerate(exchanges, 1):
        action, observation = (quoted(shortened(text, limit)) for text in texts)
        blocks.append(
            f">>> STEP {number}\n<<ACTION>>\n{action}\n<<OBSERVATION>>\n{observation}\n<<END OF STEP {number}>>"
        )
    return "\n\n".join(blocks) or "(no step was taken)"


def scripts(text: str) -> list[str]:
    """Return the scripts of a text's letters ("LATIN", "CYRILLIC", "CJK" ...), the most frequent
    first."""
    names = (unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha())
    return [script for script, _ in Counter(names).most_common()]


def rules_of(messages: Sequence[Message], limit: int) -> str:
    """Return the system messages of an opening, which describe the environment to the agent."""
    rules = [str(m.get("content") or "") for m in messages if m.get("role") == "system"]
    return shortened("\n".join(rules), limit) or "(nothing but the task)"


def tool_list(tools: Sequence[Tool], limit: int) -> str:
    """Return the tools in one line each: name, arguments with their types ("?" = optional), start
    of the description.

    Lines that do not fit into `limit` characters are counted instead of shown.
    """
    lines, left = [], limit
    for tool in tools:
        line = _tool_line(tool)
        left -= len(line) + 1
        if left < 0:
            return "\n".join([*lines, f"(and {len(tools) - len(lines)} more)"])
        lines.append(line)
    return "\n".join(lines) or "(none are listed)"


def _tool_line(tool: Tool) -> str:
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any') if isinstance(schema, dict) else 'any'}"
        for name, schema in (parameters.get("properties") or {}).items()
    )
    description = " ".join(str(function.get("description") or "").split())[:120]
    line = f"- {function.get('name', '?')}({arguments}): {description}".removesuffix(": ")
    return quoted(" ".join(line.split()))
