"""A run is built whole, or what was built of it is closed."""

import pytest

from evolver.build import RunError, open_run
from evolver.config import cli


def test_an_engine_is_closed_if_a_later_part_cannot_be_built(tiny, tmp_path, monkeypatch):
    closed = []

    async def close(engine):
        closed.append(engine)

    def no_tasks(*args):
        raise ValueError("no tasks can be made")

    monkeypatch.setattr("rl.engines.jax.engine.JaxEngine.close", close)
    monkeypatch.setattr("evolver.build.make_tasks", no_tasks)
    config = cli.parse(["run.py", f"--config={tiny}", f"--workdir={tmp_path / 'run'}"]).config
    with pytest.raises(RunError, match="no tasks can be made"), open_run(config, tmp_path / "run"):
        raise AssertionError("the run must not begin")
    assert len(closed) == 1
