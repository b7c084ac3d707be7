"""JSON values with an odd part, for tests of readers."""

import copy
from collections.abc import Sequence
from typing import Any


def replaced(value: Any, path: Sequence[Any], new: object) -> Any:
    """Return the value with another part at `path`. The part is removed if the new one is `...`;
    the whole value becomes None."""
    if not path:
        return None if new is ... else new
    first, *rest = path
    result = copy.copy(value)
    if rest:
        result[first] = replaced(value[first], rest, new)
    elif new is ...:
        result.pop(first)
    else:
        result[first] = new
    return result
