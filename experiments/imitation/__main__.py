"""Make a base policy where no pretrained one exists: imitate scripted demonstrations.

    python -m experiments.imitation --config=configs/base_policy.py
    python -m experiments.imitation --config=configs/base_policy.py --config.seed=1 \\
        --workdir=runs/base_policy-1

The policy is written to WORKDIR/policy in Hugging Face format; WORKDIR is runs/<name of the config>
by default. A workdir that already holds the policy of this config is left as it is, and one that
was interrupted goes on from its last checkpoint.
configs/imitation.py documents every key. All mistakes in a config are reported together, before any
computation.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from configs import base, imitation
from envs.world import Observation
from evolver.config import cli, plugs
from evolver.config.checks.model import model_problems
from evolver.config.checks.workdir import changed, place_problems
from evolver.config.keys import fitted, key_problems
from evolver.files.workdir import Workdir, WorkdirInUse
from experiments.imitation import demonstrations
from experiments.imitation.bpe import train_bpe
from rl.contexts import Context, Opening
from run import refused

CARD = "policy/README.md"  # the last file that is written


def main(argv: list[str]) -> int:
    """Train a policy and return the exit code: 0 done, 1 failed, 2 nothing was started, 130
    interrupted."""
    logging.set_verbosity(logging.ERROR)
    parsed = cli.parse(argv)
    config, workdir, mode, found = parsed.config, parsed.workdir, parsed.mode, parsed.problems
    if parsed.sought is not None:
        print(__doc__)
        return 0
    if config is not None:
        modes = [f"--mode={mode} is a flag of run.py; imitation has no modes"]
        found = [*found, *(modes if mode != "train" else []), *problems(config, workdir)]
    if found:
        return refused([*found])
    if begun(config, workdir) and (Path(workdir) / CARD).is_file():
        print(f"{Path(workdir) / 'policy'} was already made with this config")
        return 0
    from evolver.imitating import Diverged, NothingFits  # imports jax
    from experiments.imitation.imitate import imitate
    from rl.checkpoint import CheckpointError

    command = shlex.join(["python", "-m", "experiments.imitation", *argv[1:]])
    try:
        with Workdir(workdir).locked():
            imitate(config, workdir, re.sub(r" --?workdir[= ]\S+", "", command))
    except KeyboardInterrupt:
        print(
            "\naborted; the same command goes on from its last checkpoint, if it has written one",
            file=sys.stderr,
        )
        return 130
    except (Diverged, NothingFits, CheckpointError, WorkdirInUse) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def problems(config: Any, workdir: str) -> list[str]:
    """Return everything that is wrong with a config of imitation and its workdir; [] if nothing
    is."""
    if "demonstrations" not in config:
        return [
            "this is not a config of imitation; those start from configs/imitation.py, "
            "as configs/base_policy.py does"
        ]
    found = list(key_problems(config, imitation.Config).values())
    config = fitted(config, imitation.Config)
    if config.warmup >= config.steps:
        found.append(
            f"config.warmup={config.warmup} updates is not shorter than the run of "
            f"{config.steps} updates"
        )
    if config.model.path:
        run = base.get_config()
        run.model.path = config.model.path
        # A row is to imitation what a context is to a rollout.
        run.rollout.context, run.rollout.max_tokens = config.row, 1
        found += [
            text.replace("config.rollout.context", "config.row")
            for text in model_problems(run, "train")
        ]
    if config.induction and (config.model.path or config.model.preset.startswith("qwen3")):
        found.append(
            "config.induction lays out random weights whose queries and keys have biases: choose"
            " a preset of Qwen2.5's shape, and no config.model.path"
        )
    return [
        *found,
        *template_problems(config.template),
        *demonstrations.problems(config),
        *occupied(config, workdir),
    ]


def template_problems(template: Any) -> list[str]:
    """Return why demonstrations have no prompts in this context template; [] if they have."""
    name, args = template.name, template.args.to_dict()
    if found := plugs.problems("template", name, args):
        return found
    target: Any = plugs.load("template", name)
    if target.manage is not Context.manage or getattr(target, "roles", None):
        return [
            f"config.template.name={name} asks a model during an episode, "
            "and no demonstration shows an answer"
        ]
    opening = Observation([{"role": "user", "content": "a"}])
    try:
        plugs.plug("template", name, args)(Opening(train_bpe(["a"], 400), opening))
    except ValueError as error:
        return [f"config.template: {error}"]
    return []


def begun(config: Any, workdir: str) -> bool:
    """Return True if imitation has written to the workdir with this config."""
    record = Workdir(workdir).config("imitation")
    return record is not None and not changed(record["config"], config, imitation.Config)


def occupied(config: Any, workdir: str) -> Iterator[str]:
    """Yield why a workdir cannot be used: it cannot be written, or it holds something else than
    this policy."""
    yield from place_problems(workdir)
    folder = Path(workdir)
    there = folder.is_dir() and any(path.name != "lock" for path in folder.iterdir())
    if there and not begun(config, workdir):
        yield f"--workdir={workdir} is not empty; choose a new directory"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
