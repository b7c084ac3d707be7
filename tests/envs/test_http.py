"""Shared HTTP details: tokens, bodies, sockets and Retry-After."""

import asyncio
import email.utils
import time

import pytest

from envs import http


def read(*chunks: bytes, limit: int = 100):
    async def stream():
        for chunk in chunks:
            yield chunk

    return asyncio.run(http.read_json(stream(), limit))


def test_a_body_is_parsed_up_to_its_limit():
    assert read(b'{"a":', b" 1}") == {"a": 1}
    with pytest.raises(http.BodyTooLarge, match="larger than 3 bytes"):
        read(b"[1", b",2]", limit=3)
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match="not JSON"):
            read(body, limit=1 << 20)


def test_a_token_is_sent_and_checked():
    assert http.bearer("") == {} and http.authorized("", "")
    header = http.bearer("secret")["Authorization"]
    assert http.authorized(header, "secret")
    assert not any(
        http.authorized(wrong, "secret")
        for wrong in ("", "secret", "Bearer secre", "Bearer sécret")
    )


@pytest.mark.parametrize(
    "header, seconds", [("3", 3.0), ("0.5", 0.5), ("-2", 0.0), (None, None), ("soon", None)]
)
def test_retry_after_in_seconds(header, seconds):
    assert http.retry_after(header) == seconds


def test_retry_after_as_a_date():
    assert 25 < http.retry_after(email.utils.formatdate(time.time() + 30, usegmt=True)) <= 30
    assert http.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_a_port_that_is_taken_is_named():
    with http.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            http.listen("127.0.0.1", port)
