"""Worlds in which a turn is one action, written as text or as a call of the tool `act`.

Where the simulator tells its player the forms of the actions, the schema of `act` lists them as
JSON Schema's `examples`. A word in capitals is a slot: "put OBJ in OBJ" stands for "put apple in
box".
"""

from collections.abc import Iterable

from envs.toolcalls import parse
from envs.world import ReplayWorld, StepResult, Tool, message, tool_of


class ActionWorld(ReplayWorld):
    """A world that takes one action per turn, up to a maximum. Subclasses implement `reset`, `_act`
    and `evaluate`."""

    # Characters of the longest action that the simulator reads as it is, all of them printable
    # ASCII; 0 = it reads any text.
    longest = 0

    def __init__(self, max_steps: int):
        self._max_steps = max_steps

    def _take(self, action: str) -> StepResult:
        truncated = len(self._actions) >= self._max_steps
        try:
            text, role = action_of(action)
            plain = text.isascii() and text.isprintable()
            if self.longest and not (plain and len(text) <= self.longest):
                raise ValueError(f"an action has at most {self.longest} characters, all of ASCII")
        except ValueError as error:
            self._over = truncated
            info = {"calls": [], "errors": 1, "parse_error": True}
            said = [message("user", f"error: {error}")]
            return StepResult(said, truncated=truncated, info=info)
        text, observation, reward, terminated = self._act(text)
        self._over = terminated or truncated
        calls = [{"name": "act", "arguments": {"action": text}}]
        errors = int(self._is_error(observation))
        return StepResult(
            [message(role, observation)],
            reward,
            terminated,
            truncated and not terminated,
            info={"calls": calls, "errors": errors, "parse_error": False},
        )

    def _is_error(self, observation: str) -> bool:
        """Return True if the simulator did not take the action at all, as far as it says so."""
        return False

    @property
    def _invented(self) -> bool:
        """True for a synthetic task: its query is the goal, and the simulator's own goal does not
        count."""
        return self._require_episode().origin == "synthetic"

    def _act(self, text: str) -> tuple[str, str, float, bool]:
        """Take an action. Return (the text that was executed, observation, reward, True if the
        episode ended)."""
        raise NotImplementedError


def tool(description: str, examples: Iterable[str]) -> Tool:
    """Return the schema of the tool `act`. `examples` are the forms of the actions, with slots in
    capitals."""
    action = {"type": "string", "examples": sorted(set(examples))}
    return tool_of("act", description, {"action": action}, ["action"])


def action_of(text: str) -> tuple[str, str]:
    """Return the action in an assistant turn and the role of its answer ("tool" or "user").

    In a turn without a call the action is the last non-empty line, so that a model may reason
    first. Raises ValueError with a message for the model if there is no action.
    """
    turn = parse(text)
    if turn.errors:
        raise ValueError(turn.errors[0])
    if turn.calls:
        call = turn.calls[0]
        action = call.arguments.get("action")
        fits = call.name == "act" and len(call.arguments) == 1 and isinstance(action, str)
        if len(turn.calls) > 1 or not (fits and str(action).strip()):
            raise ValueError("call act once, with an action and nothing else")
        return " ".join(str(action).split()), "tool"
    lines = [line.strip() for line in turn.content.splitlines() if line.strip()]
    if not lines:
        raise ValueError("write one action")
    return lines[-1], "user"
