"""The causal template: the whole conversation, in order and in full."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from envs.toolcalls import spoken
from envs.world import Message, Tool
from models import chat
from rl import calls
from rl.contexts import Context, Opening, inject, noted
from rl.trajectory import Completion


@dataclass(eq=False)
class Causal(Context):
    """The opening and every turn since. Ids are appended once and never encoded again.

    The tools are listed in the system message, so new tools rewrite the opening and a new training
    sample starts.

    The world is not given the thoughts of a model that may think, whose next prompts keep them.

    A template that shows a part of the turns can derive from this class: its `extend` calls `add`,
    then `show`.
    """

    opening: Opening

    def __post_init__(self) -> None:
        opening = self.opening
        self.tokenizer, self.show_tools = opening.tokenizer, opening.show_tools
        self.messages = inject(opening.observation.messages, opening.experience)
        # the ids of each turn: generation, answer, header of the next turn
        self.turns: list[list[int]] = []
        self.note = ""  # text of the template at the end of the opening's last user message
        self._plain_messages = opening.observation.messages
        self._tools: Sequence[Tool] = opening.observation.tools
        self._encode_opening()
        self.show(())

    async def extend(
        self,
        completion: Completion,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.add(completion, messages, tools)
        self.show(self.turns)
        await self.shorten()

    async def shorten(self) -> None:
        """Make a prompt that is too long shorter. This template never does."""

    def action(self, text: str) -> str:
        return spoken(text) if self.tokenizer.thinking else text

    def add(
        self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        """Append a turn to `turns`, and rewrite the opening if the tools changed."""
        self.turns.append(self.turn_ids(completion.tokens, messages))
        if tools is not None and tools != self._tools:
            self._tools = tools
            self._encode_opening()

    def turn_ids(self, tokens: list[int], messages: Sequence[Message]) -> list[int]:
        """Return the ids of a turn: its generation, and the messages that answer it."""
        return tokens + calls.observation(self.tokenizer, tokens, messages)

    def show(self, turns: Iterable[Sequence[int]]) -> None:
        """Set the prompt, with and without experience, to the opening followed by these turns."""
        ids = list(itertools.chain.from_iterable(turns))
        self.prompt = self._opening + ids
        self.stripped = self._plain_opening + ids

    def set_note(self, note: str) -> None:
        """Rewrite the opening with another note; call `show` afterwards."""
        self.note = note
        self._encode_opening()

    def _encode_opening(self) -> None:
        self._opening = self._opening_ids(self.messages)
        self._plain_opening = self._opening
        if self.messages != self._plain_messages:
            self._plain_opening = self._opening_ids(self._plain_messages)

    def _opening_ids(self, messages: Sequence[Message]) -> list[int]:
        tools = self._tools if self.show_tools else ()
        return chat.opening(self.tokenizer, noted(messages, self.note), tools)
