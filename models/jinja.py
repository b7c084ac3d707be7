"""A checkpoint's own chat template: Jinja, rendered as `transformers` does, and extended turn by
turn.

Nothing that others wrote becomes a control token. Before a conversation is rendered, each character
of its texts that could begin one is masked, except where it begins a text that the template looks
for, such as `<think>`. What then spells a control token is the template's, and gets a `MARK`, by
which the tokenizer knows it.

What was sampled is never rendered. The text that follows a turn (its end, the messages that answer
it, the header of the next one) is that which the template writes after a turn of a short
conversation. `ChatTemplate` checks on probes that longer conversations go on in the same way.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.template import ChatError

Message = dict[str, Any]
Tool = dict[str, Any]

MARK = "\ufdd0"  # stands before a control token; Unicode keeps it out of all texts
MASKS = [chr(0xFDD1 + i) for i in range(30)]  # stand for characters that could begin one
ROLES = ("system", "user", "assistant", "tool")
SAID = "What-the-turn-says-7Q"
ASKED = {"role": "user", "content": "Go."}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look-7Q",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    """Return the answer of a tool."""
    return {"role": "tool", "content": text}


def said(calls: int = 0, thought: str = "") -> Message:
    """Return a turn that says SAID and calls a function of that name."""
    call = {"type": "function", "function": {"name": SAID, "arguments": {"at": "x"}}}
    turn = {"role": "assistant", "content": thought + SAID}
    return turn | ({"tool_calls": [call] * calls} if calls else {})


# Conversations with several answers in a row and with empty ones. A text like a marker is added.
PROBES: tuple[list[Message], ...] = (
    [ASKED, said(), user("One."), said(), user("Two."), said(), user("")],
    [ASKED, said(), user("One."), user("Two.")],
    [ASKED, said(calls=1), answer("1"), said(calls=1), answer("")],
    [ASKED, said(calls=2), answer("1"), answer("2"), said(calls=1), answer("3")],
    [ASKED, said(thought="<think>\nHm.\n</think>\n\n"), user("One."), said(), user("Two.")],
)


class ChatTemplate:
    """A chat template in Jinja.

    Attributes: `end`, the control token that ends a turn; `ends`, all that may; `lists_tools`;
    `refused`, why messages of a role cannot be written; `rewrites`, how it changes what it wrote
    before, "" if it only appends.

    tokens: its variables, such as `bos_token`; controls: the spelling of all control tokens; ends:
    of those that may end a turn, besides that of the template. Raises ChatError for a template that
    cannot be used.
    """

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str],
        controls: Sequence[str],
        ends: Sequence[str] = (),
    ):
        try:
            self._template, literals = _compiled(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template is no Jinja template: {error}") from None
        self._tokens = dict(tokens)
        self._control = re.compile("|".join(map(re.escape, _longest_first(controls))) or "(?!)")
        firsts = sorted({control[0] for control in controls})
        if len(firsts) > len(MASKS):
            raise ChatError(f"control tokens begin with {len(firsts)} different characters")
        masks = dict(zip(firsts, MASKS))
        kept = [
            literal
            for literal in literals
            if literal[:1] in masks
            and not self._control.search(literal)
            and not any(control.startswith(literal) for control in controls)
        ]
        self._unsafe = re.compile(
            "|".join([*map(re.escape, _longest_first(kept)), f"[{re.escape(''.join(firsts))}]"])
            if firsts
            else "(?!)"
        )
        self._masks, self._unmasked = masks, str.maketrans({m: c for c, m in masks.items()})
        self._find_end(ends)
        self._find_limits()
        self.rewrites = ""

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        header: bool = True,
        **switches: Any,
    ) -> str:
        """Return a conversation as the template writes it, with a `MARK` before each control token.

        header: with the header of the next turn. switches: further variables of the template.
        Raises ChatError.
        """
        messages = _prepared(messages)
        try:
            text = self._template.render(
                messages=[self._masked(message) for message in messages],
                tools=[self._masked(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=header,
                **self._tokens,
                **switches,
            )
        except Exception as error:  # a template may fail in any way
            raise ChatError(f"the chat template cannot write this conversation: {error}") from None
        return self._control.sub(lambda found: MARK + found[0], text).translate(self._unmasked)

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool], **switches: Any) -> str:
        """Return a conversation up to the header of the next turn. Raises ChatError for what the
        template would leave out, too."""
        if tools and not self.lists_tools:
            raise ChatError(
                "the chat template lists no tools: template.name=brief writes them into the system"
                " message"
            )
        self._refuse(messages)
        return self.text(messages, tools, **switches)

    def following(self, messages: Sequence[Message], **switches: Any) -> str:
        """Return what follows a turn: the control token that ends it, the messages that answer it,
        and the header of the next turn. Raises ChatError."""
        self._refuse(messages)
        return self._following(messages, **switches)

    def reply(self, message: Message, **switches: Any) -> str:
        """Return what a model generates to say a message, with the end. Raises ChatError."""
        head = self.text([ASKED], **switches)
        whole = self.text([ASKED, message], header=False, **switches)
        if not whole.startswith(head):
            raise ChatError(
                "the chat template opens a turn otherwise than it writes it afterwards: "
                + difference(head, whole)
            )
        return whole[len(head) :][: self._end_in(whole[len(head) :])] + MARK + self.end

    def check(self, encode: Callable[[str], list[int]]) -> None:
        """Check on probes that every conversation goes on as `following` says, in text and in ids,
        and set `rewrites`. Raises ChatError with the first difference."""
        for messages, tools in self._probes():
            before = self.text(messages[:1], tools)
            for last in [i for i in range(1, len(messages)) if _is_answered(messages, i)]:
                start = max(i for i in range(last) if messages[i]["role"] == "assistant")
                whole = self.text(messages[:last], tools)
                found = whole[_end_of(whole, SAID) :]
                found = found[self._end_in(found) :]
                expected = self._following(messages[start + 1 : last])
                if found != expected:
                    asked = messages[last - 1]["role"] == "user"
                    if not (tools and asked):  # a listing of tools may move to the last question
                        raise ChatError(
                            "the chat template does not go on in one way, so that it cannot be"
                            f" extended: {difference(expected, found)}"
                        )
                    self.rewrites = self.rewrites or difference(expected, found)
                kept = self.text(messages[: start + 1], tools, header=False)
                kept = kept[: _end_of(kept, SAID)]
                if not whole.startswith(kept):
                    self.rewrites = self.rewrites or difference(kept, whole)
                if found == expected and (ids := encode(found)) != encode(whole)[-len(ids) :]:
                    raise ChatError(
                        "what the chat template adds after a turn has other ids alone than behind"
                        f" the conversation: {plain(found)!r}"
                    )
                if not whole.startswith(before):
                    self.rewrites = self.rewrites or difference(before, whole)
                before = whole

    def _probes(self) -> Iterator[tuple[list[Message], list[Tool]]]:
        marker = f"{self.end}\n{self._masks and min(self._masks)}x"
        for messages in (*PROBES, [ASKED, said(), user(marker)]):
            for tools in (
                [],
                [TOOL],
                [TOOL, TOOL | {"function": TOOL["function"] | {"name": "b"}}],
            ):
                if tools and not self.lists_tools:
                    continue
                try:
                    self._refuse(messages)
                    self.text(messages, tools)
                except ChatError:  # such conversations are refused when they occur
                    continue
                yield messages, tools

    def _following(self, messages: Sequence[Message], **switches: Any) -> str:
        answers = next((i for i, m in enumerate(messages) if m["role"] != "tool"), len(messages))
        failure = None
        for calls in {answers: None, 0: None}:
            try:
                text = self.text([ASKED, said(calls=calls), *messages], **switches)
            except ChatError as error:
                failure = failure or error
                continue
            text = text[_end_of(text, SAID) :]
            return text[self._end_in(text) :]
        assert failure
        raise failure

    def _find_end(self, ends: Sequence[str]) -> None:
        """Set `end` and `ends`. Raises ChatError if a plain conversation cannot be written."""
        text = self.text([ASKED, said(), user("One.")])
        if SAID not in text:
            raise ChatError("the chat template does not write what the assistant said")
        found = re.compile(f"{MARK}({self._control.pattern})").search(text, _end_of(text, SAID))
        if not found or "One." in text[_end_of(text, SAID) : found.start()]:
            raise ChatError(
                "the chat template writes no control token after what the assistant said: no token"
                " could end a turn"
            )
        self.end = found[1]
        self.ends = list(dict.fromkeys([self.end, *ends]))

    def _find_limits(self) -> None:
        """Set `lists_tools` and `refused`."""
        self.refused: dict[str, str] = {}
        try:
            self.lists_tools = TOOL["function"]["name"] in self.text([ASKED], [TOOL])
        except ChatError:
            self.lists_tools = False
        probe = "Text-of-a-role-7Q"
        for role in ("system", "tool"):
            try:
                message = {"role": role, "content": probe}
                text = self._following([message]) if role == "tool" else self.text([message, ASKED])
                if probe not in text:
                    self.refused[role] = "it leaves them out"
                elif SAID in text:
                    self.refused[role] = "it repeats the name of the call, which they lack"
            except ChatError as error:
                self.refused[role] = str(error)

    def _refuse(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if reason := self.refused.get(message.get("role", "")):
                raise ChatError(
                    f"the chat template cannot write messages of the role {message['role']}:"
                    f" {reason}"
                )

    def _end_in(self, text: str) -> int:
        """Return where a marked end of a turn begins in a text. Raises ChatError."""
        found = [place for end in self.ends if (place := text.find(MARK + end)) >= 0]
        if not found:
            raise ChatError(f"the chat template does not end every turn with {self.end}")
        return min(found)

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            value = value.translate(_NO_MARKS)
            return self._unsafe.sub(lambda found: self._masks.get(found[0], found[0]), value)
        if isinstance(value, Mapping):
            return {self._masked(key): self._masked(held) for key, held in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._masked(held) for held in value]
        return value


_NO_MARKS = str.maketrans(dict.fromkeys([MARK, *MASKS], "\ufffd"))


def plain(text: str) -> str:
    """Return a text without marks."""
    return text.replace(MARK, "")


def difference(expected: str, found: str) -> str:
    """Return the first difference of two texts, with what stands before it."""
    expected, found = plain(expected), plain(found)
    pairs = enumerate(zip(expected, found))
    n = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    return (
        f"after {expected[max(0, n - 40) : n]!r}, {expected[n : n + 60]!r} is {found[n : n + 60]!r}"
    )


def _is_answered(messages: Sequence[Message], end: int) -> bool:
    """Return True if the messages before `end` answer a turn, and all of its calls."""
    start = max((i for i in range(end) if messages[i]["role"] == "assistant"), default=end)
    calls = len(messages[start].get("tool_calls", ())) if start < end else 0
    return 0 < end - start - 1 >= calls


def _end_of(text: str, part: str) -> int:
    place = text.rfind(part)
    if place < 0:
        raise ChatError("the chat template does not write what the assistant said")
    return place + len(part)


def _longest_first(texts: Sequence[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _prepared(messages: Sequence[Message]) -> list[Message]:
    """Return messages as templates expect them: calls have ids, and answers those of their calls.
    Raises ChatError."""
    result: list[Message] = []
    waiting: list[Message] = []
    number = 0
    for message in messages:
        role, content = message.get("role"), message.get("content")
        calls = message.get("tool_calls") or ()
        if role not in ROLES:
            raise ChatError(
                f"unknown role {role!r}; the template knows system, user, assistant and tool"
            )
        if not isinstance(content, str) and (content is not None or role != "assistant"):
            raise ChatError(
                f"the content of a {role} message must be text, not {type(content).__name__}"
            )
        one: Message = {"role": role, "content": content or ""}
        if isinstance(thought := message.get("reasoning_content"), str):
            one |= {"reasoning_content": thought, "thinking": thought}
        if calls:
            one["tool_calls"] = waiting = []
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function["arguments"], dict):
                raise ChatError(
                    "the arguments of a tool call must be a JSON object, not"
                    f" {type(function['arguments']).__name__}"
                )
            id = call.get("id") or f"call{number:05}"  # Mistral's have nine characters
            number += 1
            function = {"name": function["name"], "arguments": function["arguments"]}
            waiting.append({"id": id, "type": "function", "function": function})
        if role == "tool" and waiting:
            call, waiting = waiting[0], waiting[1:]
            one |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        result.append(one)
    return result


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, by which templates for training mark what the model wrote."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[jinja2.Template, list[str]]:
    """Return a template in the environment of `transformers`, and the strings in it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    strings = [node.value for node in environment.parse(source).find_all(jinja2.nodes.Const)]
    return environment.from_string(source), [s for s in strings if isinstance(s, str) and s]


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
