"""Make tests/models/golden/qwen3_chat.jsonl: conversations as `transformers` renders them in
Qwen3's own chat template.

    python -m tests.models.make_golden_chat /dir/of/Qwen3-8B        # or of any Qwen3 tokenizer, or a .jinja file

Each line holds a conversation and its text, with thinking switched on or off. A test compares our
ids with it.
"""

import itertools
import json
import sys
from pathlib import Path

from models.hf_config import transformers
from tests.models.helpers import tool, user

FILE = Path(__file__).parent / "golden/qwen3_chat.jsonl"
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "find “flights”",
        "parameters": {"type": "object"},
    },
}


def said(text, *calls, thought=None):
    message = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": "search", "arguments": arguments} for arguments in calls]
        message["tool_calls"] = [{"type": "function", "function": held} for held in functions]
    return message if thought is None else message | {"reasoning_content": thought}


SYSTEM = {"role": "system", "content": "Be brief."}
EPISODE = [
    user("Find a flight."),
    said("<think>\nThe tool\n\nfinds one.\n</think>\n\nI look.", {"to": "Rome"}),
    tool("F12"),
    said("<think>\nAnd back?\n</think>\n\n", {"to": "Oslo", "n": 2}, {}),
    tool("F13"),
    tool("F14 <think>"),
]
CONVERSATIONS = {
    "a question": [user("Hi")],
    "a system message": [SYSTEM, user("Hi")],
    "an empty system message": [{"role": "system", "content": ""}, user("Hi")],
    "thoughts of the turns since the question stay": EPISODE,
    "thoughts of earlier turns leave": [SYSTEM, *EPISODE, said("Which one?", thought="Two fit."), user("F13")],
    "a thought beside the text": [user("Hi"), said("\nHello", thought="\nPolite.\n"), tool("x")],
    "turns without thoughts": [user("Hi"), said("Hello"), tool("x"), said("", {}), tool("y")],
    "the last turn is the model's": [user("Hi"), said("\nHello")],
    "a thought that is not closed": [user("Hi"), said("<think>\nHm"), tool("x")],
    "two thoughts": [user("Hi"), said("a <think>b</think> c </think>\n\nd"), tool("x")],
    "no question": [tool("x"), said("<think>\nOh\n</think>\n\nWell"), tool("y")],
    "an answer of a tool as a user message": [
        user("Hi"), said("<think>\nT\n</think>\n\nx"), user("<tool_response>\n3\n</tool_response>"),
    ],
    "a later system message": [user("Hi"), SYSTEM, user("Ho")],
}  # fmt: skip


def rendered(template: str, messages, tools, thinking: bool | None = None, **options) -> str:
    """Return a conversation as `transformers` renders it."""
    if thinking is not None:
        options["enable_thinking"] = thinking
    options = {"add_generation_prompt": True, "chat_template": template} | options
    render = transformers().utils.chat_template_utils.render_jinja_template
    texts, _ = render([messages], tools=list(tools) or None, **options)
    return texts[0]


def template_of(place: Path) -> str:
    """Return the text of a template: a file, or that of a tokenizer's directory."""
    from models.tokenizer import _settings_of, _template_of

    return place.read_text() if place.is_file() else _template_of(place, _settings_of(place))


if __name__ == "__main__":
    template = template_of(Path(sys.argv[1]))
    golden = [
        {"name": name, "messages": messages, "tools": tools, "thinking": thinking,
         "text": rendered(template, messages, tools, thinking)}
        for (name, messages), tools, thinking in itertools.product(
            CONVERSATIONS.items(), ([], [TOOL]), (True, False)
        )
    ]  # fmt: skip
    FILE.write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in golden))
