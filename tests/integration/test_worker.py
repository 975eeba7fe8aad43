"""Jobs through a real worker process on real servers: records in, rows out."""

import json
from pathlib import Path
from uuid import UUID

import pytest

from schemas.common import ERROR_CLASSES, ErrorCode, Lane
from schemas.events import CloudEvent, WebhookBody
from services.client.identifiers import uuid7
from services.client.signing import SIGNATURE_HEADER, signature
from services.errors import ConfigError
from services.kafka import clients as kafka
from services.process.settings import Settings
from services.s3.store import Location
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from services.webhooks.endpoints import add_endpoint
from tests.builders import lora_adapter, tiny_llama
from tests.integration.workers import running_worker
from tests.integration.world import TENANT, World, header, job_request, open_world
from tests.processes import spawn

pytestmark = pytest.mark.slow

ADAPTERS = {"formal": 1, "pirate": 2, "terse": 3}
CONTEXT = 4096


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base") / "tiny-llama", max_position_embeddings=CONTEXT)


def with_base(settings: Settings, base: Path, **changes: object) -> Settings:
    return settings.model_copy(update={"base_model": base, "dtype": "float32", "max_batch_size": 8, **changes})


async def add_adapters(world: World, base: Path, directory: Path) -> None:
    for name, seed in ADAPTERS.items():
        made = lora_adapter(directory / name, base, rank=4 * seed, seed=seed, strength=1.0)
        await world.add_adapter(made, name)


async def test_a_worker_without_topics_names_them_and_creates_none(broker_settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"there is no topic .*\.other\.control and no .*correct LORAQ_POOL=other or"):
        async with running_worker(broker_settings.model_copy(update={"pool": "other"})):
            pass
    async with kafka.admin(broker_settings) as admin:
        assert not [name for name in await admin.list_topics() if name.startswith(broker_settings.topic_prefix)]


async def test_jobs_of_several_adapters_get_rows_with_their_own_outputs(
    broker_settings: Settings, tiny_base: Path, tmp_path: Path
) -> None:
    settings = with_base(broker_settings, tiny_base)
    url = "http://receiver.invalid/hook"
    async with open_world(settings) as world:
        await add_adapters(world, tiny_base, tmp_path)
        with spawn(["worker"], settings) as worker:
            ids = {
                adapter: [
                    await world.send_job(adapter=adapter, lane=lane, webhook={"url": url}, metadata={"lane": lane})
                    for lane in Lane
                ]
                for adapter in [None, *ADAPTERS]
            }
            rows = await world.ended(*[job_id for group in ids.values() for job_id in group])
            assert worker.stop() == 0
        results = await world.results()
        outbox = await world.rows("select * from loraq.outbox order by id")
        usage = await world.rows("select * from loraq.usage_hourly")
        assert await world.lag() == 0
    assert {row["state"] for row in rows} == {"succeeded"}
    assert {(row["adapter"], row["adapter_version"]) for row in rows} == {(None, None), *((a, 1) for a in ADAPTERS)}
    assert all(row["metadata"] == {"lane": row["lane"]} and row["attempts"] == 1 for row in rows)
    texts = {adapter: {results[job_id]["output_text"] for job_id in group} for adapter, group in ids.items()}
    assert all(len(each) == 1 for each in texts.values()), "the same prompt and adapter gave different outputs"
    assert len(set.union(*texts.values())) == len(texts), "two adapters gave the same output"
    check_outbox(outbox, results, url)
    assert sum(row["jobs"] for row in usage) == len(results)
    assert {row["adapter"] for row in usage} == {"", *ADAPTERS}
    generated = sum(len(row["output_token_ids"]) for row in results.values())
    assert sum(row["completion_tokens"] for row in usage) == generated


def check_outbox(outbox: list[dict[str, object]], results: dict[UUID, dict[str, object]], url: str) -> None:
    """Each job has one event and one webhook with the same id and the content of its row."""
    events = {row["job_id"]: row for row in outbox if row["kind"] == "event"}
    webhooks = {row["job_id"]: row for row in outbox if row["kind"] == "webhook"}
    assert events.keys() == webhooks.keys() == results.keys()
    assert len(outbox) == 2 * len(results)
    for job_id, result in results.items():
        event = CloudEvent.model_validate_json(str(events[job_id]["body"]))
        body = WebhookBody.model_validate_json(str(webhooks[job_id]["body"]))
        assert events[job_id]["event_id"] == webhooks[job_id]["event_id"] == UUID(event.id)
        assert webhooks[job_id]["target"] == url
        assert body.data == event.data
        assert body.type == event.type == "job.succeeded"
        assert body.data.output_text == result["output_text"]
        assert body.data.timings.total_ms == result["total_ms"]


async def test_invalid_records_are_dead_lettered_unchanged_and_the_rest_is_served(
    broker_settings: Settings,
) -> None:
    settings = broker_settings
    used = uuid7()
    bad: list[tuple[bytes | None, str, str]] = [
        (b"not json \xff", "invalid_message", "the value is not JSON"),
        (None, "invalid_message", "the record has no value"),
        (as_json(colour="red"), "invalid_message", "field 'colour' is not known"),
        (as_json(sampling={"max_tokens": 0}), "invalid_message", "field 'sampling.max_tokens'"),
        (as_json(messages=[]), "invalid_message", "field 'messages'"),
        (as_json(tenant="nobody"), "unauthenticated", "no tenant 'nobody' is registered"),
        (as_json(job_id=str(used), prompt="something else"), "id_conflict", f"job_id {used}"),
    ]
    async with open_world(settings) as world:
        async with running_worker(settings):
            await world.send(job_request(job_id=str(used)))
            await world.ended(used)
            sent = {}
            for value, code, _ in bad:
                where = await world.send(value, key=code.encode(), headers=[("mine", b"kept")])
                sent[where.topic, where.partition, where.offset] = value
            await world.ended(await world.send_job())
            dead = await world.dead_letters(len(bad))
        assert len(await world.jobs()) == 2
        assert await world.lag() == 0
    by_value = {record.value: record for record in dead}
    for value, code, sentence in bad:
        record = by_value[value]
        assert (header(record, "loraq-error-code"), record.key) == (code, code.encode())
        assert sentence in header(record, "loraq-error-message")
        assert header(record, "mine") == "kept"
        source = [header(record, f"loraq-source-{name}") for name in ("topic", "partition", "offset")]
        assert sent[source[0], int(source[1]), int(source[2])] == value


def as_json(**fields: object) -> bytes:
    return json.dumps(job_request(**fields)).encode()


async def test_a_bad_job_fails_with_a_reason_and_the_others_succeed(
    settings: Settings, tiny_base: Path, tmp_path: Path
) -> None:
    settings = with_base(settings, tiny_base, adapter_load_timeout_s=20.0, max_result_bytes=1024)
    async with open_world(settings) as world:
        await add_adapters(world, tiny_base, tmp_path)
        await add_broken_adapters(world, tiny_base, tmp_path)
        async with world.pool.acquire() as connection:
            await add_endpoint(connection, TENANT, "orders", "http://receiver.invalid/orders")
        with spawn(["worker"], settings):
            good = [await world.send_job(adapter=adapter) for adapter in [None, *ADAPTERS]]
            bad = [(await world.send_job(**fields), code, sentence) for fields, code, sentence in BAD_JOBS]
            good += [
                await world.send_job(adapter="formal@1", webhook={"endpoint": "orders"}),
                await world.send_job(prompt=None, messages=[{"role": "user", "content": "hello"}]),
                await world.send_job(prompt=None, prompt_token_ids=[5, 6, 7]),
            ]
            rows = await world.ended(*good, *[job_id for job_id, _, _ in bad])
        jobs = {row["job_id"]: row for row in rows}
        outbox = await world.rows(
            "select type, body from loraq.outbox where kind = 'event' and type <> 'job.succeeded'"
        )
        hooks = await world.rows("select target from loraq.outbox where kind = 'webhook'")
    assert {jobs[job_id]["state"] for job_id in good} == {"succeeded"}
    for job_id, code, sentence in bad:
        row = jobs[job_id]
        assert row["error_code"] == code
        assert sentence in row["error_message"]
        found_by_the_engine = code == "invalid_message" and not row["error_message"].startswith("field")
        assert row["attempts"] == (ERROR_CLASSES[ErrorCode(code)].charged or found_by_the_engine)
        assert row["state"] == ("expired" if code == "deadline_exceeded" else "failed")
    assert len(outbox) == len(bad)
    assert [row["target"] for row in hooks] == ["http://receiver.invalid/orders"]


BAD_JOBS: list[tuple[dict[str, object], str, str]] = [
    ({"adapter": "nowhere"}, "unknown_adapter", "tenant 'acme' has no adapter 'nowhere'"),
    ({"adapter": "formal@7"}, "unknown_adapter", "tenant 'acme' has no adapter 'formal@7'"),
    ({"adapter": "off"}, "adapter_not_ready", "'off@1' of tenant 'acme' is disabled: replaced by a better one"),
    ({"adapter": "checking"}, "adapter_not_ready", "'checking@1' of tenant 'acme' is pending"),
    ({"adapter": "foreign"}, "adapter_not_ready", "admitted for another base model"),
    ({"adapter": "damaged"}, "adapter_load_failed", "adapter_model.safetensors"),
    ({"prompt": "the " * CONTEXT}, "prompt_too_long", str(CONTEXT)),
    ({"webhook": {"endpoint": "nowhere"}}, "invalid_message", "field 'webhook.endpoint'"),
    ({"prompt": None, "prompt_token_ids": [10**6]}, "invalid_message", "1000000"),
    ({"deadline": "2020-01-01T00:00:00Z"}, "deadline_exceeded", "2020-01-01"),
    (
        {"prompt": "x", "timeout_ms": 1, "sampling": {"max_tokens": CONTEXT - 20, "ignore_eos": True}},
        "timeout",
        "the job ran longer than its 1 ms",
    ),
]


async def add_broken_adapters(world: World, base: Path, directory: Path) -> None:
    """Adapters that are disabled, not yet checked, admitted for another base model, and damaged after admission."""
    for name, seed in {"off": 11, "checking": 12, "foreign": 13, "damaged": 14}.items():
        await world.add_adapter(lora_adapter(directory / name, base, rank=4, seed=seed), name)
    change = "update loraq.adapters set status = $2, status_reason = $3 where name = $1"
    async with world.pool.acquire() as connection:
        await connection.execute(change, "off", "disabled", "replaced by a better one")
        await connection.execute(change, "checking", "pending", None)
        await connection.execute("update loraq.adapters set base_fingerprint = 'other' where name = 'foreign'")
        damaged = await connection.fetchval("select uri from loraq.adapters where name = 'damaged'")
    place = Location.parse(damaged).child("adapter_model.safetensors")
    await world.objects.delete(place)


async def test_a_job_runs_once_however_often_it_is_delivered(settings: Settings) -> None:
    async with open_world(settings) as world:
        async with running_worker(settings):
            first, second = uuid7(), uuid7()
            for _ in range(3):
                await world.send(job_request(job_id=str(first)), partition=0)
                await world.send(job_request(job_id=str(second)), partition=1)
                await world.send(job_request(job_id=str(second)), partition=2, lane=Lane.BATCH)
            rows = await world.ended(first, second)
            await world.send(job_request(job_id=str(first)))
            await world.ended(await world.send_job())
        outbox = await world.rows("select job_id from loraq.outbox")
        assert await world.lag() == 0
    assert [row["attempts"] for row in rows] == [1, 1]
    assert len(outbox) == 3


async def test_a_record_without_an_id_gets_an_id_from_its_place(settings: Settings) -> None:
    async with open_world(settings) as world:
        async with running_worker(settings):
            await world.send(job_request())
            await world.send(job_request())
            await world.ended(await world.send_job())
        jobs = await world.jobs()
    assert len(jobs) == 3
    assert {job_id.version for job_id in jobs} == {7}


async def test_with_required_signatures_an_unsigned_record_is_dead_lettered(settings: Settings) -> None:
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world:
        async with running_worker(settings):
            good, unsigned, forged = (as_json(job_id=str(uuid7())) for _ in range(3))
            signed = signature(world.producer_key.encode(), good).encode()
            await world.send(unsigned)
            await world.send(forged, headers=[(SIGNATURE_HEADER, signed)])
            await world.send(good, headers=[(SIGNATURE_HEADER, signed)])
            dead = await world.dead_letters(2)
            [row] = await world.ended(UUID(json.loads(good)["job_id"]))
        assert len(await world.jobs()) == 1
    assert row["state"] == "succeeded"
    assert {header(record, "loraq-error-code") for record in dead} == {"unauthenticated"}
    assert {record.value for record in dead} == {unsigned, forged}


async def test_a_damaged_producer_key_affects_only_the_jobs_of_its_tenant(settings: Settings) -> None:
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world:
        async with world.pool.acquire() as connection:
            await add_tenant(connection, SecretBox(settings.secret_key), "damaged")
            await connection.execute("update loraq.tenants set producer_key = 'x' where tenant = 'damaged'")
        async with running_worker(settings):
            theirs, ours = as_json(tenant="damaged"), as_json(job_id=str(uuid7()))
            for value in (theirs, ours):
                await world.send(
                    value, headers=[(SIGNATURE_HEADER, signature(world.producer_key.encode(), value).encode())]
                )
            [dead] = await world.dead_letters(1)
            [row] = await world.ended(UUID(json.loads(ours)["job_id"]))
    assert (row["state"], dead.value) == ("succeeded", theirs)
    assert "the producer key of tenant 'damaged' is damaged" in header(dead, "loraq-error-message")
