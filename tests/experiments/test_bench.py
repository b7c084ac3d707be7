"""The benchmarks of training and decoding: they run, count correctly, and mark figures that are not
measured."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from envs.travel.agency import Agency
from evolver.llm.client import Chat
from evolver.llm.embedders import EndpointEmbedder
from evolver.llm.questions import Role
from evolver.parts import Parts
from evolver.plan import targets
from evolver.plan.case import case_of
from experiments import commands
from experiments.bench import accelerator, decode, embeddings, harness, reset, train
from models import qwen


def test_an_update_is_measured_on_full_rows():
    config = train.config_of("tiny", 64, 2, {})
    batch = train.packed(config, qwen.PRESETS["tiny"].vocab)
    assert batch.fill == 1.0 and batch.rows == 2 and batch.mask_RT.mean() == 0.5
    assert not batch.mask_RT[:, 0].any()  # the first token of a row never trains
    found = train.measure(config, repeats=1)
    flops = train.model_flops(config, qwen.PRESETS["tiny"], 1)
    assert batch.tokens_RT.size == 128 and found["tokens_per_s"] > 0
    assert found["flops_per_s"] / found["tokens_per_s"] == pytest.approx(flops)


def test_each_case_is_measured_in_its_own_process(monkeypatch):
    """JAX reports peak memory per process. A killed process becomes a note in the table; a failed
    one ends all."""
    ends, started = [0, -9, 1], []

    def run(words, **_):
        started.append(words[words.index("--case") :])
        return subprocess.CompletedProcess(words, ends[len(started) - 1], 'noise\n{"row": 64}\n')

    monkeypatch.setattr(train.subprocess, "run", run)
    options = ["--repeats", "3", "--set", "lora.rank=4"]
    assert train.measured("0.5b", 64, options) == {"row": 64}
    assert train.measured("0.5b", 128, options) == {"note": "killed by signal 9"}
    assert started == [
        ["--case", "--sizes", "0.5b", "--rows", row, *options] for row in ("64", "128")
    ]
    with pytest.raises(SystemExit):
        train.measured("0.5b", 64, options)


def test_every_tool_of_a_world_is_timed():
    found = reset.by_tool("travel", {}, "train", 8)
    names = {tool["function"]["name"] for tool in Agency.schemas}
    assert names <= set(found) and "" in found


@pytest.mark.parametrize("ragged", [False, True])
def test_a_decode_step_is_measured(ragged):
    assert decode.measure("tiny", 64, 4, 1, ragged) > 0


def test_the_modelled_speed_of_a_loop_is_that_of_its_kernels_and_bytes():
    """7B, 64 rows: half of the cache is not read where rows have half of the context on average."""
    chip, cache = targets.CHIPS["h100"], 64 * 2048 * 2 * 28 * 4 * 128 * 2
    loop = {"kernels": 400, "bytes": 24e9}
    for ragged, moved in ((False, 24e9), (True, 24e9 - cache / 2)):
        seconds = moved / (0.8 * chip.bandwidth) + 400 * 1.5e-6
        speed = decode.modelled("7b", 2048, 64, chip, loop, ragged)
        assert speed == pytest.approx(64 / seconds)


def test_planned_figures_are_bounded_by_the_chip_and_marked():
    case = case_of(train.config_of("0.5b", 4096, 4, {}), "h100:1")
    memory = {"argument": 6e9, "output": 6e9, "alias": 6e9, "temp": 10e9}
    found = {"phases": {"update": {"memory": memory, "collectives": {}}}}
    peak = accelerator.peak_of(found, "update")
    record = {"size": "0.5b", "row": 4096} | train.roofline(case, peak, 4)
    assert record["peak_gb"] == 16.0 and record["fits"]
    assert 0 < record["mfu"] <= 0.76  # three of four passes count
    assert train.cells(record)[:2] == ["0.5b", "4,096"] and "at most" in train.cells(record)[-1]
    assert "not measured" in accelerator.kind_of("h100:1")
    failed = accelerator.peak_of({"error": "no compiler"}, "update")
    assert "no compiler" in train.roofline(case, failed, 4)["note"]
    beside = {"tokens_per_s": 9e4, "mfu": 0.3, "peak_gb": 11.7} | train.foretold(case, 4)
    assert beside["planned"] == pytest.approx(record["tokens_per_s"])
    assert train.cells({"size": "0.5b", "row": 4096} | beside)[-1].startswith("planned: ")


def test_rooflines_are_those_of_the_literature():
    """7B, 2k of context, a batch of 256 on an H100: 19.4 thousand tokens/s, weights and cache read
    once."""
    chip = targets.CHIPS["h100"]
    assert decode.roofline("7b", 2048, 256, chip) == pytest.approx(19_400, rel=0.02)
    assert decode.batch_of("7b", 2048, chip.usable, 0) == 256
    assert decode.batch_of("14b", 16_384, chip.usable, 0) == 8
    assert decode.batch_of("72b", 2048, chip.usable, 0) == 0
    assert accelerator.chip_of("NVIDIA H100 80GB HBM3") is chip
    assert accelerator.chip_of("cpu") is None


def test_unknown_keys_are_refused():
    changes = {"learner.micro": 3, "optim.lr": 0.5}
    assert accelerator.changes_of(["learner.micro=3", "optim.lr=0.5"]) == changes
    with pytest.raises(commands.Problems, match="did you mean learner"):
        accelerator.changes_of(["learner.rwo=1"])


def test_the_fastest_setting_of_each_contender_counts(capfd):
    ours = harness.Contender(
        sys.executable, "tests.experiments.contender", ("--rounds 3", "--rounds 1", "--rounds 0")
    )
    absent = harness.Contender("no/such/python", "peer", ("",))
    harness.compare("tokens/s", {"here": ours, "peer": absent}, {"flat": [7, 9]}, "model", 2)
    out = capfd.readouterr().out
    assert out.count("tokens/s, round") == 2 and out.count("failed:") == 1
    assert out.splitlines()[-2].split() == ["flat", "32", "not", "installed"]


def test_the_parser_of_a_function_is_made_from_its_parameters(capsys):
    def main(
        word: Path, *, needed: int, few: tuple[float, ...] = (1.0,), on: bool = False,
        kind: Literal["a", "b"] = "a", any: Sequence[str] = ("z",), flags: Sequence[str] = (),
    ) -> int:  # fmt: skip
        """Do it.

        needed: how many
            of them, 100%
        """
        found.append((word, needed, few, on, kind, list(any), list(flags)))
        return 3

    found = []
    for words in ("x --needed 2", "x --needed=2 --few 1 2 --on --any -- --y"):
        assert commands.run(main, words.split()) == 3
    assert found == [
        (Path("x"), 2, (1.0,), False, "a", ["z"], []),
        (Path("x"), 2, [1.0, 2.0], True, "a", [], ["--y"]),
    ]
    assert "how many of them, 100%" in commands.parser_of(main).format_help()
    for words in ("x", "--needed=1", "x --needed=1 --kind=c", "x --needed=1 --few", "x --needed=y"):
        with pytest.raises(SystemExit):
            commands.run(main, words.split())


def test_the_embeddings_of_a_package_are_served_to_the_embedder(tmp_path):
    for folder in ("tokenizers", "weights"):
        (tmp_path / folder).mkdir()
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "bag": 1, "seat": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizers/l2_supercat_tokenizer_config.json"))
    table_VD = np.array([[0, 0], [3, 0], [0, 3]], np.float16)
    save_file({"embedding.weight": table_VD}, tmp_path / "weights/l2_supercat_256.safetensors")
    with embeddings.Server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        chat = Chat({"embedder": Role(f"http://127.0.0.1:{server.server_port}/v1", "wordllama")})
        vectors_ND = EndpointEmbedder(Parts(client=chat))(["bag", "a seat", "bag seat"])
        chat.close()
        server.shutdown()
    assert vectors_ND == pytest.approx(np.array([[1, 0], [0, 1], [0.5**0.5, 0.5**0.5]]))
