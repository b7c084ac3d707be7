"""The text of Qwen2.5's chat template, and where Qwen3's differs."""

from __future__ import annotations

import json


class ChatError(ValueError):
    """A message that the chat template cannot write, or a template that cannot be used."""


DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

# The template of models/chat.py in Jinja, for programs that render a whole conversation at once.
JINJA = (
    "{%- set first = messages[0] -%}\n"
    "{%- set system = first.content if first.role == 'system' else '" + DEFAULT_SYSTEM + "' -%}\n"
    "{{- '<|im_start|>system\\n' + system -}}\n"
    "{%- if tools -%}\n"
    "{{- " + json.dumps(TOOLS_BEFORE) + " -}}\n"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}\n"
    "{{- " + json.dumps(TOOLS_AFTER) + " -}}\n"
    "{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- for message in messages -%}\n"
    "{%- set before = loop.previtem.role if not loop.first else '' -%}\n"
    "{%- set after = loop.nextitem.role if not loop.last else '' -%}\n"
    "{%- if message.role == 'tool' -%}\n"
    "{{- '\\n' if before == 'tool' else '<|im_start|>user\\n' -}}\n"
    "{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' -}}\n"
    "{{- '' if after == 'tool' else '<|im_end|>\\n' -}}\n"
    "{%- elif not (loop.first and message.role == 'system') -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}\n"
    "{%- for item in message.tool_calls or [] -%}\n"
    "{%- set call = item.function if item.function is defined else item -%}\n"
    "{{- '' if loop.first and not message.content else '\\n' -}}\n"
    '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' -}}\n'
    "{{- (call.arguments | tojson) + '}\\n</tool_call>' -}}\n"
    "{%- endfor -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)

# Qwen3's template. It has no default system message; it writes thoughts of turns since the last
# question, and forgets older ones.
SWITCH = "enable_thinking"  # the variable by which `transformers` switches thoughts off
OPEN, CLOSE = "<think>", "</think>"
NO_THOUGHT = f"{OPEN}\n\n{CLOSE}\n\n"  # begins a turn in which the model may not think


def thoughtless(template: str) -> str:
    """Return a template of Qwen3's in which the model does not think, unless the caller asks for
    it."""
    return (
        f"{{%- if {SWITCH} is not defined -%}}{{%- set {SWITCH} = false -%}}{{%- endif -%}}\n"
        + template
    )
