"""Bridges to gymnasium: any World as a gymnasium.Env (`GymEnv`) and any text gymnasium.Env as a
World (`GymWorld`)."""

import hashlib
import re
import string
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.toolcalls import ParsedTurn, parse, spoken
from envs.values import Json
from envs.world import (
    Evaluation,
    Message,
    Observation,
    StepResult,
    Task,
    Tool,
    World,
    check_split,
    message,
    tool_of,
)

CHARACTERS = "".join(sorted(set(string.printable)))
_COLOUR = re.compile(
    r"\x1b\[[0-9;]+m(.*?)\x1b\[0m"
)  # toy-text environments highlight the agent's position
# "Commands: look, take <thing>" in what an environment says, and the slot of a form
_SAID = re.compile(r"\b(?:actions|commands)\b[^:.\n]*:\s*([^\n]+)", re.IGNORECASE)
_SLOT = re.compile(r"<.+?>|\[.+?\]|\{.+?\}|\b[A-Z]{2,}\b")
SEEDS = 1_000_000  # per split of a GymWorld: train starts at 0, dev at SEEDS, test at 2 * SEEDS
MAX_NUMBERS = 10_000  # of the arrays of an observation that are shown


class GymEnv(gymnasium.Env):
    """A World with Text spaces: the action is the assistant's raw text, the observation the text
    that answers it.

    An episode is a task of the split, drawn with the seed of `reset` or named by `options={"task":
    id}`. The text is cut to the space (printable ASCII, `max_length` characters); `info` holds the
    full messages and, after `reset`, the tools.
    """

    observation_space: spaces.Text
    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        world: World,
        split: str = "train",
        *,
        max_length: int = 8192,
        render_mode: str | None = None,
    ):
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode is None or ansi, not {render_mode!r}")
        self.world, self.render_mode = world, render_mode
        self.observation_space = spaces.Text(max_length, min_length=0, charset=CHARACTERS)
        self.action_space = spaces.Text(max_length, min_length=0, charset=CHARACTERS)
        self._tasks = world.tasks(split)
        if not self._tasks:
            raise ValueError(f"world {world.name} has no tasks in split {split!r}")
        self._transcript = ""

    def reset(self, *, seed: int | None = None, options: Json | None = None) -> tuple[str, Json]:
        super().reset(seed=seed)
        index = int(self.np_random.integers(len(self._tasks)))
        if options and "task" in options:
            ids = [task.id for task in self._tasks]
            if options["task"] not in ids:
                raise ValueError(f"no task {options['task']!r} in this split")
            index = ids.index(options["task"])
        task = self._tasks[index]
        start = self.world.reset(task, int(self.np_random.integers(2**31)))
        self._transcript = ""
        return self._text(start.messages), {"task": task.id} | start.to_dict()

    def step(self, action: str) -> tuple[str, float, bool, bool, Json]:
        self._transcript += f"assistant: {action}\n"
        result = self.world.step(action)
        info = {**result.info, "messages": result.messages}
        if result.over:
            evaluation = self.world.evaluate()
            info |= {"score": evaluation.score, "success": evaluation.success}
        text, reward = self._text(result.messages), float(result.reward)
        return text, reward, result.terminated, result.truncated, info

    def render(self) -> str | None:
        """Return the conversation so far if the render mode is "ansi"."""
        return self._transcript if self.render_mode == "ansi" else None

    def close(self) -> None:
        self.world.close()

    def _text(self, messages: list[Message]) -> str:
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        self._transcript += text + "\n"
        space = self.observation_space
        text = "".join(c if c in space.character_set else "?" for c in text)
        return text[: space.max_length]


class GymWorld(World):
    """A gymnasium.Env whose actions are Text or Discrete. A task is a seed of the environment.

    A turn is one action, given as text or as the argument of a call of the tool `act`. Discrete
    actions are named by `actions`, or else by their numbers. Of Text, `actions` are the forms, with
    slots: "take <thing>"; without them those count that the environment's docstring or its first
    observation lists ("Commands: look, take <thing>."). The agent reads the observation if it
    is text, else the environment's text rendering, else the observation as Python prints it, with
    its arrays whole; of arrays with more than MAX_NUMBERS, the text says what was cut. The score is
    the sum of rewards, clipped to [0, 1]; an episode succeeds when the sum reaches `success_at`.
    """

    name = "gym"

    def __init__(
        self,
        env: str | gymnasium.Env,
        *,
        instruction: str = "",
        actions: list[str] | None = None,
        success_at: float = 1.0,
        n_train: int = 64,
        n_dev: int = 48,
        n_test: int = 96,
        options: Json | None = None,
    ):
        """`env` is an environment or the id of a registered one; `options` are passed to
        gymnasium.make. Without a render_mode among them, one that renders text does so."""
        self._env = _made(env, options or {}) if isinstance(env, str) else env
        self._id = env if isinstance(env, str) else type(env.unwrapped).__name__
        space = self._env.action_space
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise ValueError(
                f"{self._id}: actions must be Text or Discrete, not {type(space).__name__}"
            )
        if isinstance(space, spaces.Discrete):
            actions = actions or [str(space.start + n) for n in range(space.n)]
            if len(actions) != space.n:
                raise ValueError(
                    f"{self._id} has {space.n} actions, but {len(actions)} names were given"
                )
            if len(set(actions)) < len(actions):
                raise ValueError(f"{self._id}: two actions have the same name: {actions}")
        self._space: Any = space
        self._actions = actions if actions and isinstance(space, spaces.Discrete) else []
        self._forms = [] if self._actions else actions or _forms(type(self._env.unwrapped).__doc__)
        self._instruction = instruction or f"You act in {self._id}. Write one action."
        self._success_at = success_at
        self._sizes = {"train": n_train, "dev": n_dev, "test": n_test}
        self._total, self._over = 0.0, True

    def tasks(self, split: str) -> list[Task]:
        check_split(self._id, split, self._sizes)
        first = list(self._sizes).index(split) * SEEDS
        where, query = f"gym/{self._id}/{split}", self._instruction
        return [
            Task(f"{where}/{i:04d}", self.name, query, split, seed=first + i)
            for i in range(self._sizes[split])
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        digest = hashlib.blake2b(f"{task.seed} {seed}".encode(), digest_size=4).digest()
        observation, _ = self._env.reset(seed=int.from_bytes(digest, "big") >> 1)
        self._total, self._over = 0.0, False
        if isinstance(self._space, spaces.Text):
            self._forms = self._forms or _forms(self._text(observation))
        listed = ", ".join(self._actions or self._forms)
        actions = f"\nActions: {listed}." if listed else ""
        text = f"{task.query}{actions}\n{self._text(observation)}"
        return Observation([message("user", text)], [self._tool()])

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over: reset the world first")
        turn = parse(action)
        role = "tool" if turn.calls or turn.errors else "user"
        try:
            chosen = self._action(turn, action)
        except ValueError as error:
            info = {"calls": [], "errors": 1, "parse_error": bool(turn.errors)}
            return StepResult([message(role, f"error: {error}")], info=info)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self._total += float(reward)
        self._over = bool(terminated or truncated)
        # Discrete actions have names; a text is its own.
        named = self._actions[chosen - int(self._space.start)] if self._actions else chosen
        calls = [{"name": "act", "arguments": {"action": named}}]
        return StepResult(
            [message(role, self._text(observation))],
            float(reward),
            bool(terminated),
            bool(truncated),
            info={"calls": calls, "errors": 0, "parse_error": False},
        )

    def evaluate(self) -> Evaluation:
        score = min(max(self._total, 0.0), 1.0)
        success = self._total >= self._success_at
        return Evaluation(score, success, {"progress": 1.0 if success else min(score, 0.99)})

    def close(self) -> None:
        self._env.close()

    def _tool(self) -> Tool:
        action: Json = {"type": "string"}
        if self._actions:
            action["enum"] = self._actions
        elif self._forms:
            forms = sorted({_SLOT.sub("OBJ", form) for form in self._forms})
            action["examples" if any(map(_SLOT.search, forms)) else "enum"] = forms
        # "Take an action: 2" would read like words that say what to do.
        said = "" if all(map(str.isdecimal, self._actions or [""])) else "Take an action."
        return tool_of("act", said, {"action": action}, ["action"])

    def _action(self, turn: ParsedTurn, written: str) -> Any:
        """Return the action of a turn. Raises ValueError with a message for the model."""
        if turn.errors:
            raise ValueError(turn.errors[0])
        text: Any = spoken(written)  # with the space around it, which a text may need
        if turn.calls:
            call, *more = turn.calls
            if more or call.name != "act" or set(call.arguments) != {"action"}:
                raise ValueError("call act once, with an action")
            text = call.arguments["action"]
        space = self._space
        if self._actions:
            named = str(text).strip()
            if named not in self._actions:
                raise ValueError(f"the actions are {', '.join(self._actions)}")
            return int(space.start) + self._actions.index(named)
        if not isinstance(text, str) or not space.contains(text):
            raise ValueError(
                f"an action has {space.min_length} to {space.max_length} of the characters it may "
                "have"
            )
        return text

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return _COLOUR.sub(r"[\1]", str(self._env.render())).strip("\n")
        return _printed(observation)


def _made(id: str, options: Json) -> gymnasium.Env:
    env = gymnasium.make(id, **options)
    renders = "ansi" in env.metadata.get("render_modes", ())
    if "render_mode" in options or not renders or isinstance(env.observation_space, spaces.Text):
        return env
    env.close()
    return gymnasium.make(id, render_mode="ansi", **options)


def _forms(text: str | None) -> list[str]:
    """Return the forms of actions that a text lists."""
    said = _SAID.search(text or "")
    parts = re.split(r"[,;|.]|\bor\b|\band\b", said[1]) if said else []
    return [form for part in parts if (form := part.strip(" '\"`"))]


def _printed(observation: Any) -> str:
    """Return an observation as Python prints it, with all numbers of its arrays up to MAX_NUMBERS
    and all of their digits, and a line for each array that was cut."""
    left, cuts = MAX_NUMBERS, []

    def bounded(value: Any, name: str) -> Any:
        nonlocal left
        if isinstance(value, dict):
            return {key: bounded(item, f"{name}[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [bounded(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not hasattr(value, "__array__") or np.ndim(value) == 0:
            return value
        value = np.asarray(value)
        shown = min(value.size, left)
        left -= shown
        if shown == value.size:
            return value
        cuts.append(
            f"[cut: {name} has the shape {value.shape}; the first {shown:,} of its {value.size:,}"
            " numbers are shown, in one row]"
        )
        return value.reshape(-1)[:shown]

    kept = bounded(observation, "the observation")
    with np.printoptions(threshold=sys.maxsize, precision=17):  # all digits
        return "\n".join([str(kept), *cuts])
