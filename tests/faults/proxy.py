"""A small TCP proxy on loopback that cuts, delays and throttles connections, and can drop the reply to one message."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

from services.localstack.ports import LOOPBACK

CHUNK_BYTES = 64 * 1024


class _Trap:
    """Waits for the `hit`-th message that contains `pattern`."""

    def __init__(self, pattern: bytes, hit: int, then: Callable[[], None]) -> None:
        self.pattern = pattern
        self.left = hit
        self.then = then
        self.sprung = asyncio.Event()

    def springs(self, data: bytes) -> bool:
        if self.left <= 0 or self.pattern not in data:
            return False
        self.left -= data.count(self.pattern)
        if self.left > 0:
            return False
        self.sprung.set()
        self.then()
        return True


class Proxy:
    """`async with Proxy(port) as proxy`: connect to `proxy.port`. `delay_s` and `bytes_per_s` may be changed."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._trap: _Trap | None = None
        self._open = True
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Break every open and every new connection until `restore`."""
        self._open = False
        for writer in self._writers:
            writer.transport.abort()

    def restore(self) -> None:
        """Accept connections again."""
        self._open = True

    def lose_reply(self, pattern: bytes, hit: int = 1, then: Callable[[], None] = lambda: None) -> asyncio.Event:
        """Forward the `hit`-th message that contains `pattern` to the server, and break the connection at the reply.

        Before the message is forwarded, `then` is called and the event is set.
        """
        self._trap = _Trap(pattern, hit, then)
        return self._trap.sprung

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.suppress(OSError):
            if self._open:
                await self._relay(reader, writer)
        writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
        pair = {writer, their_writer}
        self._writers |= pair
        muted = asyncio.Event()
        pumps = [
            asyncio.create_task(self._requests(reader, their_writer, muted)),
            asyncio.create_task(self._replies(their_reader, writer, muted)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pair:
                each.transport.abort()
            self._writers -= pair
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, muted: asyncio.Event) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self._trap is not None and self._trap.springs(data):
                muted.set()
            await self._forward(data, writer)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, muted: asyncio.Event) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if muted.is_set():
                return
            await self._forward(data, writer)

    async def _forward(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.bytes_per_s is not None:
            await asyncio.sleep(len(data) / self.bytes_per_s)
        writer.write(data)
        await writer.drain()
