"""Outputs of unusual sizes and contents, from the engine to the row and the webhook."""

import json
from pathlib import Path

from schemas.common import MAX_INLINE_OUTPUT_BYTES
from schemas.events import WebhookBody
from services.localstack.ports import free_ports
from services.process.settings import Settings
from services.s3.store import Location
from tests.integration.workers import running_worker
from tests.integration.world import open_world

MANY = {"max_tokens": 100_000}


async def test_a_large_output_is_stored_in_s3_and_one_too_large_fails(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"max_result_bytes": 100_000})
    large, too_large = "x" * 70_000, "x" * 100_001
    async with open_world(settings) as world, running_worker(settings):
        webhook = {"url": "http://receiver.invalid/"}
        stored = await world.send_job(prompt=large, sampling=MANY, webhook=webhook)
        failed = await world.send_job(prompt=too_large, sampling=MANY | {"max_tokens": 131_072})
        rows = await world.ended(stored, failed)
        results = await world.results()
        [hook] = await world.rows("select body from loraq.outbox where kind = 'webhook'")
        await world.objects.get_to(Location.parse(results[stored]["output_url"]), tmp_path / "output", 100_000)
        usage = await world.rows("select completion_tokens, wasted_tokens from loraq.usage_hourly")
    assert (tmp_path / "output").read_text() == large
    assert results.keys() == {stored}
    assert results[stored]["output_text"] is None
    body = WebhookBody.model_validate_json(hook["body"])
    assert (body.data.output_text, body.data.output_url) == (None, results[stored]["output_url"])
    assert [row["error_code"] for row in rows] == [None, "result_too_large"]
    assert "LORAQ_MAX_RESULT_BYTES" in rows[1]["error_message"]
    assert [dict(row) for row in usage] == [{"completion_tokens": 70_000, "wasted_tokens": 100_001}]


async def test_while_s3_is_unreachable_a_large_output_is_stored_in_its_row_and_its_event_stays_small(
    settings: Settings,
) -> None:
    text = "\x01" * 100_000  # six times as long once it is escaped
    unreachable = settings.model_copy(
        update={"s3_endpoint": f"http://127.0.0.1:{free_ports(1)[0]}", "s3_timeout_s": 1.0}
    )
    async with open_world(settings) as world, running_worker(unreachable):
        webhook = {"url": "http://receiver.invalid/"}
        job_id = await world.send_job(prompt=text, sampling=MANY, webhook=webhook)
        await world.ended(job_id)
        results = await world.results()
        outbox = await world.rows("select kind, body from loraq.outbox")
    assert results[job_id]["output_text"] == text
    assert {row["kind"] for row in outbox} == {"event", "webhook"}
    assert all(len(row["body"]) < MAX_INLINE_OUTPUT_BYTES for row in outbox)


async def test_characters_that_postgres_cannot_store_are_replaced(settings: Settings) -> None:
    async with open_world(settings) as world, running_worker(settings):
        job_id = await world.send_job(
            prompt="a\x00b\u2028é", sampling=MANY, webhook={"url": "http://receiver.invalid/"}
        )
        await world.ended(job_id)
        results = await world.results()
        [hook] = await world.rows("select body from loraq.outbox where kind = 'webhook'")
    assert results[job_id]["output_text"] == "a\u2400b\u2028é"
    assert json.loads(hook["body"])["data"]["output_text"] == "a\u2400b\u2028é"
