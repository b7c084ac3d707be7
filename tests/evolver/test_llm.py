"""The language-model client against a scripted HTTP server: cache, limits, retries, ledger, budget,
and giving up."""

import asyncio
import json
import os
import threading
import types

import pytest

from configs import base
from evolver.llm.answers import Unreadable, array, read_json, schema_error, string
from evolver.llm.client import Limits
from evolver.llm.questions import BudgetSpent, Question, Role, ServerDown, url_problem
from evolver.llm.roles import ROLES, for_evaluation, llm_problems, make_chat, roles_of
from evolver.llm.store import Ledger, ledger_lines
from evolver.parts import Parts
from tests.evolver.chat_server import Answer, ChatServer, client, refused, said

SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
DEAD = "http://127.0.0.1:9/v1"  # nobody listens there


def says(text):
    return [{"role": "user", "content": text}]


def ask(chat, *texts, **options):
    return chat.ask([Question("judge", says(text), **options) for text in texts])


class Clock:
    """The client's time. It stands still until `sleepers` coroutines sleep, then jumps to the
    latest of their ends."""

    def __init__(self, monkeypatch, module, sleepers=1):
        self.now = 0.0
        self._ends = []
        self._sleepers = sleepers
        self._passes = asyncio.Event()
        time = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(f"{module}.time", time)
        fake = types.SimpleNamespace(**vars(asyncio) | {"sleep": self.sleep})
        monkeypatch.setattr(f"{module}.asyncio", fake)

    async def sleep(self, seconds):
        self._ends.append(self.now + seconds)
        if len(self._ends) >= self._sleepers:
            self.now = max(self.now, *self._ends)
            self._passes.set()
        async with asyncio.timeout(30):
            await self._passes.wait()


class TestCache:
    def test_a_question_costs_one_call_whoever_asks_it_and_when(self, tmp_path):
        with client("yes", cache=tmp_path) as chat:
            (first,) = ask(chat, "a")
            together = ask(chat, *["b"] * 5)
            assert len(chat.server.requests) == 2 and first.text == "yes" and not first.cached
            assert sorted(reply.cached for reply in together) == [False] + [True] * 4
        with client("no", cache=tmp_path) as again:
            replies = ask(again, "a", "b")
            assert [r.text for r in replies] == ["yes", "yes"] and all(r.cached for r in replies)
            assert not again.server.requests and again.ledger.metrics()["llm/judge/hit_rate"] == 1.0

    @pytest.mark.parametrize(
        "asked, role",
        [
            *[(asked, {}) for asked in ({"version": "2"}, {"seed": 1}, {"schema": SCHEMA})],
            *[({}, role) for role in ({"model": "big"}, {"temperature": 0.5}, {"max_tokens": 9})],
            ({}, {"extra": '{"a":1}'}),
        ],
    )
    def test_whatever_changes_an_answer_makes_another_question(self, tmp_path, asked, role):
        for question, settings in (({}, {}), (asked, role)):
            with client('{"score": 1}', cache=tmp_path, role=settings) as chat:
                ask(chat, "a", **question)
                ((_, _, body),) = chat.server.requests
        sent = {"a": 1} if "extra" in role else role
        assert body.items() >= sent.items()

    UNFIT = '{"text": "{\\"points\\": 1}", "finish": "stop"}'

    @pytest.mark.parametrize(
        "damage", ["", '{"text": "{', "[]", '{"text": "x"}', UNFIT, "[" * 100_000, "a pipe"]
    )
    def test_damaged_and_useless_files_are_asked_again(self, tmp_path, damage):
        with client('{"score": 1}', cache=tmp_path) as chat:
            ask(chat, "a", schema=SCHEMA)
            (path,) = tmp_path.rglob("*.json")
            whole = path.read_text()
            if damage == "a pipe":
                path.unlink()
                os.mkfifo(path)
            else:
                path.write_text(damage)
            assert ask(chat, "a", schema=SCHEMA)[0].parsed == {"score": 1}
            assert len(chat.server.requests) == 2 and path.read_text() == whole

    def test_a_full_disk_is_counted_and_survived(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("models.files.os.replace", full)
        ledger = Ledger("/dev/full")
        with client("yes", cache=tmp_path, ledger=ledger) as chat:
            assert [r.text for r in ask(chat, "a") + ask(chat, "a")] == ["yes", "yes"]
            figures = ledger.metrics()
            assert figures["llm/unwritten/cache"] == 2 and figures["llm/judge/calls"] == 2
            assert figures["llm/unwritten/ledger"] == 2
            assert len(chat.lines) == 1 and "cannot be written" in chat.lines[0]
            assert not [p for p in tmp_path.rglob("*") if p.is_file()]  # no temporary file is left

    def test_lone_surrogates_are_asked_cached_and_read(self, tmp_path):
        with client(lambda body, n: body["messages"][0]["content"], cache=tmp_path) as chat:
            for cached in (False, True):
                (reply,) = ask(chat, "a \ud800 b")
                assert reply.text == "a \ufffd b" and reply.cached == cached

    def test_embeddings_are_cached_by_text(self, tmp_path):
        def script(body, n):
            vector = [float(len(body["input"])), 1]
            return Answer({"data": [{"embedding": vector}], "usage": {"prompt_tokens": 3}})

        with client(script, cache=tmp_path) as chat:
            vectors = [[1.0, 1.0], [2.0, 1.0], [1.0, 1.0]]
            assert chat.embed(["a", "bb", "a"], role="judge") == vectors
            assert len(chat.server.requests) == 2 and chat.server.requests[0][0] == "/v1/embeddings"
            assert chat.ledger.tokens == 6 and chat.embed(["bb"], role="judge") == vectors[1:2]
            assert len(chat.server.requests) == 2


class TestRetries:
    @pytest.mark.parametrize(
        "bad,kind",
        [
            (refused(500, "boom"), "http_500"),
            (refused(429, "slow down"), "http_429"),
            (refused(503, "busy"), "http_503"),
            (Answer(b'{"choices": [{"mess'), "bad_json"),
            (Answer({"choices": []}), "bad_json"),
            (Answer([1]), "bad_json"),
            (Answer({"choices": [{"message": {"content": 7}}]}), "bad_json"),
            (Answer({"choices": "x" * 99}, cut=50), "connection"),
        ],
    )
    def test_temporary_failures_are_retried_and_counted(self, bad, kind):
        with client(lambda body, n: "fine" if n == 2 else bad) as chat:
            assert ask(chat, "a")[0].text == "fine"
            figures = chat.ledger.metrics()
            assert figures[f"llm/judge/failures/{kind}"] == 2 and figures["llm/judge/calls"] == 1
            assert figures["llm/judge/unanswered"] == 0

    def test_retries_are_bounded_and_the_failure_is_named(self):
        with client(refused(500, "boom"), limits={"attempts": 3}) as chat:
            (error,) = ask(chat, "a")
            assert error.kind == "http_500"
            assert "boom" in str(error) and chat.server.url in str(error)
            assert len(chat.server.requests) == 3
            assert chat.ledger.metrics()["llm/judge/unanswered"] == 1
            ask(chat, "b")
            assert len(chat.lines) == 1  # each kind of failure is shown once

    def test_many_failures_lose_no_question(self):
        """A third of all requests fail in various ways; every question is answered exactly once."""
        slow = refused(429, "slow", retry_after="0")
        bad = [slow, refused(500, "boom"), Answer(b"{"), Answer(b"xx", cut=1)]

        def script(body, n):
            return body["messages"][0]["content"] if n % 3 else bad[n // 3 % 4]

        with client(script, limits={"attempts": 12}) as chat:
            texts = [f"q{i}" for i in range(60)]
            assert [r.text for r in ask(chat, *texts)] == texts
            assert chat.ledger.metrics()["llm/judge/calls"] == 60

    def test_retry_after_pauses_all_questions_to_the_server(self, monkeypatch):
        """The refused question sleeps, and so does the next in line; the third waits for its
        slot."""
        clock = Clock(monkeypatch, "evolver.llm.client", sleepers=2)
        times = []

        def script(body, n):
            times.append(clock.now)
            return refused(429, "wait", Retry_After="40") if n == 0 else "x"

        with client(script, limits={"concurrency": 1}) as chat:
            assert [reply.text for reply in ask(chat, "a", "b", "c")] == ["x"] * 3
        assert times[0] == 0 and len(times) == 4 and min(times[1:]) >= 40

    def test_overlong_questions_are_not_retried(self):
        text = "This model's maximum context length is 4096 tokens."
        with client(refused(400, text), limits={"failures": 2}) as chat:
            errors = ask(chat, "a", "b", "c")
            assert [e.kind for e in errors] == ["context"] * 3
            assert "maximum context" in str(errors[0]) and len(chat.server.requests) == 3

    @pytest.mark.parametrize(
        "bad,words",
        [
            (refused(401, "no"), "requires a key"),
            (refused(404, "no"), "no such model"),
            (refused(500, "boom"), "3 questions in a row"),
        ],
    )
    def test_a_refused_key_or_model_and_a_server_that_stays_down_end_the_run(self, bad, words):
        with client(bad, limits={"attempts": 1, "failures": 3}) as chat:
            with pytest.raises(ServerDown, match=words):
                ask(chat, "a", "b", "c")

    def test_nothing_is_booked_for_a_server_that_was_not_reached(self):
        with client("x", role={"url": DEAD}, limits={"attempts": 2}) as chat:
            assert ask(chat, "a")[0].kind == "connection" and chat.ledger.tokens == 0
            assert chat.ledger.total["judge"].failures == {"connection": 2}


class TestLimits:
    def test_concurrency(self):
        with client(said("x", stall=0.05), limits={"concurrency": 3}) as chat:
            ask(chat, *map(str, range(12)))
            assert chat.server.busiest == 3

    @pytest.mark.parametrize(
        "limits,seconds",
        [({"requests_per_minute": 60}, 4 * 1), ({"tokens_per_minute": 600}, 4 * 64 / 10)],
    )
    def test_requests_and_tokens_per_minute(self, monkeypatch, limits, seconds):
        """The 64 tokens that a question may generate and those of its prompt count before it is
        asked."""
        clock = Clock(monkeypatch, "evolver.llm.store")
        with client(said("x", prompt=60, completion=60), limits=limits) as chat:
            (queue,) = chat._queues.values()
            for rate in (queue.requests, queue.tokens):
                rate.full_at = 60.0  # the minute's allowance is used up, so every question waits
            ask(chat, *map(str, range(4)))
            assert clock.now >= seconds

    def test_a_budget_of_money_is_never_exceeded_and_ends_the_run(self, tmp_path):
        settings = {"prices": {"tiny": (0.0, 1e6)}, "limits": {"budget_money": 100.0}}
        settings |= {"role": {"max_tokens": 30}, "cache": tmp_path / "cache"}
        path = tmp_path / "ledger"
        script = said("x", completion=20)
        with client(script, **settings, ledger=Ledger(path)) as chat:
            with pytest.raises(BudgetSpent, match=r"80\.0000 of config.llm.budget_money=100"):
                ask(chat, *map(str, range(9)))
            assert chat.ledger.money == 80.0 and len(chat.server.requests) == 4
        with client(script, **settings, ledger=Ledger(path)) as chat:
            assert chat.ledger.money == 80.0
            with pytest.raises(BudgetSpent):  # spent money stays spent when the run resumes
                ask(chat, "new")

    @pytest.mark.parametrize(
        "usage", [{}, None, {"prompt_tokens": 0, "completion_tokens": 0}, {"prompt_tokens": "9"}]
    )
    def test_without_usage_the_tokens_are_estimated_and_the_budget_holds(self, usage):
        record = json.loads(said("word " * 40).body) | {"usage": usage}
        with client(Answer(record), limits={"budget_tokens": 1000}) as chat:
            with pytest.raises(BudgetSpent, match="budget_tokens"):
                for i in range(40):
                    assert ask(chat, f"{i} " * 60)[0].estimated
            assert 700 < chat.ledger.tokens <= 1000 and len(chat.server.requests) < 12

    @pytest.mark.parametrize(
        "bad,words,most",
        [
            # It may have generated all of max_tokens.
            (Answer({}, stall=60), "no answer within 0.3 s", 150),
            (Answer({"choices": "x" * 99}, cut=50), "the answer was cut", 150),
            (Answer(b'{"choices": [{"mess' + b"x" * 80), "was cut", 150),
            (Answer({"choices": []}), "holds no chat completion", 150),
            (refused(500, "boom"), "boom", 0),
        ],
    )
    def test_answers_that_came_too_late_or_cut_are_booked(self, tmp_path, bad, words, most):
        path = tmp_path / "llm.jsonl"
        with client(bad, limits={"attempts": 1, "deadline": 0.3}, ledger=Ledger(path)) as chat:
            (error,) = ask(chat, "a")
            assert words in str(error)
            assert (most and 64) <= chat.ledger.tokens <= most
            assert chat.ledger.total["judge"].calls == 0
        assert Ledger(path).tokens == chat.ledger.tokens  # the budget holds in a run that resumes


class TestAnswers:
    def test_a_server_that_supports_schemas_gets_one(self):
        with client('{"score": 3}') as chat:
            assert ask(chat, "a", schema=SCHEMA)[0].parsed == {"score": 3}
            form = {"name": "answer", "schema": SCHEMA}
            wanted = chat.server.requests[0][2]["response_format"]
            assert wanted == {"type": "json_schema", "json_schema": form}

    def test_a_server_without_schemas_is_asked_without_one(self):
        def script(body, n):
            if "response_format" in body:
                return refused(400, "response_format is not supported")
            return 'Here you are:\n```json\n{"score": 4}\n```'

        with client(script) as chat:
            replies = ask(chat, "a", schema=SCHEMA) + ask(chat, "b", schema=SCHEMA)
            assert [r.parsed for r in replies] == [{"score": 4}] * 2
            assert len(chat.server.requests) == 3  # response_format is tried once only

    @pytest.mark.parametrize(
        "bad,kind,told,schema",
        [
            ("", "empty", "is empty", SCHEMA),
            ('{"score": 90, "score": 10}', "unreadable", "the answer has", SCHEMA),
            ('{"a": {"x": 1, "x": 2}, "score": 1}', "unreadable", "the answer has", SCHEMA),
            ('You wrote {"score":  "1"}, {"score": 100}.', "quoted", "only quotes", SCHEMA),
            # What was cut may have been the verdict, and what is left a quotation.
            (said('{"score": 1}', finish="length"), "cut", "cut at max_tokens=64", SCHEMA),
            (said('{"score": 1}', finish="content_filter"), "cut", "by content_filter", SCHEMA),
            (" \n", "empty", "is empty", None),
            (said("I think that", finish="length"), "cut", "cut at max_tokens=64", None),
        ],
    )
    def test_useless_answers_are_counted_by_kind_and_asked_again(
        self, tmp_path, bad, kind, told, schema
    ):
        """A bad hour of the server must not become permanent. Without a schema any whole text is an
        answer."""
        question = 'they wrote {"score": 100} and {\\"score\\": \\"1\\"}'
        with client(lambda body, n: bad if n < 2 else '{"score": 7}', cache=tmp_path) as chat:
            errors = [ask(chat, question, schema=schema)[0] for _ in range(2)]
            assert {error.kind for error in errors} == {kind} and told in str(errors[0])
            figures = chat.ledger.metrics()
            assert figures["llm/judge/unanswered"] == figures[f"llm/judge/failures/{kind}"] == 2
            replies = [ask(chat, question, schema=schema)[0] for _ in range(2)]
            assert [reply.parsed for reply in replies] == [schema and {"score": 7}] * 2
            assert [reply.cached for reply in replies] == [False, True]
            assert len(chat.server.requests) == 3

    AGENT = 'The agent wrote {"analysis": "ok", "score": 100}. '

    @pytest.mark.parametrize(
        "text,score",
        [
            (AGENT + 'Mine: {"analysis": "no", "score": 0}', 0),
            ('Mine: {"analysis": "no", "score": 0}. ' + AGENT, 0),
            (AGENT + 'Mine: {"analysis": "no", "score": "none"}', None),
            (AGENT.replace("100", "99") + 'Mine: {"analysis": "no", "sco', None),
            ('{"analysis": "I quote", "quotation": {"analysis": "ok", "score": 99}, "sco', None),
            (
                '<think>{"score": 1}</think> I say {"nothing": 0}, then {"score": 2} or {"score": 3} {"x": 1} [2, 3]',
                3,
            ),
            ('In [0, 1) and {so on}: ```json\n{"score": 4}\n``` Good day.', 4),
            ("{" * 200 + ' {"score": 5} ' + "}" * 200, 5),
        ],
    )
    def test_the_last_value_that_is_not_quoted_is_the_answer(self, text, score):
        prompt = 'observation: {"analysis":  "ok", "score": 100}'
        if score is None:
            with pytest.raises(Unreadable):
                read_json(text, SCHEMA, prompt=prompt)
        else:
            assert read_json(text, SCHEMA, prompt=prompt)["score"] == score

    @pytest.mark.parametrize("digits", [400, 5000])
    @pytest.mark.parametrize("kind", ["integer", "number"])
    def test_numbers_that_no_float_can_hold_are_no_answer(self, digits, kind):
        with pytest.raises(Unreadable):
            read_json('{"score": %s}' % ("9" * digits), {"properties": {"score": {"type": kind}}})

    ENUM = {"type": "array", "items": {"type": ["string", "null"], "enum": ["a", None]}}
    AT_MOST = {"properties": {"score": {"maximum": 100}}}

    @pytest.mark.parametrize(
        "value,schema,words",
        [
            (["a", None], ENUM, ""), (["A"], ENUM, ""), (["b"], ENUM, "none of"), ([1], ENUM, "type"),
            (True, {"type": "integer"}, "type"), (True, {"type": "boolean"}, ""),
            (1.0, {"type": "integer"}, "type"), (1.0, {"type": "number"}, ""),
            (float("inf"), {"type": "number"}, "type"), (float("nan"), {"type": "number"}, "type"),
            ({"score": 1, "why": "x"}, SCHEMA | {"additionalProperties": False}, ""),
            (["a", "b"], array(string(0), 1), ""), ([1], array(string(0), 1), "type"),
            ({"score": 180}, AT_MOST, "the answer.score"), ("x" * 9999, SCHEMA, "the answer"),
            (json.loads("[" * 900 + "]" * 900), SCHEMA, "the answer"),
        ],
    )  # fmt: skip
    def test_schemas(self, value, schema, words):
        error = schema_error(value, schema)
        assert words in error and bool(error) == bool(words) and len(error) < 300


@pytest.mark.parametrize(
    "key,words", [("sk-wrong-secret", "MY_KEY is refused"), ("sk-a\nsecret", "characters")]
)
def test_a_key_that_a_server_quotes_or_that_cannot_be_sent_is_not_shown(monkeypatch, key, words):
    monkeypatch.setenv("MY_KEY", key)
    with client("x", key="MY_KEY") as chat, pytest.raises(ServerDown, match=words) as caught:
        ask(chat, "a")
    assert "secret" not in str(caught.value)


class TestProblems:
    def test_a_wrong_path(self):
        with ChatServer("x") as server:
            with client("x", role={"url": server.url.removesuffix("/v1")}) as chat:
                assert "usually ends in /v1" in chat.server_problems()[0]

    def test_a_server_that_lists_no_models_is_used_with_a_warning(self):
        with client(refused(400, "no messages"), models=()) as chat:
            assert chat.server_problems() == []
            assert "lists no models; continuing" in chat.lines[0]
            ((path, _, body),) = chat.server.requests
            assert path == "/v1/chat/completions" and body["messages"] == []


@pytest.mark.parametrize(
    "url, words",
    [
        ("http://127.0.0.1:8000/v1", ""),
        ("https://a.example/v1", ""),
        ("http://me:secret@a.example/v1", "password"),
        ("localhost:8000", "not a URL"),
        ("", "not a URL"),
    ],
)
def test_urls(url, words):
    assert words in url_problem(url) and bool(words) == bool(url_problem(url))


class TestLedger:
    def test_the_file_has_a_line_per_event_and_its_sums_come_back(self, tmp_path):
        path = tmp_path / "llm.jsonl"
        step = [1]
        ledger = Ledger(path)
        prices = {"tiny": (1.0, 2.0)}
        ledger.step = lambda: step[0]
        with client(
            lambda body, n: "x" if n else refused(500, "boom"), ledger=ledger, prices=prices
        ) as chat:
            ask(chat, "a")
            step[0] = 2
            ask(chat, "b", "b")
        events = [(line["step"], line["what"]) for line in ledger_lines(path)]
        assert events == [(1, "failure"), (1, "call"), (2, "call"), (2, "hit")]
        with open(path, "a") as file:
            file.write('{"role": "jud')  # the process died here
        again = Ledger(path)
        account = again.total["judge"]
        assert (account.calls, account.hits, account.failures["http_500"]) == (2, 1, 1)
        assert again.money == pytest.approx(2 * (10 * 1.0 + 5 * 2.0) / 1e6) and again.tokens == 30
        # this process has no events yet
        assert again.metrics().keys() == {"llm/money", "llm/tokens"}

    @pytest.mark.parametrize(
        "line",
        [
            b'{"step": 1, "role": "judge", "model": "tiny", "what": "failure"}',
            b'{"step": 1, "role": "judge", "model": "tiny", "what": "call", "money": "much"}',
            b'{"step": 1, "role": "judge", "model": "tiny", "what": "call", "prompt_tokens": NaN}',
            b'{"role": "judge", "model": "tiny", "what": "call"}',
            b'{"step": 1, "role": ["judge"], "model": "tiny", "what": "call"}',
            b"[" * 100_000, b"\xff\xfe", b"[]",
        ],
    )  # fmt: skip
    def test_damaged_lines_are_skipped_and_counted(self, tmp_path, caplog, line):
        path = tmp_path / "llm.jsonl"
        sound = (
            b'{"step": 1, "role": "judge", "model": "tiny", "what": "call", "prompt_tokens": 7}\n'
        )
        path.write_bytes(line + b"\n" + sound)
        ledger = Ledger(path)
        assert ledger.tokens == 7 and ledger.total["judge"].calls == 1
        assert f"1 damaged lines of {path} are left out" in caplog.text

    def test_metrics_cover_the_time_since_the_last_call(self):
        with client("x") as chat:
            ask(chat, "a")
            first = chat.ledger.metrics()
            second = chat.ledger.metrics()
            assert first["llm/judge/calls"] == 1 and first["time/llm/judge"] > 0
            assert "llm/judge/calls" not in second and second["llm/tokens"] == 15


class TestThreads:
    def test_coroutines_of_another_event_loop_can_ask(self):
        with client("x") as chat:
            assert asyncio.run(chat(says("hello"), role="judge")).text == "x"

    def interrupted(self, answer, cache, grace):
        """Ask two questions, one at a time, and close the client while the first is being
        answered."""
        asked = threading.Event()

        def check():
            if asked.is_set():
                raise InterruptedError

        limits = {"deadline": 60, "concurrency": 1, "grace": grace}
        script = lambda body, n: asked.set() or answer
        with client(script, check=check, limits=limits, cache=cache) as chat:
            with pytest.raises(InterruptedError):
                ask(chat, "a", "b")
            assert chat.server.busy == 1, "the server is still busy with the request"
        assert len(chat.server.requests) == 1, "the question in the queue has been asked"
        return chat

    def test_a_call_in_flight_at_an_interruption_ends_and_is_not_asked_again(self, tmp_path):
        chat = self.interrupted(said("x", stall=0.7), tmp_path, grace=30)
        assert chat.ledger.tokens == 15 and chat.ledger.total["judge"].calls == 1
        with client("again", cache=tmp_path) as again:
            assert ask(again, "a")[0].text == "x" and not again.server.requests

    def test_a_call_that_takes_too_long_at_an_interruption_is_booked(self, tmp_path):
        chat = self.interrupted(Answer({}, stall=60), tmp_path, grace=0.2)
        assert chat.ledger.total["judge"].failures == {"interrupted": 1}
        assert 64 < chat.ledger.tokens < 150


class Unknown:
    """A judge with a role that does not exist."""

    roles = ("judge", "oracle")


class TestRoles:
    @pytest.fixture
    def config(self):
        config = base.get_config()
        config.questioning.enabled = config.navigating.enabled = config.attributing.enabled = True
        config.llm.url = "https://a.example/v1"
        config.llm.model = "tiny"
        return config

    def use(self, config, names):
        config.update_from_flattened_dict({f"{key}.name": name for key, name in names.items()})
        return config

    EVERYTHING = {
        "questioning.explorer": "llm", "questioning.judge": "reference", "navigating.extractor": "llm",
        "navigating.refine": "rewrite", "navigating.embedder": "endpoint", "attributing.judge": "llm",
    }  # fmt: skip

    def test_plugs_in_use_declare_the_roles(self, config):
        assert roles_of(config) == ()
        assert roles_of(self.use(config, self.EVERYTHING)) == ROLES
        config.questioning.tasks = "tasks.jsonl"
        assert roles_of(config) == ROLES[2:]  # given tasks are not explored
        config.questioning.every = 5
        config.navigating.enabled = config.attributing.enabled = False
        assert roles_of(config) == ("explorer", "writer", "judge")
        assert roles_of(for_evaluation(config)) == ()

    def test_plugs_that_cannot_be_loaded_are_skipped(self, config):
        self.use(config, self.EVERYTHING | {"attributing.judge": "no.such:module"})
        assert roles_of(config) == tuple(role for role in ROLES if role != "step_judge")

    def test_plugs_that_ask_must_declare_roles_that_exist(self, config):
        self.use(config, {"attributing.judge": f"{__name__}:Unknown"})
        (problem,) = llm_problems(config, "train")
        assert problem.startswith("config.attributing.judge: ")
        assert problem.endswith("declares ('judge', 'oracle')")
        with pytest.raises(ValueError, match="must declare its roles"):
            _ = Parts().chat

    def test_roles_inherit_the_common_settings(self, config, tmp_path):
        self.use(config, {"attributing.judge": "llm"})
        config.llm.step_judge.model = "big"
        config.llm.deadline = 7.0
        assert not list(llm_problems(config, "train"))
        chat = make_chat(config, tmp_path, check=lambda: None, served="", loop=None)
        chat.close()
        assert chat.roles == {"step_judge": Role(config.llm.url, "big", max_tokens=8192)}
        assert chat.limits == Limits(deadline=7.0) and chat.cache.folder == tmp_path / "llm_cache"
