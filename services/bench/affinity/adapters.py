"""The adapters of a run: random files in the store under a prefix of their own, and a row for each in the registry."""

import asyncio
import json
import random
import struct
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import adapter_digest
from engine.files.digest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from services.bench.service.bench_pool import BenchPool
from services.postgres.pool import transaction, translated
from services.s3.store import Location, ObjectStore

REGISTER = """
insert into loraq.adapters (tenant, name, version, status, rank, uri, digest, size_bytes)
select tenant, name, 1, 'ready', 8, uri, digest, size_bytes
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[])
    as sent (tenant, name, uri, digest, size_bytes)
"""
REMOVE = "delete from loraq.adapters where tenant = any($1::text[])"


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter in the store."""

    name: str
    uri: str
    digest: str
    size_bytes: int


@asynccontextmanager
async def stored_adapters(
    store: ObjectStore, prefix: str, count: int, size_bytes: int
) -> AsyncIterator[list[StoredAdapter]]:
    """`count` adapters of about `size_bytes` each under `prefix`, deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="loraq-bench-") as scratch:
        directories = [await asyncio.to_thread(_write, Path(scratch) / f"a{i:05}", i, size_bytes) for i in range(count)]
        adapters = await asyncio.gather(*(_upload(store, prefix, directory) for directory in directories))
    try:
        yield list(adapters)
    finally:
        keys = [Location.parse(each.uri).child(name) for each in adapters for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        await asyncio.gather(*(store.delete(key) for key in keys))


def _write(directory: Path, index: int, size_bytes: int) -> Path:
    """A PEFT directory that the echo engine reads and hashes; its one tensor is noise."""
    directory.mkdir()
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(described))
    content = random.Random(index).randbytes(size_bytes)
    header = json.dumps({"noise": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    (directory / ADAPTER_WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + content)
    return directory


async def _upload(store: ObjectStore, prefix: str, directory: Path) -> StoredAdapter:
    digest = await asyncio.to_thread(adapter_digest, directory)
    place = Location(store.bucket, f"{prefix}/{directory.name}/{digest}/")
    size_bytes = 0
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        await store.put_file(place.child(name), directory / name)
        size_bytes += (directory / name).stat().st_size
    return StoredAdapter(directory.name, place.uri, digest, size_bytes)


@asynccontextmanager
async def registered(bench: BenchPool, adapters: Sequence[StoredAdapter]) -> AsyncIterator[None]:
    """The adapters as ready versions of the run's tenants, in turn; their rows are deleted afterwards."""
    rows = [(owner(bench, i), each.name, each.uri, each.digest, each.size_bytes) for i, each in enumerate(adapters)]
    async with transaction(bench.database, "register the benchmark's adapters") as connection:
        await connection.execute(REGISTER, *map(list, zip(*rows, strict=True)))
    try:
        yield
    finally:
        with translated("remove the benchmark's adapters"):
            await bench.database.execute(REMOVE, list(bench.tenants))


def owner(bench: BenchPool, index: int) -> str:
    """The tenant of adapter `index`."""
    return bench.tenants[index % len(bench.tenants)]
