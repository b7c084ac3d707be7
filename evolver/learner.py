"""The policy of a run and its learner, built from its config; the training itself is in
`rl.learner`. The planner builds the same programs from the same config."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from evolver.config.derived import kl_coef, needs_reference, updates, warmup, weight_dtype
from evolver.config.keys import arguments
from evolver.config.paths import model_folder
from evolver.config.plugs import chosen, plug
from models import hf, qwen
from models import mesh as meshes
from models.lora import LoRA
from rl import learner, optim
from rl.forward import Forward
from rl.losses import token_loss
from rl.mismatch import Alarm
from rl.seeds import seed_of

# Nats per token between engine and learner that rounding may cause.
FLOOR = {"float32": 1e-3, "bfloat16": 0.03}


@dataclass
class Learner:
    """Trains the policy: its shape, its state, and the two compiled programs."""

    shape: qwen.Config
    state: learner.State
    layout: learner.Layout
    update: learner.Update
    logp: learner.LogP
    alarm: Alarm
    needs_reference: bool
    renews: bool  # the reference changes with time
    offloaded: bool  # it is in host memory between uses
    # The policy of an earlier step that is compared with, or its adapters. None: nothing needs one,
    # or it is the initial policy, which the state of adapters holds as their base.
    reference: qwen.Params | None = None

    def reference_policy(self) -> qwen.Params:
        """Return the reference as `LogP` takes it. Not to be kept: an update consumes the state
        that it may be a part of."""
        reference = self.reference
        if reference is None:
            return self.state["base"]
        if self.offloaded:
            reference = _in_memory("device", reference)
        return learner.whole(self.state | {"params": reference}, self.layout)

    def renew_reference(self) -> None:
        """Make the current policy the reference."""
        kept = self.state["params"]
        copied = _in_memory("pinned_host", kept) if self.offloaded else jax.tree.map(jnp.copy, kept)
        self.reference = copied

    @property
    def saved(self) -> learner.State:
        """The arrays that a checkpoint needs: the state and, where it changes, the reference."""
        # without the constant weights that adapters are added to
        kept = {name: part for name, part in self.state.items() if name != "base"}
        return kept | {"reference": self.reference} if self.renews else kept

    def restore(self, saved: learner.State) -> None:
        """Continue from what `saved` was."""
        if self.renews:
            self.reference = saved.pop("reference")
        self.state |= saved

    @property
    def policy(self) -> qwen.Params:
        """The current parameters, with adapters merged."""
        return learner.merged(self.state, self.layout)


def _in_memory(kind: str, params: qwen.Params) -> qwen.Params:
    """Return a copy of parameters in another kind of memory."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params)


def initial_policy(config: Any, mesh: Mesh) -> tuple[qwen.Config, qwen.Params]:
    """Return the shape and parameters of `model.path`, or random ones of `model.preset`, in the
    dtype of the state."""
    dtype = jnp.dtype(config.model.dtype if config.lora.rank else config.optim.master)
    if config.model.path:
        folder = model_folder(config.model.path, weights=True)
        return hf.load(folder, mesh=mesh, dtype=dtype, rules=config.sharding.to_dict())
    shape = qwen.PRESETS[config.model.preset]
    params = qwen.init(shape, seed_of(config.seed, "init") % 2**31, dtype)
    places = meshes.places(qwen.weights(shape), mesh, config.sharding.to_dict())
    return shape, meshes.put(params, places)


def make_learner(config: Any, shape: qwen.Config, params: qwen.Params, mesh: Mesh) -> Learner:
    """Build the learner. The state takes over `params`; a reference is a copy of them."""
    optimizer, layout = make_optimizer(config), make_layout(config)
    update, logp = make_programs(config, shape, mesh, optimizer)
    seed = seed_of(config.seed, "adapters") % 2**31
    state = learner.init_state(shape, params, optimizer, mesh, layout, seed=seed)
    coarsest = max(FLOOR[config.model.dtype], FLOOR[weight_dtype(config)])
    needed = needs_reference(config)
    made = Learner(
        shape,
        state,
        layout,
        update,
        logp,
        alarm=Alarm(config.loss.mismatch_alarm, coarsest),
        needs_reference=needed,
        renews=needed and config.loss.renew_reference > 0,
        offloaded=config.loss.reference == "host",
    )
    # The state of adapters holds the initial policy as their base.
    if made.renews or (made.needs_reference and not config.lora.rank):
        made.renew_reference()
    return made


def make_layout(config: Any) -> learner.Layout:
    """Return how the training state is kept."""
    c = config.lora
    adapters = LoRA(c.rank, c.alpha, tuple(c.targets)) if c.rank else None
    return learner.Layout(
        config.sharding.to_dict(), config.optim.master, config.optim.offload, adapters
    )


def make_optimizer(config: Any) -> optax.GradientTransformation:
    """Return AdamW with its schedule over the run. A step counts as the updates that are planned
    for it, also where fewer are made."""
    c = config.optim
    lr = optim.schedule(lr=c.lr, schedule=c.schedule, warmup=warmup(config), steps=updates(config))
    return optim.optimizer(**(arguments(optim.optimizer, c) | {"lr": lr}))


def capacity_rows(config: Any) -> int:
    """Return the rows of a mini-batch in which nothing is packed: with room for them, one program
    serves every step."""
    return -(-config.rollout.tasks // config.learner.updates) * config.rollout.group


def make_programs(
    config: Any, shape: qwen.Config, mesh: Mesh, optimizer: optax.GradientTransformation
) -> tuple[learner.Update, learner.LogP]:
    """Return the learner's two programs, `update` and `logp`."""
    c = config
    forward = Forward(
        shape,
        mesh,
        **arguments(Forward, c.learner),
        capacity_rows=capacity_rows(c),
        temperature=c.rollout.temperature or 1.0,
        dtype=jnp.dtype(c.model.dtype),
        remat=c.model.remat,
        attention=c.model.attention,
    )
    update = learner.make_update(
        forward,
        optimizer=optimizer,
        loss=plug(*chosen(c, "loss")),
        aggregate=c.loss.aggregate,
        **(arguments(token_loss, c.loss) | {"kl_coef": kl_coef(c)}),
        max_tokens=min(c.rollout.context, c.rollout.max_turns * c.rollout.max_tokens),
        layout=make_layout(c),
        keep_logp=True,
    )
    return update, learner.make_logp(forward)
