"""Admission and rejection: a bad adapter never affects another."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest

from engine import adapter_digest
from services.adapters.push import Pushed
from services.adapters.versions import AdapterRow, disable, enable, list_adapters, show_adapter
from services.postgres.pool import Pool, transaction
from services.registrar.registrar import Registrar, maintain
from services.s3.store import ObjectStore
from tests.builders import lora_adapter, tiny_llama
from tests.services.conftest import MakeAdapter
from tests.waiting import eventually

FILES = ("adapter_config.json", "adapter_model.safetensors")
PushDir = Callable[[str, str, Path], Awaitable[Pushed]]


async def row_of(pool: Pool, ref: str, tenant: str = "acme") -> AdapterRow:
    async with transaction(pool) as connection:
        return (await show_adapter(connection, tenant, ref))[0]


async def insert_pending(pool: Pool, store: ObjectStore, name: str, files: dict[str, bytes], digest: str) -> None:
    """As another client may push it, without our checks before the upload."""
    for file, content in files.items():
        await store.put_bytes(f"acme/{name}/{digest}/{file}", content, "application/octet-stream")
    async with transaction(pool) as connection:
        await connection.execute(
            "insert into adapters (tenant, name, version, status, uri, digest, size_bytes) "
            "values ('acme', $1, 1, 'pending', $2, $3, $4)",
            name,
            f"s3://{store.bucket}/acme/{name}/{digest}/",
            digest,
            sum(len(content) for content in files.values()),
        )


async def push_unchecked(pool: Pool, store: ObjectStore, name: str, directory: Path) -> None:
    files = {file: (directory / file).read_bytes() for file in FILES}
    await insert_pending(pool, store, name, files, adapter_digest(directory))


async def test_a_good_adapter_becomes_ready_with_its_properties(
    pool: Pool, registrar: Registrar, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    await push_dir(acme, "tone", adapter_dir(rank=8, targets=("q_proj", "v_proj")))
    assert await registrar.admit_next()
    row = await row_of(pool, "tone")
    assert (row.status, row.status_reason, row.rank) == ("ready", None, 8)
    assert row.target_modules == ["q_proj", "v_proj"]
    assert row.base_model == "someone/Tiny-Llama"
    assert row.base_fingerprint is not None
    assert not await registrar.admit_next()


async def test_an_adapter_that_fits_but_names_another_base_is_ready_with_a_remark(
    pool: Pool, registrar: Registrar, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    await push_dir(acme, "tone", adapter_dir(base_model_name_or_path="someone/other-model"))
    await registrar.admit_next()
    row = await row_of(pool, "tone")
    assert row.status == "ready"
    assert row.status_reason is not None
    assert "someone/other-model" in row.status_reason
    assert "tiny-llama" in row.status_reason


def break_truncated(directory: Path) -> None:
    weights = directory / FILES[1]
    weights.write_bytes(weights.read_bytes()[:-100])


def break_pickle(directory: Path) -> None:
    (directory / FILES[1]).write_bytes(b"\x80\x02}q\x00.")


def break_json(directory: Path) -> None:
    (directory / FILES[0]).write_text('{"peft_type": "LORA",')


def break_rank(directory: Path) -> None:
    config = json.loads((directory / FILES[0]).read_text())
    (directory / FILES[0]).write_text(json.dumps(config | {"r": 5}))


def break_base(directory: Path) -> None:
    other = tiny_llama(directory.parent / "other-base", hidden_size=96)
    shutil.rmtree(directory)
    lora_adapter(directory, other, rank=4)


BROKEN = {
    "truncated": (break_truncated, "adapter_model.safetensors is truncated"),
    "pickle": (break_pickle, "pickle"),
    "not JSON": (break_json, "adapter_config.json is not JSON"),
    "rank": (break_rank, "gives it rank 5"),
    "wrong base": (break_base, "trained for another base model"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_bad_adapter_is_rejected_with_the_reason_and_the_next_one_is_admitted(
    case: str,
    pool: Pool,
    store: ObjectStore,
    registrar: Registrar,
    push_dir: PushDir,
    adapter_dir: MakeAdapter,
    acme: str,
) -> None:
    damage, sentence = BROKEN[case]
    directory = adapter_dir("bad")
    damage(directory)
    await push_unchecked(pool, store, "bad", directory)
    await push_dir(acme, "good", adapter_dir("good"))
    assert await registrar.admit_next()
    assert await registrar.admit_next()
    bad, good = await row_of(pool, "bad"), await row_of(pool, "good")
    assert bad.status == "rejected"
    assert bad.status_reason is not None
    assert sentence in bad.status_reason
    assert str(directory) not in bad.status_reason
    assert "/cache/" not in bad.status_reason
    assert bad.base_fingerprint is None
    assert good.status == "ready"


async def test_a_missing_file_is_rejected_and_named(
    pool: Pool, store: ObjectStore, registrar: Registrar, adapter_dir: MakeAdapter, acme: str
) -> None:
    directory = adapter_dir()
    only_config = {FILES[0]: (directory / FILES[0]).read_bytes()}
    await insert_pending(pool, store, "half", only_config, adapter_digest(directory))
    assert await registrar.admit_next()
    row = await row_of(pool, "half")
    assert row.status == "rejected"
    assert row.status_reason is not None
    assert "adapter_model.safetensors" in row.status_reason


async def test_an_adapter_stays_pending_while_the_store_fails(
    pool: Pool, store: ObjectStore, registrar: Registrar, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    directory = adapter_dir()
    pushed = await push_dir(acme, "tone", directory)
    key = f"acme/tone/{adapter_digest(directory)}/{FILES[1]}"
    whole = (directory / FILES[1]).read_bytes()
    await store.put_bytes(key, whole[:-1], "application/octet-stream")
    assert await registrar.admit_next()
    delayed = await row_of(pool, pushed.ref)
    assert delayed.status == "pending"
    assert delayed.status_reason is not None
    assert "bytes instead of" in delayed.status_reason
    assert not await registrar.admit_next(), "its back-off has not ended"
    await store.put_bytes(key, whole, "application/octet-stream")
    assert await eventually(registrar.admit_next, what="the back-off to end")
    assert (await row_of(pool, pushed.ref)).status == "ready"


async def test_an_unexpected_error_of_a_check_rejects_only_that_adapter(
    pool: Pool,
    registrar: Registrar,
    push_dir: PushDir,
    adapter_dir: MakeAdapter,
    acme: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(_directory: Path, _model_dir: Path) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("services.registrar.registrar.check_adapter", explode)
    await push_dir(acme, "tone", adapter_dir())
    assert await registrar.admit_next()
    row = await row_of(pool, "tone")
    assert row.status == "rejected"
    assert row.status_reason is not None
    assert "RecursionError: too deep" in row.status_reason


async def test_several_tasks_share_the_work_and_wake_on_notify(
    pool: Pool, registrar: Registrar, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(registrar.admit_until(stop)) for _ in range(3)]
    for number in range(5):
        await push_dir(acme, f"tone-{number}", adapter_dir(f"tone-{number}", seed=number))
    registrar.wake()

    async def all_ready() -> bool:
        async with transaction(pool) as connection:
            rows = await list_adapters(connection, acme)
        return [row.status for row in rows] == ["ready"] * 5

    await eventually(all_ready, what="five ready adapters")
    stop.set()
    await asyncio.gather(*tasks)


async def test_disabling_and_enabling(
    pool: Pool, registrar: Registrar, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    await push_dir(acme, "tone", adapter_dir("one", seed=1))
    await registrar.admit_next()
    await push_dir(acme, "tone", adapter_dir("two", seed=2))
    async with transaction(pool) as connection:
        assert await disable(connection, acme, "tone", "Too rude.") == [1, 2]
    assert (await row_of(pool, "tone@1")).status_reason == "Too rude."
    async with transaction(pool) as connection:
        assert await enable(connection, acme, "tone") == [1, 2]
    assert (await row_of(pool, "tone@1")).status == "ready"
    assert (await row_of(pool, "tone@2")).status == "pending", "it was never checked"


async def test_partitions_are_created_though_the_default_one_has_rows_of_a_coming_day(
    pool: Pool, database_url: str
) -> None:
    async with transaction(pool) as connection:
        await connection.execute(
            "insert into jobs (tenant, job_id, pool, lane, state, accepted_on, accepted_at) "
            "values ('acme', gen_random_uuid(), 'default', 'batch', 'queued', current_date + 8, now())"
        )
        await connection.execute("select ensure_partitions(9)")
        days = await connection.fetchval(
            "select count(*) from pg_class where relname = any(array(select 'jobs_' || to_char(current_date + d, "
            "'YYYYMMDD') from generate_series(0, 9) d))"
        )
    assert days == 9, "all days except the one with rows in the default partition"


async def test_maintenance_creates_partitions(pool: Pool, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    name = await connection.fetchval("select 'loraq.jobs_' || to_char(current_date, 'YYYYMMDD')")
    await connection.execute(f"drop table {name}")
    maintaining = asyncio.create_task(maintain(pool))
    await eventually(lambda: connection.fetchval("select to_regclass($1) is not null", name), what="today's partition")
    maintaining.cancel()
    await connection.close()
