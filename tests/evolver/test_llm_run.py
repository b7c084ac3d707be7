"""The whole program with language models behind its mechanisms: a scripted HTTP server and a tiny
policy."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs.toolcalls import call_text
from evolver.files.workdir import Workdir, read_tasks
from evolver.llm.store import ledger_lines
from tests.evolver import runs
from tests.evolver.answers import chosen, graded, learnt, role_of, scored, verdicts, written
from tests.evolver.chat_server import Answer, ChatServer, answer, refused, said
from tests.evolver.runs import go, rollouts_of

ROOT = Path(__file__).parents[2]
LABELLED = (
    "--config.attributing.enabled=True", "--config.attributing.judge.name=llm",
    "--config.advantage.name=adca",
)  # fmt: skip

EXPLORED = (
    "--config.env.name=travel", "--config.rollout.context=256", "--config.learner.row=256",
    "--config.questioning.enabled=True", "--config.questioning.explorer.name=llm",
    "--config.questioning.judge.name=reference", "--config.questioning.budget=3",
    "--config.questioning.explorer.args.depth=2",
)  # fmt: skip


def script(body, n):
    """Answer as the role that the prompt belongs to, deterministically."""
    if "input" in body:
        text = body["input"]
        return Answer({"data": [{"embedding": [1.0, len(text) / 1000, text.count("a") / 100]}]})
    text = body["messages"][-1]["content"]
    match role_of(body):
        case "step_judge":
            count = int(re.search(r"Grade all (\d+) steps", text)[1])
            return answer(graded(*((k, ("GOOD", "BAD")[k % 2]) for k in range(1, 1 + count))))
        case "judge":
            return answer(scored(70 if len(text) % 2 else 20))
        case "summariser":
            return answer(learnt("Look first.", when=f"When asked about {len(text)}"))
        case "validator":
            return answer(verdicts((1, 0.9)))
        case "reranker":
            return answer(chosen((1, "Look at it first.")))
        case "writer":  # an answer has to be a value that the walk showed
            shown = re.search(r"\bF\d\d\b", text.partition("THE RECORD")[2])
            query = f"Which flights leave from Rome, please? ({n})"
            return answer(written(1, query=query, answer=shown[0] if shown else "x9"))
        case _:
            walks = len(body["messages"]) < 6
            return said(call_text("flights", {"to": "Rome"}) if walks else "done")


@pytest.fixture
def server():
    with ChatServer(script, context=32_768) as made:
        yield made


def asking(server, *words):
    """Return the words of a run of two steps whose roles that server answers."""
    llm = [f"--config.llm.url={server.url}", "--config.llm.model=tiny", "--config.llm.attempts=2"]
    return ["--config.steps=2", *llm, *words]


@pytest.fixture
def call(tiny, tmp_path, server):
    """Play a run in a folder of this name and return its exit code."""
    return lambda name, *words: go(tiny, tmp_path / name, *asking(server, *words))


def figures(workdir):
    return runs.figures(workdir, "llm/")


def paid(workdir):
    return [line for line in ledger_lines(workdir / "llm.jsonl") if line["what"] == "call"]


def test_labels_of_a_model_train_and_a_second_run_costs_nothing(call, tmp_path, server):
    words = [*LABELLED, f"--config.llm.cache={tmp_path / 'cache'}"]
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert call("one", *words) == 0
    asked = len(server.requests)
    metrics = Workdir(one).metrics()
    assert sum(line.get("llm/step_judge/calls", 0) for line in metrics) == asked > 0
    assert metrics[1]["attributing/abstain_rate"] == 0 and metrics[1]["updates"] > 0
    assert metrics[-1]["llm/tokens"] == 15 * asked and len(paid(one)) == asked
    assert "| step_judge |" in (one / "summary.md").read_text()
    assert call("two", *words) == 0
    assert len(server.requests) == asked and figures(one) == figures(two)
    assert Workdir(two).metrics()[1]["llm/step_judge/hit_rate"] == 1.0


def test_rows_that_share_answers_train_on_the_same_tasks_which_are_paid_for_once(
    call, tmp_path, server
):
    explored = [*EXPLORED, f"--config.llm.cache={tmp_path / 'cache'}"]
    assert call("q", *explored) == 0
    asked = len(server.requests)
    assert call("qa", *explored, *LABELLED) == 0
    roles = {line["role"] for line in paid(tmp_path / "qa")}
    assert roles <= {"judge", "step_judge"} and len(server.requests) > asked > 0
    first, second = (read_tasks(tmp_path / row / "tasks.jsonl") for row in ("q", "qa"))
    assert first and [task.id for task in first] == [task.id for task in second]


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_loses_and_doubles_nothing(call, tiny, tmp_path, server):
    """It differs from one that was not killed: what was in flight is played anew."""
    workdir = tmp_path / "run"
    prices = tmp_path / "prices.json"
    prices.write_text('{"tiny": [1.0, 2.0]}')
    words = [*LABELLED, "--config.rollout.async_depth=1", f"--config.llm.prices={prices}"]
    words += ["--config.steps=3", "--config.llm.budget_tokens=-1"]
    started = [sys.executable, *runs.command(tiny, workdir, *asking(server, *words))]
    with subprocess.Popen(started, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 2/3"):
                break
        process.kill()
    assert call("run", *words) == 0
    metrics = Workdir(workdir).metrics()
    trained = Counter()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    for line in metrics[1:]:
        fates = [value for name, value in line.items() if name.startswith("ledger/")]
        assert line["ledger/rollouts"] == line["rollout/count"] == sum(fates) / 2 == 12
        assert sum(value for name, value in line.items() if name.startswith("stop/")) == 12
        records = rollouts_of(workdir, line["step"])
        trained.update((record["task"], record["draw"], record["rollout"]) for record in records)
    assert len(trained) == 36 and set(trained.values()) == {1}
    bill = paid(workdir)
    # Only answers that were on their way when the run died can be missing in the ledger.
    assert len(server.requests) - 12 <= len(bill) <= len(server.requests)
    assert metrics[-1]["llm/money"] == pytest.approx(sum(line["money"] for line in bill))
    assert metrics[-1]["llm/tokens"] == 15 * len(bill)


def test_a_spent_budget_ends_the_run_with_everything_saved(call, tmp_path, server, capsys):
    assert call("straight", *LABELLED, "--config.llm.cache=off") == 0
    first = Workdir(tmp_path / "straight").metrics()[1]["llm/step_judge/calls"]

    def dear(body, n):
        record = json.loads(script(body, n).body)
        return Answer(record | {"usage": {"prompt_tokens": 40_000, "completion_tokens": 5}})

    server.script = dear
    workdir = tmp_path / "run"
    budget = int(first * 40_005 + 30_000)
    words = [*LABELLED, f"--config.llm.budget_tokens={budget}"]
    assert call("run", *words) == 3
    err = capsys.readouterr().err
    assert "config.llm.budget_tokens" in err and "Step 1 of 2 is saved" in err
    assert [line["step"] for line in figures(workdir)] == [0, 1]
    for name in ("summary.md", "policy/model.safetensors", "checkpoints", "llm.jsonl"):
        assert (workdir / name).exists(), name
    assert call("run", *words) == 3  # it stays spent
    assert call("run", *LABELLED, "--config.llm.budget_tokens=0") == 0
    assert figures(workdir) == figures(tmp_path / "straight")


def test_a_judge_that_never_answers_is_counted_and_the_run_continues(call, tmp_path, server):
    server.script = lambda body, n: refused(500, "boom") if n % 2 else said("no idea")
    assert call("run", *LABELLED, "--config.steps=1") == 0
    line = Workdir(tmp_path / "run").metrics()[1]
    assert line["attributing/abstain_rate"] == 1.0
    assert line["llm/step_judge/unanswered"] == line["attributing/unanswered"] > 0
    failures = {f"llm/step_judge/failures/{kind}" for kind in ("http_500", "unreadable")}
    assert failures <= line.keys()


def test_a_run_whose_server_dies_can_be_resumed(call, server, capsys):
    alive = [True]

    def dying(body, n):
        alive[0] = alive[0] and n < 15
        return script(body, n) if alive[0] else refused(500, "dead")

    server.script = dying
    words = [*LABELLED, "--config.llm.failures=3", "--config.llm.attempts=1"]
    assert call("run", *words) == 3
    err = capsys.readouterr().err
    assert "questions in a row failed" in err and "dead" in err and "Traceback" not in err
    server.script = script
    assert call("run", *words) == 0


ALL = (
    *EXPLORED,
    "--config.navigating.enabled=True", "--config.navigating.rollouts=2", "--config.navigating.tasks=2",
    "--config.navigating.every=1", "--config.navigating.extractor.name=llm",
    "--config.navigating.embedder.name=endpoint", "--config.navigating.refine.name=rewrite", *LABELLED,
)  # fmt: skip


def test_every_role_at_once(call, tmp_path, server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    server.key = "sk-very-secret"
    workdir = tmp_path / "run"
    unlimited = ("--config.llm.key=MY_KEY", "--config.llm.budget_tokens=-1")
    assert call("run", *ALL, *unlimited) == 0
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


@pytest.mark.parametrize("bought", ["key=MY_KEY", "prices={prices}"])
def test_a_model_that_may_cost_money_is_not_asked_without_a_word_about_how_much(
    call, tmp_path, server, capsys, monkeypatch, bought
):
    if "key" in bought:
        server.key = "sk-right"
        monkeypatch.setenv("MY_KEY", server.key)
    prices = tmp_path / "prices.json"
    prices.write_text('{"tiny": [2.0, 8.0]}')
    words = (*LABELLED, "--config.llm." + bought.format(prices=prices))
    assert call("run", *words) == 2
    refusal = capsys.readouterr().err
    assert "step_judge may cost money" in refusal and "budget_tokens=-1 for no limit" in refusal
    assert not server.requests and not (tmp_path / "run").exists()
    for limit, ends in {
        "budget_tokens=-1": "Nothing limits them",
        "budget_tokens=99999999": "The run ends at 99,999,999 tokens",
    }.items():
        assert call(limit, *words, f"--config.llm.{limit}") == 0
        said = capsys.readouterr().out
        assert "language models (step_judge) are expected to take at most 24 calls" in said
        assert ends in said
        assert ("money: 0.10" in said) == ("prices" in bought)


@pytest.mark.parametrize(
    "key,words,expected",
    [
        ("", ["url=http://127.0.0.1:9/v1"], "(step_judge): the server cannot be reached"),
        ("sk-right", [], "the server requires a key"),
        ("", ["step_judge.model=huge"], "there is no model 'huge'; it serves 'tiny'"),
        ("", ["step_judge.max_tokens=99999"], "context of 32768 tokens leaves no room"),
    ],
)
def test_dead_servers_unknown_models_and_wrong_keys_are_reported_before_anything_is_computed(
    call, tmp_path, server, capsys, key, words, expected
):
    server.key = key
    assert call("run", *LABELLED, *(f"--config.llm.{word}" for word in words)) == 1
    assert expected in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words,expected",
    [
        ("llm.key=NO_SUCH_KEY llm.budget_tokens=-1", "NO_SUCH_KEY is not set"),
        ("llm.url=", "config.llm.url is empty and step_judge needs it"),
        ("llm.url=", "with its /v1, policy, or served"),
        ("llm.url=localhost:8000", "is not a URL"),
        ("llm.url=Policy", "'Policy' is not a URL"),
        ("llm.url=policy:first", "nor one of policy, policy:initial"),
        ("llm.url=http://me:secret@a.example/v1", "contains a user name or a password"),
        ("llm.model=", "name a model"),
        ("llm.step_judge.extra=[1]", "must be a JSON object"),
        ('llm.url=policy llm.step_judge.extra={"min_p":0.1}', "the policy knows top_k only"),
        ("llm.prices=none.json", "none.json"),
        ("llm.budget_money=3", "has no price of tiny"),
        ("attributing.judge.name=lm", "did you mean llm?"),
        (
            "llm.url=policy navigating.enabled=True navigating.embedder.name=endpoint",
            "makes no embeddings",
        ),
        ("llm.url=policy:initial engine.name=vllm", "needs config.engine.name=jax"),
        ("llm.url=served", "config.llm.url=served (step_judge) needs config.llm.serve.path"),
        (
            "llm.url=served llm.serve.path=/no/such",
            "config.llm.serve.path=/no/such is no checkpoint",
        ),
        (
            "llm.url=served llm.serve.path=. llm.serve.python=/no/python",
            "config.llm.serve.python=/no/python is not an exec",
        ),
        ("llm.serve.path=.", "has no role"),
    ],
)
def test_problems_of_the_config_are_reported(call, capsys, words, expected):
    assert call("run", *LABELLED, *(f"--config.{word}" for word in words.split())) == 2
    err = capsys.readouterr().err
    assert expected in err and "secret" not in err


def test_an_evaluation_needs_no_language_model(call, server):
    assert call("run", *LABELLED, "--config.llm.url=", "--mode=eval") == 0
    assert not server.requests
