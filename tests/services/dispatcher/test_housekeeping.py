"""Finished rows are deleted after their retention time; pending rows are measured."""

from datetime import timedelta

from prometheus_client import REGISTRY

from services.dispatcher import housekeeping
from services.dispatcher.outbox import Outbox
from tests.services.dispatcher.conftest import World

AGE = """
update loraq.outbox set state = $2, finished_at = now() - $3::interval where event_id = $1
"""


async def test_only_finished_rows_past_their_retention_are_deleted(world: World) -> None:
    old_done, old_dead, young, pending = [await world.add("event") for _ in range(4)]
    await world.database.execute(AGE, old_done, "done", timedelta(days=8))
    await world.database.execute(AGE, old_dead, "dead", timedelta(days=8))
    await world.database.execute(AGE, young, "done", timedelta(days=6))
    assert await housekeeping.delete_finished(Outbox(world.database, world.settings.pool), timedelta(days=7)) == 2
    left = await world.database.fetch("select event_id from loraq.outbox")
    assert {row["event_id"] for row in left} == {young, pending}


async def test_many_rows_are_deleted_batch_by_batch(world: World) -> None:
    await world.add("event")
    await world.database.execute(
        """insert into loraq.outbox (event_id, kind, tenant, job_id, pool, type, body, state, finished_at)
           select gen_random_uuid(), 'event', 'acme', gen_random_uuid(), $1, 'job.failed', '{}', 'done',
                  now() - interval '30 days' from generate_series(1, 2500)""",
        world.settings.pool,
    )
    assert await housekeeping.delete_finished(Outbox(world.database, world.settings.pool), timedelta(days=7)) == 2500
    assert await world.database.fetchval("select count(*) from loraq.outbox") == 1


async def test_pending_rows_are_measured_and_fall_to_zero(world: World) -> None:
    outbox = Outbox(world.database, world.settings.pool)
    await world.add("event")
    await world.add_webhook("http://127.0.0.1/")
    await housekeeping.measure(outbox)
    assert REGISTRY.get_sample_value("loraq_outbox_pending", {"kind": "event"}) == 1
    assert REGISTRY.get_sample_value("loraq_outbox_pending", {"kind": "webhook"}) == 1
    await world.database.execute("update loraq.outbox set state = 'done'")
    await housekeeping.measure(outbox)
    assert REGISTRY.get_sample_value("loraq_outbox_pending", {"kind": "event"}) == 0
    assert REGISTRY.get_sample_value("loraq_outbox_oldest_seconds", {"kind": "webhook"}) == 0
