"""Answers that are held to a JSON schema, by llguidance's grammars: guides of the JAX engine."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from envs.packages import how_to_install
from models.tokenizer import Tokenizer

# Between the parts of a JSON text. More would be room that a small policy fills.
WHITESPACE = " ?"
MAX_SCHEMA = 2**15  # characters of a schema's JSON text
KNOWN = 16  # compiled grammars that are kept


class GrammarError(ValueError):
    """A schema that cannot be followed, or llguidance is missing; the message is for the user."""


class Grammars:
    """Makes guides for answers of a tokenizer's model with `vocab` entries. It may be used by
    several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._compiled = functools.lru_cache(KNOWN)(self._compile)

    def guide(self, schema: dict[str, Any]) -> Guide:
        """Return the guide of one answer. A schema of MAX_SCHEMA characters may take seconds.

        Raises GrammarError.
        """
        try:
            text = json.dumps(schema)
        except (RecursionError, TypeError, ValueError) as error:
            raise GrammarError(f"the JSON schema cannot be read: {error}") from None
        if len(text) > MAX_SCHEMA:
            raise GrammarError(
                f"the JSON schema has {len(text):,} characters; at most {MAX_SCHEMA:,} are"
                " supported"
            )
        return Guide(self._compiled(text).deep_copy(), self._vocab)

    @functools.cached_property
    def _known(self) -> Any:
        """llguidance's form of the tokenizer."""
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise GrammarError(f"JSON schemas need llguidance: {how_to_install('llm')}") from None
        ends = list(self._tokenizer.stops)
        return LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab, eos_token=ends)

    def _compile(self, schema: str) -> Any:
        known = self._known
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise GrammarError(f"the JSON schema cannot be followed: {error}") from None
        matcher = LLMatcher(known, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what is too complex, and answers that cannot begin
        if matcher.get_error():
            raise GrammarError(f"the JSON schema cannot be followed: {_error_of(matcher)}")
        return matcher


class Guide:
    """Says which tokens may follow those of an answer so far. It ends where the JSON text is
    complete."""

    def __init__(self, matcher: Any, vocab: int):
        self._matcher, self._vocab = matcher, vocab

    def allowed(self) -> np.ndarray:
        """Return a boolean mask over the vocabulary: the tokens that may come next, at least one.

        Raises GrammarError if the schema turns out too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the JSON schema cannot be followed: {_error_of(self._matcher)}")
        return np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)

    def accept(self, token: int) -> None:
        """Note the next token of the answer. Raises GrammarError for one that was not allowed, and
        if the schema turns out too complex."""
        if not self._matcher.consume_token(token):
            raise GrammarError(
                f"token {token} cannot follow by the JSON schema: {_error_of(self._matcher)}"
            )


def _error_of(matcher: Any) -> str:
    return matcher.get_error().partition("\n")[0][:300]
