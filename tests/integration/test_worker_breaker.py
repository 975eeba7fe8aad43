"""The breaker in a running worker, and a dead-letter topic that fails."""

import asyncio
import json
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from services.client.signing import SIGNATURE_HEADER, signature
from services.kafka import clients as kafka
from services.process import telemetry
from services.process.lifecycle import Lifecycle
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.waiting import eventually

OTHERS = ("globex", "initech")


def with_breaker(settings: Settings, **changes: object) -> Settings:
    """A breaker that opens soon and a small backlog, so that its effect shows."""
    defaults = {"breaker_min_jobs": 12, "breaker_probe_s": 1.0, "max_backlog_jobs": 30, "max_attempts": 1}
    return settings.model_copy(update=defaults | changes)


async def add_others(world: World) -> dict[str, str]:
    """Add more tenants; returns the producer keys of all."""
    keys = {TENANT: world.producer_key}
    async with world.pool.acquire() as connection:
        for name in OTHERS:
            tenant = await add_tenant(connection, SecretBox(world.settings.secret_key), name)
            keys[name] = tenant.producer_key
    return keys


async def is_open(life: Lifecycle) -> bool:
    return "breaker" in (life.health.reasons or {})


def alarms(action: str) -> float:
    return float(telemetry.ALARMS.labels(action=action)._value.get())


async def test_consumption_stops_while_all_jobs_fail_and_resumes_once_they_succeed(settings: Settings) -> None:
    settings = with_breaker(settings)
    before = alarms("breaker_open")
    async with open_world(settings) as world:
        await add_others(world)
        failing = [job_request(tenant=tenant, prompt="fail") for tenant in (TENANT, *OTHERS)] * 10
        await asyncio.gather(*(world.send(request) for request in failing))
        good = [job_request(tenant=tenant) for tenant in (TENANT, *OTHERS)] * 40
        async with running_worker(settings, FAULTY_ENGINE) as life:
            await eventually(lambda: is_open(life), what="the breaker to open")
            reason = (life.health.reasons or {})["breaker"]
            assert "of the last jobs of 3 tenants failed or were dead-lettered" in reason
            assert "engine_error: the engine failed on this job 1 times" in reason
            assert alarms("breaker_open") > before
            await asyncio.gather(*(world.send(request) for request in good))

            async def all_served() -> bool:
                rows = (await world.jobs()).values()
                return sum(row["state"] == "succeeded" for row in rows) == len(good) and await world.lag() == 0

            await eventually(all_served, 60.0, "every good job to be served")
            await eventually(lambda: life.health.ready is None, what="the worker to be ready again")


async def test_a_release_that_rejects_every_record_stops_before_the_topic_is_drained(settings: Settings) -> None:
    settings = with_breaker(settings, breaker_probe_s=600.0)
    num_sent = 300
    async with open_world(settings) as world:
        await add_others(world)
        values = [json.dumps(job_request(tenant=tenant, colour="red")).encode() for tenant in (TENANT, *OTHERS)]
        await asyncio.gather(*(world.send(value) for value in values * (num_sent // len(values))))
        async with running_worker(settings) as life:
            await eventually(lambda: is_open(life), what="the breaker to open")
            assert "invalid_message: field 'colour' is not known" in (life.health.reasons or {})["breaker"]
            assert await world.lag() > num_sent / 2


@pytest.mark.parametrize("signed", [False, True])
async def test_one_tenants_garbage_is_dead_lettered_and_does_not_stop_others(settings: Settings, signed: bool) -> None:
    """With required signatures, not even garbage in the names of other tenants."""
    settings = with_breaker(settings, require_signed_jobs=signed)
    num_garbage = 120
    async with open_world(settings) as world:
        keys = await add_others(world)
        names = (TENANT, *OTHERS) if signed else (TENANT,)
        garbage = [json.dumps(job_request(tenant=name, colour="red")).encode() for name in names]
        await asyncio.gather(*(world.send(value) for value in garbage * (num_garbage // len(garbage))))
        async with running_worker(settings) as life:
            request = json.dumps(job_request(tenant="globex")).encode()
            header = (SIGNATURE_HEADER, signature(keys["globex"].encode(), request).encode())
            await world.send(request, headers=[header])
            await eventually(world.jobs, what="the other tenant's row")
            assert len(await world.dead_letters(num_garbage)) >= num_garbage
            assert life.health.ready is None


async def test_in_a_database_without_tenants_nothing_is_dead_lettered(settings: Settings) -> None:
    async with open_world(settings) as world:
        await world.rows("update loraq.tenants set disabled_at = now()")
        await world.send(job_request())
        async with running_worker(settings):
            await eventually(lambda: telemetry.PARTITIONS_PAUSED._value.get() > 0, what="partitions to be paused")
            assert await world.lag() == 1
            await world.rows("update loraq.tenants set disabled_at = null")
            await eventually(world.jobs, what="the job's row")


@pytest.mark.kafka
@pytest.mark.parametrize("fault", ["missing", "refusing"])
async def test_while_the_dead_letter_topic_fails_offsets_are_not_committed_and_an_alarm_is_raised(
    apache_settings: Settings, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(kafka, "REQUEST_TIMEOUT_MS", 2000)  # how long the library waits for a missing topic
    settings, before = apache_settings, alarms("dead_letter_failed")
    async with open_world(settings) as world:
        await (delete_topic(settings) if fault == "missing" else set_max_message_bytes(settings, 100))
        async with running_worker(settings) as life:
            poison = await world.send(b"\xff", partition=0)
            behind, other = await world.send(job_request(), partition=0), await world.send(job_request(), partition=1)
            await eventually(lambda: alarms("dead_letter_failed") >= before + 2, what="two alarms")
            reason = (life.health.reasons or {})["dead letters"]
            assert f"the request to Kafka at {settings.kafka_bootstrap} failed" in reason or "larger than" in reason
            await eventually(lambda: all_succeeded(world, 2), what="the jobs next to and behind it to be served")
            await eventually(lambda: is_done(settings, other), what="the offset of the other partition to be committed")
            assert await position(settings, poison) <= poison.offset
            await (kafka.ensure_topics(settings) if fault == "missing" else set_max_message_bytes(settings, 2**21))
            assert (await world.dead_letters(1, 60.0))[0].value == b"\xff"
            await eventually(lambda: is_done(settings, behind), what="the offset to be committed")
            assert life.health.ready is None


async def all_succeeded(world: World, count: int) -> bool:
    return [row["state"] for row in (await world.jobs()).values()] == ["succeeded"] * count


async def position(settings: Settings, sent: Any) -> int:
    """The group's committed offset in the record's partition; -1 if there is none."""
    place = TopicPartition(sent.topic, sent.partition)
    async with kafka.admin(settings) as admin:
        found = await admin.list_consumer_group_offsets(settings.consumer_group, partitions=[place])
    return int(found[place].offset)


async def is_done(settings: Settings, sent: Any) -> bool:
    return await position(settings, sent) > sent.offset


async def delete_topic(settings: Settings) -> None:
    async with kafka.admin(settings) as admin:
        await admin.delete_topics([settings.dead_topic])
        await eventually(lambda: not_listed(admin, settings.dead_topic), what="the topic to be gone")


async def not_listed(admin: Any, topic: str) -> bool:
    return topic not in await admin.list_topics()


async def set_max_message_bytes(settings: Settings, num_bytes: int) -> None:
    change = {"max.message.bytes": str(num_bytes)}
    async with kafka.admin(settings) as admin:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, settings.dead_topic, change)])
