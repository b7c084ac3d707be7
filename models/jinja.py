"""A checkpoint's own chat template: Jinja, rendered by `transformers`, and extended turn by turn.

Nothing that others wrote becomes a control token. Before a conversation is rendered, each character
of its texts that could begin one is masked, except where it begins a text that the template looks
for, such as `<think>`. What then spells a control token is the template's, and gets a `MARK`, by
which the tokenizer knows it.

What was sampled is never rendered. The text that follows a turn (its end, the messages that answer
it, the header of the next one) is that which the template writes after a turn of a short
conversation. `ChatTemplate.check` tries on probes that longer conversations go on in the same way.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from models.hf_config import transformers

Message = dict[str, Any]
Tool = dict[str, Any]

# The template that shipped policies are saved with, and Qwen3's own (Apache-2.0).
QWEN25, QWEN3 = (Path(__file__).with_name(f"{n}.jinja").read_text() for n in ("qwen2_5", "qwen3"))
SWITCH = "enable_thinking"  # the variable by which `transformers` switches thoughts off
MARK = "\ufdd0"  # stands before a control token; Unicode keeps it out of all texts
MASKS = [chr(0xFDD1 + i) for i in range(30)]  # stand for characters that could begin one
ROLES = ("system", "user", "assistant", "tool")
SAID, CALLED = "What-the-turn-says-7Q", "look-7Q"
NO_TEMPLATE = "the chat template is no Jinja template"
UNREADABLE = "unreadable"  # stands for the name of a call that could not be read
ASKED = {"role": "user", "content": "Go."}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": CALLED,
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class ChatError(ValueError):
    """A message that the chat template cannot write, or a template that cannot be used."""


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    """Return the answer of a tool."""
    return {"role": "tool", "content": text}


def said(*calls: tuple[str, str], text: str = SAID) -> Message:
    """Return a turn that says a text, and calls functions, each a name and an id, with it."""
    turn = {"role": "assistant", "content": text}
    made = [{"id": id, "name": name, "arguments": {"at": text}} for name, id in calls]
    return turn | ({"tool_calls": made} if made else {})


CALL = (CALLED, "")
Turn = tuple[Message, list[Message]]  # and the messages that answer it
# What follows the first question. A text like a marker is added.
PROBES: tuple[list[Turn], ...] = (
    [(said(), [user("One.")]), (said(), [user("Two.")]), (said(), [user("")])],
    [(said(), [user("One."), user("Two.")])],
    [(said(CALL), [answer("1")]), (said(), [user("One.")])],
    [(said(CALL, CALL), [answer("1"), answer("2")])],
    [(said(text=f"<think>\nHm.\n</think>\n\n{SAID}"), [user("One.")]), (said(), [user("Two.")])],
)


class ChatTemplate:
    """A chat template in Jinja.

    Attributes: `end`, the control token that ends a turn; `ends`, all that may; `header`, the text
    that begins one; `lists_tools`; `refused`, why messages of a role cannot be written; `call`, how
    it writes a call of CALLED with SAID, "" if it does not; `repeats_calls`: it writes the name or
    the id of a call before the answer; `rewrites`, how it changes what it wrote before, "" if it
    only appends.

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
            literals = _strings(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"{NO_TEMPLATE}: {error}") from None
        self._source, self._tokens = source, dict(tokens)
        longest = sorted(controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        firsts = sorted({control[0] for control in controls})
        if len(firsts) > len(MASKS):
            raise ChatError(f"control tokens begin with {len(firsts)} different characters")
        self._masks = dict(zip(firsts, MASKS))
        self._unmasked = str.maketrans(dict(zip(MASKS, firsts)))
        kept = [
            literal
            for literal in sorted(literals, key=len, reverse=True)
            if literal[:1] in self._masks
            and not self._control.search(literal)
            and not any(control.startswith(literal) for control in controls)
        ]
        self._unsafe = re.compile("|".join(map(re.escape, [*kept, *firsts])) or "(?!)")
        self.rewrites = ""
        self._find_end(ends)
        self._find_limits()

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
            (text,), _ = transformers().utils.chat_template_utils.render_jinja_template(
                [self._masked(messages)],
                self._masked(tools) or None,
                chat_template=self._source,
                add_generation_prompt=header,
                **self._tokens,
                **switches,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"{NO_TEMPLATE}: {error}") from None
        except Exception as error:  # a template may fail in any way
            raise ChatError(f"the chat template cannot write this conversation: {error}") from None
        return self._control.sub(rf"{MARK}\g<0>", text).translate(self._unmasked)

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

    def following(
        self, messages: Sequence[Message], calls: Sequence[tuple[str, str]] = (), **switches: Any
    ) -> str:
        """Return what follows a turn: the control token that ends it, the messages that answer it,
        and the header of the next turn. calls: the name and the id of each call of the turn; only
        some templates write them. Raises ChatError."""
        self._refuse(messages)
        answers = next((i for i, m in enumerate(messages) if m["role"] != "tool"), len(messages))
        made = [*calls[:answers], *[(UNREADABLE, "")] * (answers - len(calls))]
        mark, others = SAID, f"{messages}{made}"
        while mark in others:  # whoever wrote that
            mark += "."
        try:
            text = self.text([ASKED, said(*made, text=mark), *messages], **switches)
        except ChatError:
            if not made:
                raise
            # some refuse several calls of one turn
            text = self.text([ASKED, said(text=mark), *messages], **switches)
        return self._after(text, mark)

    def reply(self, message: Message, **switches: Any) -> str:
        """Return what a model generates to say a message, with the end. Raises ChatError."""
        head = self.text([ASKED], **switches)
        whole = self.text([ASKED, message], header=False, **switches)
        if not whole.startswith(head):
            raise ChatError(
                "the chat template opens a turn otherwise than it writes it afterwards: "
                + difference(head, whole)
            )
        turn = whole[len(head) :]
        return turn[: self._end_in(turn)] + MARK + self.end

    def check(self, encode: Callable[[str], list[int]]) -> None:
        """Check on probes that every conversation goes on as `following` says, in text and in ids,
        and set `rewrites`. Raises ChatError with the first difference."""
        marker = f"{self.end}\n{self._masks and min(self._masks)}x"
        other = TOOL | {"function": TOOL["function"] | {"name": "b"}}
        for turns in (*PROBES, [(said(), [user(marker)])]):
            for tools in ([], [TOOL], [TOOL, other]) if self.lists_tools else ([],):
                messages = [ASKED, *itertools.chain(*([turn, *rest] for turn, rest in turns))]
                try:
                    self.opening(messages, tools)
                except ChatError:  # such conversations are refused when they occur
                    continue
                self._check(turns, tools, encode)

    def _check(
        self, turns: list[Turn], tools: list[Tool], encode: Callable[[str], list[int]]
    ) -> None:
        messages, before = [ASKED], self.text([ASKED], tools)
        for turn, answers in turns:
            kept = self.text([*messages, turn], tools, header=False)
            messages += [turn, *answers]
            whole = self.text(messages, tools)
            found = self._after(whole)
            expected = self.following(answers, [CALL] * len(turn.get("tool_calls", ())))
            for earlier in (before, kept[: _end_of(kept)], whole[: -len(found)] + expected):
                if not whole.startswith(earlier):
                    self.rewrites = self.rewrites or difference(earlier, whole)
            # A listing of tools may move to the last question.
            if found != expected and not (tools and answers[-1]["role"] == "user"):
                raise ChatError(
                    "the chat template does not go on in one way, so that it cannot be extended: "
                    + difference(expected, found)
                )
            if found == expected and (ids := encode(found)) != encode(whole)[-len(ids) :]:
                raise ChatError(
                    "what the chat template adds after a turn has other ids alone than behind the"
                    f" conversation: {found.replace(MARK, '')!r}"
                )
            before = whole

    def _find_end(self, ends: Sequence[str]) -> None:
        """Set `end`, `ends` and `header`. Raises ChatError if a plain conversation cannot be
        written."""
        text = self.text([ASKED, said(), user("One.")])
        found = re.compile(f"{MARK}({self._control.pattern})").search(text, _end_of(text))
        if not found or "One." in text[_end_of(text) : found.start()]:
            raise ChatError(
                "the chat template writes no control token after what the assistant said: no token"
                " could end a turn"
            )
        self.end = found[1]
        self.ends = list(dict.fromkeys([self.end, *ends]))
        opened, asked = self.text([ASKED]), self.text([ASKED], header=False)
        self.header = opened[len(asked) :] if opened.startswith(asked) else ""

    def _find_limits(self) -> None:
        """Set `lists_tools`, `refused`, `call` and `repeats_calls`."""
        self.refused: dict[str, str] = {}
        probe = "Text-of-a-role-7Q"
        system, tool = {"role": "system", "content": probe}, answer(probe)

        def tried(write: Callable[..., str], *arguments: Any, **more: Any) -> tuple[str, str]:
            """Return (the text that a method writes, why it writes none)."""
            try:
                return write(*arguments, **more), ""
            except ChatError as error:
                return "", str(error)

        written = {
            "system": tried(self.text, [system, ASKED]),
            "tool": tried(self.following, [tool]),
        }
        for role, (text, why) in written.items():
            if probe not in text:
                self.refused[role] = why or "it leaves them out"
        self.lists_tools = CALLED in tried(self.text, [ASKED], [TOOL])[0]
        whole = tried(self.text, [ASKED, said(CALL)], header=False)[0]
        turn = tried(self.reply, said(CALL))[0] or whole  # some open a turn in another way
        turn = turn.removesuffix(MARK + self.end).replace(MARK, "")
        self.call = turn if CALLED in whole else ""
        named = {tried(self.following, [tool], [call])[0] for call in (CALL, ("b", "b00000000"))}
        self.repeats_calls = len(named) == 2

    def _refuse(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if reason := self.refused.get(message.get("role", "")):
                raise ChatError(
                    f"the chat template cannot write messages of the role {message['role']}:"
                    f" {reason}"
                )

    def _after(self, text: str, mark: str = SAID) -> str:
        """Return what follows the turn that says a text, from its end on. Raises ChatError."""
        text = text[_end_of(text, mark) :]
        return text[self._end_in(text) :]

    def _end_in(self, text: str) -> int:
        """Return where a marked end of a turn begins in a text. Raises ChatError."""
        found = re.search("|".join(re.escape(MARK + end) for end in self.ends), text)
        if not found:
            raise ChatError(f"the chat template does not end every turn with {self.end}")
        return found.start()

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


def thoughtless(template: str) -> str:
    """Return a template in which the model does not think, unless the caller asks for it."""
    return (
        f"{{%- if {SWITCH} is not defined -%}}{{%- set {SWITCH} = false -%}}{{%- endif -%}}\n"
        + template
    )


def difference(expected: str, found: str) -> str:
    """Return the first difference of two texts, with what stands before it."""
    expected, found = expected.replace(MARK, ""), found.replace(MARK, "")
    pairs = enumerate(zip(expected, found))
    n = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    return (
        f"after {expected[max(0, n - 40) : n]!r}, {expected[n : n + 60]!r} is {found[n : n + 60]!r}"
    )


def _end_of(text: str, mark: str = SAID) -> int:
    """Return where the last mark in a text ends. Raises ChatError."""
    place = text.rfind(mark)
    if place < 0:
        raise ChatError("the chat template does not write what the assistant said")
    return place + len(mark)


def _prepared(messages: Sequence[Message]) -> list[Message]:
    """Return messages as templates expect them: calls have ids, and answers the ids and names of
    their calls. Raises ChatError."""
    result: list[Message] = []
    waiting: list[Message] = []
    ids = (f"call{number:05}" for number in itertools.count())  # nine characters, as Mistral's
    for message in messages:
        role, content = message.get("role"), message.get("content")
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
        calls = message.get("tool_calls") or ()
        if calls:
            one["tool_calls"] = waiting = []
        for call in calls:
            function = call.get("function", call)
            if not isinstance(arguments := function["arguments"], dict):
                raise ChatError(
                    "the arguments of a tool call must be a JSON object, not"
                    f" {type(arguments).__name__}"
                )
            function = {"name": function["name"], "arguments": arguments}
            id = call.get("id") or next(ids)
            waiting.append({"id": id, "type": "function", "function": function})
        if role == "tool" and waiting:
            call, waiting = waiting[0], waiting[1:]
            one |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        result.append(one)
    return result


def _strings(source: str) -> list[str]:
    """Return the strings that stand in the code of a template."""
    tokens = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).lexer.tokenize(source)
    return [str(token.value) for token in tokens if token.type == "string" and token.value]
