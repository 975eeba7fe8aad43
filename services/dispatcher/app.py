"""Builds the dispatcher's parts and runs them."""

from datetime import timedelta

import aiohttp

from services.dispatcher import housekeeping
from services.dispatcher.connector import guarded_session
from services.dispatcher.events import EventLoop
from services.dispatcher.outbox import Outbox
from services.dispatcher.schedule import RetryPolicy
from services.dispatcher.sender import Sender
from services.dispatcher.slots import HostSlots
from services.dispatcher.wakeup import CHANNEL
from services.dispatcher.webhooks import WebhookLoop, WebhookTimings
from services.postgres.pool import listen, open_pool, transaction
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import check_secret_key
from services.webhooks.guard import AddressGuard


async def serve(life: Lifecycle, settings: Settings) -> None:
    """Run until `life.stop`; attempts in flight then have `settings.drain_s` seconds to end."""
    guard = AddressGuard(settings.webhook_allow_networks)
    box = SecretBox(settings.secret_key)
    life.health.set("events", "connecting to Kafka")
    async with (
        open_pool(settings, fresh_plans=True) as database,
        guarded_session(
            guard, concurrency=settings.webhook_concurrency, timeout_s=settings.webhook_timeout_s
        ) as session,
    ):
        async with transaction(database, "check the secret key") as connection:
            await check_secret_key(connection, box)
        outbox = Outbox(database, settings.pool)
        webhooks = _webhook_loop(settings, outbox, session, guard, box)
        events = EventLoop(outbox, settings)

        def wake() -> None:
            webhooks.wake.set()
            events.wake.set()

        retention = timedelta(days=settings.outbox_retention_days)
        life.background("listen", listen(settings, CHANNEL, wake), endless=True)
        life.background("webhooks", webhooks.run(life.stop, life.health))
        life.background("events", events.run(life.stop, life.health))
        life.background("retention", _delete_finished(outbox, retention, life))
        life.background("measure", _measure(outbox, life))
        await life.until_stopped(grace_s=settings.drain_s)


def _webhook_loop(
    settings: Settings, outbox: Outbox, session: aiohttp.ClientSession, guard: AddressGuard, box: SecretBox
) -> WebhookLoop:
    return WebhookLoop(
        outbox,
        Sender(session, guard, settings.webhook_timeout_s),
        box,
        HostSlots(settings.webhook_concurrency, settings.webhook_per_host),
        retry_policy(settings),
        WebhookTimings(timedelta(seconds=settings.webhook_timeout_s), settings.poll_interval_s, settings.drain_s),
    )


def retry_policy(settings: Settings) -> RetryPolicy:
    """The retry policy of these settings."""
    return RetryPolicy(
        delays=tuple(timedelta(seconds=delay) for delay in settings.webhook_retry_delays_s),
        max_attempts=settings.webhook_max_attempts,
        ttl=timedelta(seconds=settings.webhook_ttl_s),
    )


async def _delete_finished(outbox: Outbox, retention: timedelta, life: Lifecycle) -> None:
    async def delete() -> None:
        await housekeeping.delete_finished(outbox, retention)

    await housekeeping.every(housekeeping.DELETE_EVERY_S, delete, life.stop)


async def _measure(outbox: Outbox, life: Lifecycle) -> None:
    async def measure() -> None:
        await housekeeping.measure(outbox)

    await housekeeping.every(housekeeping.MEASURE_EVERY_S, measure, life.stop)
