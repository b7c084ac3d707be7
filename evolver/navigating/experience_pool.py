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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from usearch.index import Index

from evolver.llm.embedders import Embedder
from evolver.navigating import Experience
from models.files import BrokenFile, read_jsonl, write_atomically

_FORMAT = "evolver-experience-pool-1"
DUPLICATE = 0.95  # least cosine, of `key` and of `content`, at which two experiences are one
EXACT_BELOW = 20_000  # experiences up to which the search is exhaustive
# experiences used at least this often, with at most this win rate, are deleted
MIN_USES, MAX_WIN_RATE = 5, 0.5
# candidates fetched in addition, so that experiences with equal cosines are ordered by their ids
_TIES = 256
_MOST_TWINS = 16  # nearest experiences among which a duplicate is looked for


class PoolError(ValueError):
    """A pool on disk that cannot be used; the message says what to do about it."""


class ExperiencePool:
    """Experiences that are searched by the cosine of their `key`.

    With few experiences the search is exhaustive, so that its result does not depend on the order
    in which the index was built; with more it uses HNSW. The index uses one thread, because its
    graph would otherwise depend on timing.
    """

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.splits: set[str] = set()  # of all tasks that experience was extracted from
        self._experiences: dict[int, Experience] = {}  # by their keys in the index
        self._index = _empty_index(embedder)

    def __len__(self) -> int:
        return len(self._experiences)

    def __contains__(self, id: str) -> bool:
        return _key(id) in self._experiences

    def __getitem__(self, id: str) -> Experience:
        return self._experiences[_key(id)]

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
            del self._experiences[_key(id)]
        # built anew, because an index with gaps differs from the one that a resumed run builds
        before, self._index = self._index, _empty_index(self.embedder)
        for key in self._experiences:
            self._index.add(key, np.asarray(before.get(key)), threads=1)

    def search(
        self, queries: Sequence[str], k: int, *, min_similarity: float = 0.0
    ) -> list[list[tuple[Experience, float]]]:
        """Return for each query the `k` nearest experiences and their cosines, best first; equal
        cosines in the order of their ids. The queries are embedded together."""
        if not self._experiences:
            return [[] for _ in queries]
        return [self._nearest(vector_D, k, min_similarity) for vector_D in self.embedder(queries)]

    def record(self, ids: Sequence[str], *, success: bool, expected: float) -> None:
        """Count one guided rollout that carried `ids`; ids that are no longer in the pool are
        ignored."""
        for id in ids:
            if id in self:
                experience = self[id]
                experience.uses += 1
                experience.wins += bool(success)
                experience.expected += expected

    def prune(self) -> list[str]:
        """Delete experiences that do not help (ReMe's utility rule) and return their ids.

        They were used at least MIN_USES times, and succeeded in at most MAX_WIN_RATE of their uses
        and no more often than the unguided rollouts of the same groups: early in training, even
        good advice often fails.
        """
        useless = []
        for e in self.all():
            if e.uses >= MIN_USES and e.wins <= min(MAX_WIN_RATE * e.uses, e.expected):
                useless.append(e.id)
        if useless:
            self.remove(useless)
        return useless

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "embedder": self.embedder.name,
            "splits": sorted(self.splits),
            "experiences": [e.to_dict() for e in self.all()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace the pool by the one that `state` was taken from. Raises PoolError if its embedder
        was another one."""
        _check_embedder(state["embedder"], self.embedder)
        experiences = [Experience.from_dict(record) for record in state["experiences"]]
        self.splits = set(state["splits"])
        self._experiences, self._index = {}, _empty_index(self.embedder)
        vectors_ND = self.embedder([e.key for e in experiences])
        for experience, vector_D in zip(experiences, vectors_ND, strict=True):
            self._insert(experience, vector_D)

    def save(self, folder: Path) -> None:
        """Write the pool. At any moment the folder holds the previous pool or the new one."""
        data = bytes(self._index.save() or b"")
        header = {
            "format": _FORMAT,
            "embedder": self.embedder.name,
            "index": _index_name(data),
            "size": len(self),
            "splits": sorted(self.splits),
        }
        lines = [json.dumps(line) for line in (header, *(e.to_dict() for e in self.all()))]
        write_atomically(folder / _index_name(data), data)
        write_atomically(folder / "experiences.jsonl", "\n".join(lines) + "\n")
        for file in folder.iterdir():
            if file.suffix in (".tmp", ".usearch") and file.name != _index_name(data):
                file.unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises PoolError, naming file and line, if it cannot be used."""
        header, experiences = _read(folder)
        _check_embedder(header["embedder"], self.embedder)
        index = _read_index(folder, header["index"], self.embedder)
        by_key = {_key(e.id): e for e in experiences}
        if len(index) != len(by_key) or not all(key in index for key in by_key):
            raise PoolError(
                f"{folder / header['index']} does not belong to experiences.jsonl: the keys differ"
            )
        self._experiences, self._index, self.splits = by_key, index, set(header["splits"])

    def _insert(self, experience: Experience, vector_D: np.ndarray) -> None:
        self._index.add(_key(experience.id), vector_D, threads=1)
        self._experiences[_key(experience.id)] = experience

    def _nearest(
        self, vector_D: np.ndarray, k: int, min_similarity: float
    ) -> list[tuple[Experience, float]]:
        count, exact = min(len(self), k + _TIES), len(self) <= EXACT_BELOW
        matches = self._index.search(vector_D, count, exact=exact, threads=1)
        near = []
        for key, distance in zip(matches.keys, matches.distances, strict=True):
            similarity = round(1.0 - float(distance), 6)
            if similarity >= min_similarity:
                near.append((self._experiences[int(key)], similarity))
        near.sort(key=lambda pair: (-pair[1], pair[0].id))
        return near[:k]

    def _twin(self, experience: Experience, vector_D: np.ndarray) -> Experience | None:
        """Return the experience of the pool that says the same, None if there is none."""
        if not self._experiences or experience.id in self:
            return self._experiences.get(_key(experience.id))
        near = [other for other, _ in self._nearest(vector_D, _MOST_TWINS, DUPLICATE)]
        contents = [other.content for other in near]
        if experience.content in contents:
            return near[contents.index(experience.content)]
        if near:
            vectors_ND = self.embedder([experience.content, *contents])
            for other, similarity in zip(near, vectors_ND[1:] @ vectors_ND[0], strict=True):
                if similarity >= DUPLICATE:
                    return other
        return None


def provenance(folder: Path) -> tuple[set[str], set[str]]:
    """Return the splits and the ids of the tasks that a pool on disk was made from.

    Raises PoolError if the folder holds no pool, or one that does not name its splits, since it may
    hold answers of held-out tasks.
    """
    header, experiences = _read(folder)
    return set(header["splits"]), set().union(*(e.sources for e in experiences))


def _key(id: str) -> int:
    """Return the key of an experience in the index: 63 bits, a hash of its id."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") >> 1


def _empty_index(embedder: Embedder) -> Index:
    return Index(ndim=embedder.dims, metric="cos", dtype="f32")


def _index_name(data: bytes) -> str:
    return f"index-{hashlib.blake2b(data, digest_size=16).hexdigest()}.usearch"


def _check_embedder(name: str, embedder: Embedder) -> None:
    if name != embedder.name:
        raise PoolError(
            f"the pool was embedded by '{name}', this run embeds by '{embedder.name}': "
            "use the same embedder or start with an empty pool"
        )


def _read(folder: Path) -> tuple[dict[str, Any], list[Experience]]:
    """Return the header and the experiences of a pool on disk. Raises PoolError."""
    path = folder / "experiences.jsonl"
    if not path.is_file():
        raise PoolError(f"{path} does not exist: this is not a pool, or one that was never saved")
    try:
        header: dict[str, Any] = next(read_jsonl(path), {})
        _check_header(path, header)
        _, *experiences = read_jsonl(
            path, make=lambda record: record if record == header else Experience.from_dict(record)
        )
    except BrokenFile as error:
        raise PoolError(f"{path} is not an experience pool, or a damaged one: {error}") from None
    size = header["size"]
    if len(experiences) != size or len({e.id for e in experiences}) != size:
        raise PoolError(
            f"{path} was cut or edited: {len(experiences)} experiences, its first line says {size}"
        )
    return header, experiences


def _check_header(path: Path, header: dict[str, Any]) -> None:
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
            f"{path} does not say which splits its experience comes from, so it may come from"
            " held-out tasks: make the pool again, or add, for example,"
            ' "splits": ["train"] to its first line'
        )


def _read_index(folder: Path, name: str, embedder: Embedder) -> Index:
    path = folder / Path(name).name
    data = path.read_bytes() if path.is_file() else b""
    if path.name != _index_name(data):
        raise PoolError(
            f"{path} is {'damaged' if data else 'missing'}: restore it, or delete {folder} to start"
            " with an empty pool"
        )
    index = _empty_index(embedder)
    index.load(data)
    if index.ndim != embedder.dims:
        raise PoolError(
            f"{path} holds vectors of {index.ndim} dimensions, the embedder makes {embedder.dims}"
        )
    return index
