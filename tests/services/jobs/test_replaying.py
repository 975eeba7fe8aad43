"""`loraq jobs replay`: a job that did not succeed is sent again under a new id, from its record in Kafka."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from schemas.common import Lane
from services.client.identifiers import uuid7
from services.client.signing import SIGNATURE_HEADER, signature
from services.errors import InputError
from services.jobs.record_lookup import JobIdentity, find_record
from services.jobs.replaying import ReplayRequest, replay_job
from services.process.settings import Settings
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.processes import loraq

PAST = "2020-01-01T00:00:00Z"


def replay_request(job_id: UUID) -> ReplayRequest:
    return ReplayRequest(job_id, tenant=None, lane=None, deadline=None, again=False, force=False)


async def test_a_job_that_did_not_succeed_is_replayed_once(broker_settings: Settings) -> None:
    settings = broker_settings.model_copy(update={"max_attempts": 1})
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        await a_failed_job_runs_again_as_a_new_job_that_names_it(settings, world)
        await an_expired_job_is_replayed_without_its_past_deadline(settings, world)
        await a_job_with_a_derived_id_is_found(settings, world)
        await jobs_that_cannot_be_replayed_are_refused(settings, world)


async def a_failed_job_runs_again_as_a_new_job_that_names_it(settings: Settings, world: World) -> None:
    job_id = await world.send_job(prompt="fail", lane=Lane.BATCH, metadata={"a": 1})
    await world.ended(job_id)
    receipt = await replay_job(settings, replay_request(job_id))
    [row] = await world.ended(receipt.job_id)
    assert (row["replay_of"], row["lane"], row["metadata"], row["state"]) == (job_id, "batch", {"a": 1}, "failed")
    with pytest.raises(InputError, match=f"was already replayed as job {receipt.job_id} at .*--again"):
        await replay_job(settings, replay_request(job_id))
    again = await replay_job(settings, replace(replay_request(job_id), again=True, lane=Lane.INTERACTIVE))
    [row] = await world.ended(again.job_id)
    assert (row["replay_of"], row["lane"]) == (job_id, "interactive")


async def an_expired_job_is_replayed_without_its_past_deadline(settings: Settings, world: World) -> None:
    job_id = await world.send_job(deadline=PAST)
    [old] = await world.ended(job_id)
    assert old["state"] == "expired"
    with pytest.raises(InputError, match="has already passed"):
        await replay_job(settings, replace(replay_request(job_id), deadline=datetime.fromisoformat(PAST)))
    receipt = await replay_job(
        settings, replace(replay_request(job_id), deadline=datetime.now(UTC) + timedelta(hours=1))
    )
    [row] = await world.ended(receipt.job_id)
    assert row["state"] == "succeeded"


async def a_job_with_a_derived_id_is_found(settings: Settings, world: World) -> None:
    known = set(await world.jobs())
    await world.send(job_request(deadline=PAST))
    await world.ended(await world.send_job(prompt="another"))
    [job_id] = [each for each, row in (await world.jobs()).items() if each not in known and row["state"] == "expired"]
    receipt = await replay_job(settings, replay_request(job_id))
    [row] = await world.ended(receipt.job_id)
    assert (row["replay_of"], row["state"]) == (job_id, "succeeded")


async def jobs_that_cannot_be_replayed_are_refused(settings: Settings, world: World) -> None:
    done = await world.send_job()
    await world.ended(done)
    with pytest.raises(InputError, match="succeeded; give --force to replay it"):
        await replay_job(settings, replay_request(done))
    receipt = await replay_job(settings, replace(replay_request(done), force=True))
    await world.ended(receipt.job_id)
    with pytest.raises(InputError, match="no such job"):
        await replay_job(settings, replay_request(uuid4()))
    with pytest.raises(InputError, match="belongs to pool 'default'; set LORAQ_POOL"):
        await replay_job(settings.model_copy(update={"pool": "other"}), replay_request(done))


async def test_a_signed_job_is_signed_again_and_a_deleted_record_is_reported(settings: Settings) -> None:
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world:
        async with running_worker(settings):
            job_id = uuid7()
            value = json.dumps(job_request(job_id=str(job_id), deadline=PAST)).encode()
            header = (SIGNATURE_HEADER, signature(world.producer_key.encode(), value).encode())
            await world.send(value, headers=[header])
            await world.ended(job_id)
            replayed = await asyncio.to_thread(
                loraq, "jobs", "replay", str(job_id), "--tenant", TENANT, "--json", settings=settings
            )
            assert replayed.returncode == 0, replayed.stderr
            new_id = UUID(json.loads(replayed.stdout)["job_id"])
            [row] = await world.ended(new_id)
            assert (row["state"], row["replay_of"]) == ("succeeded", job_id)
        await world.pool.execute("update loraq.tenants set producer_key = '\\x01'")
        with pytest.raises(InputError, match=rf"cannot be signed .*'{TENANT}' is damaged in the database"):
            await replay_job(settings, replace(replay_request(job_id), again=True))
        for job_id in (uuid7(), uuid7(0), uuid7(2**48 - 1)):
            wanted = JobIdentity(TENANT, job_id, Lane.STANDARD, b"another", datetime.now(UTC))
            with pytest.raises(InputError, match=f"the record of job {job_id} is not in .*submit the job again"):
                await find_record(settings, wanted)
