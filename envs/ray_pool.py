"""Instances as Ray actors, one each, on one machine or a cluster: `python -m envs.service --backend=ray`.

Needs `pip install -r requirements/ray.txt` here and on the cluster. For environments that are heavy enough to want
a process each, or more machines than one; light ones are cheaper in `envs.pool.Pool`, whose promises hold here too.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from envs.pool import Instance, Json, Pool, PoolFull, Slot
from envs.process import DEADLINES, ROOT, Deadlines, unpack
from envs.worker import Worlds, reply
from envs.world import WorldError, WorldTimeout


class Host:
    """The inside of an actor: a world and its operations, in JSON."""

    def __init__(self, env: str, kwargs: Json):
        self._worlds = Worlds(env, kwargs)

    def methods(self) -> list[str]:
        return self._worlds.methods()

    def call(self, op: str, name: str, args: str) -> str:
        return reply(0, lambda: self._worlds.call(op, name, json.loads(args)))


class RayWorker:
    """An actor, with the face of `envs.process.Worker`."""

    def __init__(self, env: str, kwargs: Json, options: Json, deadline: float):
        """Place the actor and construct the world. Raises WorldTimeout if the cluster has no room in time."""
        import ray

        self.env, self._ray = env, ray
        self._actor = ray.remote(Host).options(max_restarts=0, **options).remote(env, kwargs)
        self._dead = threading.Event()
        self.methods = self._get(self._actor.methods.remote(), "start", deadline)

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def call(self, op: str, world: str = "", args: list[Any] | None = None, *, deadline: float = 30.0) -> Any:
        answer = self._get(self._actor.call.remote(op, world, json.dumps(args or [])), op, deadline)
        return unpack(json.loads(answer), self.env, op)

    def kill(self) -> None:
        self._dead.set()
        with contextlib.suppress(Exception):  # the cluster may be gone already
            self._ray.kill(self._actor)

    close = kill

    def _get(self, reference: Any, op: str, deadline: float) -> Any:
        try:
            return self._ray.get(reference, timeout=deadline)
        except self._ray.exceptions.GetTimeoutError:
            self.kill()
            raise WorldTimeout(f"{self.env} did not answer {op} within {deadline:g} s") from None
        except self._ray.exceptions.RayError as error:
            self.kill()
            last = str(error).strip().split("\n")[-1].strip()
            raise WorldError(f"the actor of {self.env} died in {op}: {last[:300]}") from None


class RayPool(Pool):
    """A pool whose instances are actors. `actor` are Ray's options of each, such as num_cpus and runtime_env."""

    def __init__(
        self,
        env: str,
        kwargs: Json | None = None,
        *,
        address: str | None = None,
        actor: Json | None = None,
        limit: int = 10_000,
        deadlines: Deadlines = DEADLINES,
        lease_s: float = 3600.0,
    ):
        """Join the cluster at `address` ("auto", "ray://..."; None starts one on this machine). Raises WorldError."""
        import ray

        if not ray.is_initialized():
            environment = {"py_modules": [str(ROOT / "envs")]} if address else {"env_vars": {"PYTHONPATH": str(ROOT)}}
            try:
                ray.init(address, include_dashboard=False, log_to_driver=False, runtime_env=environment)
            except Exception as error:  # Ray raises plain Exceptions, ConnectionErrors and more
                raise WorldError(f"no Ray cluster: {str(error).strip().splitlines()[0]}") from error
        self._limit = limit
        self._actor = (env, kwargs or {}, {"num_cpus": 0.01, **(actor or {})}, deadlines.start)
        super().__init__(env, workers=1, deadlines=deadlines, lease_s=lease_s)

    def close(self) -> None:
        slots = [instance.slot for instance in list(self._instances.values())]
        super().close()
        for slot in slots:
            slot.close()

    def _spawn(self) -> RayWorker:
        self._count("workers started")
        return RayWorker(*self._actor)

    def _place(self) -> Slot:
        if len(self._instances) >= self._limit:
            raise PoolFull(f"all {self._limit} places for {self.env} are taken")
        return Slot(self._spawn)

    def _forget(self, instance: Instance) -> None:
        instance.slot.close()
