"""The planner: the work and needs of a run (`--mode=plan`), on this machine or another
(`--target=h100:8`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from evolver.config import plugs
from evolver.config.keys import flat
from evolver.llm.prompts import prompt
from evolver.llm.roles import prompts_of
from evolver.plan import calls, facts
from evolver.plan.case import PlanError, case_of
from evolver.plan.compilers import compiled
from evolver.plan.report import render
from evolver.plan.text import section

__all__ = ["PlanError", "plan"]


def plan(config: Any, workdir: str | Path, target: str = "") -> str:
    """Return the plan as text: the resolved config and plugs, prompts of language models, the
    amount of work, sizes, and calls of language models.

    With a target, it also says what memory and time the programs need there. Raises PlanError.
    """
    originals, held_out, unknown = facts.task_counts(config)
    try:
        resolved = []
        for key, name, args in plugs.in_config(config):
            off = "" if config[key.partition(".")[0]].get("enabled", True) else ", off"
            resolved.append(f"{key} = {plugs.resolved(key, name, args)}{off}")
        bill = calls.lines(config, originals, held_out)
    except (OSError, ValueError) as error:  # of a plug that cannot be loaded, or of the price list
        raise PlanError(str(error)) from error
    known = facts.work(config, originals, held_out, unknown) | facts.sizes(config)
    width = max(map(len, known))
    prompts = [prompt(name) for name in prompts_of(config)]
    sections = [
        section("config", *(f"{name} = {value!r}" for name, value in sorted(flat(config).items()))),
        section("plugs", *resolved),
        *(section(f"prompt {text.version}, {text.path}", *text.lines()) for text in prompts),
        section(f"plan for {workdir}", *(f"{n.ljust(width)}  {text}" for n, text in known.items())),
        section(*bill),
    ]
    if target:
        sections.append(render(compiled(replace(case_of(config, target), held_out=held_out))))
    return "\n\n".join(filter(None, sections))
