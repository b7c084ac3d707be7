"""Shared parts of HTTP servers and clients: bearer tokens, request bodies, listening sockets,
Retry-After.

Standard library only.
"""

import asyncio
import contextlib
import email.utils
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from envs.values import Repeated, without_repeats

TOKEN_VARIABLE = (
    "EVOLVER_ENV_TOKEN"  # environment variable with the bearer token of the environment service
)
BODY_S = 60.0  # seconds in which the body of a request has to arrive
MAX_DROPPED, DROP_S = 256 << 20, 30.0  # bytes of a refused body that are read, and seconds
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class BodyTooLarge(ValueError):
    """A request body above the server's limit."""


class BodyTooLate(ValueError):
    """A request body that did not arrive in time."""


def bearer(token: str) -> dict[str, str]:
    """Return the headers that send `token`; none if it is empty."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def authorized(header: str, token: str) -> bool:
    """Return True if an Authorization header carries `token`, or if the server asks for none."""
    return not token or hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def is_local(host: str) -> bool:
    """Return True if a Host header names this machine, so that no other name was made to resolve to
    it."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]").lower() in LOOPBACK


async def read_json(stream: AsyncIterator[bytes], limit: int) -> Any:
    """Return the JSON value in a request body. Raises what `read_body` does, and ValueError for
    invalid JSON and for a key that occurs twice in an object."""
    body = await read_body(stream, limit)
    try:
        return json.loads(body, object_pairs_hook=without_repeats)
    except Repeated as error:
        raise ValueError(f"the body has {error}") from None
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None


async def read_body(stream: AsyncIterator[bytes], limit: int) -> bytes:
    """Return a request body.

    Raises BodyTooLarge above `limit` bytes, and BodyTooLate after BODY_S seconds.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in stream:
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(f"the body is larger than {limit:,} bytes")
    except TimeoutError:
        raise BodyTooLate(f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(body)


async def drain(stream: AsyncIterator[bytes]) -> None:
    """Read and drop the rest of a body, up to a limit, so that a client which still sends gets to
    read its answer."""
    left = MAX_DROPPED
    with contextlib.suppress(Exception):  # the client may have gone
        async with asyncio.timeout(DROP_S):
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    return


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises OSError with the address in its
    message."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    return listener


def retry_after(header: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or a date); None if it is
    missing or invalid."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
