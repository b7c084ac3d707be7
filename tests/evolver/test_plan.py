"""Tests of the planner: targets, arithmetic against XLA, collectives, calls, verdicts, and the real
compilers."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from evolver import build, plan
from evolver import learner as parts
from evolver.build import RunError
from evolver.config import plugs
from evolver.llm.roles import prompts_of
from evolver.plan import (
    advice,
    analytic,
    calls,
    compilers,
    estimate,
    facts,
    hlo,
    preflight,
    programs,
    report,
    targets,
)
from evolver.plan import case as cases
from evolver.plan.text import size
from models import qwen
from rl import learner
from tests.configs import changed, config_of

ROOT = Path(__file__).parents[2]
JAX = ("engine.name=jax", "engine.slots=4")


def case_of(name, target, *overrides):
    return cases.case_of(config_of(name, *overrides), target)


@pytest.fixture
def no_compiler(monkeypatch):
    """As on a machine where none is installed."""
    monkeypatch.setenv("EVOLVER_PLAN_PYTHON", "/nowhere/python")


def flagship(*overrides):
    """The paper's main config on its eight devices."""
    return case_of("appworld_14b", "a100-80g:8", *overrides)


def small(*overrides):
    """Its smaller model there, with the engine of the process."""
    return case_of("appworld_7b", "a100-80g:8", *JAX, *overrides)


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a100-80g:8", "h100:8", "h200:1", "v5p:8", "v6e:16", "H100:16"])
def test_targets_are_known(text):
    target = targets.parse(text)
    assert target.name == text.lower() and 0 < target.chip.usable < target.chip.memory
    if target.chip.platform == "tpu":
        slice = targets.topologies(target.chip.name)[target.count][4:]
        assert math.prod(map(int, slice.split("x"))) == target.count
    else:
        assert math.prod(map(int, targets.gpu_topology(target.count).split("x"))) == target.count
        assert f"device_memory_size: {target.chip.memory}" in targets.gpu_description(target.chip)


@pytest.mark.parametrize(
    "text,words",
    [
        ("h10:8", "did you mean h100?"),
        ("tpu", "known chips are a100-40g, a100-80g, h100, h200, v5e, v5p, v6e"),
        ("mi300:8", "known chips are"),
        ("v5p:7", "slices of v5p have 4, 8, 16"),
        ("h100:12", "whole nodes of 8"),
        ("h100:0", "up to 8 devices"),
    ],
)
def test_an_unknown_target_lists_the_known_ones(text, words):
    with pytest.raises(targets.TargetError, match=words.replace("?", r"\?")):
        targets.parse(text)


def test_links_between_nodes_are_slower():
    one = targets.parse("h100:8")
    two = targets.parse("h100:16")
    assert two.link < one.link == one.chip.link


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_forward_pass_are_those_that_xla_counts(tied):
    # Two layers are unrolled; XLA would count a loop once.
    shape = qwen.Config(512, 64, 2, 4, 2, 16, 192, tied=tied)
    rows = 2
    length = 64  # a single block of queries, so all scores are computed

    def logits(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        return qwen.merge(shape, params).hidden(tokens, positions, tokens) @ qwen.unembed(
            shape, params
        )

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    counted = jax.jit(logits).lower(qwen.shapes(shape), tokens).compile().cost_analysis()["flops"]
    ours = analytic.forward_flops(shape, rows * length, 2 * length, rows * length)
    # XLA also counts other operations than products.
    assert ours == pytest.approx(counted, rel=0.08) and ours < counted


def test_decoding_counts_the_weights_and_the_cache_once():
    shape = qwen.PRESETS["7b"]
    assert analytic.kv_bytes(shape, "bfloat16") == 57_344
    sizes = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
    empty = analytic.decode_bytes(shape, 1, 0, **sizes)
    assert empty == pytest.approx(14.1e9, rel=0.01)  # all weights but the embedding table
    assert analytic.decode_bytes(shape, 4, 100, **sizes) - empty == 400 * 57_344
    assert analytic.sequences_that_fit(10 * 57_344 * 1000 + 1, shape, 1000, "bfloat16") == 10
    assert analytic.sequences_that_fit(-1, shape, 1000, "bfloat16") == 0


def test_recomputing_trades_compute_for_memory():
    levels = ("full", "attention", "dots", "none")
    kept = [case_of("bfcl_7b_lora", "h200:1", f"model.remat={level}") for level in levels]
    sizes = [estimate.temporaries(case)["update"] for case in kept]
    assert sizes == sorted(sizes) and sizes[-1] > 5 * sizes[0]
    shape = qwen.PRESETS["7b"]
    flops = [analytic.update_flops(shape, 1e6, 8192, 1e5, remat=remat) for remat in (False, True)]
    assert flops[1] / flops[0] == pytest.approx(4 / 3)


def test_attention_within_samples_takes_memory_for_each_of_them():
    def update(target, kernel, most, remat="full"):
        changes = f"model.attention={kernel}", f"learner.most_segments={most}"
        case = case_of("bfcl_7b_lora", target, *changes, f"model.remat={remat}")
        return estimate.temporaries(case)["update"]

    case = case_of("bfcl_7b_lora", "a100-80g:1")
    c = case.config
    shape = case.shape
    head = c.learner.micro * c.learner.row * shape.head_dim * 2  # bytes
    one = head * (2 * shape.heads + 2 * shape.kv_heads)  # queries, keys, values, outputs
    for remat, kept in (("full", 0), ("attention", shape.heads * head), ("none", one)):
        alone, more = (update("a100-80g:1", "cudnn_apart", most, remat) for most in (1, 5))
        assert more - alone == pytest.approx(2 * 4 * one + shape.layers * 4 * kept)
    masked, packed = (update("h100:1", kernel, 5) for kernel in ("cudnn", "cudnn_packed"))
    assert packed - masked == pytest.approx(8 * 5 * shape.heads * head / 2)


def test_the_state_is_spread_over_the_mesh():
    case = flagship("optim.offload=False")
    held = case.state["parameters"]
    count = qwen.parameter_count(case.shape)
    assert held == pytest.approx(4 * count / 8, rel=1e-3)  # biases are not spread
    assert case.state["optimizer"] == pytest.approx(2 * held)
    more = case_of("appworld_14b", "h100:16", "engine.name=jax")
    assert more.state["parameters"] < 0.51 * held


def test_a_mesh_for_other_devices_is_adapted_with_a_note():
    def adapted(target, *overrides):
        config, note = cases.adapted(config_of("appworld_7b", *overrides), targets.parse(target))
        return config.mesh.fsdp, config.mesh.tensor, config.learner.micro, note

    assert adapted("h200:1")[:3] == (1, 1, 1) and "8 devices" in adapted("h200:1")[3]
    assert adapted("h100:8") == (8, 1, 8, "")
    assert adapted("h100:16", "mesh.fsdp=4", "mesh.tensor=2")[:2] == (8, 2)


# --- collectives ----------------------------------------------------------------------------------

HLO = """HloModule jit_step
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%layer (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %gather = (bf16[2,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%x), replica_groups=mesh['a'=8,'b'=1] {'a'}
  %scatter = ((f32[16,16]{1,0}), f32[2,16]{1,0}) reduce-scatter-start(%y), replica_groups={{0,1,2,3,4,5,6,7}}
}
%layer_condition (p: (s32[], bf16[8,16])) -> pred[] {
  %layers.1 = s32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%i, %layers.1), direction=LT
}
%micro (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %inner = (s32[], bf16[8,16]) while(%start), condition=%layer_condition, body=%layer
  %known = (s32[], bf16[8,16]) while(%start), condition=%other, body=%branch, backend={"known_trip_count":{"n":"5"}}
}
%branch (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %alone = f32[100] all-reduce(%z), replica_groups=[8,1]<=[8], to_apply=%add
  %moved = f32[10] collective-permute(%z), source_target_pairs={{0,1},{1,0}}
}
%micro_condition (p: (s32[], f32[4])) -> pred[] {
  ROOT %less.1 = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (s32[], f32[4]) while(%start), condition=%micro_condition, body=%micro
  ROOT %all = f32[50]{0} all-reduce(%w), replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_collectives_are_counted_with_the_trips_of_their_loops():
    found = hlo.collectives(HLO, trips=4)
    gather = 16 * 16 * 2 * 7 / 8
    scatter = 16 * 16 * 4 * 7 / 8  # a ring sends all parts but one
    assert found["all-gather"] == pytest.approx((12, 12 * gather))
    assert found["reduce-scatter"] == pytest.approx((12, 12 * scatter))
    # A group of one device sends nothing.
    assert found["all-reduce"] == pytest.approx((1, 2 * 200 * 7 / 8))
    assert found["collective-permute"] == pytest.approx((20, 20 * 40))


LOOP = """
%body (p: (bf16[8,4,64,16], f32[9,16])) -> (bf16[8,4,64,16], f32[9,16]) {
  %p = (bf16[8,4,64,16], f32[9,16]) parameter(0)
  %cache = bf16[8,4,64,16]{3,2,1,0} get-tuple-element(%p), index=0
  %table = f32[9,16]{1,0} get-tuple-element(%p), index=1
  %loop_gather_fusion = f32[2,16]{1,0} fusion(%table), kind=kLoop, calls=%g
  %input_scatter_fusion = bf16[8,4,64,16]{3,2,1,0} fusion(%cache, %loop_gather_fusion), kind=kInput
  %fmha = (bf16[8,4,1,16]{3,2,1,0}, u8[0]{0}) custom-call(%input_scatter_fusion)
  %out = bf16[8,4,1,16]{3,2,1,0} get-tuple-element(%fmha), index=0
}

ENTRY %main (a: s32[]) -> s32[] {
  %w = (bf16[8,4,64,16]{3,2,1,0}, f32[9,16]{1,0}) while(%t), condition=%c, body=%body
}
"""


def test_the_kernels_of_a_loop_read_what_they_need_of_their_operands():
    """Two rows of the table; two new rows of the cache, twice; the whole cache, and the output."""
    rows = 2 * 16 * 4
    cache = 8 * 4 * 64 * 16 * 2
    out = 8 * 4 * 16 * 2
    assert hlo.loop(LOOP) == {"kernels": 3, "bytes": 2 * rows + 2 * rows + cache + out}
    assert hlo.loop(HLO.replace("while", "call")) == {"kernels": 0, "bytes": 0}


# --- work and sizes -------------------------------------------------------------------------------


def facts_of(*overrides):
    config = config_of("quickstart", *overrides)
    return facts.work(config, *facts.task_counts(config)) | facts.sizes(config)


def test_the_text_has_the_config_every_plug_and_the_work(tmp_path):
    config = config_of("quickstart", "advantage.args.alpha=0.5")
    text = plan.plan(config, tmp_path / "run")
    sections = {part.splitlines()[0]: part.splitlines()[1:] for part in text.split("\n\n")}
    assert "  rollout.group = 8" in sections["config"]
    resolved = dict(line.strip().split(" = ", 1) for line in sections["plugs"])
    assert list(resolved) == list(plugs.KINDS)
    assert resolved["advantage"].startswith("adca(") and "alpha=0.5" in resolved["advantage"]
    assert "clip_high_guided=0.6" in resolved["loss"]
    assert resolved["questioning.judge"] == "verifier()"
    work = sections[f"plan for {tmp_path}/run"]
    assert any("80 of 16 tasks x 8 = 128 rollouts" in line for line in work)
    assert "language models" not in text, "the quickstart asks none"


def test_a_plug_that_does_not_exist_is_named():
    with pytest.raises(plan.PlanError, match="did you mean grpo"):
        plan.plan(config_of("quickstart", "advantage.name=grpo2"), "runs/x")


def test_evaluations_that_never_happen_are_not_planned():
    assert facts_of("eval.every=0", "eval.split=nonsense")["evaluation"] == "none"


@pytest.mark.parametrize(
    "overrides,state,checkpoint",
    [
        (["loss.kl_coef=0.0"], "12 (float32 weights, two float32 moments)", 12),
        ([], "16 (float32 weights, two float32 moments, float32 reference policy)", 12),
        (
            ["optim.master=bfloat16"],
            "12 (bfloat16 weights, two float32 moments, bfloat16 reference policy)",
            10,
        ),
        (
            ["loss.reference=host", "optim.offload=True"],
            "4 (float32 weights), and 12 in host memory (two float32 moments, float32 reference policy)",
            12,
        ),
        (["loss.reference=host"], "12 (float32 weights, two float32 moments), and 4 in host", 12),
        (
            ["loss.kl_coef=0.0", "recipe.name=separate_critic"],
            "24 (float32 weights, two float32 moments, float32 weights of another network, its two"
            " float32 moments)",
            24,
        ),
    ],
)
def test_sizes_follow_what_is_kept_and_where(overrides, state, checkpoint):
    found = facts_of("loss.kl_coef=0.1", *overrides)
    count = qwen.parameter_count(cases.model_shape(config_of("quickstart")))
    expected = re.sub(r"^\d+|(?<=, and )\d+", lambda n: size(int(n[0]) * count), state)
    assert found["training state"].startswith(expected)
    assert found["checkpoint"] == size(checkpoint * count)


@pytest.mark.parametrize("offload", [False, True])
def test_sizes_of_adapters_are_those_of_the_state(offload):
    values = ("lora.rank=4", "model.dtype=bfloat16", "loss.kl_coef=0.1")
    config = config_of("quickstart", f"optim.offload={offload}", *values)
    found = facts.sizes(config)
    shape = cases.model_shape(config)
    optimizer = parts.make_optimizer(config)
    layout = parts.make_layout(config)
    state = learner.state_shapes(shape, optimizer, None, layout, frozen_dtype=jnp.bfloat16)

    def held(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim)

    adapters = held(state["params"]) // 4
    assert f"and {adapters:,} of adapters" in found["parameters"]
    text = found["training state"]
    total = held(state)
    if offload:
        assert f"{size(8 * adapters)} in host memory (two float32 moments)" in text
        total -= 8 * adapters
    assert text.startswith(f"{size(total)} (bfloat16 weights, float32 adapters")
    kept = {name: part for name, part in state.items() if name != "base"}
    assert "reference" not in text and found["checkpoint"] == size(held(kept))


# --- calls of language models ---------------------------------------------------------------------


@pytest.fixture
def paid():
    """The paper's AppWorld config, small: 10 steps of 4 tasks x 8 rollouts, 6 tasks for the first
    pool."""
    return config_of(
        "appworld_14b",
        *("steps=10", "rollout.tasks=4", "navigating.tasks=6", "questioning.budget=20"),
        "llm.model=one",
    )


def counts(config, *known):
    return {role: (made.least, made.most) for role, made in calls.bill(config, *known).items()}


def test_the_bill_counts_the_calls_of_each_role(paid):
    """AppWorld's 90 training tasks: by default 20 turns a walk, 3 tasks a walk, 8 walks per
    training task."""
    first = 6 * 4
    rollouts = 10 * 4 * 8
    assert counts(paid, 90) == {
        "explorer": (7 * 20, 8 * 90 * 20),
        "writer": (7, 8 * 90),
        "judge": (0, rollouts + first),
        "step_judge": (0, rollouts),  # the extractor does not read labels
        "summariser": (0, 2 * 6),  # an extraction and a validation for each task of the first pool
        "reranker": (0, 10 * 4),
        "embedder": (0, 1 + 40 + 2 * 6),
    }
    # Where the world is elsewhere, its tasks are not known.
    assert counts(paid)["explorer"] == (7 * 20, math.inf)


@pytest.mark.parametrize(
    "overrides,role,expected",
    [
        ("questioning.share=0.5", "judge", (0, 10 * 2 * 8 + 24)),
        ("navigating.pool=somewhere", "judge", (0, 10 * 4 * 8)),
        ("questioning.judge.name=verifier", "judge", None),
        ("questioning.tasks=tasks.jsonl", "explorer", None),
        ("questioning.every=3 questioning.refresh=9", "writer", (7 + 3 * 3, 4 * 720)),
        (
            "questioning.tasks=a questioning.every=3 questioning.refresh=9",
            "writer",
            (9, 3 * 720),
        ),
        ("questioning.explorer.args.depth=7", "explorer", (7 * 10, 720 * 10)),
        ("attributing.judge.name=replay", "step_judge", None),
        ("rollout.refill=2", "step_judge", (0, 3 * 10 * 4 * 8)),
        ("navigating.extractor.name=contrast", "step_judge", (0, 10 * 4 * 8 + 24)),
        # With share 1 only the synthetic tasks are attempted.
        ("navigating.tasks=0", "judge", (0, 10 * 4 * 8 + 4 * 20)),
        (
            "navigating.tasks=0 questioning.share=0.5",
            "judge",
            (0, 10 * 2 * 8 + 4 * (20 + 90)),
        ),
        ("navigating.tasks=0 questioning.tasks=tasks.jsonl", "judge", (0, math.inf)),
        ("navigating.tasks=0 questioning.tasks=tasks.jsonl", "step_judge", (0, 10 * 4 * 8)),
        ("navigating.every=5", "summariser", (0, 2 * (6 + 2 * 4))),
        ("navigating.extractor.args.valid=0.0", "summariser", (0, 6)),
        ("navigating.share=0.0", "reranker", (0, 0)),
        ("navigating.embedder.name=ngrams", "embedder", None),
        ("eval.experience=1.0 eval.every=5 eval.tasks=7", "reranker", (0, 40 + 3 * 7)),
        ("eval.experience=1.0 eval.every=5", "reranker", (0, 40 + 3 * 12)),
    ],
)
def test_the_bill_follows_the_config(paid, overrides, role, expected):
    assert counts(changed(paid, *overrides.split()), 90, 12).get(role) == expected


def test_calls_of_another_plug_are_unknown(paid):
    paid.attributing.judge.name = f"{__name__}:own_judge"
    assert counts(paid, 90)["step_judge"] == (0, math.inf)
    assert re.search(r"step_judge \(qwen-max\) +unknown", "\n".join(calls.lines(paid, 90)))


def own_judge(chat):
    """A judge of turns that asks a language model."""


own_judge.roles = ("step_judge",)


def test_the_bill_has_tokens_and_costs(paid, tmp_path):
    assert all(made.cost is None for made in calls.bill(paid).values())
    total = re.split(r"  +", calls.lines(paid)[-3].strip())
    assert total == ["total", "at least 6.6", "at least 0.4", "?"]  # of calls without a bound
    prices = {"qwen-plus": [1, 2], "qwen-max": [100, 200], "text-embedding-v4": [1, 0]}
    prices["qwen3-235b-a22b-instruct-2507"] = [10, 20]
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    paid.llm.prices = str(tmp_path / "prices.json")
    bill = calls.bill(paid, 90)
    episode = 25_580 / 3
    judge = bill["judge"]
    assert judge.read == pytest.approx(344 * episode) and judge.written == 344 * 500
    assert judge.cost == pytest.approx(344 * (episode * 10 + 500 * 20) / 1e6)
    assert bill["reranker"].read == 40 * 100 * (1 + 3 * 5)
    text = "\n".join(calls.lines(paid, 90))
    assert "140 to 14,400" in text and "at most 344" in text and "unit of config.llm.prices" in text
    paid.llm.step_judge.model = "unpriced"
    assert calls.bill(paid)["step_judge"].cost is None
    paid.llm.prices = "no/prices.json"
    with pytest.raises(plan.PlanError, match=r"no/prices\.json"):
        plan.plan(paid, "runs/x")


def test_a_plan_shows_the_prompts_of_the_plugs_in_use(paid):
    text = plan.plan(paid, "runs/x")
    begins = "prompt step_judge-3, evolver/llm/prompts/step_judge.txt\n  # system\n  You grade the"
    assert begins in text
    shown = re.findall(r"^prompt (\w+)-\d+,", text, re.MULTILINE)
    assert set(shown) == set(prompts_of(paid)) and len(shown) == len(set(shown))
    assert "\nprompt " not in plan.plan(config_of("quickstart"), "runs/x")


def test_a_plan_has_one_bill_with_and_without_a_target(paid, no_compiler):
    bill = "\n  ".join(calls.lines(paid, *facts.task_counts(paid)[:2]))
    for target in ("", "a100-80g:8"):
        text = plan.plan(paid, "runs/x", target)
        assert bill in text and text.count("\n  explorer ") == 1


# --- verdicts -------------------------------------------------------------------------------------


def test_7b_fits_eight_devices_of_80_gb_beside_the_engine():
    case = small()
    assert estimate.fits(case) and estimate.sequences(case) >= 4


def test_14b_fits_eight_devices_of_80_gb_beside_vllm_with_its_moments_on_the_host():
    case = flagship()
    assert case.engine.shared and estimate.fits(case)
    assert not estimate.fits(flagship("optim.offload=False", "loss.reference=device"))


def test_learner_and_servers_that_take_turns_have_the_memory_one_after_the_other():
    flags = "engine.vllm.flags=--gpu-memory-utilization 0.6"
    beside = flagship(flags)
    assert not estimate.fits(beside)
    assert "--config.engine.vllm.sleep=True" in advice.advise(beside)[0]
    nccl = flagship(flags, "engine.vllm.transfer=nccl")
    assert not any("sleep" in line for line in advice.advise(nccl))  # a run would refuse it
    case = flagship(flags, "engine.vllm.sleep=True")
    assert estimate.fits(case) and estimate.sleep_seconds(case)
    assert "learner and servers take turns" in report.render(case)
    for phase, row in estimate.memory(case).items():
        servers = row["engine weights"] + row["KV cache"]
        assert bool(servers) == (phase in ("prefill", "decode"))
    elsewhere = "engine.vllm.urls=('http://10.0.0.1:8000',)"
    moved = flagship("engine.vllm.sleep=True", elsewhere)
    assert not estimate.sleep_seconds(moved)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_does_not_fit_comes_with_a_value_that_does(dtype):
    case = small("engine.slots=400", f"engine.cache_dtype={dtype}")
    (line,) = advice.advise(case)
    assert "would fit" in line and "--config.engine" in line
    flags = re.findall(r"--config\.(\S+)", line)
    assert estimate.fits(replace(case, config=changed(case.config, *flags)))


def test_advice_on_a_run_with_servers_does_not_name_the_engine_of_the_process():
    """Device memory that holds not even a part of the weights, as of a CPU without a mesh."""
    case = flagship()
    tiny = replace(case.target.chip, memory=1 << 30)
    case = replace(case, target=replace(case.target, chip=tiny))
    assert advice.advise(case) == ["no change of the config makes it fit, nor do 64 such devices"]


def test_a_compiled_program_replaces_the_estimate_and_a_refused_one_does_not_fit():
    case = small()
    memory = {"temp": case.state["gradients"] + 5e9}
    update = {"memory": memory, "collectives": {"all-gather": (10, 45e9)}, "seconds": 1.0}
    compiled = replace(case, compiled={"jax": "0", "phases": {"update": update}})
    held = estimate.memory(compiled)["update"]["temporaries"]
    assert held == pytest.approx(5e9) and "update compiled" in report.render(compiled)
    sent = estimate.phases(compiled)["update"].sent
    assert sent == 45e9 * case.config.learner.updates
    refused = {"update": {"error": "RESOURCE_EXHAUSTED: Used 28.76G of 15.75G hbm", "seconds": 1.0}}
    case = replace(case, compiled={"jax": "0", "phases": refused})
    assert not estimate.fits(case) and "RESOURCE_EXHAUSTED" in report.render(case)


def test_without_a_compiler_the_plan_is_arithmetic_and_says_so(no_compiler):
    case = case_of("appworld_7b", "v5p:8", *JAX)
    text = plan.plan(case.config, "runs/x", "v5p:8")
    for words in ("arithmetic only", "make plan-tpu", "memory of the fullest device", "verdict"):
        assert words in text
    cells = {line.split()[0]: line.split()[4] for line in text.splitlines() if " compute " in line}
    assert cells["update"] == "?" and "?: no compiler has said it" in text
    assert estimate.phases(case)["update"].sent is None
    assert estimate.phases(case)["decode"].sent == 0.0  # on one device
    assert all(phase.roofline <= phase.expected for phase in estimate.phases(case).values())


def test_a_failing_compiler_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such plugin' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("EVOLVER_PLAN_PYTHON", str(broken))
    case = case_of("quickstart", "h100:1")
    error = compilers.compiled(case).compiled["error"]
    assert "exit code 3" in error and "no such plugin" in error


def test_too_little_memory_is_reported_before_anything_is_loaded(monkeypatch, tmp_path):
    config = config_of("quickstart")
    assert not preflight.shortages(config, tmp_path)
    assert preflight.limit_of(jax.devices()[0]) > 1e8
    monkeypatch.setattr(preflight, "limit_of", lambda device: 16e6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    # Workers of a world can take all memory of a machine that is too small.
    monkeypatch.setattr(build, "open_source", lambda *_, **__: pytest.fail("a world is opened"))
    with pytest.raises(RunError) as error, build.open_run(config, tmp_path):
        pass
    for words in (
        "too little memory", "16 MB", "optimizer", "KV cache", "--mode=plan", "checkpoints take up to",
    ):  # fmt: skip
        assert words in str(error.value)


def test_the_training_path_imports_no_planner():
    code = "import sys; from evolver import loop; assert 'evolver.plan' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_kernels_are_chosen_for_the_gpu_of_the_plan(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_compute_capability", fused.check_compute_capability)
    assert not fused.check_compute_capability("9.0")  # this machine has none
    for capability, packs in (("9.0", True), ("10.3", True), ("8.0", False)):
        programs.take_for_local(SimpleNamespace(compute_capability=capability))
        assert fused.check_compute_capability("9.0") == packs


def test_the_programs_of_a_run_are_traced_without_weights():
    config = config_of("quickstart", "loss.kl_coef=0.1")
    shape = cases.model_shape(config)
    devices = jax.devices()[:1]
    where = SingleDeviceSharding(devices[0])
    traces = programs.learner_programs(config, shape, devices)
    traces |= programs.engine_programs(config, shape, where, 4)
    assert set(traces) == set(cases.PHASES)
    outputs = {phase: jax.tree.leaves(trace().out_info) for phase, trace in traces.items()}
    new_weights = [x.shape for x in outputs["update"]]
    assert (shape.vocab, shape.d_model) in new_weights
    rows = parts.capacity_rows(config)
    micro = config.learner.micro
    assert [x.shape for x in outputs["logp"]] == [(rows // micro, micro, config.learner.row)]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:8", "v6e:8"])
def test_the_real_compilers_agree_with_the_arithmetic(target):
    if compilers.interpreter(targets.parse(target)) is None:
        pytest.skip(compilers.how_to_install(targets.parse(target)))
    sizes = ("learner.row=2048", "rollout.context=2048", "rollout.max_tokens=512")
    case = compilers.compiled(case_of("appworld_7b", target, *JAX, "model.preset=0.5b", *sizes))
    assert set(case.programs) == set(cases.PHASES) and not case.refused
    arguments = case.programs["update"]["memory"]["argument"]
    held = case.state["parameters"] + case.state["optimizer"]
    assert arguments == pytest.approx(held, rel=0.03)
    assert case.programs["update"]["collectives"]
    memory = case.programs["decode"]["memory"]
    assert memory["temp"] < 0.1 * memory["argument"], "the cache is written in place"
