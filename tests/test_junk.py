"""Junk in every file and text that is read: each reader returns, or raises the one error that it
promises.

A reader gets raw bytes, and sound samples of what it reads, spoilt: a part of a JSON value is
replaced by an odd one, or bytes are lost, changed or put in. `make test-faults` reads 100,000 of
them.
"""

import copy
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save

from envs import boundary, toolcalls, values
from envs.bfcl import replies
from envs.world import Evaluation, Observation, StepResult, Task
from evolver import replaying, transcripts
from evolver.config import cli
from evolver.files.report import report
from evolver.files.rollout_files import read_rollouts, record_of, rollout_files, write_rollouts
from evolver.files.workdir import Workdir, read_tasks
from evolver.llm import answers
from evolver.llm.embedders import HashedNgrams
from evolver.llm.questions import url_problem
from evolver.llm.store import Cache, Ledger
from evolver.navigating import new_experience
from evolver.navigating.experience_pool import ExperiencePool
from evolver.plan import targets
from experiments import from_gguf
from experiments.imitation.bpe import train_bpe
from models import hf, hf_config, qwen
from models.files import BrokenFile
from models.tokenizer import Tokenizer, TokenizerError
from rl.checkpoint import _drop_damaged_metrics
from rl.engines.serve.requests import ChatRequest, Refused, fields_of, parse, prompts_of
from tests.evolver.test_books import trajectory
from tests.experiments.results import scores_of
from tests.odd_parts import replaced

INPUTS = 100_000  # of all readers together, in the slow test
DEEP, LONG = "@deep@", "@long@"  # stand for what json.dumps would not write
ODD = [
    None, True, -1, 0, 0.5, 1e308, float("nan"), float("inf"), LONG, "", "x", "\ud800", "../../x",
    "a\0b", DEEP, [], [1], [[]], ["x"], {}, {"a": 1}, 2**63, -(2**31), [None], [{}],
]  # fmt: skip


def text_of(value):
    text = json.dumps(value, ensure_ascii=False)
    return text.replace(f'"{DEEP}"', "[" * 990 + "]" * 990).replace(f'"{LONG}"', "9" * 400)


def paths(value, here=()):
    """Yield the place of each part of a JSON value, itself included."""
    yield here
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, part in value.items():
            yield from paths(part, (*here, key))


@st.composite
def spoilt(draw, samples, separator):
    """Draw raw bytes, or JSON values like the samples in which something is odd, written one after
    the other."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=60))
    chosen = [copy.deepcopy(sample) for sample in samples]
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(chosen) - 1))
        path = draw(st.sampled_from(list(paths(chosen[i]))))
        chosen[i] = replaced(chosen[i], path, draw(st.sampled_from([*ODD, ...])))
    return cut(draw, separator.join(map(text_of, chosen)).encode("utf-8", "surrogatepass"))


@st.composite
def damaged(draw, sample):
    """Draw the sample with bytes lost, changed or put in."""
    return cut(draw, sample, least=1)


def cut(draw, data, least=0):
    for _ in range(draw(st.integers(least, 2))):
        at = draw(st.integers(0, len(data)))
        count = draw(st.sampled_from([0, 0, 1, 4, 50, len(data)]))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + count :]
    return data


@dataclass
class Reader:
    """read: gets junk and a folder that it may write to. errors: what it may raise, and nothing
    else."""

    junk: st.SearchStrategy[bytes]
    read: Callable[[bytes, Path], Any]
    errors: type[Exception] | tuple[type[Exception], ...] = ()
    weight: float = 1.0  # share of the inputs; slow readers get less


def lines(*samples):
    return spoilt(list(samples), "\n")


def placed(name, function):
    """Return a reader of a folder that holds the junk under this name."""

    def read(data, folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        return function(folder)

    return read


def decoded(data):
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def of_text(function):
    """Return a reader of the junk as text."""
    return lambda data, _: function(decoded(data))


def read_answer(text):
    value = answers.read_json(text, SCHEMA)
    assert not answers.schema_error(value, SCHEMA)


def value_of(data):
    try:
        return json.loads(decoded(data))
    except (ValueError, RecursionError):
        return decoded(data)


SCHEMA = {
    "type": "object", "required": ["steps"], "properties": {"steps": {"type": "array", "items": {
        "type": "object", "required": ["step", "label"], "properties": {
            "step": {"type": "integer"}, "label": {"enum": ["GOOD", "BAD"]}, "analysis": {"type": "string"}}}}},
}  # fmt: skip
CALL = {"name": "flights", "arguments": {"to": "Rome", "days": [1, 2.5, None], "more": {"a": True}}}
CALLS = st.lists(spoilt([CALL], ""), min_size=1, max_size=3).map(
    lambda bodies: b"".join(b"<tool_call>\n" + body + b"\n</tool_call>" for body in bodies)
)
GOOD, BAD = {"step": 1, "label": "GOOD", "analysis": "It looks."}, {"step": 2, "label": "BAD"}
STEPS = {"steps": [GOOD, BAD]}
METRICS = {"step": 0, "eval/avg@2": 0.5, "time/elapsed": 3.25, "stop/done": 4}
SCORES = vars(scores_of([[0, 1]] * 2, greedy_N=[1, 0], sweep={"0.5": [[0, 1]] * 2}))
CALLED = {
    "step": 1, "role": "judge", "model": "m", "what": "call", "prompt_tokens": 5, "money": 0.1,
    "seconds": 1.0,
}  # fmt: skip
TASK = {
    "id": "a", "env": "toy", "query": "Book it.", "seed": 3, "reference": ["x"],
    "verifier": {"state": [["a", 1]]},
}  # fmt: skip
MODEL = hf_config.record_of(qwen.Config(64, 32, 2, 2, 1, 16, 64), "float32") | {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "rope_parameters": {"rope_type": "default"}, "layer_types": ["full_attention"] * 2,
    "eos_token_id": [1, 2], "rope_theta": 1e4, "torch_dtype": "float32",
}  # fmt: skip
REQUEST = {
    "model": "policy", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}, {
        "role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
    "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}],
    "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "stop": ["x"], "n": 2, "logprobs": True,
    "top_logprobs": 2, "stop_token_ids": [5], "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}  # fmt: skip
RESULT = {
    "messages": [{"role": "tool", "content": "3 flights"}], "reward": 0.5, "terminated": False, "truncated": False,
    "tools": None, "info": {"calls": [CALL | {"ok": True}], "errors": 0},
}  # fmt: skip
TOKENIZER = train_bpe(["book a flight to Rome", "<tool_call>"] * 3, 300)
EMBEDDER = HashedNgrams()


def written(name, write):
    """Return the bytes of the file of this name that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return (Path(folder) / name).read_bytes()


def write_pool(folder):
    pool = ExperiencePool(EMBEDDER)
    pool.add([new_experience(when, "Look.", sources=["a"]) for when in ("When lending", "Later")])
    pool.splits = {"train"}
    pool.save(folder)


POOL = [json.loads(line) for line in written("experiences.jsonl", write_pool).splitlines()]
RECORDS = [record_of(trajectory(i), fate="trained") for i in range(2)]
ROLLOUTS = written("x.jsonl.gz", lambda folder: write_rollouts(folder / "x.jsonl.gz", RECORDS))


def read_pool(folder):
    ExperiencePool(EMBEDDER).load(folder)


def read_all_rollouts(folder):
    for file in rollout_files(folder):
        file.index_text()
        file.make_index()
        file.lines(0, 200)
    read_rollouts(folder / "trajectories/step_000001.jsonl.gz")


WEIGHTS = {"model.norm.weight": np.ones(32), "lm_head.weight": np.ones((2, 3))}
SAFETENSORS = save({name: weight.astype(np.float32) for name, weight in WEIGHTS.items()})


def read_model(folder):
    (folder / "config.json").write_text(json.dumps(MODEL))
    hf.load(folder)


def gguf_file():
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    keys += [text("llama.block_count") + struct.pack("<II", 4, 2)]
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 8, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + tensor
    return head + b"\0" * (-len(head) % 32) + b"\0" * 128


def as_world(data, folder):
    """Everything that a world hands over, made of junk."""
    value = value_of(data)
    fields = {"messages": []} | (value if isinstance(value, dict) else {"messages": value})
    scores = (value, Evaluation(value, True), Evaluation(0.5, True, value))
    given = [(boundary.evaluation, score) for score in scores]
    for make, check in ((StepResult, boundary.result), (Observation, boundary.observation)):
        known = {name: part for name, part in fields.items() if name in make.__dataclass_fields__}
        given += [(check, value), (check, make(**known))]
    given.append((boundary.task, Task("a", "toy", "q", verifier=value, reference=value)))
    for check, each in given:
        try:
            json.dumps(check(each).to_dict(), allow_nan=False, ensure_ascii=False).encode()
        except values.Unsafe:
            continue


def overridden(data, folder):
    """A value on the command line, of a key of each type."""
    config = Path(__file__).parents[1] / "configs/base.py"
    text = decoded(data)
    keys = (
        "steps", "rollout.temperature", "model.path", "learner.drop", "env.args.x", "rollout", "no.such",
    )  # fmt: skip
    key = keys[len(data) % len(keys)]
    command = cli.parse(["run.py", f"--config={config}", f"--config.{key}={text}"])
    assert command.problems or command.config is not None


READERS = {
    "tool calls": Reader(CALLS, of_text(toolcalls.parse), weight=2),
    "BFCL's replies": Reader(CALLS, of_text(replies.official_calls), weight=2),
    "answers": Reader(lines(STEPS), of_text(read_answer), answers.Unreadable, 2),
    "texts of models": Reader(lines("Look."), of_text(lambda text: answers.unfit_reason(text, "q", ["o"])), weight=2),
    "transcripts": Reader(lines("a", "b"), of_text(lambda text: transcripts.transcript([(text, text)] * 2, 60)), weight=2),
    "actions": Reader(CALLS, of_text(replaying.values_used), weight=2),
    "worlds": Reader(lines(RESULT), as_world, weight=2),
    "metrics.jsonl": Reader(lines(*[METRICS | {"step": i} for i in range(3)]), placed(
        "metrics.jsonl", lambda folder: Workdir(folder).metrics()), BrokenFile, 2),
    "reports": Reader(lines(METRICS, METRICS | {"step": 1}), placed("metrics.jsonl", report), BrokenFile, 0.01),
    "evaluations": Reader(lines(SCORES), placed("eval/step_000001.json", lambda f: Workdir(f).scores()), weight=2),
    "trajectories": Reader(damaged(ROLLOUTS), placed(
        "trajectories/step_000001.jsonl.gz", read_all_rollouts), BrokenFile, 0.5),
    "plain trajectories": Reader(lines(RECORDS[0]), placed(
        "trajectories/step_000001.jsonl.gz", read_all_rollouts), BrokenFile, 0.5),
    "tasks.jsonl": Reader(lines(TASK, TASK | {"id": "b"}), placed(
        "tasks.jsonl", lambda folder: read_tasks(folder / "tasks.jsonl")), BrokenFile, 2),
    "llm.jsonl": Reader(lines(CALLED, CALLED | {"what": "failure", "kind": "timeout"}), placed(
        "llm.jsonl", lambda folder: Ledger(folder / "llm.jsonl").money), weight=2),
    "cached answers": Reader(lines({"text": "a", "finish": "stop"}), lambda data, folder: placed(
        str(Cache(folder).path("").relative_to(folder)), lambda f: Cache(f).get(""))(data, folder), weight=2),
    "experience": Reader(lines(*POOL), placed("experiences.jsonl", read_pool), BrokenFile),
    "metrics of checkpoints": Reader(lines({"best": 0.5, "digest": "x"}), placed(
        "3/metrics/metrics", lambda folder: _drop_damaged_metrics(folder))),
    "config.json": Reader(lines(MODEL), placed("config.json", hf.config_of), hf_config.ModelError, 2),
    "index of weights": Reader(lines({"weight_map": {"a": "model.safetensors"}}), placed(
        "model.safetensors.index.json", read_model), hf_config.ModelError, 0.5),
    "safetensors": Reader(damaged(SAFETENSORS), placed("model.safetensors", read_model), hf_config.ModelError),
    "GGUF": Reader(damaged(gguf_file()), placed(
        "m.gguf", lambda folder: from_gguf.convert(folder / "m.gguf", folder / "out")), hf_config.ModelError, 0.5),
    "tokenizer.json": Reader(lines(json.loads(TOKENIZER.to_json())), placed(
        "tokenizer.json", Tokenizer.load), TokenizerError, 0.2),
    "requests": Reader(lines(REQUEST), lambda data, _: list(prompts_of(
        parse(ChatRequest, fields_of(data, "policy")), TOKENIZER, vocab=400, context=400)), (Refused, values.Unsafe), 2),
    "URLs": Reader(damaged(b"http://user:key@[::1]:8000/v1?x=1#y"), of_text(url_problem)),
    "targets": Reader(damaged(b"h100:8"), of_text(targets.parse), targets.TargetError),
    "values of keys": Reader(lines(["a", {"b": 1.5}]), overridden, weight=0.02),
}  # fmt: skip


def feed(reader, folder, count):
    """Give a reader so many inputs, and return how many it took."""
    taken = [0]

    checks = [*hypothesis.HealthCheck]
    fixed = {"deadline": None, "derandomize": True, "database": None}

    @hypothesis.settings(max_examples=count, suppress_health_check=checks, **fixed)
    @hypothesis.given(reader.junk)
    def check(data):
        taken[0] += 1
        try:
            reader.read(data, folder)
        except reader.errors as error:
            assert str(error)

    check()
    return taken[0]


@pytest.mark.parametrize("name", READERS)
def test_no_reader_trips_over_junk(name, tmp_path):
    feed(READERS[name], tmp_path, max(2, int(12 * READERS[name].weight)))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_no_reader_trips_over_much_junk(name, tmp_path):
    share = READERS[name].weight / sum(reader.weight for reader in READERS.values())
    assert feed(READERS[name], tmp_path, round(1.02 * share * INPUTS)) >= share * INPUTS / 2
