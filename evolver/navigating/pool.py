"""The experience pool: a usearch index and the texts that belong to it, on disk.

A pool is a directory. `experiences.jsonl` holds a header line and one experience per line. The
header names the file of the index and the splits of the tasks that the experience comes from. A
save writes the index first, under a name made from its digest, and then replaces
`experiences.jsonl`. A process that is killed in between leaves the previous pool readable, and the
next save deletes the leftovers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from usearch.index import Index

from evolver.llm.embedders import Embedder
from evolver.navigating.experience import Experience
from models.files import BrokenFile, read_jsonl, write_atomically

_FORMAT = "evolver-experience-pool-1"
DUPLICATE = 0.95  # least cosine, of `key` and of `content`, at which two experiences are one
EXACT_BELOW = 20_000  # experiences up to which the search is exhaustive
MIN_USES, MAX_WIN_RATE = (
    5,
    0.5,
)  # experiences used at least this often, with at most this win rate, are deleted
# candidates fetched in addition, so that experiences with equal cosines are ordered by their ids
_TIES = 256


class PoolError(ValueError):
    """A pool on disk that cannot be used; the message says what to do about it."""


class Pool:
    """Experiences that are searched by the cosine of their `key`.

    With few experiences the search is exhaustive, so that its result does not depend on the order
    in which the index was built; with more it uses HNSW. The index uses one thread, because its
    graph would otherwise depend on timing.
    """

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.splits: set[str] = set()  # of all tasks that experience was extracted from
        self._experiences: dict[str, Experience] = {}
        self._ids: dict[int, str] = {}
        self._index = _empty(embedder)

    def __len__(self) -> int:
        return len(self._experiences)

    def __contains__(self, id: str) -> bool:
        return id in self._experiences

    def __getitem__(self, id: str) -> Experience:
        return self._experiences[id]

    def all(self) -> list[Experience]:
        """Return all experiences in the order of arrival."""
        return list(self._experiences.values())

    def add(self, experiences: Sequence[Experience]) -> list[str]:
        """Add new experiences and return their ids. The sources of a duplicate are added to the
        original."""
        added = []
        vectors_ND = self.embedder([e.key for e in experiences])
        for experience, vector_D in zip(experiences, vectors_ND, strict=True):
            twin = self._twin(experience, vector_D)
            if twin is None:
                self._insert(experience, vector_D)
                added.append(experience.id)
            else:
                twin.sources.extend(s for s in experience.sources if s not in twin.sources)
        return added

    def remove(self, ids: Sequence[str]) -> None:
        """Remove experiences. Raises KeyError for an id that is not in the pool."""
        for id in ids:
            del self._experiences[id]
            del self._ids[_key(id)]
        if (
            ids
        ):  # built anew, because an index with gaps differs from the one that a resumed run builds
            before, self._index = self._index, _empty(self.embedder)
            for key in self._ids:
                self._index.add(key, before.get(key), threads=1)

    def search(
        self, query: str, k: int, *, min_similarity: float = 0.0
    ) -> list[tuple[Experience, float]]:
        """Return the `k` nearest experiences and their cosines, best first; equal cosines in the
        order of their ids."""
        return self.search_all([query], k, min_similarity=min_similarity)[0]

    def search_all(
        self, queries: Sequence[str], k: int, *, min_similarity: float = 0.0
    ) -> list[list[tuple[Experience, float]]]:
        """Return what `search` finds for each query; they are embedded together, which a server
        does at once."""
        if not (queries and self._experiences) or k < 1:
            return [[] for _ in queries]
        return [self._nearest(vector_D, k, min_similarity) for vector_D in self.embedder(queries)]

    def record(self, ids: Sequence[str], *, success: bool, expected: float) -> None:
        """Count one guided rollout that carried `ids`; ids that are no longer in the pool are
        ignored."""
        for id in ids:
            experience = self._experiences.get(id)
            if experience is not None:
                experience.uses += 1
                experience.wins += bool(success)
                experience.expected += float(expected)

    def prune(self) -> list[str]:
        """Delete experiences that do not help (ReMe's utility rule) and return their ids.

        They were used at least MIN_USES times, and succeeded in at most MAX_WIN_RATE of their uses
        and no more often
        than the unguided rollouts of the same groups: early in training, even good advice often
        fails.
        """
        useless = [
            e.id
            for e in self.all()
            if e.uses >= MIN_USES and e.wins <= MAX_WIN_RATE * e.uses and e.wins <= e.expected
        ]
        self.remove(useless)
        return useless

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        experiences = [e.to_dict() for e in self.all()]
        return {
            "embedder": self.embedder.name,
            "splits": sorted(self.splits),
            "experiences": experiences,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace the pool by the one that `state` was taken from. Raises PoolError if its embedder
        was another one."""
        _check_embedder(state["embedder"], self.embedder)
        experiences = [Experience.from_dict(record) for record in state["experiences"]]
        self.splits = set(state["splits"])
        self._experiences, self._ids, self._index = {}, {}, _empty(self.embedder)
        for experience, vector_D in zip(
            experiences, self.embedder([e.key for e in experiences]), strict=True
        ):
            self._insert(experience, vector_D)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the pool. At any moment the folder holds the previous pool or the new one."""
        folder = Path(folder)
        data = bytes(self._index.save())
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        index = f"index-{digest}.usearch"
        header = {
            "format": _FORMAT,
            "embedder": self.embedder.name,
            "index": index,
            "size": len(self),
        }
        header["splits"] = sorted(self.splits)
        lines = [json.dumps(header)] + [json.dumps(e.to_dict()) for e in self.all()]
        write_atomically(folder / index, data)
        write_atomically(folder / "experiences.jsonl", "\n".join(lines) + "\n")
        for stale in folder.iterdir():
            if stale.name.endswith(".tmp") or (stale.suffix == ".usearch" and stale.name != index):
                stale.unlink(missing_ok=True)

    def load(self, folder: str | os.PathLike) -> None:
        """Read what `save` wrote. Raises PoolError, naming file and line, if it cannot be used."""
        folder = Path(folder)
        header, experiences = _read(folder / "experiences.jsonl")
        _check_embedder(header["embedder"], self.embedder)
        index = _read_index(folder, header["index"], self.embedder)
        keys = {_key(e.id): e.id for e in experiences}
        if len(index) != len(keys) or not all(key in index for key in keys):
            raise PoolError(
                f"{folder / header['index']} does not belong to experiences.jsonl: the keys differ"
            )
        self._experiences = {e.id: e for e in experiences}
        self._ids, self._index, self.splits = keys, index, set(header["splits"])

    def _insert(self, experience: Experience, vector_D: np.ndarray) -> None:
        key = _key(experience.id)
        self._index.add(key, vector_D, threads=1)
        self._ids[key] = experience.id
        self._experiences[experience.id] = experience

    def _nearest(
        self, vector_D: np.ndarray, k: int, min_similarity: float
    ) -> list[tuple[Experience, float]]:
        exact = len(self) <= EXACT_BELOW
        matches = self._index.search(vector_D, min(len(self), k + _TIES), exact=exact, threads=1)
        scored = [(round(1.0 - float(m.distance), 6), self._ids[int(m.key)]) for m in matches]
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        return [
            (self._experiences[id], score) for score, id in scored[:k] if score >= min_similarity
        ]

    def _twin(self, experience: Experience, vector_D: np.ndarray) -> Experience | None:
        if experience.id in self._experiences or not self._experiences:
            return self._experiences.get(experience.id)
        near = [other for other, _ in self._nearest(vector_D, 16, DUPLICATE)]
        same = [other for other in near if other.content == experience.content]
        if same or not near:
            return same[0] if same else None
        contents_ND = self.embedder([experience.content] + [other.content for other in near])
        similar = [
            other
            for other, c in zip(near, contents_ND[1:] @ contents_ND[0], strict=True)
            if c >= DUPLICATE
        ]
        return similar[0] if similar else None


def provenance(folder: str | os.PathLike) -> tuple[set[str], set[str]]:
    """Return the splits and the ids of the tasks that a pool on disk was made from.

    Raises PoolError if the folder holds no pool, or one that does not name its splits, since it may
    hold answers of held-out tasks.
    """
    header, experiences = _read(Path(folder) / "experiences.jsonl")
    return set(header["splits"]), {
        source for experience in experiences for source in experience.sources
    }


def _key(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") >> 1


def _empty(embedder: Embedder) -> Index:
    return Index(ndim=embedder.dims, metric="cos", dtype="f32")


def _check_embedder(name: str, embedder: Embedder) -> None:
    if name != embedder.name:
        raise PoolError(
            f"the pool was embedded by '{name}', this run embeds by '{embedder.name}': "
            "use the same embedder or start with an empty pool"
        )


def _read(path: Path) -> tuple[dict[str, Any], list[Experience]]:
    if not path.is_file():
        raise PoolError(f"{path} does not exist: this is not a pool, or one that was never saved")
    try:
        header = next(read_jsonl(path), {})
    except BrokenFile as error:
        raise PoolError(f"{path} is not an experience pool: {error}") from None
    if header.get("format") != _FORMAT:
        raise PoolError(
            f"{path} is not an experience pool of format {_FORMAT}: its first line does not say so"
        )
    kinds = {"embedder": str, "index": str, "size": int}
    if wrong := [name for name, kind in kinds.items() if type(header.get(name)) is not kind]:
        raise PoolError(
            f"{path}: its first line is damaged: {', '.join(wrong)} is missing or of the wrong type"
        )
    splits = header.get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise PoolError(
            f"{path} does not say which splits its experience comes from, so it may come from held-out tasks: make the "
            'pool again, or add, for example, "splits": ["train"] to its first line'
        )
    try:
        lines = read_jsonl(
            path, make=lambda record: record if record == header else Experience.from_dict(record)
        )
        _, *experiences = lines
    except BrokenFile as error:
        raise PoolError(str(error)) from None
    if len(experiences) != header.get("size") or len({e.id for e in experiences}) != len(
        experiences
    ):
        raise PoolError(
            f"{path} was cut or edited: {len(experiences)} experiences, its first line says {header['size']}"
        )
    return header, experiences


def _read_index(folder: Path, name: str, embedder: Embedder) -> Index:
    path = folder / Path(str(name)).name
    if not path.is_file():
        raise PoolError(
            f"{path} is missing: restore it, or delete {folder} to start with an empty pool"
        )
    data = path.read_bytes()
    if path.name != f"index-{hashlib.blake2b(data, digest_size=16).hexdigest()}.usearch":
        raise PoolError(
            f"{path} is damaged: restore it, or delete {folder} to start with an empty pool"
        )
    index = _empty(embedder)
    index.load(data)
    if index.ndim != embedder.dims:
        raise PoolError(
            f"{path} holds vectors of {index.ndim} dimensions, the embedder makes {embedder.dims}"
        )
    return index
