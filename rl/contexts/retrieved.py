"""The brief template for very many tools: it shows those that the task asks for, and more when the
policy asks for others."""

import functools
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from usearch.index import MetricKind, search

from envs.world import Message, Tool
from rl.bounds import Count
from rl.contexts.brief import Brief, line_of
from rl.trajectory import Completion

MORE = "\n\nThere are also these tools:\n"
SIZE = 4096  # entries of a vector
GRAM = 4  # characters of a piece of a word
_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")


@dataclass(eq=False, kw_only=True)
class Retrieved(Brief):
    """The conversation of `Brief` with the tools that are nearest to the user's words, and as many
    that are near to those.

    More are shown at the end of an answer, so that prompts only grow: those nearest to what the
    user says next, or to a turn that names none of the tools that are shown.

    first: tools that the opening shows. more: those that an answer adds. most: characters of a
    tool's line, as in `brief`.
    """

    first: Count = 16
    more: Count = 4

    def __post_init__(self) -> None:
        seen = self.opening.observation
        asked = [m["content"] for m in seen.messages if m["role"] == "user"]
        self._asked = " ".join(asked)
        found = replace(seen, tools=self._offered(seen.tools))
        self.opening = replace(self.opening, observation=found)
        super().__post_init__()

    def _offered(self, tools: Sequence[Tool]) -> list[Tool]:
        """Index the tools on offer, and return those that the opening shows."""
        self._all, lines = list(tools), list(map(line_of, tools))
        self._index = index_of(tuple(lines))
        # What looks up the values of a call shares words with its tool, not with the task.
        near = self._index.nearest(self._asked, -(-self.first // 2))
        related = self._index.nearest(" ".join(lines[n] for n in near), self.first)
        self._shown = set(list(dict.fromkeys([*near, *related]))[: self.first])
        return [self._all[n] for n in sorted(self._shown)]

    def add(
        self, completion: Completion, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        if tools is not None and list(tools) != self._all:
            super().add(completion, messages, self._offered(tools))
        else:
            super().add(completion, messages, None)

    def turn_ids(self, tokens: list[int], messages: Sequence[Message]) -> list[int]:
        if not (messages and self.show_tools):
            return super().turn_ids(tokens, messages)
        *first, last = messages
        said = last["content"] + self._found(self.tokenizer.decode(tokens), messages)
        return super().turn_ids(tokens, [*first, last | {"content": said}])

    def _found(self, text: str, messages: Sequence[Message]) -> str:
        """Return what is said about the tools that the user asks for next, or that a turn asks for
        which names none of those that are shown."""
        asked = [message["content"] for message in messages if message["role"] == "user"]
        names = {self._all[n]["function"]["name"] for n in self._shown}
        if not asked and not names.isdisjoint(_NAME.findall(text)):
            return ""
        near = self._index.nearest(" ".join(asked) or text, len(self._shown) + self.more)
        new = [n for n in near if n not in self._shown][: self.more]
        self._shown.update(new)
        return MORE * bool(new) + "\n".join(line_of(self._all[n], self.most) for n in new)


class Index:
    """Vectors of texts: the pieces of their words, weighed by how few of the texts have them."""

    def __init__(self, texts: Sequence[str]):
        counts = np.array([_pieces(text) for text in texts], np.float32).reshape(-1, SIZE)
        self._rarity = np.log((1 + len(texts)) / (1 + np.count_nonzero(counts, axis=0)))
        self._vectors = self._weighed(counts)

    def nearest(self, text: str, count: int) -> list[int]:
        """Return the numbers of the nearest texts, the nearest first."""
        if not len(self._vectors):
            return []
        query, count = self._weighed(_pieces(text)[None]), min(count, len(self._vectors))
        matches = search(self._vectors, query[0], count, MetricKind.Cos, exact=True)
        return [int(n) for n in matches.keys]

    def _weighed(self, counts_NS: np.ndarray) -> np.ndarray:
        vectors_NS = np.sqrt(counts_NS) * self._rarity
        norm_N1 = np.linalg.norm(vectors_NS, axis=1, keepdims=True)
        return (vectors_NS / np.maximum(norm_N1, 1e-9)).astype(np.float32)


@functools.lru_cache(8)
def index_of(texts: tuple[str, ...]) -> Index:
    """Return the index of some texts; episodes of one world share it."""
    return Index(texts)


def _pieces(text: str) -> np.ndarray:
    counts_S = np.zeros(SIZE, np.float32)
    for piece in _split(text):
        counts_S[zlib.crc32(piece.encode()) % SIZE] += 1
    return counts_S


def _split(text: str) -> Iterator[str]:
    """Yield the words of a text, with their pieces, so that "booking" is near "book_flight"."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()
    for word in re.findall(r"[^\W_]+", spaced):
        yield word
        for start in range(len(word) - GRAM + 1):
            yield word[start : start + GRAM]
