"""The formats in which policies call tools, each with its reader and its writer.

Tasks, worlds and judges know one, that of envs/toolcalls.py (Hermes, as Qwen calls). A turn of a
policy that has learnt another is read here, once, and handed on in that one; a demonstrated turn is
written in the policy's own. The reading is strict: what only resembles a call is an error that the
model can read, and never an answer or another call.

    hermes        <tool_call>\\n{"name": "search", "arguments": {"to": "Rome"}}\\n</tool_call>
    llama3_json   {"name": "search", "parameters": {"to": "Rome"}}
    mistral       [TOOL_CALLS] [{"name": "search", "arguments": {"to": "Rome"}}]
                  [TOOL_CALLS]search[ARGS]{"to": "Rome"}                 (of its later models)

A call of Llama 3 stands alone in its turn, behind `<|python_tag|>` or not. A call of Mistral may
have an id of nine letters and digits: "id", or `[CALL_ID]` behind the name. Another format is a
subclass of `CallFormat`.
"""

import json
import re
from typing import Any

from envs import toolcalls
from envs.toolcalls import END_THINK, THINK, Call, ParsedTurn

PYTHON, CALLS = "<|python_tag|>", "[TOOL_CALLS]"
# What calls look like, also where no call is read.
_LOOSE = re.compile(
    r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"\s*:|'
    + "|".join(map(re.escape, (toolcalls.OPEN, toolcalls.CLOSE, PYTHON, CALLS)))
)
_ID = re.compile("[a-zA-Z0-9]{9}")
_NAMED = re.compile(
    rf"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>{_ID.pattern}))?(?:\[ARGS\])?(?=\{{)"
)
_THOUGHT_ENDS = re.compile(re.escape(END_THINK))
_BETWEEN = re.compile(rf"\s*(?:{re.escape(CALLS)}(?!\s*$)|$)")


class CallFormat:
    """A format of calls. Subclasses define `example`, `begins`, `calls` and `write`."""

    example: str  # how a call is written, for messages to the model
    begins: re.Pattern[str]  # what is said up to the first call, matched behind the thought

    def calls(self, text: str) -> list[Call]:
        """Return the calls in the text behind what `begins` matches. Raises ValueError with a
        message for the model."""
        raise NotImplementedError

    def write(self, content: str, calls: list[Call]) -> str:
        """Return the text of a turn with calls."""
        raise NotImplementedError

    def read(self, text: str) -> ParsedTurn:
        """Return what is in a turn. Never raises. Of a turn with an error, no call is read."""
        starts = [0, *(found.end() for found in _THOUGHT_ENDS.finditer(text))]
        start = next((s for s in starts if self.begins.match(text, s)), starts[-1])
        turn = ParsedTurn("", thought=text[:start])
        begun = self.begins.match(text, start)
        said = text[start : begun.end("said")] if begun else text[start:]
        said, unclosed, _ = said.partition(THINK)
        turn.content = said.strip()
        try:
            if unclosed:
                raise ValueError(f"{THINK} without {END_THINK}")
            if _LOOSE.search(said):
                raise ValueError(f"tool call is not in the format {self.example}")
            turn.calls = self.calls(text[begun.end() :]) if begun else []
        except ValueError as error:
            turn.errors.append(str(error))
        return turn


class Hermes(CallFormat):
    """The format of envs/toolcalls.py."""

    example = '<tool_call>\n{"name": TOOL, "arguments": {PARAMETER: VALUE}}\n</tool_call>'

    def read(self, text: str) -> ParsedTurn:
        return toolcalls.parse(text)

    def write(self, content: str, calls: list[Call]) -> str:
        texts = [toolcalls.call_text(call.name, call.arguments) for call in calls]
        return "\n".join([content] * bool(content) + texts)


class Llama3Json(CallFormat):
    """A turn that is one JSON object, as Llama 3.1's and 3.2's templates write it."""

    example = '{"name": TOOL, "parameters": {PARAMETER: VALUE}}'
    begins = re.compile(rf"(?P<said>\s*)(?:{re.escape(PYTHON)}|(?=\{{))")

    def calls(self, text: str) -> list[Call]:
        return [toolcalls.call_of(toolcalls.loads(text), "parameters")]

    def write(self, content: str, calls: list[Call]) -> str:
        if len(calls) > 1:
            raise ValueError("llama3_json has one call a turn")
        return _json({"name": calls[0].name, "parameters": calls[0].arguments})


class Mistral(CallFormat):
    """Calls behind a control token: a list, as the templates of Mistral 7B v0.3 and Nemo write it,
    or a name and its arguments, as those of later models do."""

    example = f'{CALLS} [{{"name": TOOL, "arguments": {{PARAMETER: VALUE}}}}]'
    begins = re.compile(
        rf"(?P<said>(?:(?!{THINK}|{END_THINK}|{re.escape(CALLS)}).)*){re.escape(CALLS)}", re.DOTALL
    )

    def calls(self, text: str) -> list[Call]:
        if _NAMED.match(text):
            return self._named(text)
        records = toolcalls.loads(text)
        if not isinstance(records, list) or not records:
            raise ValueError(f"tool call is not in the format {self.example}")
        made = [toolcalls.call_of(record, "arguments", "id") for record in records]
        for call, record in zip(made, records):
            call.id = record.get("id", "")
            if "id" in record and not (isinstance(call.id, str) and _ID.fullmatch(call.id)):
                raise ValueError('"id" of a tool call must be nine letters and digits')
        return made

    def _named(self, text: str) -> list[Call]:
        made, place = [], 0
        while head := _NAMED.match(text, place):
            try:
                end = json.JSONDecoder().raw_decode(text, head.end())[1]
            except (ValueError, RecursionError):
                end = len(text)  # which `loads` explains
            arguments = toolcalls.loads(text[head.end() : end])
            call = toolcalls.call_of({"name": head["name"], "arguments": arguments})
            call.id = head["id"] or ""
            made.append(call)
            between = _BETWEEN.match(text, end)
            place = between.end() if between else len(text) + 1
        if place != len(text):
            raise ValueError(
                f"tool call is not in the format {CALLS}TOOL[ARGS]{{PARAMETER: VALUE}}"
            )
        return made

    def write(self, content: str, calls: list[Call]) -> str:
        records = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return f"{content}{CALLS} {_json(records)}"


FORMATS = {"hermes": Hermes(), "llama3_json": Llama3Json(), "mistral": Mistral()}


def written_in(text: str, call: Call) -> str:
    """Return the name of the format in which a turn makes this call and nothing else, "" if it is
    none that is known."""
    for name, known in FORMATS.items():
        turn = known.read(text)
        if turn.calls == [call] and not turn.errors:
            return name
    return ""


def as_hermes(text: str, known: CallFormat) -> str:
    """Return a turn as worlds read it, in the format of envs/toolcalls.py: the very text if it has
    neither calls nor errors."""
    if isinstance(known, Hermes):
        return text
    turn = known.read(text)
    said = text[len(turn.thought) :]
    if turn.errors:
        said = toolcalls.refusal_text(turn.errors[0], said.strip())
    elif turn.calls:
        said = FORMATS["hermes"].write(turn.content, turn.calls)
    for whole in (turn.thought + said, said):  # a thought may hold tags
        found = toolcalls.parse(whole)
        if (found.calls, found.errors) == (turn.calls, turn.errors):
            return whole
    return toolcalls.refusal_text(f"tool call is not in the format {known.example}", said)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
