"""Imitation: mistakes in its configs, the demonstrations of a batch, the weights that Muon updates,
and a small run."""

import functools
import importlib
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from configs import imitation
from evolver import imitating
from evolver.config import plugs
from evolver.config.keys import keys_of
from evolver.files.workdir import Workdir
from evolver.imitating import (
    batches,
    lists_of_pairs,
    make_optimizer,
    random_pairs,
    samples_of,
    shares,
    whole_of,
)
from experiments.imitation import demonstrations, tokenized
from experiments.imitation.__main__ import main, problems
from experiments.imitation.bpe import train_bpe
from experiments.imitation.imitate import with_unseen
from experiments.imitation.induction import with_induction
from models import hf, qwen
from models.tokenizer import Tokenizer, TokenizerError
from rl import optim
from rl.samples import Sample
from rl.seeds import seed_of
from tests.configs import changed
from tests.evolver import toy
from tests.evolver.toy import task
from tests.tiny import tiny_policy

CONFIG = """
from configs import imitation

def get_config():
    config = imitation.get_config()
    config.steps = 3
    config.warmup = 0
    config.model.preset = "tiny"
    config.demonstrations = 6
    config.rows = 2
    config.row = 512
    config.micro = 2
    return config
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return the command line of a config whose updates take a moment."""
    monkeypatch.setitem(qwen.PRESETS, "tiny", qwen.Config(1024, 32, 1, 2, 1, 16, 64))
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return ["imitation", f"--config={path}", f"--workdir={tmp_path}/run"]


def config_of(*settings):
    return changed(imitation.get_config(), "steps=40", "demonstrations=8", *settings)


# --- from a checkpoint ----------------------------------------------------------------------------


def test_a_checkpoint_imitates_with_its_own_tokenizer(tiny, tmp_path):
    policy = tiny_policy(tmp_path / "start")
    words = [f"--config.model.path={policy}", "--config.lr=1e-3", "--config.vocab=10"]
    assert main([*tiny, *words]) == 0
    made = tmp_path / "run/policy"
    (shape, params), (before, started) = hf.load(made), hf.load(policy)
    assert shape == before
    one, other = (folder / "tokenizer.json" for folder in (made, policy))
    assert one.read_text() == other.read_text()
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, started)
    # three updates of Adam, not random weights
    assert 1e-4 < max(jax.tree.leaves(moved)) < 4e-3
    assert f"trained from {policy} by" in (made / "README.md").read_text()


def test_a_policy_is_made_once(stderr, stdout, tiny, tmp_path):
    """A grid that was killed starts it again, whether the policy was finished or not."""
    assert main(tiny) == 0
    weights, card = tmp_path / "run/policy/model.safetensors", tmp_path / "run/policy/README.md"
    first, config = weights.read_bytes(), tmp_path / "run/config.imitation.json"
    weights.write_bytes(b"")
    record = json.loads(config.read_text())
    for newer in ((), ("pairs",)):  # keys that are newer than the policy
        for key in newer:
            del record["config"][key]
        config.write_text(json.dumps(record))
        assert main(tiny) == 0 and weights.read_bytes() == b""
        assert "already made" in stdout()
    card.unlink()
    assert main(tiny) == 0 and weights.read_bytes() == first
    assert main([*tiny, "--config.seed=1"]) == 2 and "is not empty" in stderr()


def test_two_processes_do_not_write_one_policy(stderr, tiny, tmp_path):
    with Workdir(tmp_path / "run").locked():
        assert main(tiny) == 1 and "is in use by process" in stderr()
    assert not (tmp_path / "run").exists()


def test_an_interrupted_policy_is_the_same(stderr, stdout, monkeypatch, tiny, tmp_path):
    """Two of three updates are made, then the process is interrupted while it waits for a batch."""
    assert main([*tiny[:2], f"--workdir={tmp_path}/whole"]) == 0
    monkeypatch.setattr(imitating, "SAVE_EVERY", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(imitating, "pack", interrupted(imitating.pack, after=2))
        assert main(tiny) == 130 and "goes on" in stderr()
    assert not (tmp_path / "run/policy").exists()
    assert main(tiny) == 0 and "resuming after update 2" in stdout()
    one, other = (tmp_path / name / "policy/model.safetensors" for name in ("whole", "run"))
    assert one.read_bytes() == other.read_bytes()
    assert not (tmp_path / "run/checkpoints").exists()


def interrupted(function, after):
    """Return the function, which raises KeyboardInterrupt once it was called `after` times."""
    calls = itertools.count()

    def call(*args, **kwargs):
        if next(calls) == after:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


# --- what it begins with --------------------------------------------------------------------------


def copied(shape, params):
    """Return the share of tokens that are predicted in the second half of lists of eight pairs."""
    draw = np.random.default_rng(0)
    pairs = [draw.choice(shape.vocab, (8, 2), replace=False) for _ in range(32)]
    rows = np.array([np.concatenate([p, p[draw.permutation(8)]]).reshape(-1) for p in pairs])
    positions = np.broadcast_to(np.arange(32), rows.shape)
    h = qwen.merge(shape, params).hidden(rows, positions, np.zeros_like(rows))
    logits = np.array(h @ qwen.unembed(shape, params))
    np.put_along_axis(logits, rows[..., None], -np.inf, -1)  # tied embeddings prefer this token
    asked = np.arange(16, 32, 2)
    return (logits[:, asked].argmax(-1) == rows[:, asked + 1]).mean()


def test_induction_copies_what_followed_a_token_before_any_update():
    shape = qwen.Config(2000, 128, 5, 4, 2, 32, 384)
    params = qwen.init(shape, 0)
    laid_out = with_induction(shape, params, 0)
    assert jax.tree.map(np.shape, laid_out) == jax.tree.map(np.shape, params)
    assert copied(shape, params) < 0.02 and copied(shape, laid_out) > 0.15


def test_the_first_updates_may_show_short_lists_alone():
    data = [Sample(np.arange(300), np.arange(300) > 0)]
    packed, again = (next(lists_of_pairs(data, rows=2, row=256, seed=0)) for _ in range(2))
    assert packed.tokens_RT.shape == (2, 256) and packed.mask_RT.sum() > 60
    assert (packed.tokens_RT == again.tokens_RT).all()


# --- mistakes in a config -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings,words",
    {
        "care=5.0": "config.care must be",
        "hint=7.0": "config.hint must be",
        "careful=1.5": "config.careful must be",
        "final_lr=2.0": "config.final_lr must be",
        "rows=0": "config.rows must be at least 1",
        "muon_lr=0.0": "config.muon_lr must be above 0",
        "schedule=cosin": "config.schedule must be 'constant', 'cosine' or 'linear'",
        "steps=6 warmup=20": "config.warmup=20 updates is not shorter than the run",
        "env.name=appworld": "has no demonstrations to imitate; bfcl, home, made_up, travel have",
        "env.name=tests.tiny:Parity": "has no demonstrations",
        "env.name=tests.evolver.toy:Library explored=none-*.jsonl": "has no task that tool calls "
        "solve; --mode=explore writes such files",
        "env.args.n_trian=3": "n_trian",
        "env.args.plain=2": "plain must be in [0, 1], not 2",
        "model.path=nowhere": "config.model.path=nowhere: there is no such directory",
        "induction=True model.preset=qwen3-0.6b": "config.induction lays out random",
        "template.name=slding_window": "did you mean sliding_window?",
        "template.name=sliding_window": "`limit` must say how long a prompt may be",
        "template.name=self_managing template.args.limit=9": "asks a model during an episode",
        "template.name=summarised_window": "asks a model during an episode",
    }.items(),
)
def test_each_mistake_is_named_once(tmp_path, settings, words):
    found = problems(config_of(*settings.split()), f"{tmp_path}/run")
    assert len(found) == 1 and words in found[0]


def test_a_rate_of_a_config_has_to_be_finite(tmp_path):
    config = config_of()
    config.lr = math.inf
    (problem,) = problems(config, f"{tmp_path}/run")
    assert "config.lr must be finite" in problem


def test_all_mistakes_are_reported_together(stderr, tiny, tmp_path):
    words = ["care=5", "rows=0", "vocab=10", "warmup=20", "lora.rank=4", "stepz=1", "steps=many"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "policy").touch()
    assert main([*tiny, *(f"--config.{word}" for word in words), "--mode=eval"]) == 2
    err = stderr()
    parts = ["9 problems; nothing was started", "did you mean steps?", "is not empty"]
    parts += ["imitation has no modes", *(word.partition("=")[0] for word in words)]
    assert all(part in err for part in parts)


def test_a_config_of_run_py_is_recognised(stderr):
    assert main(["imitation", "--config=configs/quickstart.py"]) == 2
    err = stderr()
    assert "1 problem; nothing was started" in err and "not a config of imitation" in err


@pytest.mark.parametrize(
    "name",
    [
        "base_policy", "reader_base", "reader_base:smollm2", "bfcl_tiny_base", "home_base",
        "pretrained_base", "window_base",
    ],
)  # fmt: skip
def test_the_configs_that_imitate_are_sound(tmp_path, name):
    if name == "bfcl_tiny_base":
        pytest.importorskip("bfcl_eval")
    name, _, argument = name.partition(":")
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config(argument or None)
    if config.model.path:  # `make pretrained` writes it
        config.model.path = "configs/assets/travel_base"
    assert not problems(config, f"{tmp_path}/run")
    assert f"python -m experiments.imitation --config=configs/{name}.py" in module.__doc__
    with pytest.raises(ValueError, match="nonsense"):
        module.get_config("nonsense")
    if name == "bfcl_tiny_base":
        config.hint = 0.1
        (problem,) = problems(config, f"{tmp_path}/run")
        assert "have no hints" in problem


def test_bfcl_tiny_starts_from_the_policy_that_its_base_writes():
    from configs import bfcl_tiny, bfcl_tiny_base

    config, base = bfcl_tiny.get_config(), bfcl_tiny_base.get_config()
    assert config.model.path == "runs/bfcl_tiny_base/policy"
    assert config.env.args.to_dict() == base.env.args.to_dict()


def test_every_key_is_documented_and_read():
    """Each key has a meaning, and the code of imitation uses it."""
    folder = Path(demonstrations.__file__).parent
    files = [*folder.glob("*.py"), Path("evolver/imitating.py")]
    source = "\n".join(path.read_text() for path in files)
    for name, key in keys_of(imitation.Config).items():
        assert re.search(rf"\b(c|config)\.{re.escape(name)}\b", source) and key.meaning, name


def test_the_least_vocabulary_is_the_tokenizers(tmp_path):
    (problem,) = problems(config_of("vocab=10"), f"{tmp_path}/run")
    least, extra = int(problem.split()[-1]), demonstrations.extra_tokens("travel")
    assert train_bpe(["a"], least, extra).vocab_size == least
    with pytest.raises(TokenizerError):
        train_bpe(["a"], least - 1, extra)


@pytest.mark.parametrize(
    "words,low,high",
    [("", 0.3, 0.7), ("env.args.plain=1.0", 1, 1), ("env.args.plain=0.0", 0, 0)],
)
def test_half_of_the_demonstrations_are_worded_by_the_tools_unless_the_config_says_otherwise(
    words, low, high
):
    episodes = demonstrated(config_of("hint=0.2", *words.split()), 60, 1.0)
    assert low <= np.mean([shown["template"].startswith("plain/") for shown in episodes]) <= high


# --- solutions of explored tasks ------------------------------------------------------------------


@pytest.fixture
def explored(tmp_path):
    """Return a pattern of files with two solved tasks of the toy library, one of them asking for an
    answer."""
    lent = [toy.call("shelf", "green"), toy.call("lend", "B15"), "done"]
    asked = [toy.call("shelf", "blue"), "Kim"]
    place = {"origin": "synthetic", "env": "tests.evolver.toy:Library"}
    solved = [
        replace(task("Lend Solaris.", lent=["B15"]), reference=lent, **place),
        replace(task("Which book is blue?", answer="Kim"), reference=asked, **place),
    ]
    for n, one in enumerate(solved):
        (tmp_path / f"tasks-{n}.jsonl").write_text(json.dumps(one.to_dict()) + "\n")
    return str(tmp_path / "tasks-*.jsonl")


def test_solutions_of_explored_tasks_are_demonstrated_in_any_world(explored, tmp_path):
    config = config_of("env.name=tests.evolver.toy:Library", f"explored={explored}", "hint=0")
    assert problems(config, f"{tmp_path}/run") == []
    episodes = demonstrated(config, 20, 1.0)
    assert {(episode["success"], episode["hinted"]) for episode in episodes} == {(True, False)}
    assert {episode["messages"][-1]["content"] for episode in episodes} == {"done", "Kim"}
    slips = demonstrated(config, 60, 0.0)
    assert 0.1 < np.mean([episode["success"] for episode in slips]) < 0.9
    for *before, last in (episode["messages"] for episode in slips):
        if last["content"] == "Kim":  # an answer that was not looked up is not given
            assert any("blue" in m["content"] for m in before if m["role"] == "assistant")


def demonstrated(config, n, care):
    """Return the first demonstrations of a config."""
    config.demonstrations = n
    return [
        demonstrations.demonstrate(config, care, *one) for one in demonstrations.planned(config)
    ]


@pytest.mark.parametrize(
    "name,files,shares",
    [
        ("tests.evolver.toy:Library", "*.jsonl", [True] * 8),  # it has none of its own
        ("travel", "*.jsonl", [False, True] * 4),
        ("travel", "", [False] * 8),
    ],
)
def test_half_of_the_demonstrations_are_a_worlds_own(name, files, shares):
    config = config_of(f"env.name={name}", f"explored={files}")
    assert [theirs for _, theirs in demonstrations.planned(config)] == shares


def test_demonstrations_are_made_once_and_do_not_depend_on_the_processes(
    monkeypatch, tmp_path, tiny
):
    config = config_of("demonstrations=7", "row=512")
    tokenizer = tiny_policy(tmp_path / "policy")
    monkeypatch.setattr(tokenized, "CHUNK", 3)
    made = tokenized.tokenized(config, 0.5, tokenizer)
    monkeypatch.setattr(tokenized, "_made", None)
    again = tokenized.tokenized(config, 0.5, tokenizer)
    episodes = demonstrated(config, 7, 0.5)
    template = plugs.plug("template", "causal", {})
    alone = samples_of(episodes, Tokenizer.load(tokenizer), 512, template)
    assert len(alone) == len(made.samples) == len(again.samples) > 0
    for one, other, third in zip(alone, made.samples, again.samples):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.mask, third.mask)
    assert list(made.success_N) == [episode["success"] for episode in episodes]


def test_ids_that_no_sample_holds_get_embeddings_like_those_of_the_others():
    draw = np.random.default_rng(0)
    embed_VD = draw.normal(0.5, 2.0, (300, 16)).astype(np.float32)
    embed_VD[250:] = draw.normal(-9.0, 0.1, (50, 16))  # all they have learned is to be unlikely
    samples = [Sample(draw.integers(0, 250, 2000), np.arange(2000) > 0)]
    got_VD = np.asarray(with_unseen(jax.numpy.asarray(embed_VD), samples, seed=0))
    np.testing.assert_array_equal(got_VD[:250], embed_VD[:250])
    np.testing.assert_allclose(got_VD[250:].mean(), 0.5, atol=0.2)
    np.testing.assert_allclose(got_VD[250:].std(), 2.0, rtol=0.2)
    assert len(np.unique(got_VD[250:].round(3), axis=0)) == 50


# --- a small run ----------------------------------------------------------------------------------


def test_a_few_updates_without_clipping_write_a_policy(stdout, tiny, tmp_path):
    assert main([*tiny, "--config.clip=0"]) == 0
    out = stdout()
    assert "6 demonstrations twice" in out and "imitate 3/3" in out
    shape, params = hf.load(tmp_path / "run" / "policy")
    before = qwen.init(shape, seed_of(0, "init") % 2**31)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - np.asarray(b)).max()), params, before)
    assert shape.layers == 1 and all(0 < size < math.inf for size in jax.tree.leaves(moved))
    card = (tmp_path / "run" / "policy" / "README.md").read_text()
    command = f"python -m experiments.imitation --config={tmp_path}/tiny.py --config.clip=0"
    assert "6 careless ones" in card and f"    {command}\n" in card


def test_demonstrations_longer_than_a_row_end_the_run_with_a_message(stderr, tiny):
    assert main([*tiny, "--config.row=16"]) == 1
    err = stderr()
    assert "none of 6 demonstrations fits config.row=16: the shortest sample has" in err
    assert "Traceback" not in err
    assert main([*tiny, "--config.steps=4"]) == 0, "another config may use the workdir"


def test_imitation_that_diverges_ends_with_a_message_and_writes_no_policy(
    stderr, monkeypatch, tiny, tmp_path
):
    monkeypatch.setattr(
        "evolver.imitating.learner.make_update",
        lambda *args, **options: lambda state, batch, seed: (
            state, {"loss": float("nan"), "skipped": 1}
        ),
    )  # fmt: skip
    assert main(tiny) == 1
    err = stderr()
    assert "imitation has diverged" in err and "up to 3 of 3" in err and "Traceback" not in err
    assert not (tmp_path / "run" / "policy").exists()


def test_a_clip_of_0_is_none():
    """Only Adam's moments show what was clipped: its updates do not depend on the size of a
    gradient."""
    grads = {"norm": np.full(4, 1e3, np.float32)}

    def moments(clip: float) -> np.ndarray:
        tx = make_optimizer(config_of(f"clip={clip}"))
        _, state = tx.update(grads, tx.init(grads), grads, position=0)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)])

    unclipped, far, near = moments(0.0), moments(1e9), moments(1.0)
    assert (unclipped == far).all() and not (unclipped == near).all()


@pytest.mark.parametrize(
    "careful,expected", [(1.0, [0, 0, 0, 0]), (0.5, [0, 0, 1, 1]), (0.0, [0.5, 1, 1, 1])]
)
def test_the_share_of_careless_demonstrations_grows_after_the_careful_ones(careful, expected):
    assert list(itertools.islice(shares(careful, 4), 4)) == expected


# --- batches and updates --------------------------------------------------------------------------


def samples(token: int, n: int) -> list[Sample]:
    return [Sample(np.full(8, token), np.arange(8) > 0) for _ in range(n)]


SAID = ("Go on.", "One.", "more", "Two.", "end")


def imitated(contents, name: str = "causal", row: int = 512, **args):
    """Return the samples of one conversation, and its tokenizer. contents: the user's words, then
    those of the assistant and of a tool in turn."""
    roles = ["user", *itertools.islice(itertools.cycle(("assistant", "tool")), len(contents) - 1)]
    messages = [{"role": role, "content": said} for role, said in zip(roles, contents)]
    tokenizer, template = train_bpe(contents, 300), plugs.plug("template", name, args)
    return samples_of([{"messages": messages}], tokenizer, row, template), tokenizer


def test_the_turns_of_the_assistant_train_or_all_tokens_of_a_conversation_but_the_first():
    (sample,), tokenizer = imitated(SAID)
    ids = np.asarray(sample.tokens)
    assert tokenizer.decode(ids[sample.mask].tolist()) == "One.<|im_end|>Two.<|im_end|>"
    text = tokenizer.decode(ids.tolist())
    assert "more" in text and "end\n" not in text and text.endswith("Two.<|im_end|>")
    whole = whole_of(sample)
    assert (whole.tokens == sample.tokens).all() and whole.mask.sum() == len(sample) - 1
    assert not whole.mask[0] and sample.mask.sum() < whole.mask.sum()


def test_a_template_makes_the_prompts_of_demonstrations_as_those_of_an_episode():
    said = ["Go on.", *(n * 3 * times for n, times in itertools.product("abcd", (1, 2)))]
    (whole,), _ = imitated(said)
    made, tokenizer = imitated(said, "sliding_window", limit=50, keep=0.5)
    texts = [tokenizer.decode(sample.tokens.tolist()) for sample in made]
    trained = [tokenizer.decode(sample.tokens[sample.mask].tolist()) for sample in made]
    assert len(made) > 1 and "".join(trained) == tokenizer.decode(whole.tokens[whole.mask].tolist())
    assert "earlier turns are not shown" in texts[-1] and "aaa" not in texts[-1]
    assert max(map(len, made)) < len(whole)


def test_a_batch_holds_the_given_share_of_careless_samples():
    shares = (0.0, 0.5, 1.0)
    kinds = samples(1, 5), samples(2, 7)
    made, again = (list(batches(*kinds, iter(shares), 4, 32, 0)) for _ in range(2))
    careless = [np.mean(packed.tokens_RT[packed.tokens_RT > 0] == 2) for packed in made]
    assert careless[0] == 0 and careless[2] == 1 and careless[1] == pytest.approx(0.5, abs=0.1)
    assert all(packed.tokens_RT.shape[0] <= 4 for packed in made)
    assert all(np.array_equal(a.tokens_RT, b.tokens_RT) for a, b in zip(made, again, strict=True))


def test_a_batch_holds_more_samples_that_share_what_their_prompts_begin_with():
    tools = np.arange(1, 17)
    ones = [Sample(np.r_[tools, n, n + 1, n + 2], np.arange(19) > 17) for n in range(20, 320, 3)]
    apart, shared = (
        next(batches(ones, ones, [0.0], 4, 32, 0, share=share)) for share in (False, True)
    )
    assert apart.mask_RT.sum() == 4 and shared.mask_RT.sum() == 20 and shared.rows == 4
    assert all((row[:16] == tools).all() for row in shared.tokens_RT)


def test_what_follows_a_token_can_be_found_in_a_list_of_random_pairs_and_alone_trains():
    draw = np.random.default_rng(0)
    for longest in (8, 100, 1000):
        sample = random_pairs(draw, np.arange(5, 300), longest)
        half = len(sample) // 2
        assert 8 <= len(sample) <= max(longest, 12) and half % 2 == 0
        follows = {int(sample.tokens[i]): int(sample.tokens[i + 1]) for i in range(0, half, 2)}
        assert len(follows) == half // 2  # no token is ambiguous
        places = np.flatnonzero(sample.mask)
        assert list(places) == list(range(half + 1, 2 * half, 2))
        assert all(
            follows[int(sample.tokens[place - 1])] == sample.tokens[place] for place in places
        )


def test_pairs_are_mixed_in_as_long_as_there_are_no_slips():
    careful, trained = [Sample(np.arange(n, n + 8), np.arange(8) > 0) for n in range(5)], []
    for share in (0.0, 0.5):
        made = batches(careful, samples(2, 7), (0.0, 0.5), 4, 32, 0, pairs=share)
        trained.append([int(packed.mask_RT.sum()) for packed in made])
    without, mixed = trained
    assert mixed[0] < without[0] and mixed[1] == without[1]  # fewer tokens train in a list of pairs


def test_muon_moves_every_direction_of_a_matrix_alike_and_adam_the_rest():
    config = qwen.Config(32, 16, 2, 4, 2, 4, 24)
    rng = np.random.default_rng(0)
    params, grads = (
        jax.tree.map(lambda w: rng.normal(size=w.shape).astype(np.float32), qwen.shapes(config))
        for _ in range(2)
    )
    tx = optim.muon(lr=1.0, adam_lr=0.1, clip=0)
    update = jax.jit(functools.partial(tx.update, position=0))
    updates, state = update(grads, tx.init(params), params)
    for name, inputs in qwen.INPUTS.items():
        step = np.asarray(qwen.by_name(updates)[f"layers.{name}"])
        rows = np.prod(step.shape[1 : 1 + inputs])
        for matrix in step.reshape(step.shape[0], rows, -1):
            sizes = np.linalg.svd(matrix, compute_uv=False)
            assert 0.6 < np.median(sizes) <= sizes.max() < 1.4, name
    adam = optax.adam(0.1)
    expected, moments = adam.update(grads, adam.init(params))
    for _ in range(4):
        for name in ("embed", "layers.q_bias"):
            ours, adams = (qwen.by_name(tree)[name] for tree in (updates, expected))
            np.testing.assert_allclose(ours, adams, rtol=1e-5, atol=1e-7)
        grads = jax.tree.map(lambda g: g + 1, grads)
        updates, state = update(grads, state, params)
        expected, moments = adam.update(grads, moments)
