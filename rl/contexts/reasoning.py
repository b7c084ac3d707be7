"""The reasoning-augmented template: the policy thinks before it acts, and forgets what it
thought."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from envs.toolcalls import THINK, spoken
from envs.world import Message, Tool
from rl.contexts import Opening
from rl.contexts.causal import Causal
from rl.trajectory import Completion

HINT = "Before each action, think between <think> and </think>, as briefly as you can. Then act."


class ReasoningAugmented(Causal):
    """The opening and every turn since, without the thoughts of earlier turns (section 6.2 of the
    AgentEvolver paper).

    A thought is what a turn writes up to its last `</think>` (envs/toolcalls.py). The world is
    given the rest. The next prompt leaves the thought out, so every turn that thinks is a training
    sample of its own; one that does not, extends the last sample.
    """

    def __init__(self, opening: Opening, *, hint: bool = True, force: bool = False):
        """hint: ask for thoughts in the opening. force: open each turn with `<think>`, for a policy
        that would not."""
        self.force = force
        super().__init__(opening)
        if hint:
            self.set_note(HINT)
            self.show(())

    def action(self, text: str) -> str:
        """Return the text after the thought; "" if a thought does not end."""
        return spoken(THINK + text if self.force else text)

    def add(
        self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        super().add(
            replace(completion, tokens=self._thoughtless(completion.tokens)), messages, tools
        )

    def show(self, turns: Iterable[Sequence[int]]) -> None:
        super().show(turns)
        if self.force:
            opened = self.tokenizer.encode(f"{THINK}\n")
            self.prompt, self.stripped = self.prompt + opened, self.stripped + opened

    def _thoughtless(self, tokens: list[int]) -> list[int]:
        """Return a generation without its thought: the very tokens if there is none."""
        end = tokens[-1:] if tokens[-1:] == list(self.tokenizer.stops[:1]) else []
        text = self.tokenizer.decode(tokens[: len(tokens) - len(end)])
        said = self.action(text)
        return tokens if said == text else self.tokenizer.encode(said) + end
