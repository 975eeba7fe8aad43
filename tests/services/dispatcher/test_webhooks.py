"""Outbox rows become webhooks: a real Postgres, real HTTP servers, a dispatcher in the test's event loop."""

import asyncio
import os
import time
from datetime import timedelta
from uuid import UUID

import pytest
from prometheus_client import REGISTRY

from services.dispatcher.outbox import Outbox
from services.dispatcher.slots import Capacity
from services.kafka.clients import ensure_topics
from services.tenants.secrets import new_webhook_secret
from services.webhooks.outcome import Delivered, Failed, Retry
from services.webhooks.receiver import ReceivedWebhook, WebhookReceiver
from tests.services.dispatcher.conftest import BODY, TENANT, World, dispatching
from tests.services.dispatcher.servers import OK, hang, raw_server, responding
from tests.waiting import eventually

CAPACITY = Capacity(total=10, by_host={}, other_hosts=5)
REPLACE_SECRET = "update loraq.tenants set webhook_secret = $1 where tenant = $2"
EXPIRE_CLAIM = "update loraq.outbox set next_attempt_at = now() where event_id = $1"


async def finished(world: World, event_id: UUID, state: str = "done") -> None:
    async def check() -> bool:
        return await world.state(event_id) == state

    await eventually(check, what=f"the outbox row to be {state}")


def alarms(action: str) -> float:
    return REGISTRY.get_sample_value("loraq_alarms_total", {"action": action}) or 0.0


async def test_a_due_row_is_delivered_signed_and_recorded(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        [webhook] = await receiver.wait_for(1)
        await finished(world, event_id)
    assert webhook.webhook_id == str(event_id)
    assert webhook.body.decode() == BODY
    [delivery] = await world.deliveries(event_id)
    assert (delivery["outcome"], delivery["status_code"], delivery["attempt"]) == ("delivered", 204, 1)
    assert (delivery["url"], delivery["error"], delivery["next_attempt_at"]) == (receiver.url, None, None)


async def test_a_notification_wakes_the_dispatcher(world: World) -> None:
    settings = world.settings.model_copy(update={"poll_interval_s": 60.0})
    async with WebhookReceiver(world.secret) as receiver, dispatching(settings):
        await world.add_webhook(receiver.url)
        await receiver.wait_for(1, timeout_s=20.0)
        await world.add_webhook(receiver.url)
        await receiver.wait_for(2, timeout_s=20.0)


async def test_rows_without_a_notification_are_found_by_polling(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id)
        await world.database.execute("update loraq.outbox set state = 'pending', next_attempt_at = now()")
        await eventually(lambda: len(receiver.received) == 2, what="the second attempt")


async def test_attempts_are_repeated_under_one_id_until_the_receiver_accepts_it(world: World) -> None:
    statuses = iter([500, 429, 302, 200])

    def respond(_: ReceivedWebhook) -> int:
        return next(statuses)

    async with WebhookReceiver(world.secret, respond=respond) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id)
    assert {webhook.webhook_id for webhook in receiver.received} == {str(event_id)}
    assert all(webhook.problem is None for webhook in receiver.received)
    deliveries = await world.deliveries(event_id)
    assert [row["status_code"] for row in deliveries] == [500, 429, 302, 200]
    assert [row["attempt"] for row in deliveries] == [1, 2, 3, 4]
    assert await world.outcomes(event_id) == ["retrying", "retrying", "retrying", "delivered"]
    assert all(row["next_attempt_at"] is not None for row in deliveries[:3])


async def test_a_webhook_ends_after_its_last_attempt(world: World) -> None:
    settings = world.settings.model_copy(update={"webhook_max_attempts": 3})
    async with WebhookReceiver(world.secret, respond=lambda _: 500) as receiver, dispatching(settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["retrying", "retrying", "failed"]
    assert (await world.deliveries(event_id))[-1]["error"] == "HTTP 500; given up after 3 attempts"


async def test_410_ends_it_immediately(world: World) -> None:
    async with WebhookReceiver(world.secret, respond=lambda _: 410) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["failed"]
    assert len(receiver.received) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"])
async def test_a_private_address_is_blocked_and_the_tenant_gets_no_detail(
    world: World, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = world.settings.model_copy(update={"webhook_allow_networks": ()})
    async with raw_server(OK) as server, dispatching(settings):
        event_id = await world.add_webhook(server.url(host))
        await finished(world, event_id, "dead")
        assert server.connections == 0
    [delivery] = await world.deliveries(event_id)
    assert (delivery["outcome"], delivery["error"], delivery["status_code"]) == ("blocked", "address not allowed", None)
    assert "LORAQ_WEBHOOK_ALLOW_NETWORKS" in "".join(capsys.readouterr()), "the operator's log says how to allow it"


async def test_webhooks_are_signed_with_their_tenants_secret(world: World) -> None:
    other = new_webhook_secret()
    await world.add_tenant("other", other)
    async with WebhookReceiver(other) as receiver, dispatching(world.settings):
        theirs = await world.add_webhook(receiver.url, tenant="other")
        await world.add_webhook(receiver.url)
        await eventually(lambda: len(receiver.received) >= 2, what="both webhooks")
        assert set(receiver.verified) == {str(theirs)}


async def test_an_unusable_secret_raises_an_alarm_and_the_webhook_is_retried(world: World) -> None:
    before = alarms("webhook_secret_unusable")
    sealed_elsewhere = os.urandom(64)
    sealed = await world.database.fetchval("select webhook_secret from loraq.tenants")
    await world.add_tenant("other", new_webhook_secret())
    await world.database.execute(REPLACE_SECRET, sealed_elsewhere, TENANT)
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        broken = await world.add_webhook(receiver.url)
        await eventually(lambda: world.deliveries(broken), what="an attempt")
        assert receiver.received == []
        await world.database.execute(REPLACE_SECRET, sealed, TENANT)
        await receiver.wait_for(1)
        await finished(world, broken)
    assert alarms("webhook_secret_unusable") > before
    first = (await world.deliveries(broken))[0]
    assert (first["outcome"], "secret" in str(first["error"])) == ("retrying", True)


async def test_a_deleted_tenant_delays_no_other(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        orphan = await world.add_webhook(receiver.url, tenant="nobody")
        healthy = await world.add_webhook(receiver.url)
        await finished(world, healthy)
        await eventually(lambda: world.deliveries(orphan), what="an attempt")


async def test_an_attempt_that_raises_is_counted_and_ends_after_the_last(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_(*_: object) -> None:
        raise KeyError("no known receiver causes this")

    before = alarms("webhook_broke")
    monkeypatch.setattr("services.dispatcher.sender.Sender.send", break_)
    async with dispatching(world.settings.model_copy(update={"webhook_max_attempts": 2})):
        event_id = await world.add_webhook("http://127.0.0.1:8080/")
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["retrying", "failed"]
    assert alarms("webhook_broke") == before + 2


async def test_an_invalid_retry_after_is_ignored(
    world: World,
) -> None:
    busy = responding(
        b"HTTP/1.1 503 X\r\nRetry-After: Thu, 01 Jan 99999999999 00:00:00 GMT\r\nContent-Length: 0\r\n\r\n"
    )
    settings = world.settings.model_copy(update={"webhook_max_attempts": 2})
    async with raw_server(busy) as server, dispatching(settings):
        event_id = await world.add_webhook(server.url())
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["retrying", "failed"]


LONG_LABEL = f"http://{'a' * 64}.example/"


@pytest.mark.parametrize(
    "target", ["", "nonsense", "http://", "https://[::1", "ftp://example.com", "http://a b/", LONG_LABEL]
)
async def test_a_target_that_is_not_a_url_ends_with_a_reason_and_delays_no_other(world: World, target: str) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(target)
        healthy = await world.add_webhook(receiver.url)
        await finished(world, event_id, "dead")
        await finished(world, healthy)
    [delivery] = await world.deliveries(event_id)
    assert delivery["outcome"] == "failed"
    assert "URL" in str(delivery["error"])


async def test_receivers_that_hang_delay_no_other(world: World) -> None:
    settings = world.settings.model_copy(update={"webhook_concurrency": 8, "webhook_timeout_s": 20.0, "drain_s": 0.1})
    async with raw_server(hang) as one, raw_server(hang) as two, WebhookReceiver(world.secret) as receiver:
        for _ in range(50):
            await world.add_webhook(one.url())
            await world.add_webhook(two.url())
        async with dispatching(settings):
            await eventually(lambda: one.connections and two.connections, what="the first attempts to hang")
            start = time.monotonic()
            for _ in range(20):
                await world.add_webhook(receiver.url)
            await receiver.wait_for(20, timeout_s=15.0)
            assert time.monotonic() - start < settings.webhook_timeout_s
            assert one.connections <= 2
            assert two.connections <= 2


async def test_a_hundred_webhooks_to_one_host_each_arrive_once(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings), dispatching(world.settings):
        sent = {str(await world.add_webhook(receiver.url)) for _ in range(100)}
        await receiver.wait_for(100)
        await eventually(lambda: pending_is(world, 0), what="all rows to be done")
    assert set(receiver.verified) == sent
    assert len(receiver.received) == 100


async def pending_is(world: World, count: int) -> bool:
    return await world.database.fetchval("select count(*) from loraq.outbox where state = 'pending'") == count


async def test_an_attempt_whose_claim_expired_is_repeated_with_a_new_signature(world: World) -> None:
    """As after a kill between the receiver's 2xx and the database write."""
    async with WebhookReceiver(world.secret) as receiver:
        event_id = await world.add_webhook(receiver.url)
        outbox = Outbox(world.database, world.settings.pool)
        [claimed] = await outbox.claim_webhooks(CAPACITY, timedelta(seconds=60))
        assert await outbox.claim_webhooks(CAPACITY, timedelta(seconds=60)) == []
        await world.database.execute(EXPIRE_CLAIM, event_id)
        async with dispatching(world.settings):
            await receiver.wait_for(1)
            await finished(world, event_id)
    assert claimed.attempts == 1
    assert [row["attempt"] for row in await world.deliveries(event_id)] == [2]


async def test_a_write_under_an_expired_claim_changes_nothing(world: World) -> None:
    outbox = Outbox(world.database, world.settings.pool)
    event_id = await world.add_webhook("http://127.0.0.1/")
    [stale] = await outbox.claim_webhooks(CAPACITY, timedelta(seconds=60))
    await world.database.execute(EXPIRE_CLAIM, event_id)
    [fresh] = await outbox.claim_webhooks(CAPACITY, timedelta(seconds=60))
    await outbox.finish_webhook(stale, Failed("late"), None, timedelta(0))
    assert await world.state(event_id) == "pending"
    await outbox.finish_webhook(fresh, Delivered(), 200, timedelta(0))
    await outbox.finish_webhook(fresh, Delivered(), 200, timedelta(0))
    assert await world.state(event_id) == "done"
    await outbox.finish_webhook(stale, Retry(timedelta(0), "later still"), None, timedelta(0))  # the same attempt again
    assert await world.state(event_id) == "done"
    assert await world.outcomes(event_id) == ["failed", "delivered"]


async def test_rows_of_another_pool_are_ignored(world: World) -> None:
    elsewhere = world.settings.model_copy(update={"pool": "elsewhere"})
    await ensure_topics(elsewhere)
    async with WebhookReceiver(world.secret) as receiver, dispatching(elsewhere):
        foreign = await world.add_webhook(receiver.url)
        await world.database.execute("update loraq.outbox set pool = 'elsewhere' where event_id <> $1", foreign)
        own = await world.add_webhook(receiver.url)
        await world.database.execute("update loraq.outbox set pool = 'elsewhere' where event_id = $1", own)
        await finished(world, own)
    assert await world.state(foreign) == "pending"


async def test_stopping_waits_for_attempts_in_flight(world: World) -> None:
    requested, may_respond = asyncio.Event(), asyncio.Event()

    async def slow(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.set()
        await may_respond.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()

    async with raw_server(slow) as server:
        event_id = await world.add_webhook(server.url())
        async with dispatching(world.settings) as life:
            await requested.wait()
            life.stop.set()
            may_respond.set()
        assert await world.state(event_id) == "done"


async def test_it_continues_when_postgres_drops_every_connection(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings) as life:
        for count in range(1, 4):
            await world.add("event")
            event_id = await world.add_webhook(receiver.url)
            await receiver.wait_for(count)
            await drop_connections(world)
            await finished(world, event_id)
        assert life.failure is None
    assert len(receiver.received) == 3


async def drop_connections(world: World) -> None:
    await world.database.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )


async def test_a_claim_respects_the_capacity_of_each_host(world: World) -> None:
    outbox = Outbox(world.database, world.settings.pool)
    for number in range(8):
        for host in ("busy", "full", "Idle"):
            await world.add_webhook(f"https://{host}:8443/{number}")
    capacity = Capacity(total=6, by_host={"busy:8443": 1, "full:8443": 0}, other_hosts=3)
    claimed = [row.host for row in await outbox.claim_webhooks(capacity, timedelta(seconds=60))]
    assert sorted(claimed) == ["busy:8443", "idle:8443", "idle:8443", "idle:8443"]
    small = Capacity(total=2, by_host={}, other_hosts=3)
    assert len(await outbox.claim_webhooks(small, timedelta(seconds=60))) == 2
