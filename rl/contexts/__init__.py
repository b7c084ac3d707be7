"""Context templates: how an episode becomes the policy's prompt; and helpers for writing one.

A template is a class that is constructed for each episode with an `Opening`. Its keyword-only
parameters are the config's `template.args`.

    class LastTurns(Causal):
        def __init__(self, opening: Opening, *, keep: Count = 4): ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.world import Message, Observation, Tool
from models.tokenizer import Tokenizer
from rl.trajectory import Completion

CONTEXTS = {
    "causal": "rl.contexts.causal:Causal",
    "brief": "rl.contexts.brief:Brief",
    "retrieved": "rl.contexts.retrieved:Retrieved",
    "reasoning_augmented": "rl.contexts.reasoning:ReasoningAugmented",
    "sliding_window": "rl.contexts.window:SlidingWindow",
    "latest": "rl.contexts.latest:Latest",
    "self_managing": "rl.contexts.managing:SelfManaging",
}
# characters that a token of an observation may have on average; prose and code have three to five
MAX_WIDTH = 16


@dataclass(frozen=True)
class Limits:
    """The limits of an episode, the only owner of budgets. Tokens are counted with the policy's
    tokenizer."""

    max_turns: int  # turns of the policy
    max_tokens: int  # tokens of one generation
    context: int  # tokens of prompt and generation together; at most the engine's context
    max_observation: int  # tokens of the answer to one turn; a longer one is cut at a visible mark
    timeout: float  # seconds for the episode, set-up included; evaluation has its own `env_timeout`
    # seconds for one call into the world; inf if the world itself ends its calls in time
    env_timeout: float
    # an episode that a limit of turns or tokens ended has failed, whatever it had reached
    must_end: bool = False


@dataclass(frozen=True)
class Opening:
    """The beginning of an episode: everything that a template may see when it is constructed."""

    tokenizer: Tokenizer
    observation: Observation  # the world's first observation
    experience: Sequence[str] = ()  # texts to inject into the prompt
    show_tools: bool = True  # False if the system message must not list the tools
    limits: Limits | None = None
    chat: Any = None  # the client of language models (`evolver.llm.client.Chat`), None without one
    world: str = ""  # the name of the world, which tells those of a mixture apart
    rollout: str = ""  # the `Trajectory.name` of the episode


class Context(Protocol):
    """The context of one episode.

    A template may rewrite the context at any turn. While the next prompt begins with the last
    prompt and its generation, turns share a training sample; otherwise a new sample starts.

    A class that subclasses this protocol inherits the defaults below and only has to define
    `extend`.
    """

    prompt: list[int]  # ids of the next prompt, up to the header of the assistant's turn
    # the same prompt without the injected experience; ignored when nothing was injected
    stripped: list[int]
    messages: list[Message]  # the opening messages, experience included
    # True while the next generation answers the template and not the world. It is a turn of the
    # trajectory, which trains.
    managing: bool = False

    async def extend(
        self,
        completion: Completion,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> None:
        """Add a generation and the messages that answer it. `tools` is None if the tools on offer
        did not change.

        The call may wait for a language model. Any exception ends the episode, and so does its
        deadline.
        """

    def action(self, text: str) -> str:
        """Return the part of a generation's text that the world is given."""
        return text

    def manage(self, completion: Completion) -> dict[str, Any]:
        """Take a generation that answers the template, while `managing`. Return the turn's
        `info`."""
        return {}


Template = Callable[[Opening], Context]  # the plug `template`, bound to its arguments


def noted(messages: Sequence[Message], note: str) -> list[Message]:
    """Return the messages with a note, unless it is "", at the end of the last user message.

    Raises ValueError if there is a note and no user message.
    """
    copies = [dict(message) for message in messages]
    if note:
        _questions(copies, "a note into")[-1]["content"] += f"\n\n{note}"
    return copies


def inject(messages: Sequence[Message], experience: Sequence[str]) -> list[Message]:
    """Return the messages with the experience in front of the first user message, as
    `<EXP>...</EXP>`.

    Raises ValueError if there is experience and no user message.
    """
    copies = [dict(message) for message in messages]
    if experience:
        first, text = _questions(copies, "experience in front of")[0], "\n".join(experience)
        first["content"] = f"<EXP>{text}</EXP>\n{first['content']}"
    return copies


def _questions(messages: Sequence[Message], purpose: str) -> list[Message]:
    """Return the user messages. Raises ValueError if there are none."""
    asked = [message for message in messages if message["role"] == "user"]
    if not asked:
        raise ValueError(f"the opening has no user message to put {purpose}")
    return asked


def cut(tokenizer: Tokenizer, messages: Sequence[Message], limit: int) -> list[Message]:
    """Return the messages with their contents cut to `limit` tokens in total, each cut marked in
    the text.

    Short messages stay whole; the long ones share the tokens that remain. Of a very long text only
    the first MAX_WIDTH characters per token are tokenised. Of more messages than tokens, such as
    the answers to a call that is repeated without end, only as many are kept.
    """
    if sum(len(message["content"].encode("utf-8", "replace")) for message in messages) <= limit:
        return list(messages)  # a token has at least one byte
    if len(messages) > max(limit, 1):
        kept = max(limit, 1) - 1
        last = messages[kept] | {"content": f"[cut: {len(messages) - kept} more messages]"}
        return [*cut(tokenizer, messages[:kept], kept), last]
    width = MAX_WIDTH * max(limit, 256)
    ids = [tokenizer.encode(message["content"][:width]) for message in messages]
    result, left = list(messages), limit
    for rank, index in enumerate(sorted(range(len(ids)), key=lambda i: len(ids[i]))):
        share = left // (len(ids) - rank)
        shown = min(share, len(ids[index]))
        left -= shown
        more = "more than " if len(messages[index]["content"]) > width else ""
        if shown < len(ids[index]) or more:
            # The cut may split a character.
            text = tokenizer.decode(ids[index][:shown]).rstrip("\ufffd")
            mark = f"\n[cut: the first {shown} of {more}{len(ids[index])} tokens]"
            result[index] = messages[index] | {"content": text + mark}
    return result
