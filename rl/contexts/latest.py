"""The template of worlds whose observations say all that the policy may know: it sees the last one
only."""

from collections.abc import Sequence

from envs.world import Message, Tool
from rl.contexts import Opening, inject
from rl.contexts.brief import Brief
from rl.trajectory import Completion


class Latest(Brief):
    """The system message, and what answered the last turn in the place of the user's message.

    Every turn is a training sample of its own. Where one policy plays several players, none of them
    sees what only another may.
    """

    def __init__(self, opening: Opening):
        super().__init__(opening)

    def add(
        self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        """Put the messages in the place of the user's. No turn is shown again."""
        self._tools = self._tools if tools is None else tools
        told = [m for m in self._plain_messages if m["role"] == "system"]
        seen = "\n".join(message["content"] for message in messages)
        self._plain_messages = [*told, {"role": "user", "content": seen}]
        self.messages = inject(self._plain_messages, self.opening.experience)
        self._encode_opening()
