"""The estimate of a case as text and tables."""

from evolver.config.derived import sleeps
from evolver.llm.roles import engine_context
from evolver.plan import calls, preflight
from evolver.plan.advice import advise
from evolver.plan.amounts import evaluated_tasks
from evolver.plan.analytic import kv_bytes
from evolver.plan.case import PHASES, SERVER, Case
from evolver.plan.estimate import (
    DISK,
    GENERATED,
    KINDS,
    fits,
    halves,
    learner_peak,
    memory,
    overheads,
    phases,
    sequences,
    step_seconds,
    weight_sync,
)
from evolver.plan.targets import GIB
from evolver.plan.text import duration, section, table


def render(case: Case) -> str:
    """Return the estimates of a case as text, one section after the other."""
    target = case.target
    chip = case.target.chip
    mesh = [f"{axis}={size}" for axis, size in case.config.mesh.items() if size > 1]
    sections = [
        section(
            f"target {target.name}: {target.count} x {chip.name}, {chip.usable / GIB:.1f} GiB"
            f" usable of {chip.memory / GIB:.1f} each, mesh {' '.join(mesh) or 'of one device'}",
            f"source of the figures: {source_text(case)}",
            f"engine: {case.engine.place}",
            *([case.note] if case.note else []),
        ),
        section("memory of the fullest device, GiB", *memory_table(case)),
        collectives(case),
        section(
            f"one step: {case.trajectories:,} episodes; assumed: {case.episode:,.0f} tokens each,"
            f" {GENERATED:.0%} of them generated",
            *time_table(case),
            f"expected: {duration(step_seconds(case))} a step without environments and judges",
            *budget(case),
            run_time(case),
        ),
        section("sizes", *sizes(case)),
        section("each host needs", *preflight.lines(case)),
        section("verdict", *verdict(case)),
    ]
    return "\n\n".join(filter(None, sections))


def source_text(case: Case) -> str:
    """Return where the figures come from."""
    why = case.compiled.get("error", "not asked")
    if not case.programs:
        return f"arithmetic only, no program was compiled ({why})"
    names = ", ".join(case.programs)
    jax = case.compiled["jax"]
    return f"XLA of jax {jax} for memory and collectives of {names}; arithmetic for the rest"


def memory_table(case: Case) -> list[str]:
    """Return the memory by phase and kind, with a mark where it is above the limit."""
    limit = case.target.chip.usable
    rows = [["", *KINDS, "total", "of"]]
    for phase, row in memory(case).items():
        total = sum(row.values())
        over = "" if total <= limit else "  too much"
        cells = [f"{row[kind] / GIB:.1f}" if row[kind] else "." for kind in KINDS]
        rows.append([phase, *cells, f"{total / GIB:.1f}", f"{limit / GIB:.1f}{over}"])
    here = [phase for phase in PHASES if phase in memory(case)]
    sources = [f"{p} {'compiled' if p in case.programs else 'estimated'}" for p in here]
    lines = [*table(*rows), f"temporaries (activations, buffers): {', '.join(sources)}"]
    if sleeps(case.config):
        lines.append(
            "learner and servers take turns: servers sleep in update and logp, where each keeps"
            f" {SERVER / GIB:.0f} GiB (assumed, with the temporaries)"
        )
    if host := sum(case.on_host.values()) * case.target.count:
        lines.append(f"in host memory: {host / GIB:.0f} GiB of all hosts together")
    return lines


def collectives(case: Case) -> str:
    """Return a section on how often each collective runs and what one device sends, "" without
    figures of the compiler."""
    rows = []
    for phase, program in case.programs.items():
        for kind, (count, sent) in program["collectives"].items():
            if sent >= 1e6:
                words = f"{sent / 1e9:,.1f} GB sent by a device"
                rows.append([phase, kind, f"{count:,.0f} times", words])
    title = "collectives of one update and one pass of log-probabilities"
    return section(title, *table(*rows)) if rows else ""


def time_table(case: Case) -> list[str]:
    """Return a table of each phase: the work of a device, its bottleneck, and the best and the
    expected time."""
    titles = "tokens,PFLOP,TB moved,GB sent,bound by,roofline s,expected s,tokens/s"
    rows = [["", *titles.split(",")]]
    for name, phase in phases(case).items():
        rate = phase.tokens / phase.expected if phase.expected else 0.0
        rows.append(
            [
                name,
                f"{phase.tokens:,.0f}",
                f"{phase.flops / 1e15:,.2f}",
                f"{phase.moved / 1e12:,.2f}",
                "?" if phase.sent is None else f"{phase.sent / 1e9:,.0f}",
                phase.bound,
                f"{phase.roofline:,.1f}",
                f"{phase.expected:,.1f}",
                f"{rate:,.0f}",
            ]
        )
    unknown = any(phase.sent is None for phase in phases(case).values())
    return [
        *table(*rows),
        *(["?: no compiler has said it, and the times are without it"] if unknown else []),
        "tokens and tokens/s are those of all devices together, the other columns those of one",
    ]


def budget(case: Case) -> list[str]:
    """Return what a step takes with and without each overlap of its parts."""
    c = case.config
    (rollouts, learner) = halves(case)
    questions, grades = calls.grading(c)
    part = {"rollouts": rollouts, "grades": grades, "learner": learner}
    words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in part.items() if seconds)
    if questions:
        words += (
            f" ({questions:,} questions of {calls.SECONDS:g} s each, assumed,"
            f" {c.llm.concurrency} at a time)"
        )
    overlapped = max(rollouts, grades)
    ahead = c.rollout.async_depth
    rows = [["one part after the other", duration(sum(part.values())), ""]]
    if questions:
        grown = duration(overlapped + learner)
        rows.append(["groups graded as they end", grown, "" if ahead else "this config"])
    setting = "this config" if ahead else "rollout.async_depth=1"
    if sleeps(c):
        setting += ", engine.vllm.sleep=False"
    rows.append(
        ["rollouts of the next step meanwhile", duration(max(overlapped, learner)), setting]
    )
    return [f"budget: {words}", *(f"  {row}" for row in table(*rows))]


def run_time(case: Case) -> str:
    """Return the time of the whole run: its steps, and what comes on top of them."""
    c = case.config
    parts = {f"{c.steps:,} steps": step_seconds(case) * c.steps, **overheads(case)}
    counted = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds >= 1]
    words = ", ".join(counted)
    if c.eval.every and not evaluated_tasks(c, case.held_out):
        words += "; evaluation is not counted, because the number of tasks is not known here"
    return f"the run: {duration(sum(parts.values()))} ({words})"


def sizes(case: Case) -> list[str]:
    """Return the sizes of weights, caches and files."""
    s = case.sizes
    c = case.config
    (sent, rate) = weight_sync(case)
    seconds = sent / rate
    speed = rate / 1e9
    took = f"{seconds:.2f} s" if seconds < 10 else duration(seconds)
    asked = f"; engine.slots asks for {c.engine.slots:,}" if case.on_jax else ""
    room = sequences(case) * case.engine.used
    fit = f"{room:,} episodes of {engine_context(c):,} tokens fit{asked}"
    written = f"{s['checkpoint'] / DISK:.0f} s at 1 GB/s"
    return table(
        ["parameters", f"{s['parameters']:,}", f"{s['trained']:,} trained"],
        ["checkpoint", f"{s['checkpoint'] / 1e9:.1f} GB", written],
        ["weight sync", f"{sent / 1e9:.1f} GB", f"{took} at {speed:,.{int(speed < 10)}f} GB/s"],
        ["exported policy", f"{s['policy'] / 1e9:.1f} GB", ""],
        ["KV cache", f"{kv_bytes(case.shape, c.engine.cache_dtype):,} B a token", fit],
    )


def verdict(case: Case) -> list[str]:
    """Return the verdict: it fits, or what would make it fit."""
    if fits(case):
        return ["fits", *advise(case)]
    words = "does not fit"
    alone = learner_peak(case)
    limit = case.target.chip.usable
    if alone <= limit and not case.refused:
        sizes = f"{alone / GIB:.1f} of {limit / GIB:.1f} GiB"
        words += f" with the engine on the same device; the learner alone fits ({sizes})"
    refused = [
        f"the compiler refuses {name}: {text.splitlines()[0][:200]}"
        for name, text in case.refused.items()
    ]
    return [*refused, words, *advise(case)]
