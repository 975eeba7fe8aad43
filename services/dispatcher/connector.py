"""HTTP connections that are only ever made to addresses the guard allows.

Names are resolved here, and a name is refused if any of its addresses is. The socket factory then checks once more
the very address that is connected to: there is no second look-up in between, so a name that changes its address
between check and connection gains nothing. The URL keeps its host, so `Host` and TLS server name are the tenant's.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from services.dispatcher.guard import AddressGuard

KEEP_ALIVE_S = 15.0


class GuardedResolver(AbstractResolver):
    """Resolves in threads of its own, so that names whose servers hang do not fill the loop's."""

    def __init__(self, guard: AddressGuard, threads: int) -> None:
        self._guard = guard
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="webhook-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """All addresses of `host`; raises AddressNotAllowedError if one is refused, OSError if there are none."""
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _lookup, host, port, family)
        for result in found:
            self._guard.check(result["host"])
        return found

    async def close(self) -> None:
        """Let look-ups that hang end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lookup(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    infos = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [_result(host, port, socket.AddressFamily(found), proto, address) for found, _, proto, _, address in infos]


def _result(
    host: str, port: int, family: socket.AddressFamily, proto: int, address: tuple[str | int | bytes, ...]
) -> ResolveResult:
    """The address with its IPv6 zone, if it has one, so that the guard sees it."""
    literal = str(address[0])
    if family == socket.AF_INET6 and address[3]:
        literal += f"%{address[3]!r}"
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=literal, port=port, family=family, proto=proto, flags=flags)


@asynccontextmanager
async def guarded_session(
    guard: AddressGuard, *, concurrency: int, timeout_s: float, tls: ssl.SSLContext | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client session whose every connection passes `guard`; no cookies, no proxies, no decompression.

    `tls` replaces the system's authorities.
    """

    def guarded_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, proto, _, address = info
        guard.check(str(address[0]))
        return socket.socket(family, kind, proto)

    resolver = GuardedResolver(guard, threads=concurrency)
    connector = aiohttp.TCPConnector(
        resolver=resolver,
        socket_factory=guarded_socket,
        use_dns_cache=False,
        limit=concurrency,
        keepalive_timeout=KEEP_ALIVE_S,
        ssl=tls or True,
    )
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    jar = aiohttp.DummyCookieJar()
    try:
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=jar, trust_env=False, auto_decompress=False
        ) as session:
            yield session
    finally:
        await resolver.close()
