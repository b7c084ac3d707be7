"""The whole idea in one file: explore, roll out, label, credit, pack, update. Read this first.

    python -m experiments.minimal    # eight steps on `travel`, one to two minutes on two cores

It uses the packages as a library and none of the run's machinery: no config, no checkpoint, no
pipeline, no evaluation. Comments name the folder of each idea; docs/extending.md says how to
replace one in a real run.
"""

import asyncio
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import envs
from envs.commands import called
from envs.probed import probed
from envs.world import Task, World
from evolver.attributing.replay import ReplayJudge
from evolver.llm.embedders import HashedNgrams
from evolver.navigating import Experience, Unrefined
from evolver.navigating.experience_pool import ExperiencePool
from evolver.navigating.extract import Contrast
from evolver.navigating.guidance import Navigating
from evolver.parts import Parts
from evolver.questioning import TaskPool, mixture
from evolver.questioning.curiosity import Curiosity
from models import hf
from models.tokenizer import Tokenizer
from rl import learner, optim
from rl.advantages import Batch, estimate
from rl.advantages.estimators import adca
from rl.contexts import Limits
from rl.engines.jax.engine import JaxEngine
from rl.forward import Forward
from rl.losses.ppo import ppo
from rl.packing import pack
from rl.rollout import Actor, Job, Worlds, rollouts
from rl.samples import drop_reasons, samples
from rl.seeds import seed_of
from rl.trajectory import Sampling, Trajectory

POLICY = Path(__file__).parents[1] / "configs/assets/travel_base"
ROW = 512  # tokens of a packed row, and of an episode


async def main(
    *, steps: int = 8, tasks: int = 8, group: int = 8, budget: int = 64, seed: int = 0
) -> list[float]:
    """Train on invented tasks and return the success rate of each step's rollouts."""
    shape, params = hf.load(POLICY)  # models/: any dense Qwen2.5, Qwen3 or Llama
    tokenizer = Tokenizer.load(POLICY)

    # rl/learner.py: two compiled programs over a plain dict of arrays. rl/losses/: the objective.
    optimizer = optim.optimizer(lr=5e-4, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip=1.0)
    forward = Forward(shape, micro=8)
    update = learner.make_update(forward, optimizer=optimizer, loss=ppo, importance_cap=2.0)
    logp = learner.make_logp(forward)
    # Donated buffers: the update consumes its state, so the engine gets weights of its own.
    state = learner.init_state(shape, jax.tree.map(np.asarray, params), optimizer)
    engine = JaxEngine(shape, params, slots=64, context=ROW)  # rl/engines/

    # evolver/questioning/: explore, and keep the tasks that can be checked.
    world = make_world()
    originals = world.tasks("train")
    world.close()
    pool = TaskPool(originals, overlap=0.8, capacity=1000)
    invented = pool.grow(Curiosity(Parts(task_pool=pool)), make_world, budget, seed)
    print(f"{len(invented)} tasks invented, for example: {invented[0].query}")

    experience = navigating()
    judge = ReplayJudge(Parts(make_world=make_world))  # evolver/attributing/: labels turns
    limits = Limits(
        max_turns=10,
        max_tokens=80,
        context=ROW,
        max_observation=256,
        timeout=600.0,
        env_timeout=60.0,
    )
    actor = Actor(engine, tokenizer, limits, show_tools=False)
    worlds, rates = Worlds(make_world), []

    for step in range(1, steps + 1):
        # 1 tasks, and which rollouts of them are guided
        weights = pool.weights(invented)
        chosen = mixture(
            originals, invented, step=step - 1, n=tasks, share=1.0, seed=seed, weights=weights
        )
        guidance = experience.guide(chosen, group, seed_of(seed, "guide", step))
        # 2 rollouts, 3 outcomes. rl/contexts/: how an episode is written down.
        jobs = jobs_of(chosen, guidance, seed, step)
        trajectories = await rollouts(jobs, actor, worlds)
        # 4 labels
        for trajectory, labels in zip(trajectories, judge.label(trajectories)):
            for turn, label in zip(trajectory.turns, labels):
                turn.label, turn.reason = label
        # 5 advantages. rl/advantages/: from outcomes and labels to one number per turn.
        assign(trajectories, step)
        # 6 samples: gates, the experience stripped, turns merged into rows. 7 update. 8 new weights
        # for the engine.
        reasons = drop_reasons(trajectories, row=ROW)
        trained = [t for t, reason in zip(trajectories, reasons) if reason is None]
        batch = pack(list(itertools.chain.from_iterable(map(samples, trained))), ROW)
        metrics: dict[str, Any] = {}
        if trained:
            batch.old_logp_RT = logp(state["params"], batch)
            state, metrics = update(state, batch)
            await engine.load(jax.tree.map(np.asarray, state["params"]), step)
        # 9 memory: attempts become experience, and results show which tasks can still teach
        # something.
        experience.learn(trajectories, step=step)
        pool.record((t.task.id, t.success) for t in trajectories)
        # 10 books
        rates.append(float(np.mean([t.success for t in trajectories])))
        print(
            f"step {step}: success {rates[-1]:.0%}, "
            f"{len(trained)} of {len(trajectories)} rollouts train, "
            f"loss {float(metrics.get('loss', 0)):+.4f}, {len(experience.pool)} experiences",
            flush=True,
        )
    judge.close()
    worlds.close()
    await engine.close()
    return rates


def make_world() -> World:
    """Return a world. envs/: any of them, and support for tasks that probes check."""
    return probed(envs.make("travel"))


def navigating() -> Navigating:
    """Return the experience, which guides half of each group's rollouts. It is empty at first.
    evolver/navigating/."""
    parts, hints = Parts(make_world=make_world, splits=("train",)), "envs.hints"
    extractor = Contrast(parts, render=f"{hints}:render", when=f"{hints}:when_text")
    pool = ExperiencePool(HashedNgrams())
    return Navigating(pool, extractor, Unrefined(), share=0.5, top_k=1, min_similarity=0.3)


def jobs_of(
    tasks: Sequence[Task], guidance: Sequence[Sequence[Sequence[Experience]]], seed: int, step: int
) -> list[Job]:
    """Return the rollouts of each task, with the experience that their prompts show."""
    jobs = []
    for task, row in zip(tasks, guidance):
        for i, shown in enumerate(row):
            notes = [(e.id, e.content) for e in shown]
            own_seed, sampling = seed_of(seed, step, task.id, i), Sampling(max_tokens=80)
            jobs.append(Job(task, i, own_seed, sampling, notes))
    return jobs


def assign(trajectories: Sequence[Trajectory], step: int) -> None:
    """Write ADCA's advantages into the turns: labels and outcomes, standardised apart within each
    group."""
    advantage_NK = estimate(functools.partial(adca, alpha=0.1), Batch.of(trajectories, step))
    for trajectory, value_K in zip(trajectories, advantage_NK):
        for turn, value in zip(trajectory.turns, value_K):
            turn.advantage = float(value)


if __name__ == "__main__":
    asyncio.run(called(main))
