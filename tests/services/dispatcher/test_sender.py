"""One attempt against receivers of every kind, all real servers on loopback."""

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
from services.webhooks.outcome import Answer, Answered, NotAllowed, Unreachable
from services.webhooks.receiver import WebhookReceiver
from tests.services.dispatcher.servers import (
    OK,
    Answering,
    drip,
    hang,
    hang_up,
    make_certificates,
    raw_server,
    reset,
    saying,
)

LOOPBACK = ("127.0.0.0/8",)
SECRET = new_webhook_secret()
TIMEOUT_S = 1.0


def names(**addresses: list[str]) -> Lookup:
    """A resolver that knows these names, with `_` for the dot."""

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


async def post(sender: Sender, target: str) -> Answer:
    return await sender.send(target, "msg_1", b'{"a": 1}', SECRET, datetime.now(UTC))


async def test_the_receiver_gets_bytes_that_others_can_verify() -> None:
    async with WebhookReceiver(SECRET) as receiver, sending() as sender:
        assert await post(sender, receiver.url) == Answered(204)
        [webhook] = await receiver.wait_for(1)
    Webhook(SECRET).verify(webhook.body, webhook.headers, json_parse=False)
    assert webhook.headers["content-type"] == "application/json"
    assert webhook.headers["user-agent"].startswith("loraq/")


async def test_the_receiver_refuses_another_secret() -> None:
    async with WebhookReceiver(new_webhook_secret()) as receiver, sending() as sender:
        assert await post(sender, receiver.url) == Answered(401)
    assert receiver.received[0].problem is not None
    assert receiver.verified == {}


async def test_connections_are_used_again() -> None:
    async with raw_server(OK) as server, sending() as sender:
        for _ in range(3):
            assert await post(sender, server.url()) == Answered(204)
        assert server.connections == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(status: int) -> None:
    async with raw_server(OK) as inside:
        answer = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {inside.url()}\r\nContent-Length: 0\r\n\r\n"
        async with raw_server(saying(answer.encode())) as server, sending() as sender:
            assert await post(sender, server.url()) == Answered(status)
        assert inside.connections == 0


async def test_retry_after_is_handed_on() -> None:
    answer = b"HTTP/1.1 503 Busy\r\nRetry-After: 17\r\nContent-Length: 0\r\n\r\n"
    async with raw_server(saying(answer)) as server, sending() as sender:
        assert await post(sender, server.url()) == Answered(503, "17")


@pytest.mark.parametrize("answer", [hang, drip])
async def test_an_endpoint_that_takes_for_ever_is_left_after_the_timeout(answer: Answering) -> None:
    async with raw_server(answer) as server, sending() as sender:
        begun = time.monotonic()
        assert await post(sender, server.url()) == Unreachable("no answer within 1 s", timed_out=True)
        assert time.monotonic() - begun < TIMEOUT_S + 10.0


async def test_an_answer_without_end_is_cut_off_and_its_status_counts() -> None:
    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await writer.drain()
            server.bytes_sent += 0x10000

    async with raw_server(flood) as server, sending() as sender:
        assert await post(sender, server.url()) == Answered(200)
        assert server.bytes_sent < 16 * 1024 * 1024


async def test_a_body_that_drips_after_its_status_does_not_hold_the_attempt() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        await asyncio.Event().wait()

    async with raw_server(answer) as server, sending(timeout_s=20.0) as sender:
        async with asyncio.timeout(10):
            assert await post(sender, server.url()) == Answered(200)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hang_up, "the connection was closed before an answer"),
        (reset, "the connection was closed before an answer"),
        (saying(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "the answer is not valid HTTP"),
        (saying(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 80_000 + b"\r\n\r\n"), "the answer is not valid HTTP"),
    ],
)
async def test_an_answer_that_is_none(answer: Answering, reason: str) -> None:
    async with raw_server(answer) as server, sending() as sender:
        assert await post(sender, server.url()) == Unreachable(reason)


async def test_nobody_listens() -> None:
    async with raw_server(OK) as server:
        pass
    async with sending() as sender:
        assert await post(sender, server.url()) == Unreachable("could not connect: Connection refused")


async def test_a_name_that_does_not_exist() -> None:
    async with sending(lookup=names()) as sender:
        assert await post(sender, "http://nowhere.test/") == Unreachable("the host name could not be resolved")


async def test_host_and_tls_name_are_the_urls_while_the_address_is_the_checked_one(tmp_path: Path) -> None:
    certificates = make_certificates("hook.test", tmp_path)
    asked: list[str | None] = []
    certificates.server.sni_callback = lambda _socket, name, _context: asked.append(name)
    lookup = names(hook_test=["127.0.0.1"])
    async with raw_server(OK, certificates.server) as server, sending(lookup=lookup, tls=certificates.client) as sender:
        assert await post(sender, server.url("hook.test", "https")) == Answered(204)
        assert asked == ["hook.test"]
        assert f"Host: hook.test:{server.port}\r\n" in server.heads[0]


async def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    certificates = make_certificates("other.test", tmp_path)
    lookup = names(hook_test=["127.0.0.1"])
    async with raw_server(OK, certificates.server) as server, sending(lookup=lookup, tls=certificates.client) as sender:
        answer = await post(sender, server.url("hook.test", "https"))
        assert answer == Unreachable("the TLS certificate is not valid for this host")
        assert server.heads == []


async def test_plain_http_where_tls_was_promised() -> None:
    async with raw_server(saying(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as server, sending() as sender:
        answer = await post(sender, server.url(scheme="https"))
    assert isinstance(answer, Unreachable)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["::1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], ["fe80::1%2"]]
)
async def test_a_name_that_leads_inside_is_refused_without_a_connection(addresses: list[str]) -> None:
    async with raw_server(OK) as server, sending(allow=(), lookup=names(hook_test=addresses)) as sender:
        assert await post(sender, server.url("hook.test")) == NotAllowed()
        assert await post(sender, server.url("hook.test.")) == NotAllowed()
        assert server.connections == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1.", "localhost", "127.1", "[::1]", "0x7f.1"])
async def test_literal_and_local_hosts_are_refused_without_a_connection(host: str) -> None:
    async with raw_server(OK) as server, sending(allow=()) as sender:
        assert await post(sender, server.url(host)) == NotAllowed()
        assert server.connections == 0


async def test_a_name_that_changes_its_address_gains_nothing() -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1"]])
    async with (
        raw_server(saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")) as server,
        sending(lookup=lambda _host, _family: next(answers)) as sender,
    ):
        target = server.url("rebind.test")
        assert [await post(sender, target) for _ in range(3)] == [Answered(200), NotAllowed(), Answered(200)]
        assert server.connections == 2


async def test_the_socket_itself_is_guarded_whatever_came_before() -> None:
    async with raw_server(OK) as server, guarded_session(AddressGuard(), concurrency=1, timeout_s=1.0) as session:
        with pytest.raises(AddressNotAllowedError):
            await session.post(server.url())
        assert server.connections == 0
