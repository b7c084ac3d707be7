"""The experience pool: a usearch index and the texts behind it, on disk.

A pool is a folder. `experiences.jsonl` holds a header line and one experience per line; the header names the file of
the index. The index is written first, under a name made of its digest, and replacing `experiences.jsonl` is the commit:
a process killed anywhere in between leaves the previous pool readable, and the next save clears the rest away.
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

from evolver.navigating.embed import Embedder
from evolver.navigating.experience import Experience

_FORMAT = "evolver-experience-pool-1"


class PoolError(ValueError):
    """A pool on disk that cannot be used, with what to do about it."""


class Pool:
    """Experiences searched by the cosine of their `key`.

    Up to `exact_below` experiences the search is exhaustive, so its answer does not depend on the order in which the
    index was built; beyond that it is HNSW's. Index work runs on one thread, because the graph depends on timing else.
    """

    def __init__(self, embedder: Embedder, *, duplicate: float = 0.95, exact_below: int = 20_000):
        """`duplicate`: cosine of `key` and of `content` from which two experiences are one."""
        if not 0.0 < duplicate <= 1.0:
            raise ValueError(f"duplicate must be in (0, 1], got {duplicate}")
        self.embedder = embedder
        self.duplicate = duplicate
        self.exact_below = exact_below
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
        """Every experience, in the order of arrival."""
        return list(self._experiences.values())

    def add(self, experiences: Sequence[Experience]) -> list[str]:
        """Add what is new and return the ids added. A duplicate gives its sources to the one that is there."""
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
            key = _key(id)
            del self._ids[key]
            self._index.remove(key, threads=1)

    def search(self, query: str, k: int, *, min_similarity: float = 0.0) -> list[tuple[Experience, float]]:
        """The `k` nearest experiences and their cosines, best first; equal cosines in the order of their ids."""
        if not self._experiences or k < 1:
            return []
        return self._nearest(self.embedder([query])[0], k, min_similarity)

    def record(self, ids: Sequence[str], *, success: bool, expected: float) -> None:
        """Count one guided rollout that used `ids`; ids no longer in the pool are passed over."""
        for id in ids:
            experience = self._experiences.get(id)
            if experience is not None:
                experience.uses += 1
                experience.wins += bool(success)
                experience.expected += float(expected)

    def prune(self, *, min_uses: int = 5, max_win_rate: float = 0.5, relative: bool = True) -> list[str]:
        """Delete what was used at least `min_uses` times and won at most `max_win_rate` of them (ReMe's utility rule).

        With `relative` an experience also has to win no more than the unguided rollouts of the same groups did:
        early in training even good advice wins less than half of the time.
        """
        useless = [
            e.id
            for e in self.all()
            if e.uses >= min_uses and e.wins <= max_win_rate * e.uses and (not relative or e.wins <= e.expected)
        ]
        self.remove(useless)
        return useless

    def state(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {"embedder": self.embedder.name, "experiences": [e.to_dict() for e in self.all()]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Become the pool that `state` was taken from. Raises PoolError if another embedder made it."""
        _check_embedder(state["embedder"], self.embedder)
        experiences = [Experience.from_dict(record) for record in state["experiences"]]
        self._experiences, self._ids, self._index = {}, {}, _empty(self.embedder)
        for experience, vector_D in zip(experiences, self.embedder([e.key for e in experiences]), strict=True):
            self._insert(experience, vector_D)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the pool. At every moment the folder holds the pool before or the pool after."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        data = bytes(self._index.save())
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        index = f"index-{digest}.usearch"
        header = {"format": _FORMAT, "embedder": self.embedder.name, "index": index, "size": len(self)}
        lines = [json.dumps(header)] + [json.dumps(e.to_dict()) for e in self.all()]
        _replace(folder / index, data)
        _replace(folder / "experiences.jsonl", ("\n".join(lines) + "\n").encode())
        for stale in folder.iterdir():
            if stale.name.endswith(".tmp") or (stale.suffix == ".usearch" and stale.name != index):
                stale.unlink(missing_ok=True)

    def load(self, folder: str | os.PathLike) -> None:
        """Read what `save` wrote. Raises PoolError naming the file and the line that cannot be used."""
        folder = Path(folder)
        header, experiences = _read(folder / "experiences.jsonl")
        _check_embedder(header["embedder"], self.embedder)
        index = _read_index(folder, header["index"], self.embedder)
        keys = {_key(e.id): e.id for e in experiences}
        if len(index) != len(keys) or not all(key in index for key in keys):
            raise PoolError(f"{folder / header['index']} does not belong to experiences.jsonl: the keys differ")
        self._experiences = {e.id: e for e in experiences}
        self._ids, self._index = keys, index

    def _insert(self, experience: Experience, vector_D: np.ndarray) -> None:
        key = _key(experience.id)
        self._index.add(key, vector_D, threads=1)
        self._ids[key] = experience.id
        self._experiences[experience.id] = experience

    def _nearest(self, vector_D: np.ndarray, k: int, min_similarity: float) -> list[tuple[Experience, float]]:
        exact = len(self) <= self.exact_below
        matches = self._index.search(vector_D, min(len(self), 4 * k + 16), exact=exact, threads=1)
        scored = [(round(1.0 - float(m.distance), 6), self._ids[int(m.key)]) for m in matches]
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        return [(self._experiences[id], score) for score, id in scored[:k] if score >= min_similarity]

    def _twin(self, experience: Experience, vector_D: np.ndarray) -> Experience | None:
        if experience.id in self._experiences or not self._experiences:
            return self._experiences.get(experience.id)
        near = [other for other, _ in self._nearest(vector_D, 16, self.duplicate)]
        same = [other for other in near if other.content == experience.content]
        if same or not near or self.duplicate == 1.0:
            return same[0] if same else None
        contents_ND = self.embedder([experience.content] + [other.content for other in near])
        similar = [
            other for other, c in zip(near, contents_ND[1:] @ contents_ND[0], strict=True) if c >= self.duplicate
        ]
        return similar[0] if similar else None


def _key(id: str) -> int:
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") >> 1


def _empty(embedder: Embedder) -> Index:
    return Index(ndim=embedder.dims, metric="cos", dtype="f32")


def _check_embedder(found: str, embedder: Embedder) -> None:
    if found != embedder.name:
        raise PoolError(
            f"the pool was embedded by '{found}', this run embeds by '{embedder.name}': "
            "use the same embedder or start with an empty pool"
        )


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(path: Path) -> tuple[dict[str, Any], list[Experience]]:
    if not path.is_file():
        raise PoolError(f"{path} does not exist: not a pool, or one that was never saved")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0]) if lines else None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PoolError(f"{path} is not an experience pool: {error}") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise PoolError(f"{path} is not an experience pool of format {_FORMAT}: its first line does not say so")
    experiences = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            experiences.append(Experience.from_dict(json.loads(line)))
        except ValueError as error:
            raise PoolError(f"{path} line {number}: {error}") from error
    if len(experiences) != header.get("size") or len({e.id for e in experiences}) != len(experiences):
        raise PoolError(
            f"{path} was cut or edited: {len(experiences)} experiences, its first line says {header['size']}"
        )
    return header, experiences


def _read_index(folder: Path, name: str, embedder: Embedder) -> Index:
    path = folder / Path(str(name)).name
    if not path.is_file():
        raise PoolError(f"{path} is missing: restore it, or delete {folder} to start with an empty pool")
    data = path.read_bytes()
    if path.name != f"index-{hashlib.blake2b(data, digest_size=16).hexdigest()}.usearch":
        raise PoolError(f"{path} is damaged: restore it, or delete {folder} to start with an empty pool")
    index = _empty(embedder)
    index.load(data)
    if index.ndim != embedder.dims:
        raise PoolError(f"{path} holds vectors of {index.ndim} dimensions, the embedder makes {embedder.dims}")
    return index
