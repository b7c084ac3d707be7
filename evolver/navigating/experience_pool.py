"""The experience pool: texts and the vectors that they are searched by, on disk.

A pool is a directory. `experiences.jsonl` holds a header line and one experience per line. The
header names the file of the vectors and the splits of the tasks that the experience comes from. A
save writes the vectors first, under a name made from their digest, and then replaces
`experiences.jsonl`. A process that is killed in between leaves the previous pool readable, and the
next save deletes the leftovers.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from usearch.index import MetricKind, search

from evolver.llm.embedders import Embedder
from evolver.navigating import Experience
from models.files import BrokenFile, read_jsonl, write_atomically

_FORMAT = "evolver-experience-pool-2"
DUPLICATE = 0.95  # least cosine, of `key` and of `content`, at which two experiences are one
# experiences used at least this often, with at most this win rate, are deleted
MIN_USES, MAX_WIN_RATE = 5, 0.5
# candidates fetched in addition, so that experiences with equal cosines are ordered by their ids
_TIES = 256
_MOST_TWINS = 16  # nearest experiences among which a duplicate is looked for


class PoolError(ValueError):
    """A pool on disk that cannot be used; the message says what to do about it."""


class ExperiencePool:
    """Experiences that are searched by the cosine of their `key`.

    The search is exhaustive: a hundred thousand experiences take it a few milliseconds, an
    approximate index would have to be built anew at each removal, and its result would depend on
    the order of insertion.
    """

    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.splits: set[str] = set()  # of all tasks that experience was extracted from
        self._experiences: dict[str, Experience] = {}  # by their ids, in the order of arrival
        self._vectors = _Vectors(embedder.dims)  # of the experiences, in the same order

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
        gone = {id: self._experiences[id] for id in ids}
        self._vectors.keep([id not in gone for id in self._experiences])
        for id in gone:
            del self._experiences[id]

    def search(
        self, queries: Sequence[str], k: int, *, min_similarity: float = 0.0
    ) -> list[list[tuple[Experience, float]]]:
        """Return for each query the `k` nearest experiences and their cosines, best first; equal
        cosines in the order of their ids. The queries are embedded together."""
        if not self._experiences:
            return [[] for _ in queries]
        experiences = self.all()
        return [
            self._nearest(experiences, vector_D, k, min_similarity)
            for vector_D in self.embedder(queries)
        ]

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
        self._experiences, self._vectors = {}, _Vectors(self.embedder.dims)
        vectors_ND = self.embedder([e.key for e in experiences])
        for experience, vector_D in zip(experiences, vectors_ND, strict=True):
            self._insert(experience, vector_D)

    def save(self, folder: Path) -> None:
        """Write the pool. At any moment the folder holds the previous pool or the new one."""
        data = self._vectors.to_bytes()
        header = {
            "format": _FORMAT,
            "embedder": self.embedder.name,
            "vectors": _file_name(data),
            "size": len(self),
            "splits": sorted(self.splits),
        }
        lines = [json.dumps(line) for line in (header, *(e.to_dict() for e in self.all()))]
        write_atomically(folder / _file_name(data), data)
        write_atomically(folder / "experiences.jsonl", "\n".join(lines) + "\n")
        for file in folder.iterdir():
            if file.suffix in (".tmp", ".npy") and file.name != _file_name(data):
                file.unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises PoolError, naming file and line, if it cannot be used."""
        header, experiences = _read(folder)
        _check_embedder(header["embedder"], self.embedder)
        vectors = _read_vectors(folder, header["vectors"], self.embedder)
        if len(vectors) != len(experiences):
            raise PoolError(
                f"{folder / header['vectors']} does not belong to experiences.jsonl: it holds"
                f" {len(vectors)} vectors for {len(experiences)} experiences"
            )
        self._experiences = {experience.id: experience for experience in experiences}
        self._vectors, self.splits = vectors, set(header["splits"])

    def _insert(self, experience: Experience, vector_D: np.ndarray) -> None:
        self._vectors.append(vector_D)
        self._experiences[experience.id] = experience

    def _nearest(
        self, experiences: list[Experience], vector_D: np.ndarray, k: int, min_similarity: float
    ) -> list[tuple[Experience, float]]:
        near = []
        for row, distance in self._vectors.nearest(vector_D, k + _TIES):
            similarity = round(1.0 - distance, 6)
            if similarity >= min_similarity:
                near.append((experiences[row], similarity))
        near.sort(key=lambda pair: (-pair[1], pair[0].id))
        return near[:k]

    def _twin(self, experience: Experience, vector_D: np.ndarray) -> Experience | None:
        """Return the experience of the pool that says the same, None if there is none."""
        if not self._experiences or experience.id in self:
            return self._experiences.get(experience.id)
        found = self._nearest(self.all(), vector_D, _MOST_TWINS, DUPLICATE)
        near = [other for other, _ in found]
        contents = [other.content for other in near]
        if experience.content in contents:
            return near[contents.index(experience.content)]
        if near:
            vectors_ND = self.embedder([experience.content, *contents])
            for other, similarity in zip(near, vectors_ND[1:] @ vectors_ND[0], strict=True):
                if similarity >= DUPLICATE:
                    return other
        return None


class _Vectors:
    """The rows of a matrix, float32, to which rows are appended in constant time on average."""

    def __init__(self, dims: int):
        self._rows_ND, self._count = np.empty((16, dims), np.float32), 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector_D: np.ndarray) -> None:
        if self._count == len(self._rows_ND):
            self._rows_ND = np.resize(self._rows_ND, (2 * self._count, self._rows_ND.shape[1]))
        self._rows_ND[self._count] = vector_D
        self._count += 1

    def keep(self, kept: Sequence[bool]) -> None:
        """Drop the rows that are not kept."""
        rows_ND = self._rows_ND[: self._count][np.asarray(kept, bool)]
        self._rows_ND[: len(rows_ND)], self._count = rows_ND, len(rows_ND)

    def nearest(self, vector_D: np.ndarray, count: int) -> list[tuple[int, float]]:
        """Return (row, cosine distance) of the nearest rows, nearest first."""
        rows_ND = self._rows_ND[: self._count]
        matches = search(
            rows_ND, vector_D, min(count, self._count), MetricKind.Cos, exact=True, threads=1
        )
        return list(zip(map(int, matches.keys), map(float, matches.distances), strict=True))

    def to_bytes(self) -> bytes:
        """Return the rows as an .npy file."""
        file = io.BytesIO()
        np.save(file, self._rows_ND[: self._count])
        return file.getvalue()


def provenance(folder: Path) -> tuple[set[str], set[str]]:
    """Return the splits and the ids of the tasks that a pool on disk was made from.

    Raises PoolError if the folder holds no pool, or one that does not name its splits, since it may
    hold answers of held-out tasks.
    """
    header, experiences = _read(folder)
    return set(header["splits"]), set().union(*(e.sources for e in experiences))


def _file_name(data: bytes) -> str:
    return f"vectors-{hashlib.blake2b(data, digest_size=16).hexdigest()}.npy"


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
    kinds = {"embedder": str, "vectors": str, "size": int}
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


def _read_vectors(folder: Path, name: str, embedder: Embedder) -> _Vectors:
    path = folder / Path(name).name
    data = path.read_bytes() if path.is_file() else b""
    if path.name != _file_name(data):
        raise PoolError(
            f"{path} is {'damaged' if data else 'missing'}: restore it, or delete {folder} to start"
            " with an empty pool"
        )
    rows_ND = np.load(io.BytesIO(data), allow_pickle=False)
    if rows_ND.ndim != 2 or rows_ND.shape[1] != embedder.dims:
        raise PoolError(
            f"{path} holds vectors of shape {rows_ND.shape[1:]}, the embedder makes"
            f" {embedder.dims} dimensions"
        )
    vectors = _Vectors(embedder.dims)
    for vector_D in rows_ND:
        vectors.append(vector_D)
    return vectors
