"""Answers of language models: schemas to ask for, the JSON value in a text that fits one, and the
refusal of texts that prompts must not hold.

Texts and lists in a schema are bounded, so that an answer ends: a small model held to an unbounded
schema writes until its tokens are spent. The bounds are for servers that enforce schemas. An answer
that exceeds them is read all the same, and whoever asked decides what to do with the surplus.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from envs.toolcalls import THINK, parse
from envs.values import Repeated, without_repeats
from evolver.transcripts import COPIED, scripts, words

Schema = dict[str, Any]
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
UNFIT_REASONS = ("empty", "long", "marked", "quoted", "foreign")  # see `unfit_reason`
_OPENING = re.compile(r"[{\[]")
_LOOSE = re.compile(r"[\s\\]+")
_LONGEST = 1200  # characters; a task or an experience has a few hundred
_FEW = 5  # words
_TAGS = re.compile(  # text that would end or imitate a part of a prompt
    r"</?(?:EXP|tools?|tool_call|tool_response|think)\b|<\||<<\s*[A-Z]|>>>|===|overall outcome:",
    re.IGNORECASE,
)
_LARGEST = 10**300  # of a number: a float must be able to hold it
_TRIES = 10_000  # most positions in an answer that are tried as the beginning of a value


class Unreadable(ValueError):
    """An answer that cannot be used. kind: "empty", "cut", "quoted" or "unreadable"."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


# --- schemas --------------------------------------------------------------------------------------


def string(most: int) -> Schema:
    """Return the schema of a string of at most this many characters."""
    return {"type": "string", "maxLength": most}


def array(items: Schema, most: int) -> Schema:
    """Return the schema of a list of at most this many entries."""
    return {"type": "array", "items": items, "maxItems": most}


def record(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return schema | {"additionalProperties": False}


def schema_error(value: Any, schema: Schema) -> str:
    """Return why a JSON value does not fit a JSON schema, "" if it does.

    Not every server enforces schemas, so an `enum` ignores case, and additional properties, longer
    texts and longer lists are allowed. Unlike the standard, numbers must be finite, and 1.0 is not
    an integer.
    """
    from jsonschema.exceptions import best_match

    try:
        error = best_match(_validator()(schema).iter_errors(value))
    except RecursionError:
        return "the answer is nested too deeply"
    if error is None:
        return ""
    return f"{error.json_path.replace('$', 'the answer', 1)}: {error.message[:200]}"


@functools.cache
def _validator() -> Any:
    """Return the validator class for answers."""
    from jsonschema import Draft202012Validator, ValidationError, validators

    def folded(value: Any) -> Any:
        return value.casefold() if isinstance(value, str) else value

    def enum(_validator: Any, options: list[Any], value: Any, _schema: Any) -> Iterator[Exception]:
        if folded(value) not in map(folded, options):
            yield ValidationError(f"{value!r} is none of {', '.join(map(str, options))}")

    def of(*types: type) -> Callable[[Any, Any], bool]:
        return lambda _, value: type(value) in types and abs(value) < _LARGEST  # False for NaN

    types = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": of(int), "number": of(int, float)}
    )
    ignored = dict.fromkeys(("additionalProperties", "maxItems", "maxLength"), lambda *_: ())
    return validators.extend(Draft202012Validator, ignored | {"enum": enum}, type_checker=types)


# --- reading --------------------------------------------------------------------------------------


def read_json(text: str, schema: Schema, *, prompt: str = "") -> Any:
    """Return the JSON value in a model's answer that fits the schema. Raises Unreadable if there is
    none.

    Models wrap their answer in fences and prose, think before it, and quote what they were shown.
    So thoughts are ignored, and so are values that also occur in `prompt`, the text that others
    wrote. Of the remaining values, the last one with any property of the schema is the answer: if
    it does not fit, no earlier one takes its place. A text that ends inside a value was cut and has
    no answer.
    """
    text = text[len(parse(text).thought) :]
    if THINK in text:
        raise Unreadable("cut", "the answer ends inside a thought")
    if not text.strip():
        raise Unreadable("empty", "the answer is empty")
    own = []
    quotes = False
    problem = "there is no JSON in the answer"
    prompt = _squeezed(prompt)
    properties = schema.get("properties")
    for value, source in _values(text):
        # An answer is an object with a property of the schema; anything if it has none.
        if properties and not (isinstance(value, dict) and properties.keys() & value):
            problem = schema_error(value, schema) or problem
        elif _squeezed(source) in prompt:
            quotes = True
        else:
            own.append(value)
    if own:
        problem = schema_error(own[-1], schema)
    elif quotes:
        raise Unreadable("quoted", "the answer only quotes what the model was shown")
    if problem:
        raise Unreadable("unreadable", problem)
    try:  # JSON can express halves of characters
        json.dumps(own[-1], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise Unreadable("unreadable", f"the answer cannot be written: {error}") from None
    return own[-1]


def _values(text: str) -> Iterator[tuple[Any, str]]:
    """Yield the JSON objects and arrays in a text that are not parts of one another, with their
    source text."""
    decoder = json.JSONDecoder(object_pairs_hook=without_repeats)
    start = 0
    for _ in range(_TRIES):
        match = _OPENING.search(text, start)
        if not match:
            return
        start = match.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
                raise Unreadable("cut", "the JSON in the answer is cut") from None
            start += 1
        except RecursionError:
            raise Unreadable("unreadable", "the answer is nested too deeply") from None
        except Repeated as error:
            raise Unreadable("unreadable", f"the answer has {error}") from None
        except ValueError:  # Python reads no number of more than 4,300 digits
            raise Unreadable("unreadable", "the answer holds a number that is too long") from None
        else:
            yield value, text[start:end]
            start = end


def _squeezed(text: str) -> str:
    """Return the text without whitespace and backslashes, which quoting may change."""
    return _LOOSE.sub("", text)


def unfit_reason(text: str, query: str = "", observations: Iterable[str] = ()) -> str:
    """Return why a model's text cannot become a task or experience beside tasks like `query`, one
    of UNFIT_REASONS; "" if it can.

    Later prompts hold the text, so it must not contain their tags, nor marks that a model copied
    from an attempt, and it must not be a sentence that the environment wrote, which may be an
    instruction. A few words may occur anywhere. Its language is judged by its script only.
    """
    if _TAGS.search(text) or COPIED in text:  # first, because a caller may care for tags only
        return "marked"
    sentence = words(text)
    if not sentence.strip():  # nothing, or the dots of the answer's example
        return "empty"
    if len(text) > _LONGEST:
        return "long"
    if len(text.split()) > _FEW and any(sentence in words(seen) for seen in observations):
        return "quoted"
    common = scripts(text)
    own = scripts(query)
    return "foreign" if common and own and common[0] not in own else ""
