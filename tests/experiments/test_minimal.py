"""The loop to read first runs, learns from invented tasks alone, and is short."""

import asyncio
import inspect

from experiments import minimal
from rl.engines.jax.engine import JaxEngine


def test_it_runs_and_prints_what_each_step_did(stdout, monkeypatch):
    def few_shapes(*arguments, **settings):  # as each one is compiled
        return JaxEngine(*arguments, **settings | {"slots": 4, "prefill": 64})

    monkeypatch.setattr(minimal, "JaxEngine", few_shapes)
    rates = asyncio.run(minimal.main(steps=2, tasks=2, group=4, budget=6))
    out = stdout()
    assert len(rates) == 2 and all(0.0 <= rate <= 1.0 for rate in rates)
    assert "6 tasks invented" in out and "step 2: success" in out and "rollouts train" in out


def test_it_is_short_and_uses_none_of_the_machinery():
    source = inspect.getsource(minimal)
    assert source.count("\n") < 200
    assert not any(
        f"evolver.{module}" in source for module in ("run ", "loop", "config", "books", "plugs")
    )
