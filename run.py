"""Train, evaluate or plan an agent.

    python run.py --config=configs/quickstart.py
    python run.py --config=configs/quickstart.py:grpo --config.seed=1 --workdir=runs/grpo-1
    python run.py --config=configs/quickstart.py --mode=eval \\
        --config.model.path=runs/quickstart/policy
    python run.py --config=configs/appworld_14b.py --mode=plan --target=h100:8
    python run.py --help=advantage      # the keys and arguments that a word finds

configs/base.py documents every key. All problems with a config are reported at once, before
anything is compiled.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

from absl import logging

from configs import base
from evolver.config import cli
from evolver.config.checks import problems as config_problems
from evolver.config.help import search
from evolver.processes.streams import open_streams, surroundings_problems, until_unread


def main(argv: list[str]) -> int:
    """Run one mode and return the exit code: 0 done, 1 failed, 2 nothing was started, 3 ended early
    (a spent budget, a language-model server that is down, a world that fails in every rollout), 130
    interrupted."""
    logging.set_verbosity(logging.FATAL)  # orbax also logs, with a traceback, what it raises
    open_streams()
    if surroundings := surroundings_problems():
        return refused(surroundings)
    command = cli.parse(argv)
    if command.sought and not command.problems:
        with until_unread():
            print(search(command.sought, base.Config, command.config))
        return 0
    if command.sought == "":
        of_word = argv[0].startswith("evolver ")  # see command.py
        about = f"{cli.MODES[command.mode].capitalize()}.\n" if of_word else __doc__
        with until_unread():
            print(about + "\n" + cli.flags(argv[0] if of_word else "run.py").format_help())
        return 0
    problems = [*command.problems, *target_problems(command.target, command.mode)]
    if command.config is not None:
        problems += config_problems(command.config, base.Config, command.workdir, command.mode)
    if problems:
        return refused(problems)
    return start(command.config, command.workdir, command.mode, command.target)


def refused(problems: list[str]) -> int:
    """Print the problems, and return the exit code of a command that was not started."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"{count}; nothing was started.\n", file=sys.stderr)
    for number, problem in enumerate(problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)
    return 2


def target_problems(target: str, mode: str) -> list[str]:
    """Return what is wrong with --target."""
    if not target:
        return []
    from evolver.plan import targets

    try:
        targets.parse(target)
    except targets.TargetError as error:
        return [str(error)]
    if mode != "plan":
        return [f"--target={target} is for --mode=plan; --mode={mode} runs on this machine"]
    return []


def keep_programs() -> None:
    """Let an accelerator's compiled programs stay on disk for later runs, unless
    JAX_COMPILATION_CACHE_DIR says where. On a GPU the engine's take minutes to compile."""
    import jax

    if jax.default_backend() == "cpu" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "evolver" / "jax"))


def set_variables(config: Any) -> None:
    """Set the environment variables that XLA needs on GPUs. What the user has set stays.

    XLA reads them when jax first looks for devices. Where that has happened already, in a plug or
    in a sitecustomize, the program is executed again, with them.
    """
    if os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return
    if not Path("/dev/nvidiactl").exists():
        return
    from jax._src import xla_bridge  # jax.extend.backend does not say

    from evolver.plan.preflight import FLAGS, variables

    own_choices = os.environ.keys() - {FLAGS}
    missing = {n: value for n, value in variables(config).items() if n not in own_choices}
    for name, value in missing.items():
        print(f"{name}={value} (set the variable to choose another value)", flush=True)
    os.environ.update(missing)
    own = Path(sys.argv[0]).stem in ("run", "evolver")  # else another program calls `main`
    if missing and own and xla_bridge.backends_are_initialized():
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def start(config: Any, workdir: str, mode: str, target: str) -> int:
    """Run a mode of a config that has been checked, and return the exit code. From here on jax may
    be imported."""
    if mode == "plan":
        from evolver.plan import PlanError, plan

        try:
            with until_unread():
                print(plan(config, workdir, target))
        except PlanError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    from evolver import evolve, loop, modes
    from evolver.build import RunError
    from evolver.processes import hosts
    from evolver.processes.identity import identity
    from evolver.processes.interrupt import Interrupted, RunEnds, tell
    from rl import checkpoint

    checkpoint.report_once()
    # Once: a process that starts several runs would keep the garbage of earlier ones.
    if not gc.get_freeze_count():
        # What was imported stays; otherwise each full collection of garbage looks at all of it.
        gc.freeze()
    start_mode = {
        "train": loop.train,
        "eval": modes.evaluate,
        "explore": modes.explore,
        "pool": modes.pool,
        "evolve": evolve.evolve,
    }
    try:
        set_variables(config)
        with hosts.connected(config):
            if not hosts.alone():
                hosts.agree(identity(config))
            keep_programs()
            start_mode[mode](config, workdir)
    except KeyboardInterrupt:
        tell("\naborted; the last checkpoint is unharmed")
        return 130
    except Interrupted as stop:
        tell(f"\n{str(stop) or 'interrupted'}")
        return 130
    except RunEnds as end:
        tell(f"\n{end}")
        return 3
    except (hosts.HostsError, RunError) as error:
        tell("\n".join(["", str(error), *getattr(error, "__notes__", ())]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
