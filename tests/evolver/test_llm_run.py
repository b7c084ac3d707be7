"""The whole program with language models behind its mechanisms: a scripted HTTP server and a tiny
policy."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import run
from envs.toolcalls import call_text
from evolver.files.rollout_files import read_rollouts
from evolver.files.workdir import Workdir, read_tasks
from evolver.llm.store import ledger_lines
from tests.evolver.chat_server import Answer, ChatServer, refused, said
from tests.tiny import config_file, tiny_policy

ROOT = Path(__file__).parents[2]
LABELLED = (
    "--config.attributing.enabled=True",
    "--config.attributing.judge.name=llm",
    "--config.advantage.name=adca",
)

EXPLORED = (
    "--config.env.name=travel", "--config.rollout.context=256", "--config.learner.row=256",
    "--config.questioning.enabled=True", "--config.questioning.explorer.name=llm",
    "--config.questioning.judge.name=reference", "--config.questioning.budget=3",
    "--config.questioning.explorer.args.depth=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return config_file(folder, tiny_policy(folder / "policy"))


def script(body, n):
    """Answer as the role that the prompt belongs to, deterministically."""
    if "input" in body:
        text = body["input"]
        return Answer({"data": [{"embedding": [1.0, len(text) / 1000, text.count("a") / 100]}]})
    text = body["messages"][-1]["content"]
    if count := re.search(r"Grade all (\d+) steps", text):
        labels = ["GOOD" if k % 2 else "BAD" for k in range(int(count[1]))]
        return said(
            json.dumps(
                {
                    "steps": [
                        {"step": k + 1, "analysis": "", "label": x} for k, x in enumerate(labels)
                    ]
                }
            )
        )
    if text.endswith("Score every piece."):
        return said('{"verdicts": [{"number": 1, "reason": "", "score": 0.9}]}')
    if text.endswith("Give the score."):
        return said(json.dumps({"analysis": "", "score": 70 if len(text) % 2 else 20}))
    if "THE RECORD" in text:
        # An answer has to be a value that the walk showed.
        shown = re.findall(r"\bF\d\d\b", text.partition("THE RECORD")[2])
        task = {
            "query": f"Which flights leave from Rome, please? ({n})",
            "confidence": 1.0,
            "steps": [1],
            "answer": shown[0] if shown else "x9",
        }
        return said(json.dumps({"tasks": [task]}))
    if "THE ATTEMPTS" in text:
        found = {"when": f"When asked about {len(text)}", "content": "Look first."}
        return said(json.dumps({"experiences": [found]}))
    if "THE EXPERIENCES" in text:
        return said('{"chosen": [{"number": 1, "content": "Look at it first."}]}')
    return said(call_text("flights", {"to": "Rome"}) if len(body["messages"]) < 6 else "done")


@pytest.fixture
def server():
    with ChatServer(script, context=32_768) as made:
        yield made


def call(tiny, workdir, server, *words) -> int:
    llm = [f"--config.llm.url={server.url}", "--config.llm.model=tiny", "--config.llm.attempts=2"]
    return run.main(
        ["run.py", f"--config={tiny}", f"--workdir={workdir}", "--config.steps=2", *llm, *words]
    )


def figures(workdir) -> list[dict]:
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "llm/"))}
        for line in Workdir(workdir).metrics()
    ]


def test_labels_of_a_model_train_and_a_second_run_costs_nothing(tiny, tmp_path, server):
    cache = f"--config.llm.cache={tmp_path / 'cache'}"
    assert call(tiny, tmp_path / "one", server, *LABELLED, cache) == 0
    asked = len(server.requests)
    metrics = Workdir(tmp_path / "one").metrics()
    assert sum(line.get("llm/step_judge/calls", 0) for line in metrics) == asked > 0
    assert metrics[1]["attributing/abstain_rate"] == 0 and metrics[1]["updates"] > 0
    assert metrics[-1]["llm/tokens"] == 15 * asked
    assert (
        len([x for x in ledger_lines(tmp_path / "one" / "llm.jsonl") if x["what"] == "call"])
        == asked
    )
    assert "| step_judge |" in (tmp_path / "one" / "summary.md").read_text()
    assert call(tiny, tmp_path / "two", server, *LABELLED, cache) == 0
    assert len(server.requests) == asked and figures(tmp_path / "one") == figures(tmp_path / "two")
    assert Workdir(tmp_path / "two").metrics()[1]["llm/step_judge/hit_rate"] == 1.0


def test_rows_that_share_answers_train_on_the_same_tasks_which_are_paid_for_once(
    tiny, tmp_path, server
):
    explored = [*EXPLORED, f"--config.llm.cache={tmp_path / 'cache'}"]
    assert call(tiny, tmp_path / "q", server, *explored) == 0
    asked = len(server.requests)
    assert call(tiny, tmp_path / "qa", server, *explored, *LABELLED) == 0
    roles = {
        line["role"]
        for line in ledger_lines(tmp_path / "qa" / "llm.jsonl")
        if line["what"] == "call"
    }
    assert roles <= {"judge", "step_judge"} and len(server.requests) > asked > 0
    first, second = (read_tasks(tmp_path / row / "tasks.jsonl") for row in ("q", "qa"))
    assert first and [task.id for task in first] == [task.id for task in second]


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_loses_and_doubles_nothing(tiny, tmp_path, server):
    """It differs from one that was not killed: what was in flight is played anew."""
    workdir, prices = tmp_path / "run", tmp_path / "prices.json"
    prices.write_text('{"tiny": [1.0, 2.0]}')
    words = [*LABELLED, "--config.rollout.async_depth=1", f"--config.llm.prices={prices}"]
    flags = [f"--config={tiny}", f"--workdir={workdir}", "--config.steps=3", *words]
    llm = [f"--config.llm.url={server.url}", "--config.llm.model=tiny", "--config.llm.attempts=2"]
    process = subprocess.Popen(
        [sys.executable, "run.py", *flags, *llm], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step 2/3"):
            break
    process.kill()
    process.wait()
    process.stdout.close()
    assert call(tiny, workdir, server, "--config.steps=3", *words) == 0
    metrics, trained = Workdir(workdir).metrics(), Counter()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    for line in metrics[1:]:
        fates = [value for name, value in line.items() if name.startswith("ledger/")]
        assert line["ledger/rollouts"] == line["rollout/count"] == sum(fates) / 2 == 12
        assert sum(value for name, value in line.items() if name.startswith("stop/")) == 12
        records = read_rollouts(workdir / f"trajectories/step_{line['step']:06d}.jsonl.gz")
        trained.update((record["task"], record["draw"], record["rollout"]) for record in records)
    assert len(trained) == 36 and set(trained.values()) == {1}
    ledger = ledger_lines(workdir / "llm.jsonl")
    paid = [line for line in ledger if line["what"] == "call"]
    # Only answers that were on their way when the run died can be missing in the ledger.
    assert len(server.requests) - 12 <= len(paid) <= len(server.requests)
    assert metrics[-1]["llm/money"] == pytest.approx(sum(line["money"] for line in paid))
    assert metrics[-1]["llm/tokens"] == 15 * len(paid)


def test_a_spent_budget_ends_the_run_with_everything_saved(tiny, tmp_path, server, capsys):
    assert call(tiny, tmp_path / "straight", server, *LABELLED, "--config.llm.cache=off") == 0
    first = Workdir(tmp_path / "straight").metrics()[1]["llm/step_judge/calls"]

    def dear(body, n):
        record = json.loads(script(body, n).body)
        return Answer(record | {"usage": {"prompt_tokens": 40_000, "completion_tokens": 5}})

    server.script = dear
    budget = f"--config.llm.budget_tokens={int(first * 40_005 + 30_000)}"
    assert call(tiny, tmp_path / "run", server, *LABELLED, budget) == 3
    err = capsys.readouterr().err
    assert "config.llm.budget_tokens" in err and "Step 1 of 2 is saved" in err
    assert [line["step"] for line in figures(tmp_path / "run")] == [0, 1]
    for name in ("summary.md", "policy/model.safetensors", "checkpoints", "llm.jsonl"):
        assert (tmp_path / "run" / name).exists(), name
    assert call(tiny, tmp_path / "run", server, *LABELLED, budget) == 3  # it stays spent
    assert call(tiny, tmp_path / "run", server, *LABELLED, "--config.llm.budget_tokens=0") == 0
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")


def test_a_judge_that_never_answers_is_counted_and_the_run_continues(tiny, tmp_path, server):
    server.script = lambda body, n: refused(500, "boom") if n % 2 else said("no idea")
    assert call(tiny, tmp_path / "run", server, *LABELLED, "--config.steps=1") == 0
    line = Workdir(tmp_path / "run").metrics()[1]
    assert line["attributing/abstain_rate"] == 1.0
    assert line["llm/step_judge/unanswered"] == line["attributing/unanswered"] > 0
    kinds = {key for key in line if key.startswith("llm/step_judge/failures/")}
    assert {"llm/step_judge/failures/http_500", "llm/step_judge/failures/unreadable"} <= kinds


def test_a_run_whose_server_dies_can_be_resumed(tiny, tmp_path, server, capsys):
    alive = [True]

    def dying(body, n):
        alive[0] = alive[0] and n < 15
        return script(body, n) if alive[0] else refused(500, "dead")

    server.script = dying
    words = [*LABELLED, "--config.llm.failures=3", "--config.llm.attempts=1"]
    assert call(tiny, tmp_path / "run", server, *words) == 3
    err = capsys.readouterr().err
    assert "questions in a row failed" in err and "dead" in err and "Traceback" not in err
    server.script = script
    assert call(tiny, tmp_path / "run", server, *words) == 0


ALL = (
    *EXPLORED,
    "--config.navigating.enabled=True", "--config.navigating.rollouts=2", "--config.navigating.tasks=2",
    "--config.navigating.every=1", "--config.navigating.extractor.name=llm",
    "--config.navigating.embedder.name=endpoint", "--config.navigating.refine.name=rewrite", *LABELLED,
)  # fmt: skip


def test_every_role_at_once(tiny, tmp_path, server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    server.key = "sk-very-secret"
    workdir = tmp_path / "run"
    assert call(tiny, workdir, server, *ALL, "--config.llm.key=MY_KEY") == 0
    first, second = Workdir(workdir).metrics()[:2]
    for role in ("explorer", "writer", "summariser", "embedder"):
        assert first[f"llm/{role}/calls"] > 0, role
    for role in ("judge", "step_judge", "reranker"):
        assert second[f"llm/{role}/calls"] + second[f"llm/{role}/hits"] > 0, role
    made = [task for task in read_tasks(workdir / "tasks.jsonl") if task.origin == "synthetic"]
    assert made and all(re.fullmatch(r"F\d\d", task.verifier["answer"]["value"]) for task in made)
    assert 0.2 <= second["rollout/score/synthetic"] <= 0.7
    assert second["navigating/guided_rate"] > 0
    secret = [p for p in tmp_path.rglob("*") if p.is_file() and b"sk-very-secret" in p.read_bytes()]
    assert not secret


def test_dead_servers_unknown_models_and_wrong_keys_are_reported_before_anything_is_computed(
    tiny, tmp_path, server, capsys
):
    server.key = "sk-right"
    for words, expected in [
        (["--config.llm.url=http://127.0.0.1:9/v1"], "the server cannot be reached"),
        (["--config.llm.key=NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        ([], "the server requires a key"),
    ]:
        assert call(tiny, tmp_path / "run", server, *LABELLED, *words) == 1
        assert expected in capsys.readouterr().err
    server.key = ""
    assert (
        call(tiny, tmp_path / "run", server, *LABELLED, "--config.llm.step_judge.model=huge") == 1
    )
    assert "there is no model 'huge'" in capsys.readouterr().err
    assert (
        call(tiny, tmp_path / "run", server, *LABELLED, "--config.llm.step_judge.max_tokens=99999")
        == 1
    )
    assert "leaves no room for a prompt" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "run")


@pytest.mark.parametrize(
    "words,expected",
    [
        (["--config.llm.url="], "config.llm.url is empty and step_judge needs it"),
        (["--config.llm.url=localhost"], "is not a URL"),
        (["--config.llm.url=http://me:secret@a.example/v1"], "contains a user name or a password"),
        (["--config.llm.model="], "name a model"),
        (["--config.llm.step_judge.extra=[1]"], "must be a JSON object"),
        (["--config.llm.prices=none.json"], "none.json"),
        (["--config.llm.budget_money=3"], "has no price of tiny"),
        (["--config.attributing.judge.name=lm"], "did you mean llm?"),
    ],
)
def test_problems_of_the_config_are_reported_together(
    tiny, tmp_path, server, capsys, words, expected
):
    assert call(tiny, tmp_path / "run", server, *LABELLED, *words) == 2
    err = capsys.readouterr().err
    assert expected in err and "secret" not in err


def test_an_evaluation_needs_no_language_model(tiny, tmp_path, server):
    assert call(tiny, tmp_path / "run", server, *LABELLED, "--config.llm.url=", "--mode=eval") == 0
    assert not server.requests
