"""Embedders: texts to unit vectors, for searching experience and for comparing tasks."""

import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Ge

from evolver.llm.questions import ChatError, ServerDown
from evolver.parts import Parts
from rl.bounds import Count, NotNegative

EMBEDDERS = {
    "ngrams": "evolver.llm.embedders:HashedNgrams",
    "endpoint": "evolver.llm.embedders:EndpointEmbedder",
    "policy": "evolver.llm.embedders:PolicyEmbedder",
}
_WORD = re.compile(r"[^\W_]+")
_SENTENCE_START = re.compile(r"(?:^|[.!?:]\s+)[\"'(]*$")


class Embedder(Protocol):
    """Turns texts into vectors of `dims` numbers."""

    @property
    def dims(self) -> int: ...

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [N, dims]; each row has length 1, or 0 for a text without words.

        The vector of a text must not depend on the other texts.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class HashedNgrams:
    """Feature hashing of word unigrams and bigrams, character n-grams within words, and counts of
    named entities.

    Needs no model and gives the same vectors on any machine (features are hashed by crc32). Texts
    are close if they share wording and name equally many entities. Entities are not wording: words
    with digits are all one token and capitalised words inside a sentence another, so "Book a flight
    to Oslo" equals "Book a flight to Rome".

    dims: length of the vectors. characters: n of the character n-grams, which weigh
    `character_weight`; a count of entities weighs `entity_weight`, a word or bigram 1.
    """

    dims: Annotated[int, Ge(8)] = 512
    characters: Count = 3
    character_weight: NotNegative = 0.3
    entity_weight: NotNegative = 2.0

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors_ND = np.zeros((len(texts), self.dims), np.float32)
        for vector_D, text in zip(vectors_ND, texts, strict=True):
            for feature, weight in self._features(normalise(text)):
                index, sign = _hash(feature, self.dims)
                vector_D[index] += sign * weight
            vector_D /= max(float(np.linalg.norm(vector_D)), 1e-12)
        return vectors_ND

    def _features(self, words: list[str]) -> Iterator[tuple[str, float]]:
        for word in words:
            yield "w " + word, 1.0
            padded = f"<{word}>"
            if word.isalpha() and len(word) > 2:
                for start in range(len(padded) - self.characters + 1):
                    yield "c " + padded[start : start + self.characters], self.character_weight
        for first, second in itertools.pairwise(words):
            yield f"b {first} {second}", 1.0
        for entity in ("A", "0"):
            yield f"n {entity} {words.count(entity)}", self.entity_weight if words else 0.0


class EndpointEmbedder:
    """Embeddings from the `/embeddings` route of an OpenAI-compatible server, cached by text.

    The constructor asks for one vector to learn its length. Experience cannot be searched without
    embeddings, so a failure ends the run (ServerDown). role: of `config.llm`, which names server
    and model.
    """

    roles = ("embedder",)

    def __init__(self, parts: Parts, *, role: str = "embedder"):
        self.chat = parts.chat
        self.role = role
        self.dims = len(self._vectors(["dimensions"])[0])

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self._vectors([text or " " for text in texts])  # servers refuse empty texts
        for count in map(len, vectors):
            if count != self.dims:
                raise ServerDown(f"embeddings have {count} numbers instead of {self.dims}")
        vectors_ND = np.array(vectors, np.float32).reshape(-1, self.dims)
        return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)

    def _vectors(self, texts: Sequence[str]) -> list[list[float]]:
        try:
            return self.chat.embed(texts, role=self.role)
        except ChatError as error:
            raise ServerDown(f"experience cannot be searched without embeddings: {error}") from None


class PolicyEmbedder:
    """The mean of the last hidden states of a Qwen checkpoint over the tokens of a text, computed
    in this process.

    By default the checkpoint is the one that the run starts from. Its weights stay as they are:
    vectors of a policy that trains could not be compared with those of earlier steps.
    """

    def __init__(self, parts: Parts, *, path: str = "", tokens: Count = 512):
        """path: another checkpoint than the run's, a directory or a Hub id. tokens: most of a
        text."""
        import jax
        import jax.numpy as jnp

        from evolver.config.paths import model_folder
        from models import hf, qwen
        from models.tokenizer import Tokenizer

        path = path or parts.policy
        if not path:
            key = "config.navigating.embedder"
            hint = f"set config.model.path or {key}.args.path"
            raise ValueError(f"{key}.name=policy needs a checkpoint: {hint}")
        folder = model_folder(path, weights=True)
        shape, self._params = hf.load(folder)
        self._tokenizer = Tokenizer.load(folder)
        self._most = tokens
        self.dims = shape.d_model

        @jax.jit
        def pooled(params: qwen.Params, tokens_T: jax.Array, real_T: jax.Array) -> jax.Array:
            place_1T = jnp.arange(len(tokens_T))[None]
            states_1TD = qwen.merge(shape, params).hidden(tokens_T[None], place_1T, real_T[None])
            mean_D = (states_1TD[0] * real_T[:, None]).sum(0) / real_T.sum()
            return mean_D / jnp.linalg.norm(mean_D)

        self._pooled = pooled

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        vectors_ND = np.zeros((len(texts), self.dims), np.float32)
        for vector_D, text in zip(vectors_ND, texts):
            if tokens := self._tokenizer.encode(text)[: self._most]:
                length = max(16, 1 << (len(tokens) - 1).bit_length())  # few, as each is compiled
                tokens_T = np.zeros(length, np.int32)
                tokens_T[: len(tokens)] = tokens
                real_T = (np.arange(length) < len(tokens)).astype(np.int32)
                vector_D[:] = self._pooled(self._params, tokens_T, real_T)
        return vectors_ND


def normalise(text: str) -> list[str]:
    """Return the lower-case words of a text. Names become "A", words with digits "0"; repeats of
    these are merged."""
    words: list[str] = []
    for match in _WORD.finditer(text):
        word = match.group()
        if any(c.isdigit() for c in word):
            word = "0"
        elif (
            word[0].isupper()
            and word not in ("A", "I")
            and not _SENTENCE_START.search(text, 0, match.start())
        ):
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
