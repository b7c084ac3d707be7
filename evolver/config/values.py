"""The values that an annotation allows: of keys of the config, arguments of plugs and of worlds.

`tasks: int = Field(32, ge=1)` in a schema and `depth: Count = 3` in a signature say it in the same
way. Values are compared as JSON, in which the config is kept: a list is as good as a tuple, and a
whole number as a float, but neither a text nor a truth value is a number.
"""

import ast
import contextlib
import difflib
import json
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import pydantic

STRICT = pydantic.ConfigDict(strict=True, allow_inf_nan=False)
# The rules of pydantic, by the type of its error; those of types are added below.
RULES = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "finite_number": "finite",
    "literal_error": "{expected}",
    "string_type": "of type str",
    "model_type": "of type dict",
    "extra_forbidden": "without other keys",
}
RULES |= {
    f"{kind}_type": f"of type {kind}" for kind in ("bool", "int", "float", "tuple", "list", "dict")
}
# Fields of annotated_types.Interval and its relatives.
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def misfit(value: Any, annotation: Any) -> str:
    """Return the rule of an annotation that a value breaks, such as "of type int" or "0 or at least
    64"; "" if it breaks none. Any value fits an annotation that pydantic does not know."""
    try:
        validator(annotation, STRICT).validate_json(json.dumps(value, default=str, skipkeys=True))
    except pydantic.ValidationError as error:
        rules = [
            RULES.get(broken["type"], broken["msg"]).format(**broken.get("ctx", {}))
            for broken in error.errors()
        ]
        return " or ".join(dict.fromkeys(rules))
    return ""


def read(text: str, annotation: Any) -> Any:
    """Return the value that a text of the command line stands for: a Python literal if it fits the
    annotation, else what pydantic makes of the text (sweeps write 16 as 16.0), else the literal."""
    value = literal(text)
    if misfit(value, annotation):
        with contextlib.suppress(pydantic.ValidationError):
            return validator(annotation, None).validate_python(text)
    return value


def literal(text: str) -> Any:
    """Return the value of a Python literal (a number, string, tuple ...); other text is returned as
    it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def validator(annotation: Any, config: pydantic.ConfigDict | None) -> pydantic.TypeAdapter[Any]:
    """Return pydantic's validator of an annotation, or of any value if it does not know it."""
    try:
        return pydantic.TypeAdapter(annotation, config=config)
    except pydantic.errors.PydanticSchemaGenerationError:
        return pydantic.TypeAdapter(Any)


def described(annotation: Any) -> str:
    """Return an annotation in words, such as "float; at least 0" or "one of mean, sum"."""
    inner = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
    if origin is Annotated:
        bounds = []
        for bound in inner[1:]:
            limits = {words: getattr(bound, name, None) for name, words in BOUNDS.items()}
            bounds += [f"{words} {limit}" for words, limit in limits.items() if limit is not None]
        return f"{described(inner[0])}; {' and '.join(bounds)}"
    if origin in (tuple, dict):
        return f"{origin.__name__} of {described(inner[-1] if origin is dict else inner[0])}"
    return " or ".join(map(described, inner)) or getattr(annotation, "__name__", str(annotation))


def nearest(word: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """Return the known word that is most like a word, at least as much as `cutoff`; "" if none
    is."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=cutoff)), "")


def hint(word: str, known: Iterable[str], *cutoff: float) -> str:
    """Return " (did you mean grpo?)", or "" if no known word is like a word. cutoff: of
    `nearest`."""
    near = nearest(word, known, *cutoff)
    return f" (did you mean {near}?)" if near else ""
