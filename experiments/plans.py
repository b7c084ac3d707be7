"""Make and check the plans in docs/plans: the needs of the main configs on the devices that they
are meant for.

    python -m experiments.plans                     # compile all plans and write docs/plans/
    python -m experiments.plans appworld_14b        # one of them
    python -m experiments.plans --render            # compile nothing; write the texts again from
                                                    # the kept figures
    python -m experiments.plans --check             # compile nothing; exit code 1 if a plan is out
                                                    # of date

NAME.json holds the figures of the compiled programs and the inputs that they were compiled from;
NAME.txt is the text that `--mode=plan` prints. A plan is out of date if the config has other
inputs, if the text does not follow from the figures, or if the learner does not fit.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from envs.values import Json
from evolver.config import plugs
from evolver.config.keys import flat
from evolver.plan import calls, report
from evolver.plan.case import Case, case_of
from evolver.plan.compilers import compiled
from evolver.plan.estimate import fits, learner_peak
from evolver.plan.text import section
from experiments import commands
from models.files import write_atomically

FOLDER = Path(__file__).parents[1] / "docs" / "plans"
LORA = {"lora.rank": 32, "engine.name": "jax", "engine.slots": 16}
# name -> (config, target, changes to the config)
KEPT: dict[str, tuple[str, str, Json]] = {
    "appworld_14b": ("appworld_14b", "a100-80g:8", {}),
    "appworld_7b": ("appworld_7b", "a100-80g:8", {}),
    "appworld_7b_lora": ("appworld_7b", "h200:1", LORA),
    "bfcl_14b": ("bfcl_14b", "a100-80g:8", {}),
    "bfcl_7b": ("bfcl_7b", "a100-80g:8", {}),
}
# The keys that affect the programs; other keys change the text at most.
INPUTS = (
    *("model.", "mesh.", "sharding.", "lora.", "loss.", "optim.", "engine."),
    *(f"learner.{name}" for name in ("row", "micro", "widths", "chunk", "updates")),
    *(f"rollout.{name}" for name in ("tasks", "group", "context", "top_p")),
)
NOT_INPUTS = (
    "model.path",
    "model.tokenizer",
    "engine.vllm.",
    "optim.lr",
    "loss.guided_prompt",
    "loss.name",
    "loss.args",
)


def kept_case(name: str) -> Case:
    """Return the config of a plan on its target."""
    config_name, target, changes = KEPT[name]
    config = importlib.import_module(f"configs.{config_name}").get_config()
    config.update_from_flattened_dict(changes)
    return case_of(config, target)


def inputs_of(case: Case) -> Json:
    """Return the values that the programs are compiled from. "loss" is the resolved call of the
    plug."""
    values = {
        key: value
        for key, value in flat(case.config).items()
        if key.startswith(INPUTS) and not key.startswith(NOT_INPUTS)
    }
    loss = plugs.resolved("loss", case.config.loss.name, case.config.loss.args.to_dict())
    return json.loads(json.dumps(values | {"loss": loss, "target": case.target.name}))


def text_of(name: str, case: Case) -> str:
    """Return the text of a plan, with the figures of the case's compiled programs."""
    config_name, target, changes = KEPT[name]
    words = "".join(f" --config.{key}={value}" for key, value in changes.items())
    command = f"python run.py --config=configs/{config_name}.py{words} --mode=plan"
    bill = section(*calls.lines(case.config))
    return f"{command} --target={target}\n\n{bill}\n\n{report.render(case)}\n"


def read(name: str) -> Json:
    """Return what NAME.json holds: {"inputs", "compiled"}."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def problems(name: str) -> list[str]:
    """Return why the plan is out of date; [] if it is not."""
    if not (FOLDER / f"{name}.json").exists():
        return [f"{name}.json is missing"]
    kept = read(name)
    case = replace(kept_case(name), compiled=kept["compiled"])
    now, reasons = inputs_of(case), []
    for key, value in sorted(kept["inputs"].items()):  # a key that was added later does not count
        if value != (found := now.get(key, "(absent)")):
            reasons.append(f"{key}: {value!r} then, {found!r} now")
    written = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    if not reasons and text_of(name, case) != written:
        reasons.append(f"{name}.txt does not follow from the figures")
    if learner_peak(case) > case.target.chip.usable or case.refused:
        reasons.append("the learner does not fit")
    return reasons


def make(name: str, done: Json) -> None:
    """Compile and write one plan. done: compiled figures by their inputs, which plans with equal
    inputs share."""
    case = kept_case(name)
    inputs = inputs_of(case)
    key = json.dumps(inputs)
    if key not in done:
        done[key] = compiled(case).compiled
    if "error" in done[key]:
        sys.exit(done[key]["error"])
    for program in done[key]["phases"].values():
        program["seconds"] = 0.0  # the time of compilation is not part of the plan
    case = replace(case, compiled=done[key])
    body = json.dumps({"inputs": inputs, "compiled": done[key]}, indent=1)
    write_atomically(FOLDER / f"{name}.json", body + "\n")
    write_atomically(FOLDER / f"{name}.txt", text_of(name, case))
    print(f"{name}: {'fits' if fits(case) else 'does not fit'}")


def main(names: Sequence[str] = (), *, check: bool = False, render: bool = False) -> int:
    """Compile and write plans.

    names: all plans if none is named
    check: only report the plans that are out of date
    render: only write the texts again
    """
    if unknown := [name for name in names if name not in KEPT]:
        raise commands.Problems(*(f"{name}: choose {', '.join(KEPT)}" for name in unknown))
    done: Json = {}
    outdated = 0
    for name in names or KEPT:
        if check:
            if reasons := problems(name):
                outdated = 1
                print(f"{name}:", *reasons, sep="\n  ")
        elif render:
            case = replace(kept_case(name), compiled=read(name)["compiled"])
            write_atomically(FOLDER / f"{name}.txt", text_of(name, case))
        else:
            make(name, done)
    return outdated


if __name__ == "__main__":
    commands.program(main)
