"""One attempt against many kinds of receivers, all real servers on loopback."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from services.dispatcher.connector import Lookup, guarded_session
from services.dispatcher.sender import Sender
from services.tenants.secrets import new_webhook_secret
from services.webhooks.guard import AddressGuard, AddressNotAllowedError
from services.webhooks.outcome import AttemptResult, NotAllowed, Responded, Unreachable
from services.webhooks.receiver import WebhookReceiver
from tests.services.dispatcher.servers import (
    OK,
    Responder,
    drip,
    hang,
    hang_up,
    make_certificates,
    raw_server,
    reset,
    responding,
)

LOOPBACK = ("127.0.0.0/8",)
SECRET = new_webhook_secret()
TIMEOUT_S = 1.0


def names(**addresses: list[str]) -> Lookup:
    """A resolver of these names only, with `_` for the dot."""

    def lookup(host: str, _family: socket.AddressFamily) -> list[str]:
        try:
            return addresses[host.rstrip(".").replace(".", "_")]
        except KeyError:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None

    return lookup


@asynccontextmanager
async def sending(
    allow: tuple[str, ...] = LOOPBACK,
    lookup: Lookup | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[Sender]:
    guard = AddressGuard(allow)
    async with guarded_session(guard, concurrency=8, timeout_s=timeout_s, tls=tls, lookup=lookup) as session:
        yield Sender(session, guard, timeout_s)


async def post(sender: Sender, target: str) -> AttemptResult:
    return await sender.send(target, "msg_1", b'{"a": 1}', SECRET, datetime.now(UTC))


async def test_another_implementation_verifies_the_signature() -> None:
    async with WebhookReceiver(SECRET) as receiver, sending() as sender:
        assert await post(sender, receiver.url) == Responded(204)
        [webhook] = await receiver.wait_for(1)
    Webhook(SECRET).verify(webhook.body, webhook.headers, json_parse=False)
    assert webhook.headers["content-type"] == "application/json"
    assert webhook.headers["user-agent"].startswith("loraq/")


async def test_a_signature_with_another_secret_is_rejected() -> None:
    async with WebhookReceiver(new_webhook_secret()) as receiver, sending() as sender:
        assert await post(sender, receiver.url) == Responded(401)
    assert receiver.received[0].problem is not None
    assert receiver.verified == {}


async def test_connections_are_reused() -> None:
    async with raw_server(OK) as server, sending() as sender:
        for _ in range(3):
            assert await post(sender, server.url()) == Responded(204)
        assert server.connections == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(status: int) -> None:
    async with raw_server(OK) as inside:
        response = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {inside.url()}\r\nContent-Length: 0\r\n\r\n"
        async with raw_server(responding(response.encode())) as server, sending() as sender:
            assert await post(sender, server.url()) == Responded(status)
        assert inside.connections == 0


async def test_retry_after_is_returned() -> None:
    response = b"HTTP/1.1 503 Busy\r\nRetry-After: 17\r\nContent-Length: 0\r\n\r\n"
    async with raw_server(responding(response)) as server, sending() as sender:
        assert await post(sender, server.url()) == Responded(503, "17")


@pytest.mark.parametrize("respond", [hang, drip])
async def test_a_receiver_that_never_finishes_is_abandoned_after_the_timeout(respond: Responder) -> None:
    async with raw_server(respond) as server, sending() as sender:
        start = time.monotonic()
        assert await post(sender, server.url()) == Unreachable("no response within 1 s", timed_out=True)
        assert time.monotonic() - start < TIMEOUT_S + 10.0


async def test_an_endless_response_is_cut_off_and_its_status_counts() -> None:
    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await writer.drain()
            server.bytes_sent += 0x10000

    async with raw_server(flood) as server, sending() as sender:
        assert await post(sender, server.url()) == Responded(200)
        assert server.bytes_sent < 16 * 1024 * 1024


async def test_a_slow_body_after_the_status_does_not_delay_the_attempt() -> None:
    async def respond(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        await asyncio.Event().wait()

    async with raw_server(respond) as server, sending(timeout_s=20.0) as sender:
        async with asyncio.timeout(10):
            assert await post(sender, server.url()) == Responded(200)


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (hang_up, "the connection was closed before a response"),
        (reset, "the connection was closed before a response"),
        (responding(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "the response is not valid HTTP"),
        (responding(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 80_000 + b"\r\n\r\n"), "the response is not valid HTTP"),
    ],
)
async def test_a_missing_or_invalid_response_is_reported(respond: Responder, reason: str) -> None:
    async with raw_server(respond) as server, sending() as sender:
        assert await post(sender, server.url()) == Unreachable(reason)


async def test_a_refused_connection_is_reported() -> None:
    async with raw_server(OK) as server:
        pass
    async with sending() as sender:
        assert await post(sender, server.url()) == Unreachable("could not connect: Connection refused")


async def test_an_unknown_host_name_is_reported() -> None:
    async with sending(lookup=names()) as sender:
        assert await post(sender, "http://nowhere.test/") == Unreachable("the host name could not be resolved")


async def test_host_header_and_tls_name_are_those_of_the_url(tmp_path: Path) -> None:
    certificates = make_certificates("hook.test", tmp_path)
    requested: list[str | None] = []
    certificates.server.sni_callback = lambda _socket, name, _context: requested.append(name)
    lookup = names(hook_test=["127.0.0.1"])
    async with raw_server(OK, certificates.server) as server, sending(lookup=lookup, tls=certificates.client) as sender:
        assert await post(sender, server.url("hook.test", "https")) == Responded(204)
        assert requested == ["hook.test"]
        assert f"Host: hook.test:{server.port}\r\n" in server.heads[0]


async def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    certificates = make_certificates("other.test", tmp_path)
    lookup = names(hook_test=["127.0.0.1"])
    async with raw_server(OK, certificates.server) as server, sending(lookup=lookup, tls=certificates.client) as sender:
        result = await post(sender, server.url("hook.test", "https"))
        assert result == Unreachable("the TLS certificate is not valid for this host")
        assert server.heads == []


async def test_plain_http_on_an_https_url_is_reported() -> None:
    async with raw_server(responding(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as server, sending() as sender:
        result = await post(sender, server.url(scheme="https"))
    assert isinstance(result, Unreachable)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["::1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], ["fe80::1%2"]]
)
async def test_a_name_that_resolves_to_a_private_address_is_refused_without_a_connection(addresses: list[str]) -> None:
    async with raw_server(OK) as server, sending(allow=(), lookup=names(hook_test=addresses)) as sender:
        assert await post(sender, server.url("hook.test")) == NotAllowed()
        assert await post(sender, server.url("hook.test.")) == NotAllowed()
        assert server.connections == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1.", "localhost", "127.1", "[::1]", "0x7f.1"])
async def test_literal_and_local_hosts_are_refused_without_a_connection(host: str) -> None:
    async with raw_server(OK) as server, sending(allow=()) as sender:
        assert await post(sender, server.url(host)) == NotAllowed()
        assert server.connections == 0


async def test_dns_rebinding_is_refused() -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1"]])
    async with (
        raw_server(responding(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")) as server,
        sending(lookup=lambda _host, _family: next(answers)) as sender,
    ):
        target = server.url("rebind.test")
        assert [await post(sender, target) for _ in range(3)] == [Responded(200), NotAllowed(), Responded(200)]
        assert server.connections == 2


async def test_the_socket_itself_is_guarded() -> None:
    async with raw_server(OK) as server, guarded_session(AddressGuard(), concurrency=1, timeout_s=1.0) as session:
        with pytest.raises(AddressNotAllowedError):
            await session.post(server.url())
        assert server.connections == 0
