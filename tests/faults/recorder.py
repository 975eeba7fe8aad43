"""The receiver of every tenant's webhooks: records each request, its time and the reply."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Self
from uuid import UUID

from services.webhooks.receiver import ReceivedWebhook, WebhookReceiver
from services.webhooks.signature import TIMESTAMP_HEADER
from tests.faults.snapshot import Key, Webhook

BAD_SIGNATURE = 401


class Recorder:
    """One receiver per tenant. `answer` may be replaced: it gets the webhook and returns an HTTP status."""

    def __init__(self, secrets: dict[str, str]) -> None:
        self.webhooks: list[Webhook] = []
        self.answer: Callable[[ReceivedWebhook], int] = lambda _: 204
        self._receivers = {
            tenant: WebhookReceiver(secret, respond=self._on_verified, on_webhook=self._on_any)
            for tenant, secret in secrets.items()
        }

    async def __aenter__(self) -> Self:
        self._exits = AsyncExitStack()
        for receiver in self._receivers.values():
            await self._exits.enter_async_context(receiver)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    def url(self, tenant: str) -> str:
        """URL of the tenant's webhooks."""
        return self._receivers[tenant].url

    def _on_verified(self, webhook: ReceivedWebhook) -> int:
        at, status = time.time(), self.answer(webhook)
        self.webhooks.append(_recorded(webhook, at, status))
        return status

    def _on_any(self, webhook: ReceivedWebhook) -> None:
        if webhook.problem is not None:
            self.webhooks.append(_recorded(webhook, time.time(), BAD_SIGNATURE))


def _recorded(webhook: ReceivedWebhook, at: float, status: int) -> Webhook:
    data = webhook.payload["data"]
    return Webhook(
        webhook_id=UUID(webhook.webhook_id),
        key=Key(data["tenant"], UUID(data["job_id"])),
        state=data["state"],
        output=output_of(data),
        at=at,
        timestamp=int(webhook.headers[TIMESTAMP_HEADER]),
        signed=webhook.problem is None,
        status=status,
    )


def output_of(data: dict[str, Any]) -> str | None:
    """The output text, which may be empty, or its URL."""
    text: str | None = data.get("output_text")
    return data.get("output_url") if text is None else text
