"""Find the smallest set of config changes that would make a plan fit, by arithmetic."""

import itertools
import math
from dataclasses import replace

from envs.values import Json
from evolver.config.derived import needs_reference
from evolver.config.keys import flat
from evolver.plan.analytic import BYTES
from evolver.plan.case import Case, adapted
from evolver.plan.estimate import fits, peak, sequences
from evolver.plan.targets import GIB

# Changes that make another run of it, and the words that explain them.
OTHER_RUN = {
    "engine.name": " and its servers on other devices (config.engine.vllm.urls)",
    "lora.rank": ", adapters instead of all weights",
}


def changes(case: Case) -> Json:
    """Return the changes to try, {key: value}, the cheapest first. All but the last two leave the
    result unchanged up to rounding."""
    busy = case.config.rollout.async_depth or case.config.engine.vllm.transfer == "nccl"
    options: Json = {} if case.on_jax or busy else {"engine.vllm.sleep": True}
    options |= {
        "engine.cache_dtype": "bfloat16",
        "model.dtype": "bfloat16",
        "model.remat": "full",
        "learner.micro": case.row_shards,
    }
    if needs_reference(case.config) and not case.rank:
        options["loss.reference"] = "host"
    if not case.rank:
        options["optim.offload"] = True
    if case.engine.shared:
        options["engine.name"] = "vllm"
    if not case.rank:
        options |= {"optim.master": "bfloat16", "lora.rank": 32}
    values = flat(case.config)
    return {key: value for key, value in options.items() if values[key] != value}


def changed(case: Case, values: Json) -> Case:
    """Return the case with other values of its config."""
    config = case.config.copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    if "engine.name" in values:
        config.engine.vllm.urls = ("elsewhere",)
    return replace(case, config=config)


def advise(case: Case) -> list[str]:
    """Return a line of advice for the verdict on a case; [] if there is none."""
    limit = case.target.chip.usable
    asked = case.config.engine.slots
    slots = sequences(case) * case.engine.used
    if fits(case):
        more = min(slots, case.config.rollout.concurrency)
        words = f"there is room for more episodes at a time: --config.engine.slots={more}"
        return [words] if case.on_jax and more > asked else []
    fewer = {"engine.slots": slots} if case.on_jax and 1 <= slots < asked else {}
    options = fewer | changes(case)
    # The figures of compiled programs hold for this config: a change moves them by arithmetic.
    alone = replace(case, compiled={})
    difference = peak(case) - peak(alone)
    for number in (1, 2, 3):
        for chosen in itertools.combinations(options.items(), number):
            expected = peak(changed(alone, dict(chosen))) + difference
            if expected <= limit:
                flags = [f"--config.{key}={v}{OTHER_RUN.get(key, '')}" for key, v in chosen]
                return [
                    f"would fit, at about {expected / GIB:.0f} of {limit / GIB:.0f} GiB, with"
                    f" {' '.join(flags)}"
                ]
    return [_more_devices(alone)]


def _more_devices(case: Case) -> str:
    """Return how many devices of this kind would hold the run, with all changes except those that
    make another run of it."""
    target = case.target
    limit = target.chip.usable
    least = {key: value for key, value in changes(case).items() if key not in OTHER_RUN}
    smallest = changed(case, least | {"engine.slots": 1}).config
    for count in (2, 4, 8, 16, 32, 64):
        larger = replace(target, count=count)
        config, _ = adapted(smallest, larger)
        if count > target.count and peak(replace(case, config=config, target=larger)) <= limit:
            return (
                "no change of the config makes it fit on this target;"
                f" {count} devices would be enough"
            )
    if not case.on_jax:
        return f"no change of the config makes it fit, nor do {count} such devices"
    weights = BYTES[case.config.model.dtype] * case.sizes["parameters"]
    return (
        f"no change of the config makes it fit: the engine alone needs {weights / GIB:.0f} GiB for"
        f" its weights, the memory of {math.ceil(weights / limit)} such devices; let vLLM servers"
        " generate"
    )
