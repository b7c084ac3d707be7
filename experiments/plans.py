"""Make and check the plans in docs/plans: the needs of the main configs on the devices that they
are meant for.

    python -m experiments.plans                     # compile all plans and write docs/plans/
    python -m experiments.plans appworld_14b        # one of them
    python -m experiments.plans --render            # compile nothing; write the texts again from the kept figures
    python -m experiments.plans --check             # compile nothing; exit code 1 if a plan is out of date

NAME.json holds the figures of the compiled programs and the inputs that they were compiled from;
NAME.txt is the text that `--mode=plan` prints. A plan is out of date if the config has other
inputs, if the text does not follow from the figures, or if the learner does not fit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from evolver import plan
from evolver.config import plugs
from evolver.config.checks import flat
from evolver.plan import advice, calls, estimate, host, report, targets
from models.files import write_atomically

FOLDER = Path(__file__).parents[1] / "docs" / "plans"
# name -> (config, target, changes to the config)
KEPT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "appworld_14b": ("appworld_14b", "a100-80g:8", {}),
    "appworld_7b": ("appworld_7b", "a100-80g:8", {}),
    "appworld_7b_lora": (
        "appworld_7b",
        "h200:1",
        {"lora.rank": 32, "engine.name": "jax", "engine.slots": 16},
    ),
    "bfcl_14b": ("bfcl_14b", "a100-80g:8", {}),
    "bfcl_7b": ("bfcl_7b", "a100-80g:8", {}),
}
# The keys that affect the programs; other keys change the text at most.
INPUTS = ("model.", "mesh.", "sharding.", "lora.", "loss.", "optim.", "engine.")
INPUTS += tuple(f"learner.{name}" for name in ("row", "micro", "widths", "chunk", "updates"))
INPUTS += tuple(f"rollout.{name}" for name in ("tasks", "group", "context", "top_p"))
NOT_INPUTS = (
    "model.path",
    "model.tokenizer",
    "engine.vllm.",
    "optim.lr",
    "loss.guided_prompt",
    "loss.name",
    "loss.args",
)


def case_of(name: str) -> tuple[estimate.Case, list[str]]:
    """Return the config of a plan on its target, and notes about it."""
    config_name, target, changes = KEPT[name]
    config = importlib.import_module(f"configs.{config_name}").get_config()
    config.update_from_flattened_dict(changes)
    wanted = targets.parse(target)
    config, notes = estimate.adapted(config, wanted)
    return estimate.Case(config, plan.model_shape(config), wanted), notes


def inputs_of(case: estimate.Case) -> dict[str, Any]:
    """Return the values that the programs are compiled from. "loss" is the resolved call of the
    plug."""
    values = {key: value for key, value in flat(case.config).items() if key.startswith(INPUTS)}
    values = {key: value for key, value in values.items() if not key.startswith(NOT_INPUTS)}
    loss = plugs.resolved("loss", case.config.loss.name, case.config.loss.args.to_dict())
    return json.loads(json.dumps(values | {"loss": loss, "target": case.target.name}))


def text_of(name: str, compiled: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (text, record) of a plan from the figures of its compiled programs."""
    case, notes = case_of(name)
    config_name, target, changes = KEPT[name]
    words = "".join(f" --config.{key}={value}" for key, value in changes.items())
    command = (
        f"python run.py --config=configs/{config_name}.py{words} --mode=plan --target={target}"
    )
    record = estimate.estimate(case, compiled)
    bill = report.section(*calls.lines(case.config))
    text = report.render(record, case.target, notes, advice.advise(case, record), host.lines(case))
    return f"{command}\n\n{bill}\n\n{text}\n", record


def problems(name: str) -> list[str]:
    """Return why the plan is out of date; [] if it is not."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return [f"{path.name} is missing"]
    kept = json.loads(path.read_text(encoding="utf-8"))
    now = inputs_of(case_of(name)[0])
    reasons = [
        f"{key}: {value!r} then, {now.get(key, '(absent)')!r} now"
        for key, value in sorted(
            kept["inputs"].items()
        )  # a key that was added later does not count
        if value != now.get(key, "(absent)")
    ]
    text, record = text_of(name, kept["compiled"])
    if not reasons and text != path.with_suffix(".txt").read_text(encoding="utf-8"):
        reasons.append(f"{name}.txt does not follow from the figures")
    fits = record["learner"] <= record["limit"] and not record["refused"]
    return reasons if fits else [*reasons, "the learner does not fit"]


def make(name: str, done: dict[str, Any]) -> None:
    """Compile and write one plan. done: compiled figures by their inputs, which plans with equal
    inputs share."""
    case, _ = case_of(name)
    inputs = inputs_of(case)
    key = json.dumps(inputs)
    if key not in done:
        done[key] = estimate.compile_case(case)
    if "error" in done[key]:
        sys.exit(done[key]["error"])
    for record in done[key]["phases"].values():
        record["seconds"] = 0.0  # the time of compilation is not part of the plan
    text, record = text_of(name, done[key])
    body = json.dumps({"inputs": inputs, "compiled": done[key]}, indent=1)
    write_atomically(FOLDER / f"{name}.json", body + "\n")
    write_atomically(FOLDER / f"{name}.txt", text)
    print(f"{name}: {'fits' if record['fits'] else 'does not fit'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *KEPT], default=[])
    parser.add_argument(
        "--check", action="store_true", help="only report the plans that are out of date"
    )
    parser.add_argument("--render", action="store_true", help="only write the texts again")
    args = parser.parse_args()
    names = args.names or list(KEPT)
    if args.check:
        outdated = {name: reasons for name in names if (reasons := problems(name))}
        for name, reasons in outdated.items():
            print(f"{name}:", *reasons, sep="\n  ")
        return 1 if outdated else 0
    done: dict[str, Any] = {}
    for name in names:
        if args.render:
            kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
            write_atomically(FOLDER / f"{name}.txt", text_of(name, kept["compiled"])[0])
        else:
            make(name, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
