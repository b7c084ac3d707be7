"""Phases 6 to 8: samples, updates, and new weights for the engine."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from evolver.build import Run
from evolver.config.derived import recomputed, updates_of_a_step
from evolver.config.keys import arguments
from evolver.learner import Learner
from evolver.metrics import Metrics, timed
from evolver.processes import hosts
from rl import mismatch
from rl.learner import whole
from rl.losses.terms import LOG_RATIO_LIMIT
from rl.packing import Packed, pack
from rl.samples import REASONS, Sample, drop_reasons, samples
from rl.seeds import seed_of
from rl.trajectory import Trajectory, Turn, groups_of

# What is told of further rollouts that do not train, by the reason; c: config.learner.
REMEDIES = {
    "env_error": "their world failed",
    "cancelled": "they were cancelled, or nothing was generated in them",
    "parse_error": "they end unreadably, and config.learner.drop names parse_error",
    "stale": "their turns are older than config.learner.max_staleness={c.max_staleness} allows",
    "overlong": "they do not fit into config.learner.row={c.row}, or are cut, which"
    " config.learner.drop_truncated={c.drop_truncated} drops",
    "no_signal": "their advantages are 0",
}
# Figures of an engine that the processes of a run have in common, or wait for.
COMMON_STATS = (
    "version", "loads", "stage_seconds", "update_seconds", "sleep_seconds", "gap", "shift",
)  # fmt: skip


def select(
    run: Run, trajectories: Sequence[Trajectory], extra: Sequence[Trajectory], step: int
) -> tuple[list[Packed], list[str | None], Metrics]:
    """Return packed mini-batches of nearly equal numbers of groups, the reason why each rollout
    does not train (None if it does), and the counts of both.

    extra: rollouts that train in groups of their own and are counted apart; their reasons come
    last.
    """
    c = run.config.learner
    gates = {"version": run.actor.engine.version, **arguments(drop_reasons, c)}
    reason_N, extra_reasons = (drop_reasons(part, **gates) for part in (trajectories, extra))
    for n, trajectory in enumerate(trajectories):
        if reason_N[n] is None and not run.recipe.trains(trajectory):
            reason_N[n] = "no_signal"
    metrics = ledger(reason_N) | {"ledger/rollouts": len(trajectories)}
    if extra:
        metrics |= ledger(extra_reasons, "extra_") | {"ledger/extra": len(extra)}
        warn_of_extra(run, extra_reasons, step)
    groups: list[list[Trajectory]] = []
    for rollouts, reasons in ((trajectories, reason_N), (extra, extra_reasons)):
        trained = [t for t, reason in zip(rollouts, reasons) if reason is None]
        groups += groups_of(trained).values()
    batches = [
        mini_batch(run.config, list(itertools.chain(*groups[i :: c.updates])))
        for i in range(min(c.updates, len(groups)))
    ]
    names = set().union(*(batch.channels for batch in batches))
    # All alike, so that one program serves them.
    for part in [*batches, *(batch.guided_alone for batch in batches if batch.guided_alone)]:
        for name in names:
            part.channels.setdefault(name, np.zeros_like(part.logp_RT))
    if batches:
        rows = [batch.rows for batch in batches]
        fill = np.average([batch.fill for batch in batches], weights=rows)
        metrics |= {"learner/rows": sum(rows), "learner/fill": float(fill)}
    return batches, [*reason_N, *extra_reasons], metrics


def ledger(reasons: Sequence[str | None], prefix: str = "") -> Metrics:
    """Return the counts of rollouts that train, and of those that do not, by their reasons."""
    fates = (None, *REASONS)
    return {f"ledger/{prefix}{fate or 'trained'}": reasons.count(fate) for fate in fates}


def warn_of_extra(run: Run, reasons: Sequence[str | None], step: int) -> None:
    """Tell the user the first time that one reason keeps all further rollouts of a step from
    training."""
    reason, *others = set(reasons)
    if reason and not others:
        run.progress.once(
            f"extra/{reason}",
            f"step {step}: none of the {len(reasons)} extra rollouts of the recipe trains"
            f" (ledger/extra_{reason}): {REMEDIES[reason].format(c=run.config.learner)}",
        )


def mini_batch(config: Any, trajectories: Sequence[Trajectory]) -> Packed:
    """Return the samples of rollouts in rows, and the turns that they are of."""
    parts = [samples(trajectory) for trajectory in trajectories]
    packed = list(itertools.chain(*parts))
    batch, guided = in_rows(config, packed), [sample for sample in packed if sample.guided]
    # Where `score` takes the log-probabilities of guided samples only, it needs no other rows.
    alone = guided and not np.isnan(batch.logp_RT).any()
    if alone and config.loss.guided_prompt == "stripped" and not recomputed(config):
        batch.guided_alone = in_rows(config, guided)
    batch.rollouts = tuple(np.repeat(np.arange(len(parts)), [len(part) for part in parts]))
    batch.turns = tuple(training_turns(trajectories))
    return batch


def training_turns(trajectories: Iterable[Trajectory]) -> list[Turn]:
    """Return the turns of rollouts that train, in order."""
    turns = itertools.chain.from_iterable(t.turns for t in trajectories)
    return [turn for turn in turns if turn.trains]


def in_rows(config: Any, chosen: Sequence[Sample]) -> Packed:
    """Return samples packed into rows as `config.learner` says."""
    c = config.learner
    return pack(chosen, c.row, share=c.share_prompts, most=c.most_segments)


def make_room(run: Run) -> None:
    """Let the engine free what it has on the learner's devices. The sync wakes it."""
    hosts.together(lambda: run.stop.finish(run.actor.engine.sleep()))


def learn(run: Run, batches: Sequence[Packed], step: int) -> Metrics:
    """Make one optimizer step per mini-batch and epoch. This must not be interrupted: the old state
    is consumed.

    The recipe weighs the tokens before the first update, when their log-probabilities by the policy
    and the reference are known. The mini-batch that is updated first needs no pass for its old
    log-probabilities, unless the recipe does: its update computes them.
    """
    c, learner, version = run.config, run.learner, run.actor.engine.version
    first = -1 if run.recipe.weighs or not batches else order(c, step, 0, len(batches))[0]
    with timed("logp") as metrics:
        for i, batch in enumerate(batches):
            run.progress.phase("log-probabilities")
            score(c, learner, batch, own=i == first)
    metrics |= run.recipe.weigh(batches)
    if batches:
        metrics["advantage/mean"] = float(np.mean([balance(learner, batch) for batch in batches]))
    measured = []
    with timed("update") as seconds:
        for batch, values in updates(run, learner, batches, step):
            logp_RT = values.pop("logp_RT")
            if batch.old_logp_RT is not None:
                own_RT = np.isnan(batch.old_logp_RT)
                batch.old_logp_RT = np.where(own_RT, logp_RT, batch.old_logp_RT)
            note_tokens(batch, logp_RT)
            measured.append({name: float(value) for name, value in values.items()})
    metrics |= mismatch.figures(batches, version, recomputed=recomputed(c))
    metrics |= seconds | merged(measured)
    if learner.renews and step % c.loss.renew_reference == 0:
        learner.renew_reference()
    if warning := learner.alarm.check(metrics):
        run.progress.say(f"step {step}: {warning}")
    return metrics | {"alarm/weights": float(bool(warning))}


def updates(
    run: Run, learner: Learner, batches: Sequence[Packed], step: int
) -> Iterator[tuple[Packed, dict[str, jax.Array]]]:
    """Make one optimizer step per mini-batch and epoch, in an order that is drawn anew for each
    epoch. Yield each mini-batch with the metrics of its update."""
    c, done = run.config, 0
    planned, total = updates_of_a_step(c), c.learner.epochs * len(batches)
    for epoch in range(c.learner.epochs):
        for i in order(c, step, epoch, len(batches)):
            run.progress.phase("update", done, total)
            learner.state, values = learner.update(
                learner.state,
                batches[i],
                position=planned * (step - 1 + done / total),
                seed=seed_of(c.seed, "rounding", step, done) % 2**32,
            )
            yield batches[i], values
            done += 1


def order(config: Any, step: int, epoch: int, count: int) -> np.ndarray:
    """Return the order in which an epoch updates its mini-batches."""
    seed = seed_of(config.seed, "batches", step, epoch)
    return np.random.default_rng(seed).permutation(count)


def balance(learner: Learner, batch: Packed) -> float:
    """Return the mean advantage of the tokens that train, as the loss weighs them: below 0, an
    update lowers the probability of what was sampled more than it raises it."""
    weight_RT = learner.update.weights(batch)
    return float(np.sum(weight_RT * batch.advantage_RT) / max(np.sum(weight_RT), 1e-9))


def score(config: Any, learner: Learner, batch: Packed, *, own: bool = False) -> None:
    """Fill in the old log-probabilities and, if they are needed, those of the reference policy.
    own: leave NaN where they are those of the update that comes first.

    A guided rollout was sampled under another prompt, so `loss.guided_prompt` decides for it
    instead of `loss.old_logp`. Tokens whose log-probability at sampling is unknown have the
    policy's.
    """
    stripped = config.loss.guided_prompt == "stripped"
    wanted_RT = np.where(batch.guided_RT, stripped, recomputed(config))
    wanted_RT = (wanted_RT | np.isnan(batch.logp_RT)) & batch.mask_RT
    if own and wanted_RT.any():
        batch.old_logp_RT = np.where(wanted_RT, np.float32(np.nan), batch.logp_RT)
    elif wanted_RT.any():
        params = whole(learner.state, learner.layout)
        if batch.guided_alone is None:
            logp_RT = learner.logp(params, batch)
        else:  # the guided samples take about half as many rows as all of them
            logp_n = np.zeros(np.count_nonzero(batch.mask_RT), np.float32)
            part_RT = learner.logp(params, batch.guided_alone)
            logp_n[batch.trained(batch.guided_RT)] = batch.guided_alone.trained(part_RT)
            logp_RT = batch.placed(logp_n)
        batch.old_logp_RT = np.where(wanted_RT, logp_RT, batch.logp_RT)
    if learner.needs_reference:
        batch.ref_logp_RT = learner.logp(learner.reference_policy(), batch)


def note_tokens(batch: Packed, logp_RT: np.ndarray | jax.Array) -> None:
    """Write into the turns of a mini-batch what its update saw of each token: the gap to the
    engine, the ratio, and the advantage where it is not that of the turn.

    logp_RT: the log-probabilities by the weights that the update started from. Of several epochs,
    the last one stays.
    """
    old_RT = batch.logp_RT if batch.old_logp_RT is None else batch.old_logp_RT
    gap_n = batch.trained(old_RT - batch.logp_RT)
    ratio_n = np.exp(batch.trained(np.clip(logp_RT - old_RT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)))
    ends = np.cumsum([len(turn.completion.tokens) for turn in batch.turns])[:-1]
    found = (np.split(x_n, ends) for x_n in (gap_n, ratio_n, batch.trained(batch.advantage_RT)))
    for turn, gap_T, ratio_T, advantage_T in zip(batch.turns, *found, strict=True):
        turn.gap, turn.ratio = gap_T if turn.completion.logprobs else None, ratio_T
        own = np.allclose(advantage_T, turn.advantage, rtol=1e-5, atol=1e-6)
        turn.weighed = None if own else advantage_T


def merged(measured: Sequence[dict[str, float]]) -> Metrics:
    """Merge the metrics of a step's updates: means over the tokens that each is a mean of, the
    largest maximum, and sums of counts.

    mismatch/* compares engine and learner, so it is taken from the first update, whose weights are
    the engine's.
    """
    result = Metrics({"updates": len(measured)})
    if not measured:
        return result
    for name in measured[0]:
        if name.startswith("tokens/"):
            continue
        values = [update[name] for update in measured]
        if name.startswith("mismatch/"):
            result[name] = values[0]
        elif name in ("tokens", "skipped"):
            result[name] = sum(values)
        elif name.endswith("/max"):
            result[name] = max(values)
        else:
            weights = [update.get(f"tokens/{name}", update["tokens"]) for update in measured]
            total = math.fsum(v * w for v, w in zip(values, weights))
            result[name] = total / max(math.fsum(weights), 1.0)
    result["trained_tokens"] = result.pop("tokens")
    return result


def sync(run: Run, step: int) -> Metrics:
    """Load the new weights into the engine. Their version is the step that made them."""
    engine, on_jax = run.actor.engine, run.config.engine.name == "jax"
    with timed("sync") as metrics:
        policy = run.learner.policy
        if run.responder:
            run.responder.expect(policy, step)
        # What is sent to servers is gathered tensor by tensor: a device need not hold all of it.
        params = hosts.local(policy) if on_jax else policy
        hosts.together(lambda: run.stop.finish(engine.load(params, step)))
    if not on_jax:
        stats = hosts.merge_metrics(engine.stats(), largest=COMMON_STATS)
        metrics |= {f"engine/{name}": value for name, value in stats.items()}
    return metrics
