"""JSON schemas of the answers that language models are asked for.

Texts and lists are bounded, so that an answer ends: a small model held to an unbounded schema
writes until its tokens are spent. The bounds are for servers that enforce schemas. An answer that
exceeds them is read all the same (see `evolver.llm.answers.misfit`), and whoever asked decides what
to do with the surplus.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}


def string(most: int) -> Schema:
    """Return the schema of a string of at most this many characters."""
    return {"type": "string", "maxLength": most}


def array(items: Schema, most: int) -> Schema:
    """Return the schema of a list of at most this many entries."""
    return {"type": "array", "items": items, "maxItems": most}


def record(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }
