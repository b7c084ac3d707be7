"""Roles of config.llm that the policy plays: the engine's answers, their place in the cache, and
whole runs."""

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest

import run
from configs import base
from evolver.attributing import BAD, GOOD, Label, TurnJudge
from evolver.build import make_players
from evolver.config.checks import differences
from evolver.engine import jax_engine
from evolver.files.rollout_files import read_rollouts
from evolver.files.workdir import Workdir, plain
from evolver.llm import roles
from evolver.llm.client import INITIAL, PRESENT, Chat, ChatError, Limits, Question, Role
from evolver.llm.policy import Player, fingerprint
from evolver.llm.schemas import record, string
from evolver.llm.store import ledger_lines
from evolver.phases import tasks
from evolver.plan import calls, targets
from evolver.plan.case import Case
from evolver.processes.interrupt import Interrupted, Stop
from models import hf
from models.tokenizer import Tokenizer
from rl.engines import EngineFault
from rl.engines.grammar import Grammars
from rl.engines.jax.engine import JaxEngine
from rl.trajectory import Completion, Sampling
from tests.evolver.chat_server import ChatServer, said
from tests.tiny import config_file, tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="module")
def tiny(policy):
    return config_file(policy.parent, policy)


class Fake:
    """An engine that answers with the tokens of a text, after `seconds`."""

    version = 0

    def __init__(self, tokenizer, text="yes", seconds=0.0, fault=None):
        self.tokenizer, self.text, self.seconds, self.fault = tokenizer, text, seconds, fault
        self.asked, self.released = [], []

    async def generate(self, prompt_ids, sampling, *, session):
        self.asked.append((prompt_ids, sampling))
        if self.fault:
            raise self.fault
        await asyncio.sleep(self.seconds)
        tokens = [*self.tokenizer.encode(self.text), self.tokenizer.im_end]
        return Completion(tokens, [0.0] * len(tokens), "stop", self.version)

    async def release(self, session):
        self.released.append(session)

    async def close(self):
        pass


WEIGHTS = {"w": jax.numpy.arange(6.0).reshape(2, 3)}


@contextlib.contextmanager
def asking(
    tokenizer,
    tmp_path,
    *,
    context=128,
    check=lambda: None,
    limits=None,
    extra="",
    others=None,
    **fake,
):
    """A client whose judge is played by a Fake on the event loop of a Stop."""
    with Stop(background=True) as stop:
        engine = Fake(tokenizer, **fake)
        role = Role(PRESENT, PRESENT, temperature=0.5, max_tokens=50, extra=extra)
        roles, limits, lines = {"judge": role} | (others or {}), limits or Limits(attempts=2), []
        cache = tmp_path / "cache"
        chat = Chat(
            roles, limits=limits, cache=cache, check=check, say=lines.append, loop=stop.loop
        )
        chat.players[PRESENT] = Player(engine, tokenizer, context, WEIGHTS)
        chat.engine, chat.lines = engine, lines
        try:
            yield chat
        finally:
            chat.close()


def judged(text: str, **more) -> Question:
    return Question("judge", [{"role": "user", "content": text}], **more)


@pytest.fixture(scope="module")
def tokenizer(policy):
    return Tokenizer.load(policy)


class TestPlayer:
    def test_a_question_in_the_chat_template_gets_text_and_counts(self, tokenizer, tmp_path):
        with asking(tokenizer, tmp_path, extra='{"top_k": 7}') as chat:
            (reply,) = chat.ask([judged("Is it?", seed=3)])
            assert (reply.text, reply.finish, reply.cached) == ("yes", "stop", False)
            prompt, sampling = chat.engine.asked[0]
            shown = tokenizer.decode(prompt)
            assert shown.endswith("<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n")
            assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 7, 50)
            assert sampling.stop_tokens == (tokenizer.im_end, tokenizer.endoftext)
            assert reply.prompt_tokens == len(prompt) and chat.engine.released == ["chat/0"]
            figures = chat.metrics()
            assert figures["llm/judge/calls"] == 1 and figures["llm/money"] == 0
            assert figures["llm/tokens"] == len(prompt) + reply.completion_tokens
            chat.ask(
                [judged("Is it?", seed=3), judged("Is it?", seed=4), judged("Is it so?", seed=3)]
            )
            seeds = [sampling.seed for _, sampling in chat.engine.asked]
            assert len(seeds) == len(set(seeds)) == 3  # the first of them was in the cache

    def test_an_answer_is_searched_for_json_and_cut_where_the_context_ends(
        self, tokenizer, tmp_path
    ):
        schema = {
            "type": "object",
            "properties": {"score": {"type": "integer"}},
            "required": ["score"],
        }
        with asking(tokenizer, tmp_path, text='Well: {"score": 7}') as chat:
            (reply,) = chat.ask([judged("Score it.", schema=schema)])
            assert reply.parsed == {"score": 7}
            (prompt, _), *_ = chat.engine.asked
        with asking(tokenizer, tmp_path, text="seven", context=len(prompt) + 9) as chat:
            (error,) = chat.ask([judged("Score it!", schema=schema)])
            assert error.kind == "unreadable" and chat.engine.asked[0][1].max_tokens == 9

    def test_random_weights_answer_in_the_form_that_is_asked_for(self, policy, tmp_path):
        """A policy of random weights would write no JSON, and would not end a text, by itself."""
        schema = record(why=string(12), label={"enum": ["GOOD", "BAD"]})
        shape, params = hf.load(policy, mesh=None)
        tokenizer = Tokenizer.load(policy)
        with Stop(background=True) as stop:
            engine = JaxEngine(shape, params, slots=4, context=256)
            role = Role(INITIAL, INITIAL, temperature=1.0, max_tokens=150)
            chat = Chat({"judge": role}, loop=stop.loop)
            chat.players[INITIAL] = Player(
                engine, tokenizer, 256, params, grammars=Grammars(tokenizer, shape.vocab)
            )
            held = chat.ask([judged("Label it.", schema=schema, seed=seed) for seed in range(4)])
            free = chat.ask([judged("Label it.", seed=9)])
            chat.close()
            stop.finish(engine.close())
        assert len({reply.text for reply in held}) > 1
        for reply in held:
            assert (
                reply.finish == "stop"
                and reply.parsed["label"] in ("GOOD", "BAD")
                and len(reply.parsed["why"]) <= 12
            )
        assert "cut at max_tokens" in str(free[0])

    def test_a_schema_that_cannot_be_followed_is_an_unanswered_question(self, tokenizer, tmp_path):
        with asking(tokenizer, tmp_path, limits=Limits(failures=2)) as chat:
            chat.players[PRESENT] = Player(
                chat.engine, tokenizer, 128, WEIGHTS, grammars=Grammars(tokenizer, 400)
            )
            wrong, fine = chat.ask(
                [judged("Is it?", schema={"type": "robot"}), judged("Is it so?")]
            )
            assert wrong.kind == "request" and "JSON schema" in str(wrong) and fine.text == "yes"

    def test_what_cannot_be_asked_is_counted_and_the_next_question_answered(
        self, tokenizer, tmp_path
    ):
        with asking(tokenizer, tmp_path, limits=Limits(failures=2)) as chat:
            long, odd, fine = chat.ask(
                [
                    judged("word " * 200),
                    Question("judge", [{"role": "robot", "content": ""}]),
                    judged("short"),
                ]
            )
            assert long.kind == "context" and "config.rollout.context=128 leaves no room" in str(
                long
            )
            assert (
                odd.kind == "request" and "unknown role 'robot'" in str(odd) and fine.text == "yes"
            )
            figures = chat.metrics()
            assert (
                figures["llm/judge/unanswered"] == 2 and figures["llm/judge/failures/context"] == 1
            )
            assert len(chat.lines) == 2 and "judge (policy at policy)" in chat.lines[0]

    def test_a_slow_engine_meets_the_deadline(self, tokenizer, tmp_path):
        limits = Limits(deadline=0.05, attempts=2, first_wait=0.01)
        with asking(tokenizer, tmp_path, seconds=60.0, limits=limits) as chat:
            (error,) = chat.ask([judged("Is it?")])
            assert error.kind == "timeout" and "config.llm.deadline" in str(error)
            assert len(chat.engine.released) == 2 and chat.metrics()["llm/tokens"] == 0

    def test_a_broken_engine_ends_the_run(self, tokenizer, tmp_path):
        with asking(tokenizer, tmp_path, fault=EngineFault("out of memory")) as chat:
            with pytest.raises(EngineFault, match="out of memory"):
                chat.ask([judged("Is it?"), judged("Is it not?")])

    def test_an_interrupted_question_is_dropped_and_closing_waits_for_none(
        self, tokenizer, tmp_path
    ):
        asked = threading.Event()

        def check():
            if asked.is_set():
                raise Interrupted

        with asking(tokenizer, tmp_path, seconds=60.0, check=check) as chat:
            threading.Timer(0.1, asked.set).start()
            began = time.monotonic()
            with pytest.raises(Interrupted):
                chat.ask([judged("Is it?")])
        assert time.monotonic() - began < 5 and chat.engine.released

    def test_threads_that_ask_when_the_client_closes_are_interrupted(self, tokenizer, tmp_path):
        ends = []

        def ask(text):
            try:
                chat.ask([judged(text)])
            except Interrupted:
                ends.append(text)

        with asking(tokenizer, tmp_path, seconds=60.0) as chat:
            threads = [threading.Thread(target=ask, args=(text,)) for text in "abc"]
            for thread in threads:
                thread.start()
            while len(chat.engine.asked) < 3:
                time.sleep(0.01)
        for thread in threads:
            thread.join(5)
        ask("d")
        assert sorted(ends) == ["a", "b", "c", "d"]

    def test_a_server_and_the_policy_are_asked_side_by_side_from_many_threads(
        self, tokenizer, tmp_path
    ):
        with ChatServer(lambda body, n: said("from afar")) as server:
            with asking(tokenizer, tmp_path, others={"writer": Role(server.url, "tiny")}) as chat:
                assert not chat.problems()
                roles = ["judge", "writer"] * 8
                with ThreadPoolExecutor(16) as threads:
                    replies = threads.map(
                        lambda n: chat.ask([replace(judged(f"{n}"), role=roles[n])])[0], range(16)
                    )
                    assert [reply.text for reply in replies] == ["yes", "from afar"] * 8

    def test_a_coroutine_of_the_engines_loop_can_await_but_not_block(self, tokenizer, tmp_path):
        async def template():
            with pytest.raises(RuntimeError, match="use `await chat"):
                chat.ask([judged("Is it?")])
            return await chat([{"role": "user", "content": "Is it?"}], role="judge")

        with asking(tokenizer, tmp_path) as chat:
            assert asyncio.run_coroutine_threadsafe(template(), chat._loop).result(10).text == "yes"


def test_an_engine_that_has_just_dropped_a_question_can_forget(policy):
    async def drop(engine):
        asking = asyncio.ensure_future(
            engine.generate([1, 2, 3], Sampling(max_tokens=4), session="chat/0")
        )
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        engine.clear_cache()

    shape, params = hf.load(policy, mesh=None)
    with Stop() as stop:
        engine = JaxEngine(shape, params, slots=4, context=256)
        stop.run(drop(engine))
        stop.finish(engine.close())


class TestWeights:
    def test_any_changed_weight_changes_the_fingerprint(self):
        def of(change=lambda a: a, dtype=np.float32):
            a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
            return fingerprint(
                {"a": jax.numpy.asarray(change(a), dtype), "b": jax.numpy.ones((2,), dtype)}
            )

        def raised(a):
            a[1, 2, 3] = np.nextafter(a[1, 2, 3], 99)
            return a

        assert of() == of(np.copy)
        prints = [
            of(),
            of(raised),
            of(lambda a: a[::-1]),
            of(lambda a: a[:, ::-1]),
            of(lambda a: a[..., ::-1]),
        ]
        prints += [of(lambda a: -a), of(dtype=jax.numpy.bfloat16)]
        assert len(set(prints)) == len(prints)

    def test_answers_of_other_weights_are_not_taken_from_the_cache(self, tokenizer, tmp_path):
        with asking(tokenizer, tmp_path) as chat:
            player = chat.players[PRESENT]

            def update(weights, version):
                player.expect(weights, version)
                chat.engine.version, chat.engine.text = version, f"answer {version}"

            assert chat.ask([judged("Is it?")])[0].text == "yes"
            update({"w": WEIGHTS["w"] + 1}, 1)
            assert chat.ask([judged("Is it?")])[0].text == "answer 1"
            update(WEIGHTS, 2)
            reply = chat.ask([judged("Is it?")])[0]
            assert reply.text == "yes" and reply.cached

    def test_an_answer_given_during_an_update_is_not_cached(self, tokenizer, tmp_path):
        with asking(tokenizer, tmp_path) as chat:
            chat.players[PRESENT].expect({"w": WEIGHTS["w"] + 1}, 1)
            generate = chat.engine.generate

            async def overtaken(*args, **kwargs):
                chat.engine.version = 1
                return await generate(*args, **kwargs)

            chat.engine.generate = overtaken
            assert [chat.ask([judged("Is it?")])[0].cached for _ in range(3)] == [
                False,
                False,
                True,
            ]

    def test_a_server_of_the_runs_own_engine_has_the_weights_in_its_key(self, tokenizer):
        config = base.get_config()
        config.engine.name = "vllm"
        engine = Fake(tokenizer)
        engine.urls = ["http://127.0.0.1:8000", "http://10.0.0.2:8000/"]
        served = [
            Role(f"http://{host}/v1", "policy")
            for host in ("localhost:8000", "10.0.0.2:8000", "10.0.0.3:8000")
        ]
        chat = Chat({str(n): role for n, role in enumerate(served)})
        chat.close()
        player, initial = make_players(config, chat, engine, tokenizer, None, WEIGHTS)
        assert initial is None and chat.players == {role.server: player for role in served[:2]}
        assert make_players(config, None, engine, tokenizer, None, WEIGHTS) == (None, None)


class Lengths(TurnJudge):
    """Labels turns by the length of what the policy, asked freely, says about them."""

    roles = ("step_judge",)
    concurrency = 2

    def __init__(self, parts):
        self.chat = parts.chat

    def label(self, trajectories):
        asked = [
            [judge_turn(turn.action, n) for n, turn in enumerate(t.turns)] for t in trajectories
        ]
        replies = iter(self.chat.ask([question for row in asked for question in row]))
        return [[label_of(next(replies)) for _ in row] for row in asked]

    def metrics(self):
        return {}


def judge_turn(action: str, n: int) -> Question:
    return Question("step_judge", [{"role": "user", "content": action[:9]}], seed=n)


def label_of(reply) -> Label:
    return Label(GOOD if isinstance(reply, ChatError) or len(reply.text) % 2 else BAD)


LABELLED = (
    "--config.attributing.enabled=True", f"--config.attributing.judge.name={__name__}:Lengths",
    "--config.advantage.name=adca", "--config.llm.step_judge.max_tokens=8", "--config.llm.step_judge.temperature=1.0",
)  # fmt: skip


def call(tiny, workdir, *words, url="policy") -> int:
    llm = [
        f"--config.llm.url={url}",
        "--config.steps=2",
        "--config.eval.every=1",
        "--config.eval.greedy=False",
    ]
    return run.main(["run.py", f"--config={tiny}", f"--workdir={workdir}", *llm, *words])


def figures(workdir, *without) -> list[dict]:
    skip = ("time/", *without)
    return [
        {k: v for k, v in line.items() if not k.startswith(skip)}
        for line in Workdir(workdir).metrics()
    ]


def asked(workdir, what="call") -> int:
    return sum(line["what"] == what for line in ledger_lines(workdir / "llm.jsonl"))


def test_a_missing_package_of_schemas_is_reported_before_anything_is_computed(
    monkeypatch, tmp_path
):
    config = base.get_config()
    config.attributing.enabled, config.attributing.judge.name = True, "llm"
    find = roles.importlib.util.find_spec
    monkeypatch.setattr(
        roles.importlib.util, "find_spec", lambda name: None if name == "llguidance" else find(name)
    )
    config.llm.url, config.llm.model = "http://127.0.0.1:9/v1", "judge"
    assert not list(
        roles.problems(config, "train", lambda path: tmp_path / path)
    )  # a server has its own
    config.llm.url = PRESENT
    (problem,) = roles.problems(config, "train", lambda path: tmp_path / path)
    assert "llguidance" in problem and "llm" in problem


class TestRuns:
    @pytest.fixture(scope="class", autouse=True)
    def whole_answers(self):
        """The random policy never ends an answer, and one that is cut counts as unanswered."""

        async def whole(player, body, schema=None):
            return await answer(player, body, schema) | {"finish": "stop"}

        answer = Player.answer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Player, "answer", whole)
            yield

    @pytest.fixture(scope="class")
    def straight(self, tiny, tmp_path_factory):
        workdir = tmp_path_factory.mktemp("runs") / "straight"
        assert call(tiny, workdir, *LABELLED) == 0
        return workdir

    def test_the_policy_labels_its_own_turns(self, straight):
        last = figures(straight)[-1]
        assert last["llm/step_judge/calls"] > 0 and "llm/step_judge/failures/context" not in last
        assert {line["model"] for line in ledger_lines(straight / "llm.jsonl")} == {"policy"}

    def test_the_same_command_gives_the_same_answers(self, tiny, straight, tmp_path, monkeypatch):
        choose, fresh = tasks.choose, []

        def watched(run, step):
            fresh.append(not any(engine._filled.any() for engine in run.engines))
            return choose(run, step)

        monkeypatch.setattr(tasks, "choose", watched)
        assert call(tiny, tmp_path / "again", *LABELLED) == 0
        assert figures(tmp_path / "again") == figures(straight)
        cached = {path.name: path.read_text() for path in (straight / "llm_cache").rglob("*.json")}
        assert cached == {
            path.name: path.read_text()
            for path in (tmp_path / "again" / "llm_cache").rglob("*.json")
        }
        assert len(cached) > 4 and fresh == [True, True]  # as the engine of a resumed run would be

    def test_a_resumed_run_goes_on_as_if_it_had_not_ended(self, tiny, straight, tmp_path):
        cache = f"--config.llm.cache={straight / 'llm_cache'}"
        assert call(tiny, tmp_path / "run", *LABELLED, "--config.steps=1", cache) == 0
        assert asked(tmp_path / "run") == 0 < asked(tmp_path / "run", "hit")
        assert call(tiny, tmp_path / "run", *LABELLED) == 0
        assert asked(tmp_path / "run") == figures(straight)[2]["llm/step_judge/calls"]
        assert figures(tmp_path / "run", "llm/") == figures(straight, "llm/")

    def test_the_initial_policy_answers_as_it_did_before_the_updates(
        self, tiny, policy, straight, tmp_path
    ):
        assert call(tiny, tmp_path / "run", *LABELLED, url=INITIAL) == 0
        first, second = (figures(path, "llm/")[1] for path in (tmp_path / "run", straight))
        assert first == second  # before the first update both policies are the same
        config = base.get_config()
        config.model.dtype, config.rollout.context = "float32", 128
        shape, params = hf.load(policy, mesh=None)
        engine, fresh = jax_engine(config, shape, params, 4), Tokenizer.load(policy)
        records = [
            json.loads(p.read_text()) for p in (tmp_path / "run" / "llm_cache").rglob("*.json")
        ]
        body = {"model": INITIAL, "temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "seed": 0}
        with Stop() as stop:
            player = Player(engine, fresh, 128, params)
            rollouts = read_rollouts(tmp_path / "run/trajectories/step_000002")
            actions = [rollout["turns"][0]["action"] for rollout in rollouts]
            for action in actions[:3]:
                messages = [{"role": "user", "content": action[:9]}]
                assert stop.run(player.answer(body | {"messages": messages})) in records
            stop.finish(engine.close())

    def test_asynchronous_rollouts_and_judges_in_threads_share_the_engine(self, tiny, tmp_path):
        words = [*LABELLED, "--config.rollout.async_depth=1", "--config.steps=3"]
        assert call(tiny, tmp_path / "run", *words) == 0
        assert figures(tmp_path / "run")[-1]["step"] == 3 and asked(tmp_path / "run") > 0

    def test_a_judge_whose_questions_are_too_long_is_counted(self, tiny, tmp_path):
        words = [
            *LABELLED,
            "--config.attributing.judge.name=llm",
            "--config.llm.step_judge.max_tokens=9999",
        ]
        assert call(tiny, tmp_path / "run", *words, "--config.steps=1") == 0
        line = figures(tmp_path / "run")[1]
        assert line["llm/step_judge/unanswered"] == line["llm/step_judge/failures/context"] > 0
        assert line["attributing/abstain_rate"] == 1.0


@pytest.mark.parametrize(
    "words,expected",
    [
        (["--config.llm.url=Policy"], "'Policy' is not a URL"),
        (["--config.llm.url=policy:first"], "nor one of policy, policy:initial"),
        (["--config.llm.url="], "with its /v1, or policy"),
        (
            ["--config.navigating.enabled=True", "--config.navigating.embedder.name=endpoint"],
            "makes no embeddings",
        ),
        (
            ["--config.llm.step_judge.url=policy:initial", "--config.engine.name=vllm"],
            "needs config.engine.name=jax",
        ),
        (['--config.llm.step_judge.extra={"min_p": 0.1}'], "the policy knows top_k only"),
    ],
)
def test_problems_are_reported_before_the_run(tiny, tmp_path, capsys, words, expected):
    assert call(tiny, tmp_path / "run", *LABELLED, *words) == 2
    assert expected in capsys.readouterr().err


def test_the_policy_needs_no_model_and_no_price(tiny, tmp_path, capsys):
    (tmp_path / "prices.json").write_text("{}")
    words = [
        "--config.llm.budget_money=1",
        f"--config.llm.prices={tmp_path / 'prices.json'}",
        "--config.steps=0",
    ]
    assert call(tiny, tmp_path / "run", *LABELLED, *words) == 2  # for the steps
    assert "price" not in capsys.readouterr().err


def test_a_role_stays_with_the_policy_when_a_run_resumes():
    config = base.get_config()
    config.llm.url, config.llm.judge.url = "http://a/v1", PRESENT
    before = plain(config.to_dict())
    config.llm.url = "http://b/v1"
    assert not differences(before, config)
    config.llm.judge.url = ""
    (problem,) = differences(before, config)
    assert problem.startswith("llm.judge.url: 'policy' then, 'http://b/v1' now")


def test_the_plan_bills_the_policy_no_money_and_counts_a_second_engine(tiny):
    config = base.get_config()
    config.attributing.enabled, config.attributing.judge.name = True, "llm"
    config.llm.url, config.llm.concurrency, config.engine.slots = PRESENT, 32, 64
    bill = calls.bill(config)["step_judge"]
    assert (
        bill.model == "policy"
        and bill.cost == 0
        and "costs no money" in "\n".join(calls.lines(config))
    )
    from models import qwen

    def engine():
        return Case(config, qwen.PRESETS[config.model.preset], targets.parse("h100:1")).engine

    assert engine().initial == 0
    config.llm.url = INITIAL
    assert engine().initial == engine().weights + engine().cache / 2
