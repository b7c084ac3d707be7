"""Groups of rollouts as text for a terminal. Nothing that a model or a world wrote can move the
cursor or hide."""

import itertools
import unicodedata
from collections.abc import Iterator

from envs.values import Json
from evolver.transcripts import shortened
from experiments.view.runs import Run

LABELS = {1: "GOOD", -1: "BAD"}
BIDI = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    """Return text in which control characters, direction marks and lone surrogates are written out,
    as "\\x1b"."""
    return "".join(
        c if c in "\n\t" or not _hidden(c) else c.encode("unicode_escape").decode() for c in text
    )


def _hidden(c: str) -> bool:
    return c in BIDI or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")


def rollouts(run: Run, *, step: int | None, task: str) -> Iterator[tuple[Json, Json]]:
    """Yield (description of the file, record) of each rollout of a step, whose task's id or words
    contain `task`."""
    index = run.index()
    for number, file in enumerate(index["files"]):
        if step is not None and file["step"] != step:
            continue
        queries, words, row = file["queries"], task.lower(), 0
        chosen = [
            task in id or words in queries.get(id, "").lower() for id in file["columns"]["task"]
        ]
        for member, (_, _, count) in enumerate(file["members"]):
            wanted, row = chosen[row : row + count], row + count
            if any(wanted):
                for record in itertools.compress(run.records(number, member), wanted):
                    yield file, record


def groups_table(run: Run, *, step: int | None) -> Iterator[str]:
    """Yield the lines of a table of groups, of the last step with rollouts unless a step is
    given."""
    files = run.index()["files"]
    steps = [file["step"] for file in files if file["kind"] == "step"]
    step = step if step is not None else max((s for s in steps if s is not None), default=None)
    groups: dict[tuple, list[tuple]] = {}
    names = ("task", "draw", "difficulty", "fate", "success", "experience")
    for file in files:
        if file["step"] == step or step is None:
            rows = zip(*(file["columns"][name] for name in names))
            for task, draw, level, fate, success, experience in rows:
                key = (_name(file), task, draw, level, _decoding(file, fate))
                query = file["queries"].get(task, "")
                groups.setdefault(key, []).append((success, fate, bool(experience), query))
    yield f"{run.name}: {len(groups)} groups" + (f" of step {step}" if step is not None else "")
    yield (
        f"{'file':18}  {'task':24}  {'level':>5}  {'success':>7}  {'guided':>6}  {'trained':>7}  "
        f"{'held out':8} query"
    )
    for (name, task, _, level, decoding), rollouts in groups.items():
        successes, fates, guided, queries = zip(*rollouts)
        head = f"{visible(name):18}  {visible(task)[:24]:24}  {level:>5}"
        wins = f"{sum(map(bool, successes)):3}/{len(rollouts):<3}"
        trained, query = fates.count("trained"), visible(" ".join(queries[0].split()))[:80]
        yield f"{head}  {wins}  {sum(guided):>6}  {trained:>7}  {decoding:7}  {query}"
    for described in files:
        for fault in described.get("faults", ()):
            yield visible(f"{described['name']}: {fault}")


def _name(file: Json) -> str:
    """Return the name of a file of rollouts without its endings."""
    return file["name"].partition(".jsonl")[0]


def _decoding(file: Json, fate: str) -> str:
    """Return how a held-out rollout was decoded, "" of one of training."""
    return "" if file["kind"] in ("step", "extra") else fate


def group(run: Run, *, step: int | None, task: str, limit: int, width: int) -> Iterator[str]:
    """Yield the lines of the rollouts of a task: turn by turn, with labels, reasons and advantages.

    limit: characters shown of one action or observation.
    """
    before = None
    for file, record in rollouts(run, step=step, task=task):
        decoding = _decoding(file, record["fate"])
        here = (file["name"], record["task"], record["draw"], decoding)
        if here != before:
            before = here
            yield "=" * width
            yield visible(f"{run.name}  {_name(file)}  {record['task']}  {decoding}".rstrip())
            yield from _block("query", record["query"], limit)
        yield "-" * width
        yield from rollout_lines(record, limit)
    if before is None:
        at = f" in step {step}" if step is not None else ""
        yield f"{run.name}: no rollout{at} belongs to a task whose id or words contain {task!r}"


def rollout_lines(record: Json, limit: int) -> Iterator[str]:
    outcome = "success" if record["success"] else "failure"
    score = "" if record["score"] is None else f"score {record['score']:.2f}"
    facts = [f"rollout {record['rollout']}", outcome, score, f"ended by {record['stop']}"]
    facts += [record["fate"], "guided" if record["experience"] else ""]
    yield visible(" · ".join(fact for fact in facts if fact))
    if record.get("expected"):
        yield from _block("expected", record["expected"], limit)
        yield from _block("given", record.get("given") or "no answer", limit)
    for experience in record["experience"]:
        yield from _block("shown", experience["content"], limit)
    if record["error"]:
        yield from _block("error", record["error"], limit)
    for number, turn in enumerate(record["turns"], 1):
        label = LABELS.get(turn["label"], "no label" if turn["reason"] else "")
        said = f"{label}: {visible(turn['reason'])}" if turn["reason"] else label
        whole, outcome = turn["advantage"], turn.get("outcome_advantage")
        advantage = "not finite" if whole is None else f"{whole:+.3f}"
        if whole is not None and outcome is not None:
            advantage += f" = outcome {outcome:+.3f}, labels {whole - outcome:+.3f}"
        if turn.get("reward"):
            advantage += f"  reward {turn['reward']:+.3f}"
        yield f"turn {number}  advantage {advantage}  {said}".rstrip()
        yield from _block(">", turn["action"], limit)
        for message in turn["observation"]:
            yield from _block("<", str(message.get("content") or ""), limit)


def _block(mark: str, text: str, limit: int) -> Iterator[str]:
    lines = visible(shortened(text, limit)).split("\n")
    for number, line in enumerate(lines):
        yield f"  {mark if number == 0 else ' ' * len(mark)} {line}"
