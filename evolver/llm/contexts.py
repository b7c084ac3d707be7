"""A context template that asks a language model: older turns are summarised."""

import contextlib
from dataclasses import dataclass

from evolver.llm.answers import unfit_reason
from evolver.llm.prompts import prompt
from evolver.llm.questions import ChatError
from evolver.transcripts import quoted
from rl.bounds import Count
from rl.contexts import CONTEXTS as OF_RL
from rl.contexts import cut
from rl.contexts.window import SlidingWindow

CONTEXTS = OF_RL | {"summarised_window": "evolver.llm.contexts:SummarisedWindow"}


@dataclass(eq=False, kw_only=True)
class SummarisedWindow(SlidingWindow):
    """The sliding window, with a summary of the turns that left instead of a mark.

    Where the summariser does not answer, the mark takes the place of a new summary, and the old one
    stays.

    limit, keep: as in a sliding window. memory: most tokens of the summary.
    """

    memory: Count = 512
    roles = ("summariser",)
    prompts = ("memory",)

    def __post_init__(self) -> None:
        super().__post_init__()
        messages = self.opening.observation.messages
        self.summary = ""
        asked = [m["content"] for m in messages if m["role"] == "user"]
        self.query = asked[-1] if asked else ""

    async def shorten(self) -> None:
        """Let the oldest turns leave, and put a summary of them and of the last summary into the
        opening."""
        if not self.is_too_long():
            return
        leaving = self.turns[: self.oldest()]
        slots = {
            "task": quoted(self.query),
            "memory": quoted(self.summary or "nothing yet"),
            "turns": quoted("\n".join(self.tokenizer.decode(turn) for turn in leaving)),
        }
        lines = []
        with contextlib.suppress(ChatError):  # recorded by the client
            asked = prompt("memory").messages(**slots)
            reply = await self.opening.chat(asked, role="summariser", about=self.opening.rollout)
            lines = reply.text.strip().splitlines()
        # A tag of a prompt would be obeyed.
        if lines and not any(unfit_reason(line) == "marked" for line in lines):
            told = [{"role": "user", "content": "\n".join(lines)}]
            (message,) = cut(self.tokenizer, told, self.memory)
            self.summary = message["content"]
        self.evict()

    def mark(self) -> str:
        summary = f"\nTheir summary:\n{self.summary}" if self.summary else ""
        return super().mark() + summary
