"""The results of an MCP server's tools as text (envs/mcp.py)."""

import base64
import contextlib
import json
from typing import Any

from envs.values import parsed


def shown(result: Any) -> str:
    """Return a result as text: its blocks, and its structured content unless the texts say it too,
    in one of them or, for a list, in one for each item. Objects in texts are one line of JSON."""
    blocks, structured = [text_of(block) for block in result.content], result.structured_content
    texts = [block.text for block in result.content if block.type == "text"]
    values, value = [parsed(text, text) for text in texts], None
    told = False
    if structured is not None:
        # A value that is no object is wrapped in one, a text or a list by any name.
        (value,) = structured.values() if len(structured) == 1 else (structured,)
        if not isinstance(value, str | list) and structured.keys() != {"result"}:
            value = structured
        saying = [*texts, *values, texts, values] if texts else []
        told = structured in saying or value in saying
        if not told:
            blocks.append(json.dumps(structured, ensure_ascii=False))
    if values and len(texts) == len(blocks) and all(isinstance(v, dict) for v in values):
        listed = len(values) > 1 or (told and isinstance(value, list))
        return json.dumps(values if listed else values[0], ensure_ascii=False)
    return "\n".join(blocks)


def text_of(block: Any) -> str:
    """Return a block of a result as text: what is text whole, of anything else what it is and where
    it lies."""
    if block.type == "text":
        return block.text
    if block.type == "resource":
        place, text = block.resource, getattr(block.resource, "text", None)
        data = getattr(place, "blob", None)
        if data is not None and (place.mime_type or "").startswith("text/"):
            with contextlib.suppress(ValueError):  # of another encoding
                text, data = base64.b64decode(data).decode(), None
        about = _about(uri=place.uri, type=place.mime_type, data=data)
        return f"[resource {about}]" if text is None else f"[resource {about}]\n{text}"
    if block.type == "resource_link":
        about = _about(
            name=block.name, title=block.title, uri=block.uri, type=block.mime_type,
            description=block.description, bytes=block.size,
        )  # fmt: skip
        return f"[resource_link {about}]"
    about = _about(type=getattr(block, "mime_type", None), data=getattr(block, "data", None))
    return f"[{block.type} {about}]" if about else f"[{block.type}]"


def _about(data: str | None = None, **facts: Any) -> str:
    """Return the facts that are known, as "uri: a, type: b". data: bytes in base64, whose number
    takes their place."""
    if data is not None:
        facts["bytes"] = len(data) * 3 // 4 - data[-2:].count("=")
    return ", ".join(f"{name}: {fact}" for name, fact in facts.items() if fact not in (None, ""))
