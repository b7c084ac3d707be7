"""JSON schemas of the answers that language models are asked for."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}


def record(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items}
