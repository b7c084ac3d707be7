"""Answers that are held to a JSON schema, by llguidance's grammars: guides of the JAX engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from envs.packages import how_to_install
from models.tokenizer import Tokenizer

# between the parts of a JSON text; without a limit, a policy may write spaces for ever
WHITESPACE = r"[ \n]{0,8}"


class GrammarError(ValueError):
    """A schema that cannot be followed, or llguidance is missing; the message is for the user."""


class Grammars:
    """Makes guides for answers of a tokenizer's model with `vocab` entries."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._known: Any = None  # llguidance's form of the tokenizer

    def guide(self, schema: dict[str, Any]) -> Guide:
        """Return the guide of one answer. Raises GrammarError."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise GrammarError(f"JSON schemas need llguidance: {how_to_install('llm')}") from None
        if self._known is None:
            ends = [self._tokenizer.im_end, self._tokenizer.endoftext]
            self._known = LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab, eos_token=ends
            )
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(schema), {"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise GrammarError(f"the JSON schema cannot be followed: {error}") from None
        matcher = LLMatcher(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(
                f"the JSON schema cannot be followed: {matcher.get_error().splitlines()[0][:300]}"
            )
        return Guide(matcher, self._vocab)


class Guide:
    """Says which tokens may follow those of an answer so far. It ends where the JSON text is
    complete."""

    def __init__(self, matcher: Any, vocab: int):
        self._matcher, self._vocab = matcher, vocab

    def allowed(self) -> np.ndarray:
        """Return a mask over the vocabulary, with at least one token in it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)

    def accept(self, token: int) -> None:
        """Note the next token of the answer. Raises ValueError for one that was not allowed."""
        if not self._matcher.consume_token(token):
            raise ValueError(
                f"token {token} does not fit the grammar: {self._matcher.get_error()[:200]}"
            )
