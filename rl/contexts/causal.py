"""The causal template: the whole conversation, in order and in full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from envs.world import Message, Tool
from models import chat
from rl.contexts import Opening, inject, noted, spoken
from rl.trajectory import Completion


class Causal:
    """The opening and every turn since. Ids are appended once and never encoded again.

    The tools are listed in the system message, so new tools rewrite the opening and a new training
    sample starts.

    The world is not given the thoughts of a model that may think, whose next prompts keep them.

    A template that shows a part of the turns can derive from this class: its `extend` calls `add`,
    then `show`.
    """

    def __init__(self, opening: Opening):
        observation, experience = opening.observation, opening.experience
        self.tokenizer, self.show_tools = opening.tokenizer, opening.show_tools
        self.messages = inject(observation.messages, experience)
        self.turns: list[
            list[int]
        ] = []  # the ids of each turn: generation, answer, header of the next turn
        self.note = ""  # text of the template at the end of the opening's last user message
        self._plain_messages, self._guided = observation.messages, bool(experience)
        self._set_tools(observation.tools)
        self.show(())

    async def extend(
        self,
        completion: Completion,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.add(completion, messages, tools)
        self.show(self.turns)

    def action(self, text: str) -> str:
        return spoken(text) if self.tokenizer.thinking else text

    def add(
        self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        """Append a turn to `turns`, and rewrite the opening if the tools changed."""
        closed = completion.tokens[-1:] == [self.tokenizer.im_end]
        self.turns.append(
            completion.tokens + chat.observation(self.tokenizer, messages, closed=closed)
        )
        if tools is not None and tools != self._tools:
            self._set_tools(tools)

    def show(self, turns: Iterable[Sequence[int]]) -> None:
        """Set the prompt, with and without experience, to the opening followed by these turns."""
        ids = list(itertools.chain.from_iterable(turns))
        self.prompt = self._opening + ids
        self.stripped = self._plain_opening + ids

    def remember(self, note: str) -> None:
        """Rewrite the opening with another note; call `show` afterwards."""
        self.note = note
        self._set_tools(self._tools)

    def _set_tools(self, tools: Sequence[Tool]) -> None:
        self._tools, shown = tools, tools if self.show_tools else ()
        self._opening = chat.opening(self.tokenizer, noted(self.messages, self.note), shown)
        self._plain_opening = self._opening
        if self._guided:
            self._plain_opening = chat.opening(
                self.tokenizer, noted(self._plain_messages, self.note), shown
            )
