"""Texts of episodes: their words, and transcripts for people and language models that nothing in
the episode can forge."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from envs.world import Message, Tool, text_of
from rl.trajectory import Trajectory

_WORD = re.compile(r"\w+")
# a character inside a number, a date or a hyphenated word, such as the 3 and the 7 of 3.7
_PART = re.compile(r"(?<=\d[.:])\w\b|(?<=\w['/-])\w\b|\b\w(?=[.:]\d|['/-]\w|,\d{3}\b)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
# the beginning of a line that could pass for a mark of a transcript or a heading of a prompt
_MARK = re.compile(
    r"\W*(?:>>>|<<|===|(?i:overall\W+outcome|(?:end\W+of\W+)?step\W*\d|attempt\W*\d))"
    r"|\s*[A-Z][A-Z']*\s+(?:[A-Z]{2}|\d+\s+[A-Z]{2})"
)
COPIED = "[experience]"  # replaces sentences that a policy copied from the experience it was given


def words(text: str) -> str:
    """Return the lower-case words with one space around each, so that `" a b " in words(text)`
    matches whole words.

    A single character inside a number, a date or a hyphenated word gets a "_", so that " 7 " does
    not match 3.7.
    """
    marked = _PART.sub(r"_\g<0>", text.lower())
    return f" {' '.join(_WORD.findall(marked))} "


def scripts(text: str) -> list[str]:
    """Return the scripts of a text's letters ("LATIN", "CYRILLIC", "CJK" ...), the most frequent
    first."""
    names = (unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha())
    return [script for script, _ in Counter(names).most_common()]


def exchanges_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return (action, observation) of every turn, as they were: what a judge has to see.

    Experience is injected into the opening only. An `<EXP>` in a turn was written by the policy or
    the world, so removing it would hide executed calls.
    """
    return [(turn.action, text_of(turn.observation)) for turn in trajectory.turns]


def without_experience(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return the exchanges with COPIED in place of the sentences that the policy copied from the
    experience it was given.

    Otherwise an extractor would learn its own experience again. Sentences of fewer than four words
    are kept, because they are too common to be copies. So are those that only the world wrote:
    experience may have quoted them.
    """
    exchanges = cleaned = exchanges_of(trajectory)
    for sentence in _SENTENCE.split("\n".join(trajectory.injected)):
        parts = sentence.split()
        copy = re.compile(r"\s+".join(map(re.escape, parts)))
        if len(parts) >= 4 and any(copy.search(action) for action, _ in exchanges):
            cleaned = [(copy.sub(COPIED, a), copy.sub(COPIED, o)) for a, o in cleaned]
    return cleaned


def shortened(text: str, limit: int) -> str:
    """Return about `limit` characters of a longer text: its middle is replaced by a visible
    mark."""
    if len(text) <= limit:
        return text
    head = (2 * limit) // 3
    tail = limit - (2 * limit) // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[-tail:]}"


def quoted(text: str) -> str:
    """Return the text with "| " before each line that looks like a mark of a transcript or a
    heading of a prompt."""
    lines = text.splitlines(keepends=True)
    return "".join(f"| {line}" if _MARK.match(_visible(line)) else line for line in lines)


def _visible(line: str) -> str:
    """Return a line with compatibility characters (NFKC) replaced and invisible ones removed."""
    plain = unicodedata.normalize("NFKC", line)
    return "".join(c for c in plain if c == "\t" or unicodedata.category(c)[0] != "C")


def transcript(exchanges: Sequence[tuple[str, str]], limit: int) -> str:
    """Return (action, observation) pairs as numbered text, between marks that the pairs cannot
    forge.

    Each text is cut to about `limit` characters.
    """
    blocks = []
    for number, texts in enumerate(exchanges, 1):
        action, observation = (quoted(shortened(text, limit)) for text in texts)
        blocks.append(
            f">>> STEP {number}\n<<ACTION>>\n{action}\n<<OBSERVATION>>\n{observation}\n"
            f"<<END OF STEP {number}>>"
        )
    return "\n\n".join(blocks) or "(no step was taken)"


def rules_of(messages: Sequence[Message], limit: int) -> str:
    """Return the system messages of an opening, which describe the environment to the agent."""
    rules = text_of([message for message in messages if message.get("role") == "system"])
    return shortened(rules, limit) or "(nothing but the task)"


def tool_list(tools: Sequence[Tool], limit: int) -> str:
    """Return the tools in one line each: name, arguments with their types ("?" = optional), start
    of the description.

    Lines that do not fit into `limit` characters are counted instead of shown.
    """
    lines: list[str] = []
    for tool in tools:
        line = _tool_line(tool)
        limit -= len(line) + 1
        if limit < 0:
            return "\n".join([*lines, f"(and {len(tools) - len(lines)} more)"])
        lines.append(line)
    return "\n".join(lines) or "(none are listed)"


def _tool_line(tool: Tool) -> str:
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    arguments = []
    for name, schema in (parameters.get("properties") or {}).items():
        optional = "" if name in (parameters.get("required") or ()) else "?"
        kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
        arguments.append(f"{name}{optional}: {kind}")
    description = " ".join(str(function.get("description") or "").split())[:120]
    line = f"- {function.get('name', '?')}({', '.join(arguments)}): {description}"
    return quoted(" ".join(line.removesuffix(": ").split()))
