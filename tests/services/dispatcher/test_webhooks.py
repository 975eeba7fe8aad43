"""Outbox rows become webhooks: against a real Postgres and real HTTP servers."""

import asyncio

from services.webhook_receiver import WebhookReceiver
from tests.services.dispatcher.conftest import BODY, World, dispatching
from tests.waiting import eventually


async def test_a_due_row_is_delivered_signed_and_recorded(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver, dispatching(world.settings):
        event_id = await world.add_webhook(receiver.url)
        [webhook] = await receiver.wait_for(1)
        await eventually(lambda: world.deliveries(event_id), what="the attempt's row")
    assert webhook.webhook_id == str(event_id)
    assert webhook.body.decode() == BODY
    assert await world.state(event_id) == "done"
    [delivery] = await world.deliveries(event_id)
    assert (delivery["outcome"], delivery["status_code"], delivery["attempt"]) == ("delivered", 204, 1)
    assert (delivery["url"], delivery["error"], delivery["next_attempt_at"]) == (receiver.url, None, None)
