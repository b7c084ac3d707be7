"""A run small enough for tests: random weights, a tokenizer of the words of `travel`, episodes of
two turns."""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from envs.world import Evaluation, Observation, StepResult, Task, World

CONFIG = """
from configs import base

def get_config():
    config = base.get_config()
    config.steps = 4
    config.env.name = "tests.tiny:Parity"
    config.model.path = {policy!r}
    config.rollout.tasks = 3
    config.rollout.group = 4
    config.rollout.max_turns = 3
    config.rollout.max_tokens = 6
    config.rollout.context = 192
    config.rollout.temperature = 1.0
    config.template.show_tools = False
    config.template.cut_turn = "continue"
    config.template.max_observation = 16
    config.engine.slots, config.engine.prefill = 4, 32  # few shapes, as each one is compiled
    config.learner.updates = 2
    config.learner.row = 192
    config.learner.micro = 4
    config.optim.lr = 1e-2
    config.loss.kl_coef = 0.0
    config.eval.tasks = 3
    config.eval.rollouts = 2
    config.eval.temperature = 1.0
    config.eval.every = 2
    config.checkpoint.every = 1
    return config
"""


class Parity(World):
    """Score the share of the two turns with an even number of characters. Random policies score one
    half."""

    name = "parity"

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "dev"):
            raise ValueError(f"parity has no split {split!r}; it has train, dev")
        return [
            Task(f"{split}/{i}", self.name, f"Write {i}.", split, difficulty=1 + i % 2)
            for i in range(6)
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._said: list[str] = []
        return Observation([{"role": "user", "content": task.query}])

    def step(self, action: str) -> StepResult:
        self._said.append(action)
        messages = [{"role": "tool", "content": f"{len(action)} characters"}]
        return StepResult(
            messages, terminated=len(self._said) == 2, info={"calls": [], "errors": 0}
        )

    def evaluate(self) -> Evaluation:
        score = sum(len(text) % 2 == 0 for text in self._said) / 2
        return Evaluation(score, score == 1.0, {"progress": score})

    def snapshot(self) -> Any:
        return list(self._said)

    def restore(self, snapshot: Any) -> None:
        self._said = list(snapshot)


def tiny_policy(folder: Path) -> Path:
    """Write a Hugging Face checkpoint of 20,000 random weights with its tokenizer, and return the
    folder."""
    shutil.copytree(_made().name, folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _made() -> tempfile.TemporaryDirectory:
    """Return a directory with that checkpoint, which disappears with this process."""
    import jax
    import numpy as np

    import envs
    from experiments.imitation.bpe import train_bpe
    from models import hf, qwen

    world = envs.make("travel")
    tasks = world.tasks("train")
    texts = [message["content"] for task in tasks for message in world.reset(task).messages]
    texts += [turn for task in tasks for turn in task.reference]
    world.close()
    tokenizer = train_bpe(texts, 400)
    shape = qwen.Config(tokenizer.vocab_size, 32, 2, 2, 1, 16, 64)
    rng = np.random.default_rng(0)

    def draw(
        path, weight: qwen.Weight
    ) -> np.ndarray:  # qwen.init would compile a program per weight
        if weight.std is None:
            return np.full(weight.shape, float(path[-1].key.endswith("norm")), np.float32)
        return (weight.std * rng.standard_normal(weight.shape)).astype(np.float32)

    params = jax.tree.map_with_path(draw, qwen.weights(shape))
    folder = tempfile.TemporaryDirectory(prefix="evolver-tests-")
    hf.save(folder.name, shape, params, tokenizer=tokenizer)
    return folder


def config_file(folder: Path, policy: Path) -> Path:
    """Write a config for that policy, with steps of less than a second each once compiled, and
    return its path."""
    path = folder / "tiny.py"
    path.write_text(CONFIG.format(policy=str(policy)))
    return path
