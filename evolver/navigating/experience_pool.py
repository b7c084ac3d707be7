"""The experience pool: texts, searched by the vectors of their keys.

On disk a pool is `experiences.jsonl` in a directory: a header line, which names the splits of the
tasks that the experience comes from, and one experience per line. Vectors are computed when it is
read, by the embedder of the run that reads it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from usearch.index import MetricKind, search

from envs.values import Json
from evolver.files import formats
from evolver.files.lines import KeptLines, read_jsonl
from evolver.llm.embedders import Embedder
from evolver.navigating import Experience
from models.files import BrokenFile, write_atomically

DUPLICATE = 0.95  # least cosine, of `key` and of `content`, at which two experiences are one
MIN_USES = 5  # before an experience may be deleted
MAX_WIN_RATE = 0.5  # of those that are deleted
# candidates fetched in addition, so that experiences with equal cosines are ordered by their ids
_TIES = 256
_MOST_TWINS = 16  # nearest experiences among which a duplicate is looked for


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
        self._records: dict[str, Json] = {}  # what `state` returned last
        self.lines = KeptLines()  # of these records
        # their vectors, in the same order, and room for more
        self._rows_ND = np.zeros((0, embedder.dims), np.float32)

    @property
    def _vectors_ND(self) -> np.ndarray:
        return self._rows_ND[: len(self)]

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
                self._append(vector_D)
                self._experiences[experience.id] = experience
                added.append(experience.id)
            else:
                twin.sources.extend(s for s in experience.sources if s not in twin.sources)
        return added

    def _append(self, vector_D: np.ndarray) -> None:
        """Add the vector of the next experience. Rows are doubled where none is left: to copy all
        vectors for each new one takes seconds in a large pool."""
        n = len(self)
        if n == len(self._rows_ND):
            self._rows_ND = np.resize(self._rows_ND, (max(64, 2 * n), len(vector_D)))
        self._rows_ND[n] = vector_D

    def remove(self, ids: Sequence[str]) -> None:
        """Remove experiences. Raises KeyError for an id that is not in the pool."""
        if not ids:  # to copy the vectors of a large pool takes long
            return
        gone = {id: self._experiences[id] for id in ids}
        self._rows_ND = self._vectors_ND[[id not in gone for id in self._experiences]]
        for id in gone:
            del self._experiences[id]

    def search(
        self, queries: Sequence[str], k: int, *, min_similarity: float = 0.0
    ) -> list[list[tuple[Experience, float]]]:
        """Return for each query the `k` nearest experiences and their cosines, best first; equal
        cosines in the order of their ids. The queries are embedded together."""
        if not self._experiences:
            return [[] for _ in queries]
        return self._nearest(self.embedder(queries), k, min_similarity)

    def record(self, ids: Sequence[str], *, success: bool, expected: float) -> None:
        """Count one guided rollout that carried `ids`; ids that are no longer in the pool are
        ignored."""
        for experience in (self[id] for id in ids if id in self):
            experience.uses += 1
            experience.wins += success
            experience.expected += expected

    def prune(self) -> list[str]:
        """Delete experiences that do not help (ReMe's utility rule) and return their ids.

        They were used at least MIN_USES times, and succeeded in at most MAX_WIN_RATE of their uses
        and no more often than the unguided rollouts of the same groups: early in training, even
        good advice often fails.
        """
        used = [e for e in self.all() if e.uses >= MIN_USES]
        useless = [e.id for e in used if e.wins <= min(MAX_WIN_RATE * e.uses, e.expected)]
        self.remove(useless)
        return useless

    def state(self) -> Json:
        """Return everything as JSON values. The record of an experience that did not change since
        the last call is the same object."""
        last, self._records = self._records, {}
        for id, experience in self._experiences.items():
            record = last.get(id, {})
            self._records[id] = record if record == vars(experience) else experience.to_dict()
        return {"splits": sorted(self.splits), "experiences": [*self._records.values()]}

    def load_state(self, state: Json) -> None:
        """Replace the pool by the one that `state` was taken from."""
        experiences = [Experience(**record) for record in state["experiences"]]
        self.splits = set(state["splits"])
        self._experiences = {experience.id: experience for experience in experiences}
        keys = [experience.key for experience in experiences]
        vectors_ND = np.array(self.embedder(keys), np.float32)
        self._rows_ND = vectors_ND.reshape(-1, self.embedder.dims)

    def save(self, folder: Path) -> None:
        """Write the pool. At any moment the folder holds the previous pool or the new one."""
        state = self.state()
        records = state.pop("experiences")
        header = {"format": formats.POOL_FORMAT, "size": len(self), **state}
        lines = [json.dumps(header), *self.lines.of(records), ""]
        write_atomically(folder / "experiences.jsonl", "\n".join(lines))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises what `read_pool` does."""
        self.load_state(read_pool(folder))

    def _nearest(
        self, vectors_QD: np.ndarray, k: int, min_similarity: float
    ) -> list[list[tuple[Experience, float]]]:
        experiences = self.all()
        count = min(k + _TIES, len(self))
        # all queries at once: the vectors of a large pool are read from memory
        found = search(self._vectors_ND, vectors_QD, count, MetricKind.Cos, exact=True, threads=1)
        keys_QN = np.reshape(found.keys, (len(vectors_QD), count))
        cosine_QN = 1 - np.reshape(found.distances, keys_QN.shape).astype(float)
        nearest = []
        for keys_N, cosine_N in zip(keys_QN, np.round(cosine_QN, 6)):
            pairs = zip(keys_N, cosine_N)
            near = [(experiences[n], float(c)) for n, c in pairs if c >= min_similarity]
            nearest.append(sorted(near, key=lambda pair: (-pair[1], pair[0].id))[:k])
        return nearest

    def _twin(self, experience: Experience, vector_D: np.ndarray) -> Experience | None:
        """Return the experience of the pool that says the same, None if there is none."""
        if not self._experiences or experience.id in self:
            return self._experiences.get(experience.id)
        (found,) = self._nearest(vector_D[None], _MOST_TWINS, DUPLICATE)
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


def read_pool(folder: Path) -> Json:
    """Return the state of a pool on disk. Raises OSError, and BrokenFile with the line, also for a
    pool that does not name its splits, since it may hold answers of held-out tasks."""
    path = folder / "experiences.jsonl"
    lines = list[Json]()
    if not path.is_file():
        raise BrokenFile(f"{path} does not exist: this is not a pool, or one that was never saved")

    def fitting(line: Any) -> Any:
        if not lines and isinstance(line, dict) and "splits" not in line:
            raise ValueError(
                "it does not say which splits its experience comes from, so it may come from"
                " held-out tasks: make the pool again, or add, for example,"
                ' "splits": ["train"] to its first line'
            )
        return formats.valid(formats.EXPERIENCE if lines else formats.POOL, line)

    for line in read_jsonl(path, make=fitting):
        lines.append(line)
    header, *records = lines or [{"size": "nothing"}]
    ids = {record["id"] for record in records}
    size = header["size"]
    if len(records) != size or len(ids) != size:
        raise BrokenFile(
            f"{path} was cut or edited: {len(records)} experiences, its first line says {size}"
        )
    return header | {"experiences": records}
