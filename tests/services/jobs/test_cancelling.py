"""`loraq jobs cancel` and the producer's `cancel`, end to end, in every state of the job."""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from pydantic import SecretStr

from services.client.identifiers import uuid7
from services.client.producer import JobProducer
from services.client.signing import SIGNATURE_HEADER, signature
from services.errors import InputError
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.processes import loraq
from tests.waiting import eventually

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text(encoding="utf-8")
[CANCELLING] = re.findall(r"^```python\n(from services.client.producer .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


async def test_a_running_and_a_later_job_are_cancelled_and_an_ended_one_is_reported(settings: Settings) -> None:
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        hanging = await world.send_job(prompt="wait")
        await eventually(lambda: is_running(world, hanging), what="the job to run")
        cancelled = await cancel(settings, hanging, "--json")
        row = json.loads(cancelled.stdout)
        assert (cancelled.returncode, row["state"], row["error_code"]) == (0, "cancelled", "cancelled")

        later = uuid7()
        async with JobProducer.from_settings(settings) as producer:
            receipt = await producer.cancel(TENANT, later)
        assert receipt.topic == settings.control_topic
        await eventually(
            lambda: remembered(world, later), what="the cancellation, which Kafka does not order before the job"
        )
        await world.send(job_request(job_id=str(later)))
        [row] = await world.ended(later)
        assert (row["state"], row["attempts"]) == ("cancelled", 0)

        [done] = await world.ended(await world.send_job())
        late = await cancel(settings, done["job_id"])
        assert late.returncode == 1
        assert late.stderr == f"loraq: job {done['job_id']} was not cancelled: it had already ended as succeeded\n"


async def is_running(world: World, job_id: UUID) -> bool:
    return (await world.jobs()).get(job_id, {}).get("state") == "running"


async def cancel(
    settings: Settings, job_id: UUID, *options: str, tenant: str = TENANT, wait: bool = True
) -> "subprocess.CompletedProcess[str]":
    arguments = ["jobs", "cancel", str(job_id), "--tenant", tenant, *(["--wait"] if wait else []), *options]
    return await asyncio.to_thread(loraq, *arguments, settings=settings)


async def test_a_cancellation_claims_no_success_for_a_job_that_its_tenant_does_not_have(settings: Settings) -> None:
    async with open_world(settings) as world, running_worker(settings, FAULTY_ENGINE):
        async with world.pool.acquire() as connection:
            await add_tenant(connection, SecretBox(settings.secret_key), "other")
        mine = await world.send_job(prompt="wait")
        await eventually(lambda: is_running(world, mine), what="the job to run")
        foreign = await cancel(settings, mine, tenant="other", wait=False)
        assert (foreign.returncode, foreign.stdout) == (1, "")
        assert foreign.stderr == (
            f"loraq: no such job of tenant other: {mine}; the cancellation is remembered in case the job arrives\n"
        )
        unknown = uuid7()
        sent = await cancel(settings, unknown, "--json", wait=False)
        assert (sent.returncode, json.loads(sent.stdout)["state"]) == (1, None)
        await eventually(lambda: remembered(world, unknown), what="the cancellation to be remembered")
        assert await is_running(world, mine)

        own = await cancel(settings, mine, wait=False)
        assert (own.returncode, own.stdout) == (0, "")
        assert own.stderr == f"Cancellation of job {mine} was sent; the job was running.\n"
        assert [row["state"] for row in await world.ended(mine)] == ["cancelled"]
        assert (await cancel(settings, mine, wait=False)).stderr == f"Job {mine} is cancelled.\n"

        done = await world.send_job()
        await world.ended(done)
        late = await cancel(settings, done, wait=False)
        assert late.returncode == 1
        assert late.stderr == f"loraq: job {done} was not cancelled: it had already ended as succeeded\n"


async def test_a_cancellation_signed_with_another_key_has_no_effect(settings: Settings) -> None:
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world, running_worker(settings):
        forged, mine = uuid7(), uuid7()
        for key, job_id in (("lqpk_another_tenant", forged), (world.producer_key, mine)):
            async with JobProducer.from_settings(settings, producer_key=key) as producer:
                await producer.cancel(TENANT, job_id)
        await eventually(lambda: remembered(world, mine), what="the signed cancellation to be stored")
        for job_id in (forged, mine):
            value = json.dumps(job_request(job_id=str(job_id))).encode()
            header = (SIGNATURE_HEADER, signature(world.producer_key.encode(), value).encode())
            await world.send(value, headers=[header])
        rows = await world.ended(forged, mine)
    assert [row["state"] for row in rows] == ["succeeded", "cancelled"]


async def remembered(world: World, job_id: UUID) -> bool:
    rows = await world.rows("select job_id from loraq.cancellations")
    return job_id in {row["job_id"] for row in rows}


async def test_the_example_of_the_page_cancels_a_job(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, object] = {}
    exec(CANCELLING, scope)  # noqa: S102  # the page's own code
    scope["load_settings"] = lambda: settings
    async with open_world(settings) as world, running_worker(settings):
        job_id = uuid7()
        await scope["cancel"](TENANT, str(job_id))  # type: ignore[operator]
        await eventually(lambda: remembered(world, job_id), what="the cancellation to be remembered")


async def test_an_invalid_cancellation_is_refused(settings: Settings) -> None:
    async with open_world(settings):
        for wait in (False, True):
            unknown = await cancel(settings, uuid7(), tenant="nobody", wait=wait)
            assert (unknown.returncode, unknown.stdout) == (1, "")
            assert unknown.stderr == "loraq: there is no tenant nobody; add it with `loraq tenants add nobody`\n"
        later = uuid7()
        waiting = await cancel(settings, later, "--wait-timeout", "1")
        assert waiting.returncode == 1
        assert waiting.stderr.startswith(f"No such job of tenant {TENANT} yet: {later}; waiting in case it arrives.\n")
        away = settings.model_copy(update={"database_url": SecretStr("postgresql://loraq@127.0.0.1:1/loraq")})
        unreachable = await cancel(away, later, wait=False)
        assert (unreachable.returncode, unreachable.stdout) == (1, "")
        assert "could not connect to Postgres at 127.0.0.1:1 (LORAQ_DATABASE_URL)" in unreachable.stderr
        async with JobProducer.from_settings(settings) as producer:
            with pytest.raises(InputError, match="field 'tenant'"):
                await producer.cancel("Not A Name", uuid7())
            with pytest.raises(InputError, match=r"field 'job_id': .*UUID.*got '0192…'"):
                await producer.cancel(TENANT, "0192…")
