"""Checks of a configuration before anything is compiled: every problem is found and reported at
once.

Each check yields sentences, so that a user fixes a config once and not key by key. Nothing here
imports jax, unless the mesh asks for more than one device or a plug imports it.
"""

import re
from pathlib import Path

from ml_collections import ConfigDict
from pydantic import BaseModel

from evolver.config import plugs
from evolver.config.checks.contradictions import contradictions
from evolver.config.checks.engine import engine_problems
from evolver.config.checks.machine import install_problems, mesh_problems
from evolver.config.checks.model import model_problems
from evolver.config.checks.workdir import workdir_problems
from evolver.config.checks.world import world_problems
from evolver.config.keys import fitted, key_problems
from evolver.llm import roles


def problems(
    config: ConfigDict, schema: type[BaseModel], workdir: str | Path, mode: str
) -> list[str]:
    """Return everything that is wrong with running `config` in `workdir`; [] if nothing is.

    schema: `configs.base.Config`. Checks that need a whole config run on one that has the default
    of each key whose value is wrong, so that one bad key neither hides nor causes other problems.
    """
    if "demonstrations" in config:
        return ["this is a config of imitation: run `python -m experiments.imitation --config=...`"]
    wrong = key_problems(config, schema)
    found = list(wrong.values())
    config = fitted(config, schema)
    plugged = plugs.problems_in(config)
    found += plugged
    checks = (
        contradictions(config, mode, plugged=not plugged),
        model_problems(config, mode),
        world_problems(config, mode),
        roles.llm_problems(config, mode),
        engine_problems(config, mode),
        install_problems(config, mode),
        mesh_problems(config),
        workdir_problems(config, workdir, mode, schema),
    )
    # What is said about a key whose value is wrong in itself is about the default instead of it.
    replaced = re.compile("|".join(rf"config\.{re.escape(name)}\b" for name in wrong) or r"(?!)")
    for check in checks:
        found += [problem for problem in check if not replaced.search(problem)]
    return found
