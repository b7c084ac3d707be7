"""TextWorld: generated text adventures (Cote et al. 2018, arXiv:1806.11532).

Needs `pip install -r requirements/textworld.txt`. A game is compiled when it is first played, which
takes seconds, and kept in a cache. The games' interpreter is C code: use workers with per_worker=1.
Listing tasks needs no package.
"""

import hashlib
import json
import os
import pathlib
import re
import tempfile
from typing import Any

from envs import packages
from envs.act import ActionWorld, tool
from envs.values import Json
from envs.world import Evaluation, Observation, Task, check_split, opening

SEEDS = 100_000  # per split: train starts at 1, dev at SEEDS + 1, test at 2 * SEEDS + 1
CACHE = pathlib.Path(__file__).resolve().parents[1] / ".cache" / "textworld"
_STATUS_BAR = re.compile(r"\s*\n>[^\n]*-?\d+/\d+\s*\Z")
CUSTOM: Json = {"nb_rooms": 3, "nb_objects": 6, "quest_length": 4}
CHALLENGES: dict[str, Json] = {
    "tw-simple": {"rewards": "balanced", "goal": "detailed", "test": False},
    "tw-cooking": {
        "recipe": 2,
        "take": 2,
        "go": 6,
        "open": True,
        "cook": True,
        "cut": False,
        "drop": False,
        "recipe_seed": 0,
        "split": None,
    },
    "tw-coin_collector": {"level": 5},
    "tw-treasure_hunter": {"level": 5},
}

# What the simulator has to say after each command.
FIELDS = (
    "objective", "admissible_commands", "policy_commands", "won", "lost", "score", "max_score",
    "feedback", "description", "command_templates",
)  # fmt: skip
SYSTEM = """\
You play a text adventure, one command per turn. Write the command on a line of its own, or call \
act. Commands are like:
look; inventory; examine X; go north; open X; close X; unlock X with Y; take X; take X from Y; \
drop X; put X on Y;
insert X into Y; eat X; cook X with Y; slice X with Y; prepare meal."""


class TextWorld(ActionWorld):
    """One game at a time. A task is a seed of the generator. The seed of `reset` has no effect.

    kind: "custom" (rooms, objects and a quest), or one of the package's challenges: tw-simple,
    tw-cooking, tw-coin_collector, tw-treasure_hunter. options: changes to CUSTOM or to
    CHALLENGES[kind]. commands: list the
    possible commands after each turn, which makes a game much easier. max_steps: commands in an
    episode. The score is the share of the game's points, and 1 exactly if the game is won.

    A synthetic task starts in the game of its seed and shows its query as the objective. The game
    cannot check it: without a verifier of probes (envs/probed.py) the score is 0, and a judge
    decides.
    """

    name = "textworld"
    longest = 200  # the interpreter's line buffer is limited

    def __init__(
        self,
        kind: str = "custom",
        options: Json | None = None,
        commands: bool = False,
        max_steps: int = 50,
        n_train: int = 64,
        n_dev: int = 48,
        n_test: int = 96,
        cache: str = "",
    ):
        known = {"custom": CUSTOM, **CHALLENGES}
        if kind not in known:
            raise ValueError(f"TextWorld has no {kind!r}; it has {', '.join(known)}")
        if unknown := sorted(set(options or {}) - set(known[kind])):
            raise ValueError(
                f"{kind} has no option {', '.join(unknown)}; it has {', '.join(known[kind])}"
            )
        self._kind, self._options = kind, {**known[kind], **(options or {})}
        super().__init__(max_steps)
        self._commands = commands
        self._sizes = {"train": n_train, "dev": n_dev, "test": n_test}
        self._cache = pathlib.Path(cache) if cache else CACHE
        self._env: Any = None

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks. Their query is generic; `reset` shows the game's own objective."""
        check_split("TextWorld", split, self._sizes)
        first = 1 + list(self._sizes).index(split) * SEEDS
        return [
            Task(
                f"textworld/{self._kind}/{seed}",
                self.name,
                f"Win the game {self._kind} {seed}.",
                split=split,
                seed=seed,
            )
            for seed in range(first, first + self._sizes[split])
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self.close()
        textworld = packages.load("textworld", "textworld")
        infos = textworld.EnvInfos(**dict.fromkeys(FIELDS, True))
        self._env = textworld.start(str(self._game(task.seed)), infos)
        self._state = self._env.reset()
        self._begin(task)
        # The game's first text contains its own objective, so a synthetic task shows the
        # description of the room.
        text = f"{task.query}\n\n{self._shown('description')}" if self._invented else ""
        text = text or f"{self._state.objective}\n\n{self._shown()}"
        # A template such as "lock {c} with {k}" tells doors from containers, which the player is
        # not told.
        templates = [
            re.sub(r"\{.*?\}", "OBJ", template) for template in self._state.command_templates
        ]
        return Observation(opening(SYSTEM, text), [tool("Enter a command.", templates)])

    def _act(self, text: str) -> tuple[str, str, float, bool]:
        if self._invented and text.lower() == "goal":  # the game would show its own objective
            return text, self._require_episode().query, 0.0, False
        before = self.evaluate().score
        self._state, _, done = self._env.step(text)
        return text, self._shown(), self.evaluate().score - before, bool(done)

    def evaluate(self) -> Evaluation:
        self._require_episode()
        if self._invented:
            return Evaluation(0.0, False, {"progress": 0.0})
        success = bool(self._state.won)
        share = (self._state.score or 0) / max(self._state.max_score or 0, 1)
        score = 1.0 if success else min(max(share, 0.0), 0.99)
        return Evaluation(score, success, {"progress": score})

    def walkthrough(self) -> list[str]:
        """Return the generator's commands that win the game from its current state."""
        self._require_episode()
        return [str(command) for command in self._state.policy_commands or []]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = self._task = None

    def _shown(self, field: str = "feedback") -> str:
        # The status bar below an answer, "> ... -= Room =-0/7", counts the moves and says nothing
        # else.
        text = _STATUS_BAR.sub("", str(getattr(self._state, field))).strip()
        if self._commands:
            possible = sorted(self._state.admissible_commands or [])
            text += f"\n\nPossible commands: {'; '.join(possible)}"
        return text

    def _game(self, seed: int) -> pathlib.Path:
        """Return the compiled game, building it if the cache lacks it. Safe if many workers build
        it at once."""
        digest = hashlib.blake2b(
            json.dumps(self._options, sort_keys=True).encode(), digest_size=4
        ).hexdigest()
        game = self._cache / f"{self._kind}-{digest}-{seed}.z8"
        if game.exists():
            return game
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            new = pathlib.Path(folder) / game.name
            self._build(seed, new)
            os.replace(
                new.with_suffix(".json"), game.with_suffix(".json")
            )  # TextWorld reads it next to the game
            os.replace(new, game)
        return game

    def _build(self, seed: int, path: pathlib.Path) -> None:
        textworld = packages.load("textworld", "textworld")
        options = textworld.GameOptions()
        options.seeds, options.path = seed, str(path)
        if self._kind == "custom":
            for name, value in self._options.items():
                setattr(options, name, value)
            textworld.make(options)
            return
        _, make, _ = packages.load("textworld.challenges", "textworld").CHALLENGES[self._kind]
        game = make(dict(self._options), options)
        packages.load("textworld.generator", "textworld").compile_game(game, options)
