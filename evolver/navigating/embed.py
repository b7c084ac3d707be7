"""Embedders: texts in, unit vectors out."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

_WORD = re.compile(r"[^\W_]+")
_SENTENCE_START = re.compile(r"(?:^|[.!?:]\s+)[\"'(]*$")


class Embedder(Protocol):
    """What searches experience needs. `name` is kept beside an index, so that no other embedder reads it."""

    name: str
    dims: int

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [N, dims], each row of length 1 (or 0 for a text without words)."""
        ...


class HashedNgrams:
    """Feature hashing of word 1- and 2-grams, of character n-grams within words, and of how many entities a text names.

    Needs no model and gives the same vector on any machine (features are hashed by crc32). Two texts are near when
    they share wording and ask about as much. What stands for one entity is not wording: words with digits become one
    sign and capitalised words inside a sentence another, so "Book a flight to Oslo" is "Book a flight to Rome" here.
    """

    def __init__(self, dims: int = 512, characters: int = 3, character_weight: float = 0.3, entity_weight: float = 2.0):
        if dims < 8 or characters < 1:
            raise ValueError(f"dims must be at least 8 and characters at least 1, got {dims} and {characters}")
        self.name = f"hashed-ngrams-{dims}-{characters}-{character_weight:g}-{entity_weight:g}"
        self.dims = dims
        self.characters = characters
        self.character_weight = character_weight
        self.entity_weight = entity_weight

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors_ND = np.zeros((len(texts), self.dims), np.float32)
        for vector_D, text in zip(vectors_ND, texts, strict=True):
            words = normalise(text)
            for feature, weight in self._features(words):
                index, sign = _hash(feature, self.dims)
                vector_D[index] += sign * weight
            vector_D /= max(float(np.linalg.norm(vector_D)), 1e-12)
        return vectors_ND

    def _features(self, words: list[str]):
        for word in words:
            yield "w " + word, 1.0
            padded = f"<{word}>"
            grams = max(len(padded) - self.characters + 1, 0) if word.isalpha() and len(word) > 2 else 0
            for start in range(grams):
                yield "c " + padded[start : start + self.characters], self.character_weight
        for first, second in itertools.pairwise(words):
            yield f"b {first} {second}", 1.0
        for entity in ("A", "0"):
            yield f"n {entity} {words.count(entity)}", self.entity_weight if words else 0.0


def normalise(text: str) -> list[str]:
    """Split into lower-case words; a name becomes "A" and anything with digits "0"; either repeated becomes one."""
    words: list[str] = []
    for match in _WORD.finditer(text):
        word = match.group()
        if any(c.isdigit() for c in word):
            word = "0"
        elif word[0].isupper() and word not in ("A", "I") and not _SENTENCE_START.search(text, 0, match.start()):
            word = "A"
        else:
            word = word.lower()
        if word not in ("A", "0") or words[-1:] != [word]:
            words.append(word)
    return words


@lru_cache(maxsize=100_000)
def _hash(feature: str, dims: int) -> tuple[int, float]:
    code = zlib.crc32(feature.encode())
    return (code >> 1) % dims, 1.0 if code & 1 else -1.0
