"""Plans that are kept in docs/plans: what the main configs need where they are meant to run.

    python -m experiments.plans                     # compile again what has changed, write docs/plans/
    python -m experiments.plans appworld_14b        # one of them
    python -m experiments.plans --check             # compile nothing; exit code 1 if a plan no longer holds

A plan is three things: the figures of the compiled programs and the inputs that they were compiled from (NAME.json),
and the text that `--mode=plan` prints (NAME.txt). It holds as long as the inputs are the config's, the text
follows from both, and the learner fits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from evolver import plan
from evolver.config import flat
from evolver.plan import advice, compilers, estimate, report, targets

FOLDER = Path(__file__).parents[1] / "docs" / "plans"
# Name: config, target, changes to the config.
KEPT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "appworld_14b": ("appworld_14b", "a100-80g:8", {}),
    "appworld_7b": ("appworld_7b", "a100-80g:8", {}),
    "appworld_7b_lora": ("appworld_7b", "h200:1", {"lora.rank": 32, "engine.name": "jax", "engine.slots": 16}),
    "bfcl_14b": ("bfcl_14b", "a100-80g:8", {}),
    "bfcl_7b": ("bfcl_7b", "a100-80g:8", {}),
}
# What the programs are made of; other keys change the text at most.
INPUTS = ("model.", "mesh.", "sharding.", "lora.", "loss.", "optim.", "engine.")
INPUTS += tuple(f"learner.{name}" for name in ("row", "micro", "widths", "chunk", "updates"))
INPUTS += tuple(f"rollout.{name}" for name in ("tasks", "group", "context", "top_p"))
NOT_INPUTS = ("model.path", "model.tokenizer", "engine.vllm.", "optim.lr", "loss.guided_prompt")


def case_of(name: str) -> tuple[estimate.Case, list[str]]:
    """A kept plan's config on its target, and the notes about it."""
    config_name, target, changes = KEPT[name]
    config = importlib.import_module(f"configs.{config_name}").get_config()
    config.update_from_flattened_dict(changes)
    wanted = targets.parse(target)
    config, notes = estimate.adapted(config, wanted)
    return estimate.Case(config, plan.model_shape(config), wanted), notes


def inputs_of(case: estimate.Case) -> dict[str, Any]:
    """What the programs were compiled from, as JSON keeps it."""
    values = {key: value for key, value in flat(case.config).items() if key.startswith(INPUTS)}
    values = {key: value for key, value in values.items() if not key.startswith(NOT_INPUTS)}
    return json.loads(json.dumps(values | {"target": case.target.name}))


def text_of(name: str, compiled: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(NAME.txt, record) from the figures of the compiled programs."""
    case, notes = case_of(name)
    config_name, target, changes = KEPT[name]
    words = "".join(f" --config.{key}={value}" for key, value in changes.items())
    command = f"python run.py --config=configs/{config_name}.py{words} --mode=plan --target={target}"
    record = estimate.estimate(case, compiled)
    return f"{command}\n\n{report.render(record, case.target, notes, advice.advise(case, record))}\n", record


def problems(name: str) -> list[str]:
    """Why the kept plan no longer holds; [] if it does."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return [f"{path.name} is missing"]
    kept = json.loads(path.read_text(encoding="utf-8"))
    now = inputs_of(case_of(name)[0])
    found = [
        f"{key}: {value!r} then, {now.get(key, '(absent)')!r} now"
        for key, value in sorted(kept["inputs"].items())  # a key that came later leaves things as they were
        if value != now.get(key, "(absent)")
    ]
    text, record = text_of(name, kept["compiled"])
    if not found and text != path.with_suffix(".txt").read_text(encoding="utf-8"):
        found.append(f"{name}.txt is not what the figures say")
    fits = record["learner"] <= record["limit"] and not record["refused"]
    return found if fits else [*found, "the learner does not fit"]


def make(name: str, done: dict[str, Any]) -> None:
    """Compile and write one plan; `done` keeps programs of equal inputs."""
    case, _ = case_of(name)
    inputs = inputs_of(case)
    key = json.dumps(inputs)
    if key not in done:
        phases = [p for p in estimate.PHASES if case.config.engine.name == "jax" or p in ("update", "logp")]
        room = estimate.estimate(case, {})["sequences"]
        done[key] = compilers.compile_programs(
            case.config.to_dict(), case.target, phases=phases, micro_batches=case.micro_batches,
            slots=max(1, min(case.config.engine.slots, room)), say=compilers.tell,
        )  # fmt: skip
    if "error" in done[key]:
        sys.exit(done[key]["error"])
    for record in done[key]["phases"].values():
        record["seconds"] = 0.0  # of the compiler: no figure of the plan
    text, record = text_of(name, done[key])
    FOLDER.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"inputs": inputs, "compiled": done[key]}, indent=1)
    (FOLDER / f"{name}.json").write_text(body + "\n", encoding="utf-8")
    (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"{name}: {'fits' if record['fits'] else 'DOES NOT FIT'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *KEPT], default=[])
    parser.add_argument("--check", action="store_true", help="compile nothing")
    args = parser.parse_args()
    names = args.names or list(KEPT)
    if args.check:
        wrong = {name: found for name in names if (found := problems(name))}
        for name, found in wrong.items():
            print(f"{name}:", *found, sep="\n  ")
        return 1 if wrong else 0
    done: dict[str, Any] = {}
    for name in names:
        make(name, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
