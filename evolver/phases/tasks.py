"""Phase 1: choose the tasks of a step: original ones of the world and synthetic ones of
self-questioning."""

import itertools
import math
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace

from envs import boundary
from envs.profile import tools_of
from envs.world import Observation, Task, first_of_worlds
from evolver import alarms
from evolver.build import Run, RunError
from evolver.config.derived import originals_needed, synthetic_tasks, worlds
from evolver.config.paths import model_folder
from evolver.llm.roles import policy_prompts, question_context
from evolver.metrics import Metrics, timed
from evolver.phases.rollouts import Chosen, gather_rollouts, sampling_of
from evolver.processes.interrupt import Interrupted
from evolver.questioning import Explorer, TaskPool, is_verified
from evolver.questioning.tasks import NotExplorable
from evolver.sampling import Draw, drawn
from evolver.transcripts import tool_list
from models import chat
from rl import calls
from rl.contexts import Opening
from rl.rollout import Job
from rl.seeds import seed_of

ANSWER = 64  # tokens that an answer with a reason takes


def check(run: Run) -> None:
    """Raise RunError if the world has too few tasks. The config check cannot ask workers or
    services."""
    needed, there = originals_needed(run.config), len(run.tasks.originals)
    if there < needed:
        raise RunError(
            f"a step needs {needed} different original tasks, and there are {there}: lower"
            " config.rollout.tasks"
        )
    c = run.config.eval
    if c.every and not run.tasks.held_out:
        raise RunError(
            f"config.eval.split={c.split} has no tasks: set config.eval.every=0 or another split"
        )


def look_ahead(run: Run) -> None:
    """Say what will make rollouts fail, as far as the first prompt of each world shows it. Raises
    RunError if it leaves no room for a turn."""
    for first in first_of_worlds([*run.tasks.originals, *run.tasks.held_out]):
        look_at(run, first)


def look_at(run: Run, task: Task) -> None:
    """Say what will make the rollouts of a task fail, as far as its first prompt shows it. Raises
    RunError if it leaves no room for a turn."""
    c, actor = run.config, run.actor
    world_of = worlds(c).get(task.env, c.env.name)
    shown = c.template.worlds.get(task.env, {}).get("show_tools", actor.show_tools)

    def tokens(seen: Observation) -> int:
        opening = Opening(actor.tokenizer, seen, (), shown, actor.limits, actor.chat, task.env)
        return len(actor.context(opening).prompt)

    try:
        with closing(run.make_world()) as world:
            seen = boundary.observation(world.reset(task, task.seed))
        prompt, bare = tokens(seen), tokens(Observation(seen.messages))
        role = "tool" if seen.tools else "user"
        chat.observation(actor.tokenizer, [{"role": role, "content": ""}])
    except chat.ChatError as error:
        raise RunError(f"the first prompt of {world_of} cannot be written: {error}") from None
    except Exception:  # a fault of the world or of the template, which the rollouts will show
        return
    found = alarms.foreseen(
        len(seen.tools), prompt, bare, shown=shown, learned=trained_in(world_of, c.model.path),
        context=c.rollout.context, max_tokens=c.rollout.max_tokens,
    )  # fmt: skip
    if prompt >= c.rollout.context:
        raise RunError(found[0])
    for role, question in policy_prompts(c):
        needed = len(chat.opening(actor.tokenizer, question.empty())) + bare
        needed += c.rollout.max_tokens + min(ANSWER, c.llm[role].max_tokens)
        if needed > question_context(c):
            found.append(
                f"the policy plays the {role}, whose questions with one turn have, with an answer,"
                f" about {needed:,} tokens, more than the {question_context(c):,} of"
                " config.llm.context"
            )
    if seen.tools and calls.is_unknown(actor.tokenizer):
        found.append(
            "the chat template writes calls of tools in no known format; they are read as hermes"
            " (config.template.calls)"
        )
    where = f"{task.env}: " if run.tasks.worlds else ""
    for text in found:
        run.progress.say(f"ALARM: {where}{text}")


def trained_in(world: str, policy: str) -> bool:
    """Return True if the policy's card says that it was trained in the world."""
    if not policy:
        return False
    card = model_folder(policy) / "README.md"
    return card.is_file() and f"`{world}`" in card.read_text("utf-8", "replace")


def explore(run: Run, step: int = 0) -> Metrics:
    """Invent synthetic tasks: the first ones at step 0, unless a file provides them, and a refresh
    later.

    Raises RunError if there are fewer than a step needs.
    """
    c, pool, explorer = run.config.questioning, run.tasks.pool, run.tasks.explorer
    metrics = Metrics()
    if pool is None:
        return metrics
    if explorer and (step or not c.tasks):
        run.progress.phase("exploring")
        with timed("explore") as metrics:
            new = run.on_first(pool, lambda: invent(run, pool, explorer, step))
        if run.tasks.words is not None:
            metrics |= run.tasks.words.metrics()
        metrics |= try_out(run, pool, new, step)
        # Only now: what was not tried would displace what is known to be solved, and may go itself.
        pool.shrink()
    needed = synthetic_tasks(run.config)
    if len(pool.tasks) < needed:
        there = f"there are {len(pool.tasks)} synthetic tasks and a step needs {needed}"
        lower = "lower config.questioning.share"
        if c.tasks and not step:
            raise RunError(f"{there}: give a file with more tasks, or {lower}")
        if c.budget < needed:
            raise RunError(f"{there}: raise config.questioning.budget or {lower}")
        raise RunError(
            f"{there}: exploring found no more ({pool.rejections()}). Try another explorer or"
            f" model, or {lower}"
        )
    return metrics if step else metrics | pool.metrics()


def invent(run: Run, pool: TaskPool, explorer: Explorer, step: int) -> list[Task]:
    """Let the explorer fill the pool, and word the new tasks, which are returned. Interrupted in a
    refresh, the pool is as before, because a run that resumes explores again. Raises RunError for a
    world that cannot be explored."""
    c, known = run.config, len(pool.tasks)
    budget = c.questioning.refresh if step else c.questioning.budget
    before, started, minutes = pool.state(), time.monotonic(), c.questioning.minutes

    def show() -> None:
        walks, steps = pool.counted("walks"), pool.counted("env_steps")
        took, found = time.monotonic() - started, len(pool.tasks) - known
        name = f"exploring · {walks:,} walks, {steps:,} steps, {steps / max(took, 1e-3):,.0f}/s"
        run.progress.phase(f"{name} · tasks", found, budget)

    def is_over() -> bool:
        # What a signal raised is lost in a callback of the garbage collector, as JAX has one, or in
        # a world's bare `except`.
        run.stop.check()
        return spent() > 1.0

    def spent() -> float:
        return (time.monotonic() - started) / (60 * minutes or math.inf)

    pool.watch, pool.is_over, pool.spent = show, is_over, spent
    try:
        with run.stop.at_once():
            new = pool.grow(explorer, run.make_world, budget, seed_of(c.seed, "explore", step))
        if len(new) < budget and pool.is_over():
            run.progress.say(
                f"exploring ended after {minutes:g} minutes with {len(new)} of {budget} tasks"
                " (config.questioning.minutes)"
            )
    except NotExplorable as error:
        raise RunError(str(error)) from None
    except Interrupted:
        if step:
            pool.load_state(before)
        raise
    finally:
        # A recipe may begin explorations of its own.
        pool.watch, pool.is_over, pool.spent = lambda: None, lambda: False, lambda: 0.0
    poor = [task.query for task in new if task.meta.get("undescribed")]
    if c.questioning.words.name == "plain" and 2 * len(poor) > len(new):
        run.progress.once(
            "words",
            f"{len(poor)} of {len(new)} invented tasks are poorly worded ({poor[0]!r}), because the"
            " tools have no description in words, or a very long one. Describe the tools, or let a"
            " language model word the tasks: config.questioning.words.name=model",
        )
    if run.tasks.words is not None and new:
        with closing(run.make_world()) as world:
            tools = tool_list(tools_of(world, pool.seeds[:8]), c.llm.shown)
        pool.reword(run.tasks.words, [task.id for task in new], tools)
    return [pool.tasks[task.id] for task in new]


def try_out(run: Run, pool: TaskPool, new: Sequence[Task], step: int) -> Metrics:
    """Attempt each new task `questioning.attempts` times, and remove those that no attempt solves.

    This is the round trip from words to effect: a query from which no attempt succeeds may not say
    what the verifier demands. Attempts from the query of a sibling, a goal with another value, must
    all fail: otherwise the verifier does not check what the query says. A task whose attempts were
    all broken off by a fault was not tried, and stays; tasks that only a judge can score are not
    attempted.
    """
    c, n = run.config, run.config.questioning.attempts
    new = [task for task in new if is_verified(task)]
    if not n or not new:
        return Metrics()
    siblings = [replace(t, query=t.meta["sibling"]) for t in new if t.meta.get("sibling")]
    jobs = [
        Job(task, i, seed_of(c.seed, "attempt", step, task.id, task.query, i), sampling_of(c))
        for task, i in itertools.product([*new, *siblings], range(n))
    ]
    with timed("attempts") as metrics:
        played = gather_rollouts(run, jobs, "attempts")
    tried = [t for t in played[: n * len(new)] if not t.broken]
    misleading = [t for t in played[n * len(new) :] if not t.broken]
    solved = {t.task.id for t in tried if t.success}
    misled = {t.task.id for t in misleading if t.success}
    pool.record((t.task.id, t.success) for t in tried)
    pool.remove({t.task.id for t in tried} - solved, "no attempt solves it")
    pool.remove(solved & misled, "solved from another query")
    return metrics


def choose(run: Run, step: int) -> tuple[Chosen, Metrics]:
    """Return {step: its tasks}; with `rollout.async_depth`, also those of later steps that are to
    be started now.

    Every `questioning.every` steps the synthetic tasks are refreshed first.
    """
    c, pool, metrics = run.config, run.tasks.pool, Metrics()
    every, seed = c.questioning.every, seed_of(c.seed, "tasks")
    chosen = {}
    for ahead in run.pipeline.ahead(step, c.steps) if run.pipeline else [step]:
        # A run that resumes may have refreshed its tasks for this step already, ahead of the one
        # that it saved.
        if pool and every and (ahead - 1) % every == 0 and ahead > max(1, pool.refreshed):
            metrics |= explore(run, ahead)
            pool.refreshed = ahead
        chosen[ahead] = draw(run, ahead - 1, c.rollout.tasks, seed)
    return chosen, metrics


def draw(
    run: Run, place: int, n: int, seed: int, *, fewer: bool = False, without: Collection[str] = ()
) -> list[Task]:
    """Return n tasks in the mixture of the run, the `place`-th of a sequence of draws.

    Tasks whose ids are in `without` are left out. fewer: return fewer tasks where there are too few
    of one kind for the mixture.
    """
    pool, share = run.tasks.pool, share_of(run)
    originals = [task for task in run.tasks.originals if task.id not in without]
    synthetic = [task for task in pool.tasks.values() if task.id not in without] if pool else []
    while fewer and (round(share * n) > len(synthetic) or n - round(share * n) > len(originals)):
        n -= 1
    learnable = run.config.questioning.learnable
    return drawn(run.sampler, Draw(originals, synthetic, n, share, place, seed, learnable))


def for_experience(run: Run) -> list[Task]:
    """Return the tasks that the first experience is made from: `navigating.tasks` of them, in the
    mixture of the run.

    0 means every task that a step may draw (p_train in eq. 13 of the AgentEvolver paper): with
    share 1 the synthetic ones only. Where there are too few of one kind for the mixture, fewer
    tasks are returned.
    """
    n, share = run.config.navigating.tasks, share_of(run)
    if n:
        return draw(run, 0, n, seed_of(run.config.seed, "pool"), fewer=True)
    originals = run.tasks.originals if share < 1 else []
    synthetic = run.tasks.pool.tasks.values() if run.tasks.pool and share > 0 else []
    return [*originals, *synthetic]


def share_of(run: Run) -> float:
    """Return the share of synthetic tasks in a step."""
    return run.config.questioning.share if run.tasks.pool else 0.0
