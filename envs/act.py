"""Turns that are one action: its text, or the argument of a call of the tool `act`."""

from __future__ import annotations

from envs.toolcalls import parse
from envs.world import Tool


def tool(description: str) -> Tool:
    """The tool `act`."""
    parameters = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
    return {"type": "function", "function": {"name": "act", "description": description, "parameters": parameters}}


def action_of(text: str) -> tuple[str, str]:
    """The action in an assistant turn and the role that answers it ("tool" or "user").

    Without a call it is the last line that is not empty: a model may think first. Raises ValueError, with words for the
    model, where there is none.
    """
    turn = parse(text)
    if turn.errors:
        raise ValueError(turn.errors[0])
    if turn.calls:
        call = turn.calls[0]
        action = call.arguments.get("action")
        if len(turn.calls) > 1 or call.name != "act" or not isinstance(action, str):
            raise ValueError("call act once, with an action")
        return " ".join(action.split()), "tool"
    lines = [line.strip() for line in turn.content.splitlines() if line.strip()]
    if not lines:
        raise ValueError("write one action")
    return lines[-1], "user"
