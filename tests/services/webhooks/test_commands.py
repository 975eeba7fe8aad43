"""`loraq webhooks` as an operator runs it: a real Postgres, a real dispatcher, and receivers that learn to behave."""

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
    """Run a command while the dispatcher in this process goes on."""
    return await asyncio.to_thread(loraq, "webhooks", *arguments, settings=world.settings)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def job_of(world: World, webhook_id: UUID) -> str:
    return str(await world.database.fetchval("select job_id from loraq.outbox where event_id = $1", webhook_id))


async def in_state(world: World, webhook_id: UUID, state: str) -> None:
    async def check() -> bool:
        return await world.state(webhook_id) == state

    await eventually(check, what=f"the webhook to be {state}")


async def test_what_was_given_up_is_seen_and_sent_again_under_its_id_with_a_fresh_schedule(world: World) -> None:
    answers = iter([500, 500, 500, 204, 204])

    def answer(_: ReceivedWebhook) -> int:
        return next(answers)

    async with WebhookReceiver(world.secret, answer=answer) as receiver, dispatching(world.settings):
        given_up = await world.add_webhook(receiver.url)
        await in_state(world, given_up, "dead")
        [seen] = lines((await webhooks(world, "list", "--tenant", TENANT, "--json")).stdout)
        assert (seen["outcome"], seen["attempts"], seen["status_code"]) == ("failed", 2, 500)
        assert seen["reason"] == "HTTP 500; given up after 2 attempts"
        assert receiver.url.endswith(f"{seen['host']}/")
        assert "given up after 2 attempts" in (await webhooks(world, "list")).stdout
        job_id = await job_of(world, given_up)
        sent = await webhooks(world, "resend", job_id, "--json")
        assert (sent.returncode, [row["webhook_id"] for row in lines(sent.stdout)]) == (0, [str(given_up)])
        await in_state(world, given_up, "done")
        assert (await webhooks(world, "list")).stderr == "There is no such webhook.\n"
        await world.database.execute(KEY, TENANT, UUID(job_id))
        refused = await webhooks(world, "resend", job_id)
        assert refused.returncode == 1
        assert "its webhook was delivered; --again sends it once more" in refused.stderr
        again = await webhooks(world, "resend", job_id, "--again")
        assert again.stderr == "1 webhooks are due now; `loraq dispatcher` sends them.\n"
        await eventually(lambda: len(receiver.received) == 5, what="the fifth attempt")
        await in_state(world, given_up, "done")
    assert {webhook.webhook_id for webhook in receiver.received} == {str(given_up)}
    assert await world.outcomes(given_up) == ["retrying", "failed", "retrying", "delivered", "delivered"]
    assert [row["attempt"] for row in await world.deliveries(given_up)] == [1, 2, 3, 4, 5]


async def test_a_receiver_that_is_back_gets_what_waits_at_once_and_others_are_left_alone(world: World) -> None:
    settings = world.settings.model_copy(update={"webhook_retry_delays_s": (9000.0,), "webhook_max_attempts": 8})
    async with WebhookReceiver(world.secret, answer=lambda _: 503) as other, dispatching(settings):
        elsewhere = await world.add_webhook(other.url)
        answers = iter([503, 204])
        async with WebhookReceiver(world.secret, answer=lambda _: next(answers)) as receiver:
            waits = await world.add_webhook(receiver.url)
            await eventually(lambda: world.deliveries(waits), what="an attempt")
            await eventually(lambda: world.deliveries(elsewhere), what="an attempt")
            host = receiver.url.split("/")[2]
            [seen] = lines((await webhooks(world, "list", "--host", host, "--outcome", "retrying", "--json")).stdout)
            assert seen["next_attempt_at"] is not None
            assert (await webhooks(world, "resend", "--host", host)).stderr.startswith("1 webhooks are due now")
            await in_state(world, waits, "done")
    assert await world.outcomes(elsewhere) == ["retrying"]


async def test_what_cannot_be_sent_again_is_told(world: World) -> None:
    unknown, none, untried, deleted = (uuid4() for _ in range(4))
    for job_id in (none, deleted):
        await world.database.execute(KEY, TENANT, job_id)
    untried = UUID(await job_of(world, await world.add_webhook("http://127.0.0.1:8080/")))
    await world.database.execute(KEY, TENANT, untried)
    await world.database.execute(ATTEMPT, TENANT, deleted)
    said = await webhooks(world, "resend", *map(str, (unknown, none, untried, deleted)), "--tenant", TENANT)
    assert said.returncode == 1
    assert f"job {unknown}: there is no such job" in said.stderr
    assert f"job {none}: it has no webhook, or has not ended" in said.stderr
    assert f"job {untried}: its webhook waits for its first attempt; is `loraq dispatcher` running?" in said.stderr
    assert f"job {deleted}: its webhook is no longer kept (LORAQ_OUTBOX_RETENTION_DAYS)" in said.stderr
    assert (await webhooks(world, "resend")).returncode == 2
    assert "there is no tenant nobody" in (await webhooks(world, "list", "--tenant", "nobody")).stderr
