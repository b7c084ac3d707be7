"""Checks of the workdir: it can be written, and what is there belongs to this run."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from pydantic import BaseModel

from envs import mixture
from envs.values import Json
from evolver.config.keys import flat
from evolver.files.workdir import Workdir, plain
from evolver.llm import roles
from evolver.llm.questions import POLICY_URLS
from models.files import BrokenFile

# Keys that may differ when a run resumes: they change what is written and how fast, never what is
# learned so far.
RESUMABLE = (
    "steps", "log.", "checkpoint.", "rollout.timeout", "env.timeout", "env.url", "env.python",
    "env.workers", "env.memory_mb", "env.recycle", "hosts.", "mesh.", "sharding.", "model.remat",
    "model.attention", "eval.seeds", "optim.offload", "loss.reference", "engine.vllm.",
    "engine.in_flight", *roles.RESUMABLE,
)  # fmt: skip
EARLY = ("llm.jsonl", "llm_cache", "engine", "lock")  # may exist before the run does


def workdir_problems(
    config: ConfigDict, workdir: str | Path, mode: str, schema: type[BaseModel]
) -> Iterator[str]:
    """Yield why a workdir cannot be used: it cannot be written, or it belongs to something else."""
    yield from place_problems(workdir)
    path = Path(workdir)
    if mode == "plan" or not path.is_dir():
        return
    try:
        before = Workdir(path).config()
    except (OSError, ValueError, RecursionError) as error:
        yield f"--workdir={workdir}: config.json there is damaged ({error}); use another --workdir"
        return
    lost = {"explore": "tasks.jsonl", "pool": "experience/"}.get(mode)
    if lost and before is not None:
        yield (
            f"--workdir={workdir} holds a run, whose {lost} --mode={mode} would replace; choose a"
            " new directory"
        )
    if mode != "train":
        return
    if before is None:
        if any(entry.name not in EARLY for entry in path.iterdir()):
            yield f"--workdir={workdir} is not empty and holds no run; choose a new directory"
        return
    lines = [f"\n       {line}" for line in differences(before["config"], config, schema)]
    if lines:
        yield (
            f"--workdir={workdir} holds a run of another config:{''.join(lines)}\n"
            "     resume with its own config, or start this one elsewhere:"
            f" --workdir={path}-2"
        )
    yield from resume_problems(config, path)


def place_problems(workdir: str | Path) -> Iterator[str]:
    """Yield why nothing can be written to a workdir."""
    if "://" in str(workdir):
        yield (
            f"--workdir={workdir} is not a directory of this machine: mount the storage (for"
            " example with gcsfuse or s3fs) and give the directory where it is mounted"
        )
        return
    if str(workdir).startswith("~"):  # the command has replaced what it could
        yield (
            f"--workdir={workdir}: there is no such user; give the path of a home directory in full"
        )
        return
    path = parent = Path(workdir).absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        yield (
            f"--workdir={workdir}: the path {path} is not UTF-8, and checkpoints cannot be written"
            " there: rename it, or choose another"
        )
        return
    try:
        parent = next(folder for folder in (path, *path.parents) if folder.exists())
        if parent.is_dir():
            tempfile.TemporaryFile(dir=parent).close()  # root ignores permission bits
        else:
            yield f"--workdir={workdir}: {parent} is a file, not a directory"
    except OSError as error:
        yield f"--workdir={workdir}: {parent} cannot be written ({error.strerror})"


def resume_problems(config: ConfigDict, path: Path) -> Iterator[str]:
    """Yield why the run in `path` cannot go on: damaged metrics, missing checkpoints, or fewer
    steps than it has."""
    try:
        last = max((line["step"] for line in Workdir(path).metrics()), default=-1)
    except BrokenFile as error:
        cure = "correct or delete that line" if ", line " in str(error) else "give the file back"
        yield f"--workdir={path}: {error}; {cure}"
        return
    folder = path / "checkpoints"
    # Before the first checkpoint is complete there may be metrics without one, but the folder
    # exists.
    begun = folder.is_dir() and last <= config.checkpoint.every
    if last >= 0 and not begun and not any(folder.glob("[0-9]*")):
        yield (
            f"--workdir={path} holds the metrics of {last} steps, but {folder} has no checkpoint:"
            " the run would start over and erase them. Restore the checkpoints, or start a new run"
            f" elsewhere: --workdir={path}-2"
        )
    if config.steps < last:
        yield (
            f"config.steps={config.steps} is less than the {last} steps that the run in"
            f" --workdir={path} has done: give at least {last}, or start a new run elsewhere:"
            f" --workdir={path}-2"
        )


def differences(before: Json, config: ConfigDict, schema: type[BaseModel]) -> list[str]:
    """Return "key: old then, new now" for each value that differs and that a resumed run may not
    change."""
    found = [
        f"{name}: {then!r} then, {now!r} now"
        for name, (then, now) in changed(before, config, schema).items()
        if not name.startswith(RESUMABLE)
    ]
    for role in roles.ROLES:
        then = url_of(role, flat(before))
        now = url_of(role, flat(config))
        if then != now and (then in POLICY_URLS or now in POLICY_URLS):
            found.append(f"llm.{role}.url: {then!r} then, {now!r} now; the policy is another model")
    return found


def url_of(role: str, values: Json) -> Any:
    """Return the url of a role of a language model. values: of a config by the names of its keys;
    an earlier one may lack some."""
    return values.get(f"llm.{role}.url") or values.get("llm.url")


def changed(
    before: Json, config: ConfigDict, schema: type[BaseModel]
) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value then, value now)} of the values that differ from those of an earlier
    config, in order. A key that did not exist then had the default of the schema."""
    then = expanded(schema().model_dump()) | expanded(before)
    now = expanded(config)
    pairs = {n: (then.get(n, "(absent)"), now.get(n, "(absent)")) for n in sorted({*then, *now})}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def expanded(config: Any) -> Json:
    """Return the values of a config, as JSON has them, with each argument of a plug as an entry of
    its own."""
    split: Json = {}
    for name, value in plain(flat(config)).items():
        if isinstance(value, dict):
            split |= {f"{name}.{argument}": given for argument, given in value.items()}
            if name == "env.args" and "worlds" in value:
                split["env.args.worlds"] = mixture.lasting(value["worlds"])
        else:
            split[name] = value
    return split
