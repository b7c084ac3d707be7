"""A pool with one Ray actor per instance, on one machine or a cluster: `python -m envs.service
--backend=ray`.

Needs `pip install -r requirements/ray.txt` here and on the cluster. Meant for environments that
need a process per instance or more than one machine; `envs.pool.Pool` gives the same guarantees at
a lower cost.
"""

import contextlib
import json
import threading
from typing import Any

from envs import packages
from envs.pool import Instance, Pool, PoolFull, Slot
from envs.process import DEADLINES, ROOT, Deadlines, unpack
from envs.values import Json
from envs.worker import Worlds, reply
from envs.world import WorldError, WorldTimeout


class Host:
    """The class of the actors: a world and its operations, with arguments and replies in JSON."""

    def __init__(self, env: str, kwargs: Json):
        self._worlds = Worlds(env, kwargs)

    def methods(self) -> list[str]:
        return self._worlds.methods()

    def call(self, op: str, name: str, args: str) -> str:
        return reply(0, lambda: self._worlds.call(op, name, json.loads(args)))


class RayWorker:
    """An actor with the interface of `envs.process.Worker`."""

    def __init__(self, env: str, kwargs: Json, deadline: float):
        """Create the actor and its world. Raises WorldTimeout if the cluster has no room within the
        deadline."""
        ray = packages.load("ray", "ray")
        self.env, self._ray = env, ray
        self._actor = ray.remote(Host).options(max_restarts=0, num_cpus=0.01).remote(env, kwargs)
        self._dead = threading.Event()
        self.methods = self._get(self._actor.methods.remote(), "start", deadline)

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def call(self, op: str, world: str, args: list[Any], *, deadline: float) -> Any:
        answer = self._get(self._actor.call.remote(op, world, json.dumps(args)), op, deadline)
        return unpack(json.loads(answer), self.env, op)

    def kill(self) -> None:
        self._dead.set()
        with contextlib.suppress(Exception):  # the cluster may already be shut down
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
            last_line = str(error).strip().split("\n")[-1].strip()
            raise WorldError(f"the actor of {self.env} died in {op}: {last_line[:300]}") from None


class RayPool(Pool):
    """A pool whose instances are actors. limit: maximum number of instances."""

    def __init__(
        self,
        env: str,
        kwargs: Json | None = None,
        *,
        address: str | None = None,
        limit: int = 10_000,
        deadlines: Deadlines = DEADLINES,
        lease_s: float = 3600.0,
    ):
        """Join the cluster at `address` ("auto", "ray://..."); None starts one here. Raises
        WorldError on failure."""
        ray = packages.load("ray", "ray")
        if not ray.is_initialized():
            here = {"env_vars": {"PYTHONPATH": str(ROOT)}}
            code = {"py_modules": [str(ROOT / "envs")]} if address else here
            try:
                ray.init(address, include_dashboard=False, log_to_driver=False, runtime_env=code)
            except Exception as error:  # Ray raises exceptions of many types here
                first_line = str(error).strip().splitlines()[0]
                raise WorldError(f"cannot use a Ray cluster: {first_line}") from error
        self._limit = limit
        self._actor_arguments = (env, kwargs or {}, deadlines.start)
        super().__init__(env, workers=1, deadlines=deadlines, lease_s=lease_s)

    def close(self) -> None:
        slots = [instance.slot for instance in list(self._instances.values())]
        super().close()
        for slot in slots:
            slot.close()

    def _spawn(self) -> RayWorker:
        self._count("workers started")
        return RayWorker(*self._actor_arguments)

    def _place(self) -> Slot:
        if len(self._instances) >= self._limit:
            raise PoolFull(f"all {self._limit} places for {self.env} are in use")
        return Slot(self._spawn)

    def _forget(self, instance: Instance) -> None:
        instance.slot.close()
