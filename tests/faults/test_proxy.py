"""The proxy relays, cuts, delays, throttles and drops replies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.localstack.ports import LOOPBACK
from tests.faults.proxy import Proxy


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[Proxy, list[bytes]]]:
    """A proxy to an echo server, and the lines that reached the server."""
    seen: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            seen.append(line)
            writer.write(line)
        writer.close()

    async with await asyncio.start_server(echo, LOOPBACK, 0) as server, Proxy(port_of(server)) as proxy:
        yield proxy, seen


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def exchange(proxy: Proxy, *lines: bytes) -> list[bytes]:
    """The reply to each line on one connection; no reply once the connection is broken."""
    reader, writer = await asyncio.open_connection(LOOPBACK, proxy.port)
    answers = []
    try:
        for line in lines:
            writer.write(line + b"\n")
            with contextlib.suppress(ConnectionError):
                answers.append(await asyncio.wait_for(reader.readline(), 10.0))
    finally:
        writer.close()
    return answers


async def test_it_relays() -> None:
    async with echo_behind_proxy() as (proxy, seen):
        assert await exchange(proxy, b"one", b"two") == [b"one\n", b"two\n"]
        assert seen == [b"one\n", b"two\n"]


async def test_the_reply_to_the_chosen_message_is_dropped_and_its_connection_closed() -> None:
    async with echo_behind_proxy() as (proxy, seen):
        sprung = proxy.lose_reply(b"COMMIT", hit=2)
        answers = await exchange(proxy, b"COMMIT", b"insert", b"COMMIT")
        assert [answer for answer in answers if answer] == [b"COMMIT\n", b"insert\n"]
        assert sprung.is_set()
        assert seen == [b"COMMIT\n", b"insert\n", b"COMMIT\n"]
        assert await exchange(proxy, b"COMMIT") == [b"COMMIT\n"]


async def test_no_connection_works_while_it_is_cut() -> None:
    async with echo_behind_proxy() as (proxy, seen):
        proxy.cut()
        assert not any(await exchange(proxy, b"lost"))
        proxy.restore()
        assert await exchange(proxy, b"found") == [b"found\n"]
        assert seen == [b"found\n"]


async def test_it_delays_and_throttles() -> None:
    async with echo_behind_proxy() as (proxy, _):
        loop = asyncio.get_running_loop()
        proxy.delay_s, proxy.bytes_per_s = 0.05, 1000.0
        started = loop.time()
        await exchange(proxy, b"x" * 99)
        assert loop.time() - started >= 0.3
