"""Copies of metrics for Weights & Biases and TensorBoard, and of some rollouts and pictures for the
former. Their packages are imported only when asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.world import text_of
from evolver.files.workdir import plain
from rl.trajectory import Trajectory

ROLLOUTS = 8  # rows of the table of rollouts
MAX_CHARS = 4000  # of one episode in it


class Sinks:
    """The open logs of W&B and TensorBoard; either may be off."""

    def __init__(self, workdir: Path, config: Any, *, id: str, writes: bool = True):
        """Open the logs that `config.log` asks for. id: W&B run to continue, "" for a new one.
        writes: False to open none. Raises OSError if W&B fails."""
        self.run: Any = None
        self.writer: Any = None
        log = config.log
        if writes and log.wandb != "off":
            import wandb

            self.wandb: Any = wandb
            try:
                self.run = wandb.init(
                    project=log.project, name=workdir.name, dir=str(workdir),
                    mode=log.wandb, config=plain(config.to_dict()), id=id or None,
                    group=log.group or None, tags=list(log.tags), resume="allow",
                    settings=wandb.Settings(silent=True),
                )  # fmt: skip
            except Exception as error:  # no key or no network: the client has many kinds of errors
                raise OSError(
                    f"W&B did not start ({error}); config.log.wandb=offline needs neither key nor"
                    " network"
                ) from None
        if writes and log.tensorboard:
            from tensorboardX import SummaryWriter

            self.writer = SummaryWriter(str(workdir / "tensorboard"))

    @property
    def id(self) -> str:
        """The id with which a resumed run continues the same W&B run."""
        return self.run.id if self.run else ""

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Log the numbers among the metrics."""
        numbers = {key: value for key, value in plain(metrics).items() if value is not None}
        if self.run:
            self.run.log(numbers, step=step)
        if self.writer:
            for key, value in numbers.items():
                self.writer.add_scalar(key, value, step)

    def rollouts(self, step: int, trajectories: Sequence[Trajectory], fates: Sequence[str]) -> None:
        """Log a table of a few rollouts, spread over the step's."""
        if not self.run:
            return
        every = max(1, len(trajectories) // ROLLOUTS)
        rows = [
            {
                "step": step,
                "task": t.task.id,
                "origin": t.task.origin,
                "query": t.task.query,
                "episode": episode(t)[:MAX_CHARS],
                "success": t.success,
                "outcome": t.outcome,
                "stop": t.stop.value,
                "fate": fate,
                "guided": t.guided,
            }
            for t, fate in list(zip(trajectories, fates))[::every][:ROLLOUTS]
        ]
        table = self.wandb.Table(list(rows[0]), [list(row.values()) for row in rows])
        self.run.log({"rollouts": table}, step=step)

    def picture(self, name: str, path: Path) -> None:
        """Log a picture at the current step."""
        if self.run and path.is_file():
            self.run.log({name: self.wandb.Image(str(path))})

    def close(self) -> None:
        """Close the logs."""
        if self.run:
            self.run.finish()
        if self.writer:
            self.writer.close()


def episode(trajectory: Trajectory) -> str:
    """Return the turns of a rollout as text."""
    lines = []
    for turn in trajectory.turns:
        lines.append(f"> {turn.action}")
        if turn.observation:
            lines.append(text_of(turn.observation))
    return "\n".join(lines)
