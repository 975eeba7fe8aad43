"""Outbox rows become webhooks: a real Postgres, real HTTP servers, the dispatcher in the test's loop."""

import asyncio
import os
import time
from datetime import timedelta
from uuid import UUID

import pytest
from prometheus_client import REGISTRY

from services.dispatcher.outbox import Outbox
from services.dispatcher.slots import Room
from services.tenants.secrets import new_webhook_secret
from services.webhooks.outcome import Delivered, Failed, Retry
from services.webhooks.receiver import ReceivedWebhook, WebhookReceiver
from tests.services.dispatcher.conftest import BODY, TENANT, World, dispatching
from tests.services.dispatcher.servers import OK, hang, raw_server, saying
from tests.waiting import eventually

ROOM = Room(total=10, by_host={}, other_hosts=5)
REPLACE_SECRET = "update loraq.tenants set webhook_secret = $1 where tenant = $2"
CLAIM_OF_ONE_LAPSES = "update loraq.outbox set next_attempt_at = now() where event_id = $1"


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


async def test_a_row_is_sent_at_once_when_it_is_notified(world: World) -> None:
    settings = world.settings.model_copy(update={"poll_interval_s": 60.0})
    async with WebhookReceiver(world.secret) as receiver, dispatching(settings):
        await world.add_webhook(receiver.url)
        await receiver.wait_for(1, timeout_s=20.0)
        await world.add_webhook(receiver.url)
        await receiver.wait_for(2, timeout_s=20.0)


async def test_rows_that_nobody_announced_are_found_by_polling(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id)
        await world.database.execute("update loraq.outbox set state = 'pending', next_attempt_at = now()")
        await eventually(lambda: len(receiver.received) == 2, what="the second attempt")


async def test_attempts_are_repeated_under_one_id_until_the_receiver_takes_it(world: World) -> None:
    answers = iter([500, 429, 302, 200])

    def answer(_: ReceivedWebhook) -> int:
        return next(answers)

    async with WebhookReceiver(world.secret, answer=answer) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id)
    assert {webhook.webhook_id for webhook in receiver.received} == {str(event_id)}
    assert all(webhook.problem is None for webhook in receiver.received)
    deliveries = await world.deliveries(event_id)
    assert [row["status_code"] for row in deliveries] == [500, 429, 302, 200]
    assert [row["attempt"] for row in deliveries] == [1, 2, 3, 4]
    assert await world.outcomes(event_id) == ["retrying", "retrying", "retrying", "delivered"]
    assert all(row["next_attempt_at"] is not None for row in deliveries[:3])


async def test_exhausted_attempts_end_it(world: World) -> None:
    settings = world.settings.model_copy(update={"webhook_max_attempts": 3})
    async with WebhookReceiver(world.secret, answer=lambda _: 500) as receiver, dispatching(settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["retrying", "retrying", "failed"]
    assert (await world.deliveries(event_id))[-1]["error"] == "HTTP 500; given up after 3 attempts"


async def test_410_ends_it_at_once(world: World) -> None:
    async with WebhookReceiver(world.secret, answer=lambda _: 410) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["failed"]
    assert len(receiver.received) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"])
async def test_an_address_inside_is_blocked_and_the_tenant_learns_no_more(
    world: World, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = world.settings.model_copy(update={"webhook_allow_networks": ()})
    async with raw_server(OK) as server, dispatching(settings):
        event_id = await world.add_webhook(server.url(host))
        await finished(world, event_id, "dead")
        assert server.connections == 0
    [delivery] = await world.deliveries(event_id)
    assert (delivery["outcome"], delivery["error"], delivery["status_code"]) == ("blocked", "address not allowed", None)
    assert "LORAQ_WEBHOOK_ALLOW_NETWORKS" in "".join(capsys.readouterr()), "the operator's log says what would allow it"


async def test_each_tenants_webhooks_carry_its_own_secret(world: World) -> None:
    other = new_webhook_secret()
    await world.add_tenant("other", other)
    async with WebhookReceiver(other) as receiver, dispatching(world.settings):
        theirs = await world.add_webhook(receiver.url, tenant="other")
        await world.add_webhook(receiver.url)
        await eventually(lambda: len(receiver.received) >= 2, what="both webhooks")
        assert set(receiver.verified) == {str(theirs)}


async def test_a_secret_that_cannot_be_opened_raises_an_alarm_and_is_retried(world: World) -> None:
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


async def test_a_tenant_that_is_gone_holds_up_nobody(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        orphan = await world.add_webhook(receiver.url, tenant="nobody")
        healthy = await world.add_webhook(receiver.url)
        await finished(world, healthy)
        await eventually(lambda: world.deliveries(orphan), what="an attempt")


async def test_an_attempt_that_breaks_counts_and_ends_some_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_(*_: object) -> None:
        raise KeyError("no receiver can be met that does this")

    before = alarms("webhook_broke")
    monkeypatch.setattr("services.dispatcher.sender.Sender.send", break_)
    async with dispatching(world.settings.model_copy(update={"webhook_max_attempts": 2})):
        event_id = await world.add_webhook("http://127.0.0.1:8080/")
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["retrying", "failed"]
    assert alarms("webhook_broke") == before + 2


async def test_a_receiver_that_wants_another_attempt_at_no_time_that_there_is_gets_it_by_the_schedule(
    world: World,
) -> None:
    asking = saying(b"HTTP/1.1 503 X\r\nRetry-After: Thu, 01 Jan 99999999999 00:00:00 GMT\r\nContent-Length: 0\r\n\r\n")
    settings = world.settings.model_copy(update={"webhook_max_attempts": 2})
    async with raw_server(asking) as server, dispatching(settings):
        event_id = await world.add_webhook(server.url())
        await finished(world, event_id, "dead")
    assert await world.outcomes(event_id) == ["retrying", "failed"]


LONG_LABEL = f"http://{'a' * 64}.example/"


@pytest.mark.parametrize(
    "target", ["", "nonsense", "http://", "https://[::1", "ftp://example.com", "http://a b/", LONG_LABEL]
)
async def test_a_target_that_is_no_url_ends_with_a_reason_and_holds_up_nobody(world: World, target: str) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(target)
        healthy = await world.add_webhook(receiver.url)
        await finished(world, event_id, "dead")
        await finished(world, healthy)
    [delivery] = await world.deliveries(event_id)
    assert delivery["outcome"] == "failed"
    assert "URL" in str(delivery["error"])


async def test_endpoints_that_hang_hold_up_nobody(world: World) -> None:
    settings = world.settings.model_copy(update={"webhook_concurrency": 8, "webhook_timeout_s": 20.0, "drain_s": 0.1})
    async with raw_server(hang) as one, raw_server(hang) as two, WebhookReceiver(world.secret) as receiver:
        for _ in range(50):
            await world.add_webhook(one.url())
            await world.add_webhook(two.url())
        async with dispatching(settings):
            await eventually(lambda: one.connections and two.connections, what="the hanging endpoints to be tried")
            begun = time.monotonic()
            for _ in range(20):
                await world.add_webhook(receiver.url)
            await receiver.wait_for(20, timeout_s=15.0)
            assert time.monotonic() - begun < settings.webhook_timeout_s
            assert one.connections <= 2
            assert two.connections <= 2


async def test_a_hundred_webhooks_to_one_host_all_arrive_once(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings), dispatching(world.settings):
        sent = {str(await world.add_webhook(receiver.url)) for _ in range(100)}
        await receiver.wait_for(100)
        await eventually(lambda: pending_is(world, 0), what="all rows to be done")
    assert set(receiver.verified) == sent
    assert len(receiver.received) == 100


async def pending_is(world: World, count: int) -> bool:
    return await world.database.fetchval("select count(*) from loraq.outbox where state = 'pending'") == count


async def test_an_attempt_whose_claim_lapsed_is_repeated_with_a_signature_of_its_own(world: World) -> None:
    """As after a kill between the receiver's 2xx and the mark."""
    async with WebhookReceiver(world.secret) as receiver:
        event_id = await world.add_webhook(receiver.url)
        outbox = Outbox(world.database, world.settings.pool)
        [claimed] = await outbox.claim_webhooks(ROOM, timedelta(seconds=60))
        assert await outbox.claim_webhooks(ROOM, timedelta(seconds=60)) == []
        await world.database.execute(CLAIM_OF_ONE_LAPSES, event_id)
        async with dispatching(world.settings):
            await receiver.wait_for(1)
            await finished(world, event_id)
    assert claimed.attempts == 1
    assert [row["attempt"] for row in await world.deliveries(event_id)] == [2]


async def test_what_a_lapsed_claim_writes_afterwards_changes_nothing(world: World) -> None:
    outbox = Outbox(world.database, world.settings.pool)
    event_id = await world.add_webhook("http://127.0.0.1/")
    [stale] = await outbox.claim_webhooks(ROOM, timedelta(seconds=60))
    await world.database.execute(CLAIM_OF_ONE_LAPSES, event_id)
    [fresh] = await outbox.claim_webhooks(ROOM, timedelta(seconds=60))
    await outbox.finish_webhook(stale, Failed("late"), None, timedelta(0))
    assert await world.state(event_id) == "pending"
    await outbox.finish_webhook(fresh, Delivered(), 200, timedelta(0))
    await outbox.finish_webhook(fresh, Delivered(), 200, timedelta(0))
    assert await world.state(event_id) == "done"
    await outbox.finish_webhook(stale, Retry(timedelta(0), "later still"), None, timedelta(0))  # the same attempt again
    assert await world.state(event_id) == "done"
    assert await world.outcomes(event_id) == ["failed", "delivered"]


async def test_another_pools_rows_are_left_alone(world: World) -> None:
    elsewhere = world.settings.model_copy(update={"pool": "elsewhere"})
    async with WebhookReceiver(world.secret) as receiver, dispatching(elsewhere):
        foreign = await world.add_webhook(receiver.url)
        await world.database.execute("update loraq.outbox set pool = 'elsewhere' where event_id <> $1", foreign)
        own = await world.add_webhook(receiver.url)
        await world.database.execute("update loraq.outbox set pool = 'elsewhere' where event_id = $1", own)
        await finished(world, own)
    assert await world.state(foreign) == "pending"


async def test_stopping_lets_attempts_under_way_end(world: World) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await may_answer.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()

    async with raw_server(slow) as server:
        event_id = await world.add_webhook(server.url())
        async with dispatching(world.settings) as life:
            await asked.wait()
            life.stop.set()
            may_answer.set()
        assert await world.state(event_id) == "done"


async def test_it_goes_on_when_postgres_drops_every_connection(world: World) -> None:
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


async def test_a_claim_takes_for_each_host_what_it_has_room_for(world: World) -> None:
    outbox = Outbox(world.database, world.settings.pool)
    for number in range(8):
        for host in ("busy", "full", "Idle"):
            await world.add_webhook(f"https://{host}:8443/{number}")
    room = Room(total=6, by_host={"busy:8443": 1, "full:8443": 0}, other_hosts=3)
    claimed = [row.host for row in await outbox.claim_webhooks(room, timedelta(seconds=60))]
    assert sorted(claimed) == ["busy:8443", "idle:8443", "idle:8443", "idle:8443"]
    small = Room(total=2, by_host={}, other_hosts=3)
    assert len(await outbox.claim_webhooks(small, timedelta(seconds=60))) == 2
