"""`loraq webhooks` with a real Postgres, a real dispatcher, and receivers that fail at first."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from services.process.settings import Settings
from services.webhooks.receiver import ReceivedWebhook, WebhookReceiver
from tests.processes import loraq
from tests.services.dispatcher.conftest import TENANT, World, dispatching, make_world, quick
from tests.waiting import eventually

KEY = "insert into loraq.job_keys (tenant, job_id, accepted_on, fingerprint) select $1, $2, current_date, ''"

ATTEMPT = """
insert into loraq.webhook_deliveries (webhook_id, tenant, job_id, url, attempt, outcome, started_at, duration_ms)
values (gen_random_uuid(), $1, $2, 'http://127.0.0.1:8080/', 1, 'failed', now(), 1)
"""


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    async with make_world(quick(settings, webhook_max_attempts=2)) as world:
        yield world


async def webhooks(world: World, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a thread, while the dispatcher runs in this event loop."""
    return await asyncio.to_thread(loraq, "webhooks", *arguments, settings=world.settings)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def job_of(world: World, webhook_id: UUID) -> str:
    return str(await world.database.fetchval("select job_id from loraq.outbox where event_id = $1", webhook_id))


async def in_state(world: World, webhook_id: UUID, state: str) -> None:
    async def check() -> bool:
        return await world.state(webhook_id) == state

    await eventually(check, what=f"the webhook to be {state}")


async def test_a_dead_webhook_is_listed_and_resent_under_its_id_with_a_new_schedule(world: World) -> None:
    statuses = iter([500, 500, 500, 204, 204])

    def respond(_: ReceivedWebhook) -> int:
        return next(statuses)

    async with WebhookReceiver(world.secret, respond=respond) as receiver, dispatching(world.settings):
        dead = await world.add_webhook(receiver.url)
        await in_state(world, dead, "dead")
        [listed] = lines((await webhooks(world, "list", "--tenant", TENANT, "--json")).stdout)
        assert (listed["outcome"], listed["attempts"], listed["status_code"]) == ("failed", 2, 500)
        assert listed["reason"] == "HTTP 500; given up after 2 attempts"
        assert receiver.url.endswith(f"{listed['host']}/")
        assert "given up after 2 attempts" in (await webhooks(world, "list")).stdout
        job_id = await job_of(world, dead)
        sent = await webhooks(world, "resend", job_id, "--json")
        assert (sent.returncode, [row["webhook_id"] for row in lines(sent.stdout)]) == (0, [str(dead)])
        await in_state(world, dead, "done")
        assert (await webhooks(world, "list")).stderr == "No matching webhooks.\n"
        await world.database.execute(KEY, TENANT, UUID(job_id))
        refused = await webhooks(world, "resend", job_id)
        assert refused.returncode == 1
        assert "its webhook was delivered; give --again to resend it" in refused.stderr
        again = await webhooks(world, "resend", job_id, "--again")
        assert again.stderr == "Webhooks due now: 1; `loraq dispatcher` sends them.\n"
        await eventually(lambda: len(receiver.received) == 5, what="the fifth attempt")
        await in_state(world, dead, "done")
    assert {webhook.webhook_id for webhook in receiver.received} == {str(dead)}
    assert await world.outcomes(dead) == ["retrying", "failed", "retrying", "delivered", "delivered"]
    assert [row["attempt"] for row in await world.deliveries(dead)] == [1, 2, 3, 4, 5]


async def test_webhooks_to_a_recovered_host_are_resent_at_once_and_others_are_not(world: World) -> None:
    settings = world.settings.model_copy(update={"webhook_retry_delays_s": (9000.0,), "webhook_max_attempts": 8})
    async with WebhookReceiver(world.secret, respond=lambda _: 503) as other, dispatching(settings):
        elsewhere = await world.add_webhook(other.url)
        statuses = iter([503, 204])
        async with WebhookReceiver(world.secret, respond=lambda _: next(statuses)) as receiver:
            waiting = await world.add_webhook(receiver.url)
            await eventually(lambda: world.deliveries(waiting), what="an attempt")
            await eventually(lambda: world.deliveries(elsewhere), what="an attempt")
            host = receiver.url.split("/")[2]
            [listed] = lines((await webhooks(world, "list", "--host", host, "--outcome", "retrying", "--json")).stdout)
            assert listed["next_attempt_at"] is not None
            assert (await webhooks(world, "resend", "--host", host)).stderr.startswith("Webhooks due now: 1;")
            await in_state(world, waiting, "done")
    assert await world.outcomes(elsewhere) == ["retrying"]


async def test_jobs_with_nothing_to_resend_are_explained(world: World) -> None:
    unknown, none, untried, deleted = (uuid4() for _ in range(4))
    for job_id in (none, deleted):
        await world.database.execute(KEY, TENANT, job_id)
    untried = UUID(await job_of(world, await world.add_webhook("http://127.0.0.1:8080/")))
    await world.database.execute(KEY, TENANT, untried)
    await world.database.execute(ATTEMPT, TENANT, deleted)
    refused = await webhooks(world, "resend", *map(str, (unknown, none, untried, deleted)), "--tenant", TENANT)
    assert refused.returncode == 1
    assert f"job {unknown}: no such job" in refused.stderr
    assert f"job {none}: it has no webhook, or has not ended" in refused.stderr
    assert f"job {untried}: its webhook waits for its first attempt; is `loraq dispatcher` running?" in refused.stderr
    assert f"job {deleted}: its webhook is older than LORAQ_OUTBOX_RETENTION_DAYS and was deleted" in refused.stderr
    assert (await webhooks(world, "resend")).returncode == 2
    assert "there is no tenant nobody" in (await webhooks(world, "list", "--tenant", "nobody")).stderr
