"""HTTP connections, made only to addresses that the guard allows.

Names are resolved here, and a name is refused if any of its addresses is. The socket factory then checks the address
that is connected to. There is no second lookup in between, so DNS rebinding gains nothing. The URL keeps its host name,
so the `Host` header and the TLS server name are those of the tenant's URL.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from services.webhooks.guard import AddressGuard

KEEP_ALIVE_S = 4.0  # shorter than common servers' keep-alive, so that no connection is closed under a request

Lookup = Callable[[str, socket.AddressFamily], list[str]]


class GuardedResolver(AbstractResolver):
    """Resolves names in its own threads: a DNS server that hangs must not occupy the event loop's default executor."""

    def __init__(self, guard: AddressGuard, threads: int, lookup: Lookup) -> None:
        self._guard = guard
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="webhook-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """All addresses of `host`; raises AddressNotAllowedError if one is refused, OSError if there are none."""
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, host, family)
        for address in found:
            self._guard.check(address)
        if not found:
            raise OSError(f"{host} has no address")
        return [_resolved(host, port, address) for address in found]

    async def close(self) -> None:
        """Cancel queued lookups; do not wait for those that hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def system_lookup(host: str, family: socket.AddressFamily) -> list[str]:
    """All addresses of `host` from the system's resolver, with IPv6 zones; raises OSError if the lookup fails."""
    infos = socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
    return [_literal(address) for *_, address in infos]


def _literal(address: tuple[str | int | bytes, ...]) -> str:
    zone = address[3] if len(address) == 4 else 0
    return str(address[0]) + (f"%{zone!r}" if zone else "")


def _resolved(host: str, port: int, address: str) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=flags)


@asynccontextmanager
async def guarded_session(
    guard: AddressGuard,
    *,
    concurrency: int,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    lookup: Lookup | None = None,
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client session that checks every connection with `guard`; no cookies, no proxies, no decompression.

    `tls` replaces the system's certificate authorities, `lookup` the system's resolver.
    """

    def guarded_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, proto, _, address = info
        guard.check(str(address[0]))
        return socket.socket(family, kind, proto)

    resolver = GuardedResolver(guard, concurrency, lookup or system_lookup)
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
