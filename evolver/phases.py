"""The ten phases of an iteration, each a function of the run. `loop.py` calls them in order."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from envs.world import Task
from evolver import books, hosts
from evolver.config import originals_needed
from evolver.parts import Run, RunError, make_limits
from evolver.questioning import mixture
from evolver.stop import Interrupted, RunEnds
from evolver.traces import broken
from rl import advantages, learner, mismatch, samples
from rl.evaluation import Scores, measures, scores_of
from rl.packing import Packed, pack
from rl.rollout import Job, rollouts
from rl.seeds import seed_of
from rl.trajectory import Sampling, StopReason, Trajectory


@contextmanager
def timed(metrics: dict[str, Any], name: str):
    """Seconds of the block, as time/<name>."""
    began = time.monotonic()
    try:
        yield
    finally:
        metrics[f"time/{name}"] = metrics.get(f"time/{name}", 0.0) + time.monotonic() - began


# --- 0 preparations --------------------------------------------------------------------------------------------------


def enough_tasks(run: Run) -> None:
    """Raise RunError where the world has fewer tasks than a step takes: its workers or service only now say so."""
    needed, there = originals_needed(run.config), len(run.originals)
    if there < needed:
        raise RunError(f"a step needs {needed} different original tasks, and there are {there}: lower rollout.tasks")
    if run.config.eval.every and not run.held_out:
        raise RunError(f"config.eval.split={run.config.eval.split} has no tasks: set config.eval.every=0, or another")


def explore_first(run: Run, metrics: dict[str, Any]) -> None:
    """Invent the first synthetic tasks, unless a file brought them."""
    c = run.config.questioning
    if not run.questioning:
        return
    if not c.tasks:
        run.progress.phase("exploring")
        with timed(metrics, "explore"):
            seed = seed_of(run.config.seed, "explore", 0)
            hosts.led(run.questioning, lambda: run.questioning.explore(seed, c.budget))
    metrics |= run.questioning.metrics()
    needed = round(c.share * run.config.rollout.tasks)
    if len(run.questioning.tasks) < needed:
        raise RunError(
            f"there are {len(run.questioning.tasks)} synthetic tasks and a step needs {needed}:"
            " raise config.questioning.budget or lower config.questioning.share"
        )


def fill_pool(run: Run, metrics: dict[str, Any]) -> None:
    """Make the first experience from unguided attempts at training tasks, unless a directory brought it."""
    c, seed = run.config.navigating, run.config.seed
    if not run.navigating:
        return
    if c.rollouts and not c.pool:
        tasks = [*run.originals, *(run.questioning.tasks.values() if run.questioning else ())]
        order = np.random.default_rng(seed_of(seed, "pool")).permutation(len(tasks))[: c.tasks]
        jobs = [
            Job(tasks[n], i, seed_of(seed, "pool", tasks[n].id, i), sampling(run.config))
            for n in order
            for i in range(c.rollouts)
        ]
        with timed(metrics, "pool"):
            trajectories = play(run, jobs, "first experience")
            judge_outcomes(run, trajectories, {})
            label(run, trajectories, {})
            hosts.led(run.navigating, lambda: run.navigating.learn(trajectories, step=0))
    metrics |= run.navigating.metrics()


# --- 1 tasks ---------------------------------------------------------------------------------------------------------


def choose_tasks(run: Run, step: int) -> dict[int, list[Task]]:
    """The tasks of a step and, with `rollout.async_depth`, of the later ones that are started with it."""
    if not run.pipeline:
        return {step: tasks_of(run, step)}
    return {ahead: tasks_of(run, ahead) for ahead in run.pipeline.ahead(step, run.config.steps)}


def tasks_of(run: Run, step: int) -> list[Task]:
    """The tasks of one step; every `questioning.every` steps the synthetic ones are refreshed first."""
    c = run.config.questioning
    if run.questioning and c.every and step > 1 and (step - 1) % c.every == 0:
        run.progress.phase("exploring")
        seed = seed_of(run.config.seed, "explore", step)
        hosts.led(run.questioning, lambda: run.questioning.explore(seed, c.refresh))
    return draw(run, step - 1, run.config.rollout.tasks, seed_of(run.config.seed, "tasks"))


def draw(run: Run, place: int, n: int, seed: int, without: Collection[str] = ()) -> list[Task]:
    """n tasks in the mixture of the run, the `place`-th of a sequence of draws; fewer if too few are left `without`
    those ids."""
    c, share = run.config.questioning, run.config.questioning.share if run.questioning else 0.0
    originals = [task for task in run.originals if task.id not in without]
    synthetic = [task for task in run.questioning.tasks.values() if task.id not in without] if run.questioning else []
    while without and (round(share * n) > len(synthetic) or n - round(share * n) > len(originals)):
        n -= 1
    if not run.questioning:
        return mixture(originals, [], step=place, n=n, ratio=0.0, seed=seed)
    options = {"step": place, "n": n, "ratio": share, "seed": seed, "learnable": c.learnable}
    return run.questioning.mixture(originals, synthetic, **options)


# --- 2 rollouts, 3 outcomes ------------------------------------------------------------------------------------------


def roll_out(run: Run, tasks: dict[int, list[Task]], step: int, metrics: dict[str, Any]) -> list[Trajectory]:
    """`rollout.group` rollouts of each task, some of them guided; the world has evaluated each.

    With `rollout.async_depth` those that `step` trains on, labels included, while others go on.
    """
    if run.pipeline:
        trajectories = collect(run, tasks, step, metrics)
    else:
        with timed(metrics, "rollout"):
            trajectories = play(run, [job for group in jobs_of(run, tasks[step], step) for job in group], "rollouts")
        judge_outcomes(run, trajectories, metrics)
    tokens = sum(len(s.completion.tokens) for t in trajectories for s in t.steps)
    metrics["time/tokens_per_s"] = tokens / metrics["time/rollout"]
    return trajectories


def show_faults(run: Run, trajectories: Sequence[Trajectory], step: int) -> None:
    """Say what the environment answered where it failed, each kind of fault once. Raises RunEnds where it failed in
    every rollout of the step: nothing can be learnt, and the steps that follow would be spent in the same way."""
    failed = [t for t in trajectories if t.stop in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT)]
    if failed and len(failed) == len(trajectories):
        raise RunEnds(f"step {step}: the environment failed in every rollout: {failed[0].error}")
    for trajectory in failed:
        kind = trajectory.error.partition(":")[0]
        if kind not in run.faults:
            run.faults.add(kind)
            run.progress.say(
                f"step {step}: the environment failed in {len(failed)} of {len(trajectories)} rollouts, for example"
                f" {trajectory.error}. They do not train (ledger/env_error); later ones are counted, not shown"
            )


def jobs_of(run: Run, tasks: Sequence[Task], step: int) -> list[list[Job]]:
    """One list of jobs for the group of each task."""
    c, group = run.config, run.config.rollout.group
    guidance = [[[] for _ in range(group)] for _ in tasks]
    if run.navigating:
        guidance = run.navigating.guide(tasks, group, seed_of(c.seed, "guide", step))
    return [
        [
            Job(task, i, seed_of(c.seed, "rollout", step, task.id, i), sampling(c), [(e.id, e.content) for e in found])
            for i, found in enumerate(row)
        ]
        for task, row in zip(tasks, guidance)
    ]


def collect(run: Run, tasks: dict[int, list[Task]], step: int, metrics: dict[str, Any]) -> list[Trajectory]:
    """Start the rollouts of `tasks`, and wait for those that `step` trains on. `time/rollout` is from those of the step
    before to these."""
    began = run.pipeline.collected or time.monotonic()
    c, groups = run.config, {ahead: jobs_of(run, tasks[ahead], ahead) for ahead in tasks}

    def show(done: int, total: int) -> None:
        run.progress.phase("groups", done, total)

    async def start_and_wait() -> tuple[list[Trajectory], int]:
        for ahead, jobs in groups.items():
            play = partial(rollouts, **settings(run, run.pipeline.places))
            run.pipeline.launch(ahead, jobs, play, partial(grade, run))
        return await run.pipeline.collect(step, c.rollout.tasks, show)

    with timed(metrics, "wait"):
        trajectories, metrics["async/late"] = run.stop.run(start_and_wait())
    metrics["time/rollout"] = run.pipeline.collected - began
    metrics |= run.pipeline.figures() | (run.outcome_judge.metrics() if run.outcome_judge else {})
    return trajectories


def grade(run: Run, trajectories: Sequence[Trajectory]) -> None:
    """Outcomes and labels of one group, in a thread of the judges'."""
    if run.outcome_judge:
        run.outcome_judge.judge(trajectories)
    write_labels(run, trajectories)


def sampling(config: Any, temperature: float | None = None) -> Sampling:
    """How the policy samples: as in training, or at another temperature."""
    c = config.rollout
    temperature = c.temperature if temperature is None else temperature
    return Sampling(max_tokens=c.max_tokens, temperature=temperature, top_p=c.top_p, top_k=c.top_k)


def play(run: Run, jobs: Sequence[Job], phase: str) -> list[Trajectory]:
    """Play jobs with the engine's present weights. What comes out does not depend on what was played before.

    Each host plays its share; all get all trajectories. An interruption of one of them is one of all.
    """
    c, mine = run.config, hosts.share(jobs)

    def show(done: int, total: int, _: Trajectory) -> None:
        run.progress.phase(phase, done, total)

    run.progress.phase(phase, 0, len(mine))
    if not (run.pipeline and run.pipeline.busy):
        run.engine.forget()
    try:
        played = run.stop.run(rollouts(mine, progress=show, **settings(run, c.rollout.concurrency)))
    except Interrupted:
        played = None
    parts = hosts.gather(played)
    if any(part is None for part in parts):
        raise Interrupted
    return hosts.interleaved(parts)


def stop_together(run: Run) -> None:
    """Raise Interrupted in every process if one of them was asked to end: a place where stopping is safe."""
    if any(hosts.gather(run.stop.asked)):
        raise Interrupted


def settings(run: Run, concurrency: Any) -> dict[str, Any]:
    """What all rollouts of the run have in common."""
    c = run.config
    return {
        "worlds": run.worlds, "concurrency": concurrency, "engine": run.engine, "tokenizer": run.tokenizer,
        "limits": make_limits(c), "parse_error": c.template.parse_error, "length_stop": c.template.cut_turn,
        "show_tools": c.template.tools, "threads": c.env.mode != "inprocess",
    }  # fmt: skip


def judge_outcomes(run: Run, trajectories: Sequence[Trajectory], metrics: dict[str, Any]) -> None:
    """Where the world's own evaluation does not count for synthetic tasks: what the judge says of them."""
    if run.outcome_judge:
        run.progress.phase("outcomes")
        with timed(metrics, "judge"):
            run.outcome_judge.judge(trajectories)
        metrics |= run.outcome_judge.metrics()


# --- 4 labels --------------------------------------------------------------------------------------------------------


def label(run: Run, trajectories: Sequence[Trajectory], metrics: dict[str, Any], *, labelled: bool = False) -> None:
    """Mark each step GOOD, BAD or abstain, unless that was done while others rolled out. Each host labels its share
    of the groups."""
    if not run.judge:
        return
    if labelled:
        metrics |= run.judge.metrics()
        return
    run.progress.phase("labels")
    groups: dict[str, list[int]] = {}
    for number, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.task.id, []).append(number)
    mine = hosts.share(list(groups.values()))
    with timed(metrics, "label"):
        found = iter(run.judge.label([trajectories[i] for group in mine for i in group]))
        labels = hosts.whole([[next(found) for _ in group] for group in mine])
    for number, values in zip((i for group in groups.values() for i in group), (v for part in labels for v in part)):
        for step, value in zip(trajectories[number].steps, values):
            step.label = value
    metrics |= hosts.merged(run.judge.metrics())


def write_labels(run: Run, trajectories: Sequence[Trajectory]) -> None:
    """The judge's word on every step, if there is one."""
    if not run.judge:
        return
    for trajectory, labels in zip(trajectories, run.judge.label(trajectories)):
        for step, value in zip(trajectory.steps, labels):
            step.label = value


# --- 5 advantages ----------------------------------------------------------------------------------------------------


def give_credit(config: Any, trajectories: Sequence[Trajectory], step: int) -> None:
    """Write an advantage into each step. A rollout whose outcome means nothing gets none and counts for no other."""
    counted = [t for t in trajectories if not is_void(t, config.learner.drop)]
    if not counted:
        return
    ids = {id: number for number, id in enumerate(dict.fromkeys(t.task.id for t in counted))}
    outcome_N = np.array([t.outcome for t in counted])
    group_N = np.array([ids[t.task.id] for t in counted])
    for trajectory, value_K in zip(counted, advantage_of(config, counted, outcome_N, group_N, step)):
        factor = config.advantage.synthetic if trajectory.task.origin == "synthetic" else 1.0
        for taken, value in zip(trajectory.steps, value_K):
            taken.advantage = factor * float(value)


def replenish(run: Run, trajectories: list[Trajectory], step: int, metrics: dict[str, Any]) -> list[Trajectory]:
    """The rollouts of the step and those of further tasks, in place of groups without signal: DAPO's dynamic sampling
    (arXiv 2503.14476, section 3.2), in `rollout.refill` rounds at most. What has no signal stays in the books."""
    c, rounds = run.config.rollout, 0
    while rounds < c.refill:
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.task.id, []).append(trajectory)
        missing = c.tasks - sum(not samples.no_signal(group) for group in groups.values())
        tasks = draw(run, rounds, missing, seed_of(run.config.seed, "refill", step), groups) if missing else []
        if not tasks:
            break
        more, rounds = roll_out(run, {step: tasks}, step, metrics), rounds + 1
        label(run, more, metrics)
        give_credit(run.config, more, step)
        trajectories = [*trajectories, *more]
    if c.refill:
        tokens = sum(len(s.completion.tokens) for t in trajectories for s in t.steps)
        metrics |= {"rollout/refills": rounds, "time/tokens_per_s": tokens / metrics["time/rollout"]}
    return trajectories


def is_void(trajectory: Trajectory, drop: Sequence[str]) -> bool:
    """Whether one of the gates that look at a rollout's end leaves it out."""
    gates = {"cancelled": samples.cancelled, "env_error": samples.env_error, "parse_error": samples.parse_error}
    return any(gate(trajectory) for name, gate in gates.items() if name in drop)


def advantage_of(config: Any, trajectories, outcome_N, group_N, step: int) -> np.ndarray:
    """advantage_NK of the configured estimator."""
    c = config.advantage
    steps_N = np.array([len(t.steps) for t in trajectories])
    width = max(int(steps_N.max()), 1)
    if c.name == "adca":
        label_NK = np.zeros((len(trajectories), width), np.int8)
        for row_K, trajectory in zip(label_NK, trajectories):
            row_K[: len(trajectory.steps)] = [taken.label for taken in trajectory.steps]
        alpha = advantages.alpha_at(step, alpha=c.alpha, alpha_min=c.alpha_min, total_steps=c.alpha_steps)
        return advantages.adca(
            outcome_N, group_N, label_NK, steps_N, alpha=alpha, scheme=c.scheme, norm=c.norm,
            outcome_at=c.outcome_at, length_normalise=c.length_normalise,
        )  # fmt: skip
    options = {"grpo": {"std": c.std}, "loop": {"drop_below": c.drop_below}}.get(c.name, {})
    return np.repeat(getattr(advantages, c.name)(outcome_N, group_N, **options)[:, None], width, axis=1)


# --- 6 samples -------------------------------------------------------------------------------------------------------


def select(run: Run, trajectories: Sequence[Trajectory], metrics: dict[str, Any]) -> tuple[list[Packed], list[str]]:
    """Packed mini-batches, and the fate of every rollout: "trained", or why not."""
    c = run.config.learner
    gates = {
        "max_tokens": c.row, "version": run.engine.version, "max_staleness": c.max_staleness, "drop": c.drop,
        "drop_truncated": c.drop_truncated,
    }  # fmt: skip
    kept, ledger = samples.admit(trajectories, **gates)
    metrics |= {f"ledger/{fate}": count for fate, count in ledger.items()} | {"ledger/rollouts": len(trajectories)}
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in kept:
        groups.setdefault(trajectory.task.id, []).append(trajectory)
    members = list(groups.values())
    batches = []
    for i in range(min(c.updates, len(members))):
        chosen = [t for group in members[i :: c.updates] for t in group]
        batches.append(pack([s for t in chosen for s in samples.samples(t)], c.row))
    if batches:
        metrics["learner/rows"] = sum(b.rows for b in batches)
        metrics["learner/fill"] = float(np.average([b.fill for b in batches], weights=[b.rows for b in batches]))
    admitted = {id(t) for t in kept}
    return batches, ["trained" if id(t) in admitted else fate_of(t, gates) for t in trajectories]


def fate_of(trajectory: Trajectory, gates: dict[str, Any]) -> str:
    """Why a rollout was left out: what the gates say of it alone. A group without signal has none in any member."""
    return next(fate for fate, count in samples.admit([trajectory], **gates)[1].items() if count)


# --- 7 update --------------------------------------------------------------------------------------------------------


def learn(run: Run, batches: Sequence[Packed], step: int, metrics: dict[str, Any]) -> None:
    """One optimizer step per mini-batch and epoch. Not to be interrupted: the old state is consumed."""
    c = run.config
    with timed(metrics, "logp"):
        for batch in batches:
            run.progress.phase("log-probabilities")
            score(run, batch)
    metrics |= mismatch.figures(batches, run.engine.version, recomputed=c.loss.old_logp == "recomputed")
    found = []
    with timed(metrics, "update"):
        for epoch in range(c.learner.epochs):
            order = np.random.default_rng(seed_of(c.seed, "batches", step, epoch)).permutation(len(batches))
            for number, i in enumerate(order):
                run.progress.phase("update", epoch * len(batches) + number, c.learner.epochs * len(batches))
                run.state, measured = run.update(run.state, batches[i])
                found.append({name: float(value) for name, value in measured.items()})
    metrics |= merged(found)
    if warning := run.alarm.check(metrics):
        run.progress.say(f"step {step}: {warning}")
    metrics["alarm/weights"] = float(bool(warning))


def score(run: Run, batch: Packed) -> None:
    """Fill in the old log-probabilities and, where the loss has a KL term, those of the reference policy.

    What a guided rollout was sampled with is another prompt's probability, so it has a choice of its own.
    """
    c = run.config.loss
    wanted_RT = np.where(batch.guided_RT, c.guided_prompt == "stripped", c.old_logp == "recomputed") & batch.mask_RT
    if wanted_RT.any():
        batch.old_logp_RT = np.where(wanted_RT, run.logp(learner.whole(run.state, run.layout), batch), batch.logp_RT)
    if c.kl:
        # Not a reference of its own to the base: an update consumes the state it is given, and makes another.
        here = run.state["base"] if run.layout.lora else run.reference
        if c.reference == "host" and not run.layout.lora:
            here = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), here)
        batch.ref_logp_RT = run.logp(here, batch)


def merged(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates: means over tokens; the largest maximum; sums of counts.

    mismatch/* compares engine and learner, so it is that of the first update, whose weights are the engine's.
    """
    if not found:
        return {"updates": 0}
    weights = [max(update["tokens"], 1.0) for update in found]
    result: dict[str, float] = {"updates": len(found)}
    for name in found[0]:
        values = [update[name] for update in found]
        if name.startswith("mismatch/"):
            result[name] = values[0]
        elif name in ("tokens", "skipped"):
            result[name] = sum(values)
        elif name.endswith("/max"):
            result[name] = max(values)
        else:
            result[name] = math.fsum(v * w for v, w in zip(values, weights)) / math.fsum(weights)
    result["trained_tokens"] = result.pop("tokens")
    return result


# --- 8 sync ----------------------------------------------------------------------------------------------------------


def sync(run: Run, step: int, metrics: dict[str, Any]) -> None:
    """New weights to the engine. The version it answers with is the step that made them."""
    with timed(metrics, "sync"):
        run.stop.finish(run.engine.load(hosts.local(run.policy), step))
    if run.config.engine.name != "jax":
        metrics |= {f"engine/{name}": value for name, value in run.engine.stats().items()}


# --- 9 memory --------------------------------------------------------------------------------------------------------


def remember(run: Run, trajectories: Sequence[Trajectory], step: int, metrics: dict[str, Any]) -> None:
    """Attempts become experience, every `navigating.every` steps; how synthetic tasks fare is noted at every step."""
    every = run.config.navigating.every
    if run.questioning:
        run.questioning.record((t.task.id, t.evaluation.success) for t in trajectories if not broken(t))
        metrics |= run.questioning.metrics()
    if run.navigating:
        if every and step % every == 0:
            with timed(metrics, "memory"):
                hosts.led(run.navigating, lambda: run.navigating.learn(trajectories, step=step))
        metrics |= run.navigating.metrics()


# --- 10 books --------------------------------------------------------------------------------------------------------


def chat_metrics(run: Run) -> dict[str, float]:
    """What language models were asked since the last time."""
    return run.chat.metrics() if run.chat else {}


def write_trajectories(run: Run, step: int, trajectories: Sequence[Trajectory], fates: Sequence[str]) -> None:
    """One line per rollout, every `log.trajectories` steps."""
    every = run.config.log.trajectories
    if every and step % every == 0:
        records = [books.trajectory_record(t, fate=fate) for t, fate in zip(trajectories, fates)]
        run.workdir.log_trajectories(step, records)


def keep_books(run: Run) -> None:
    """Evaluate if it is time, write the step's line, save if it is time. Done again as a whole if it is cut short."""
    c, step, metrics = run.config, run.step, dict(run.unbooked)
    best = None
    if c.eval.every and (step % c.eval.every == 0 or step == c.steps):
        with timed(metrics, "eval"):
            scores = hold_out(run)
        run.workdir.log_scores(step, scores)
        metrics |= {f"eval/{name}": value for name, value in measures(scores)}
        best = metrics[f"eval/avg@{c.eval.rollouts}"]
    if run.checkpoints.seconds:
        metrics["time/checkpoint"] = run.checkpoints.seconds
    metrics["time/elapsed"] = run.elapsed
    run.workdir.log_metrics(step, metrics)
    run.sinks.log(step, metrics)
    show(run, step, metrics)
    run.booked()
    if step % c.checkpoint.every == 0 or step == c.steps:
        save(run, metric=best)


def save(run: Run, metric: float | None = None) -> None:
    """A checkpoint of the last complete step."""
    if run.navigating and hosts.first():
        run.navigating.pool.save(run.workdir / "experience")
    run.workdir.log_tasks([*run.originals, *(run.questioning.tasks.values() if run.questioning else ())])
    run.checkpoints.save(run.step, learner.trained(run.state), run.saved, metric=metric)


def hold_out(run: Run, *, keep: str = "") -> Scores:
    """Success on the held-out tasks, with the same seeds at every step; `keep` writes the rollouts under that name."""
    c = run.config

    def jobs_of(name: str, count: int, temperature: float) -> list[Job]:
        experience = {}
        if c.eval.experience:
            retrieved = run.navigating.retrieve_all([t.query for t in run.held_out])
            experience = {t.id: [(e.id, e.content) for e in found] for t, found in zip(run.held_out, retrieved)}
            run.navigating.metrics()  # evaluation must leave no trace in the counters of the next step
        return [
            Job(task, i, seed_of(c.seed, name, task.id, i), sampling(c, temperature), experience.get(task.id, []))
            for task in run.held_out
            for i in range(count)
        ]

    jobs = jobs_of("eval", c.eval.rollouts, c.eval.temperature)
    greedy = jobs_of("greedy", 1, 0.0) if c.eval.greedy else []
    played = play(run, jobs + greedy, "evaluation")
    if keep:
        kinds = ["sampled"] * len(jobs) + ["greedy"] * len(greedy)
        run.workdir.log_trajectories(keep, [books.trajectory_record(t, fate=f) for t, f in zip(played, kinds)])
    sampled, greedy = played[: len(jobs)], played[len(jobs) :]
    return scores_of(sampled, greedy, temperature=c.eval.temperature)


def show(run: Run, step: int, metrics: dict[str, Any]) -> None:
    """The line of a step for whoever waits."""
    figures = {}
    if "rollout/success" in metrics:
        figures["success"] = f"{metrics['rollout/success']:.0%}"
        figures["trained"] = f"{metrics['ledger/trained']}/{metrics['ledger/rollouts']}"
        figures["tokens/s"] = f"{metrics['time/tokens_per_s']:,.0f}"
    name = f"eval/avg@{run.config.eval.rollouts}"
    if name in metrics:
        figures[f"held-out {name.removeprefix('eval/')}"] = f"{metrics[name]:.1%}"
    run.progress.step(step, **figures)
