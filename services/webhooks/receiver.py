"""A small webhook receiver that verifies signatures: for the demo, the quickstart and tests.

async with WebhookReceiver(secret) as receiver:
    …  # webhooks to receiver.url
    webhooks = await receiver.wait_for(3)
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

import click
from aiohttp import web

from services.errors import ConfigError, RetryableError
from services.parsing.addresses import is_host
from services.parsing.validation import shown
from services.webhooks.signature import ID_HEADER, SECRET_PREFIX, SecretError, SignatureError, key_of, verify

MAX_BODY_BYTES = 4 * 1024 * 1024
MIN_KEY_BYTES = 24  # the minimum of the Standard Webhooks specification


@dataclass(frozen=True)
class ReceivedWebhook:
    """One received request; `problem` is None if its signature is valid, otherwise the reason it is not."""

    webhook_id: str
    headers: dict[str, str]
    body: bytes
    problem: str | None
    received_at: float = field(default_factory=time.monotonic)

    @property
    def payload(self) -> Any:
        """The body as JSON; raises ValueError if it is not JSON."""
        return json.loads(self.body)


class WebhookReceiver:
    """Listens on `host`:`port` (0: a free port); responds 204 to a valid signature and 401 to an invalid one.

    `received` holds all webhooks; `verified` those with a valid signature by webhook-id, the first of duplicates.
    `respond` may replace the 204: it gets the webhook and returns an HTTP status.
    """

    def __init__(
        self,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        respond: Callable[[ReceivedWebhook], int] | None = None,
        on_webhook: Callable[[ReceivedWebhook], None] | None = None,
    ) -> None:
        key_of(secret)
        if not is_host(host):
            raise ConfigError(f"cannot listen for webhooks on {shown(host)}: it is not a valid host name or address")
        self.received: list[ReceivedWebhook] = []
        self.verified: dict[str, ReceivedWebhook] = {}
        self._secret = secret
        self._address = (host, port)
        self._respond = respond or (lambda _: 204)
        self._on_webhook = on_webhook or (lambda _: None)
        self._arrived = asyncio.Condition()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/{path:.*}", self._receive)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, *self._address).start()
            self._address = (self._address[0], int(self._runner.addresses[0][1]))
        except OSError as error:
            await self._runner.cleanup()
            host, port = self._address
            raise ConfigError(f"cannot listen for webhooks on {host}:{port}: {error.strerror}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port in use, or the one used last."""
        return self._address[1]

    @property
    def url(self) -> str:
        """Where to send webhooks; any path below it works as well."""
        return f"http://{self._address[0]}:{self.port}/"

    async def wait_for(self, count: int, timeout_s: float = 30.0) -> list[ReceivedWebhook]:
        """Wait for `count` verified webhooks with different ids and return them; raises RetryableError on timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(lambda: len(self.verified) >= count)
        except TimeoutError as error:
            problems = sorted({webhook.problem for webhook in self.received if webhook.problem})
            refused = f"; refused: {', '.join(problems)}" if problems else ""
            raise RetryableError(
                f"received only {len(self.verified)} of {count} webhooks within {timeout_s:g} s{refused}"
            ) from error
        return list(self.verified.values())

    async def _receive(self, request: web.Request) -> web.Response:
        webhook = self._checked(dict(request.headers), await request.read())
        self._on_webhook(webhook)
        async with self._arrived:
            self.received.append(webhook)
            if webhook.problem is None:
                self.verified.setdefault(webhook.webhook_id, webhook)
            self._arrived.notify_all()
        if webhook.problem is not None:
            return web.Response(status=401, text=webhook.problem + "\n")
        return web.Response(status=self._respond(webhook))

    def _checked(self, headers: dict[str, str], body: bytes) -> ReceivedWebhook:
        lowered = {name.lower(): value for name, value in headers.items()}
        problem = None
        try:
            verify(self._secret, lowered, body, datetime.now(UTC))
        except SignatureError as error:
            problem = str(error)
        return ReceivedWebhook(lowered.get(ID_HEADER, ""), lowered, body, problem)


def _whole_secret(text: str) -> str:
    """A secret as `loraq tenants add` prints it. A truncated one is refused: no signature would match it."""
    if not text.startswith(SECRET_PREFIX):
        raise click.BadParameter(f"a webhook secret begins with {SECRET_PREFIX}; `loraq tenants add` prints it once")
    try:
        key = key_of(text)
    except SecretError as error:
        raise click.BadParameter(f"{error}; check that it was copied completely") from error
    if len(key) < MIN_KEY_BYTES:
        raise click.BadParameter(
            f"the webhook secret has {len(key)} bytes, fewer than {MIN_KEY_BYTES}; check that it was copied completely"
        )
    return text


@click.command()
@click.option("--secret", type=_whole_secret, required=True, help="The tenant's webhook secret, whsec_….")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks a free one.")
@click.option("--count", type=click.IntRange(min=1), help="Exit after this many validly signed webhooks.")
def listen(secret: str, host: str, port: int, count: int | None) -> None:
    """Receive webhooks, verify their signatures and print them, one line each."""
    try:
        asyncio.run(_listen(secret, host, port, count))
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)


async def _listen(secret: str, host: str, port: int, count: int | None) -> None:
    async with WebhookReceiver(secret, host=host, port=port, on_webhook=_print) as receiver:
        click.echo(f"Listening for webhooks at {receiver.url} and any path below it; Ctrl-C stops", err=True)
        await receiver.wait_for(count or 2**31, timeout_s=365 * 86_400)


def _print(webhook: ReceivedWebhook) -> None:
    verdict = "signature ok" if webhook.problem is None else f"signature bad ({webhook.problem})"
    click.echo(f"{verdict}  {webhook.webhook_id}  {webhook.body.decode(errors='replace')}")
