"""Fetching from a real store: one download for all callers, verified before the adapter is visible."""

import asyncio
import errno
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engine import adapter_digest
from schemas.common import ErrorCode
from services.adapters.staging import Stager
from services.adapters.staging.disk import FILES
from services.errors import JobError, RetryableError
from services.process.settings import Settings
from services.s3.store import Location, ObjectStore, Progress, open_store
from tests.builders import lora_adapter, tiny_llama
from tests.waiting import eventually


class CountingStore(ObjectStore):
    """The real store; counts downloads of weights and delays them while `gate` is closed."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.downloads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    async def get_to(self, key: str | Location, path: Path, max_bytes: int, progress: Progress | None = None) -> int:
        if path.name == FILES[1]:
            self.downloads += 1
            await self.gate.wait()
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
        return await super().get_to(key, path, max_bytes, progress)


class Adapter:
    """An adapter in the store, with the fields of its registry row."""

    def __init__(self, directory: Path, bucket: str) -> None:
        self.directory = directory
        self.digest = adapter_digest(directory)
        self.prefix = Location(bucket, f"acme/{directory.name}/{self.digest}/")
        self.size_bytes = sum((directory / name).stat().st_size for name in FILES)

    @property
    def row(self) -> tuple[str, str, int]:
        return self.digest, self.prefix.uri, self.size_bytes


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = tiny_llama(root / "base")
    return [lora_adapter(root / f"adapter-{seed}", base, seed=seed) for seed in range(3)]


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[CountingStore]:
    store = CountingStore(settings)
    yield store
    store.close()


@pytest.fixture
async def adapters(directories: list[Path], store: CountingStore) -> list[Adapter]:
    adapters = [Adapter(directory, store.bucket) for directory in directories]
    for adapter in adapters:
        await upload(store, adapter)
    return adapters


async def upload(store: ObjectStore, adapter: Adapter) -> None:
    for name in FILES:
        await store.put_file(adapter.prefix.child(name), adapter.directory / name)


@pytest.fixture
async def stager(settings: Settings, store: CountingStore) -> AsyncIterator[Stager]:
    stager = Stager(settings, store)
    stager.retry_delays_s = (0.0, 0.0)
    yield stager
    await stager.close()


async def test_both_files_are_downloaded_once(stager: Stager, store: CountingStore, adapters: list[Adapter]) -> None:
    for _ in range(3):
        path = await stager.fetch(*adapters[0].row)
    assert adapter_digest(path) == adapters[0].digest
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert store.downloads == 1


async def test_twenty_waiters_share_one_download(stager: Stager, store: CountingStore, adapters: list[Adapter]) -> None:
    paths = await asyncio.gather(*(stager.fetch(*adapters[0].row) for _ in range(20)))
    assert len(set(paths)) == 1
    assert store.downloads == 1


async def test_a_cancelled_waiter_does_not_stop_the_others(
    stager: Stager, store: CountingStore, adapters: list[Adapter]
) -> None:
    store.gate.clear()
    first = asyncio.create_task(stager.fetch(*adapters[0].row))
    second = asyncio.create_task(stager.fetch(*adapters[0].row))
    await eventually(lambda: store.downloads == 1, what="the download to begin")
    first.cancel()
    store.gate.set()
    assert (await second).is_dir()
    assert store.downloads == 1
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_one_cold_adapter_does_not_delay_another(
    stager: Stager, store: CountingStore, adapters: list[Adapter]
) -> None:
    await stager.fetch(*adapters[1].row)
    store.gate.clear()
    waiting = asyncio.create_task(stager.fetch(*adapters[0].row))
    await eventually(lambda: store.downloads == 2, what="the download to begin")
    assert (await stager.fetch(*adapters[1].row)).is_dir()
    store.gate.set()
    await waiting


async def test_wrong_content_of_the_right_size_is_never_visible(
    stager: Stager, store: CountingStore, adapters: list[Adapter]
) -> None:
    adapter = adapters[0]
    weights = bytearray((adapter.directory / FILES[1]).read_bytes())
    weights[-1] ^= 1
    await store.put_bytes(adapter.prefix.child(FILES[1]), bytes(weights), "application/octet-stream")
    with pytest.raises(RetryableError, match="has other content than was pushed"):
        await stager.fetch(*adapter.row)
    assert store.downloads == 3, "retried twice before it failed"
    assert stager.cache.entries() == []
    assert list(stager.cache.partial.iterdir()) == []
    await upload(store, adapter)
    assert (await stager.fetch(*adapter.row)).is_dir()


@pytest.mark.parametrize("change_bytes", [-1, 1])
async def test_a_wrong_size_is_retried_then_reported(
    stager: Stager, store: CountingStore, adapters: list[Adapter], change_bytes: int
) -> None:
    adapter = adapters[0]
    weights = (adapter.directory / FILES[1]).read_bytes() + b"\x00"
    wrong = weights[: len(weights) - 1 + change_bytes]
    await store.put_bytes(adapter.prefix.child(FILES[1]), wrong, "application/octet-stream")
    with pytest.raises(RetryableError, match="bytes"):
        await stager.fetch(*adapter.row)
    assert store.downloads == 3


async def test_a_transfer_that_fails_once_is_retried(
    stager: Stager, store: CountingStore, adapters: list[Adapter]
) -> None:
    store.failure = RetryableError("the connection was reset")
    assert (await stager.fetch(*adapters[0].row)).is_dir()
    assert store.downloads == 2


async def test_a_missing_object_fails_the_job_with_its_name(
    stager: Stager, store: CountingStore, adapters: list[Adapter]
) -> None:
    await store.delete(adapters[0].prefix.child(FILES[1]))
    with pytest.raises(JobError, match=r"adapter_model\.safetensors") as failed:
        await stager.fetch(*adapters[0].row)
    assert failed.value.code is ErrorCode.ADAPTER_LOAD_FAILED
    assert store.downloads == 1, "a retry would not find it either"


async def test_an_invalid_address_fails_the_job(stager: Stager, adapters: list[Adapter]) -> None:
    with pytest.raises(JobError, match="is not an s3:// address"):
        await stager.fetch(adapters[0].digest, "https://example.com/", 10)


async def test_an_adapter_over_the_budget_is_refused_without_a_download(
    stager: Stager, store: CountingStore, adapters: list[Adapter], settings: Settings
) -> None:
    with pytest.raises(JobError, match="LORAQ_DISK_CACHE_BYTES"):
        await stager.fetch(adapters[0].digest, adapters[0].prefix.uri, settings.disk_cache_bytes + 1)
    assert store.downloads == 0


async def test_the_budget_is_kept_by_evicting_the_least_recently_used(
    stager: Stager, store: CountingStore, adapters: list[Adapter]
) -> None:
    stager.cache.budget_bytes = 2 * adapters[0].size_bytes + 1000
    for index in (0, 1, 0, 2):
        await stager.fetch(*adapters[index].row)
    assert {entry.digest for entry in stager.cache.entries()} == {adapters[0].digest, adapters[2].digest}


async def test_a_held_adapter_is_never_evicted(stager: Stager, store: CountingStore, adapters: list[Adapter]) -> None:
    stager.cache.budget_bytes = adapters[0].size_bytes + 1000
    async with stager.hold(*adapters[0].row) as path:
        with pytest.raises(RetryableError, match="is in use"):
            await stager.fetch(*adapters[1].row)
        assert adapter_digest(path) == adapters[0].digest
    assert (await stager.fetch(*adapters[1].row)).is_dir()
    assert not path.exists()


async def test_a_full_disk_evicts_and_retries(stager: Stager, store: CountingStore, adapters: list[Adapter]) -> None:
    await stager.fetch(*adapters[0].row)
    store.failure = OSError(errno.ENOSPC, "No space left on device")
    await stager.fetch(*adapters[1].row)
    assert {entry.digest for entry in stager.cache.entries()} == {adapters[1].digest}


async def test_a_new_process_uses_what_the_last_one_fetched(
    stager: Stager, store: CountingStore, adapters: list[Adapter], settings: Settings
) -> None:
    await stager.fetch(*adapters[0].row)
    await Stager(settings, store).fetch(*adapters[0].row)
    assert store.downloads == 1


async def test_two_processes_can_fetch_the_same_adapter(
    stager: Stager, store: CountingStore, adapters: list[Adapter], settings: Settings
) -> None:
    other = Stager(settings, store)
    store.gate.clear()
    both = [asyncio.create_task(each.fetch(*adapters[0].row)) for each in (stager, other)]
    await eventually(lambda: store.downloads == 2, what="both downloads to begin")
    store.gate.set()
    paths = await asyncio.gather(*both)
    assert len(set(paths)) == 1
    assert adapter_digest(paths[0]) == adapters[0].digest


async def test_closing_abandons_downloads(stager: Stager, store: CountingStore, adapters: list[Adapter]) -> None:
    store.gate.clear()
    waiting = asyncio.create_task(stager.fetch(*adapters[0].row))
    await eventually(lambda: store.downloads == 1, what="the download to begin")
    await stager.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert list(stager.cache.partial.iterdir()) == []


async def test_a_stalled_download_is_abandoned(
    settings: Settings, store: CountingStore, adapters: list[Adapter]
) -> None:
    quick = Stager(settings.model_copy(update={"s3_timeout_s": 0.05}), store)
    quick.retry_delays_s = ()
    store.gate.clear()
    with pytest.raises(RetryableError, match="downloads slower than"):
        await quick.fetch(*adapters[0].row)


@asynccontextmanager
async def cutting_proxy(settings: Settings, after_bytes: int) -> AsyncIterator[str]:
    """URL of a proxy to the store that closes its first connection after `after_bytes` bytes of responses."""
    upstream = urlsplit(settings.s3_endpoint or "")
    limits = iter([after_bytes])
    connections: set[asyncio.Task[None] | None] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: float) -> None:
        try:
            while left > 0 and (chunk := await reader.read(4096)):
                writer.write(chunk[: int(min(left, len(chunk)))])
                left -= len(chunk)
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        inner, outer = await asyncio.open_connection(upstream.hostname, upstream.port)
        directions = (forward(reader, outer, math.inf), forward(inner, writer, next(limits, math.inf)))
        await asyncio.gather(*directions, return_exceptions=True)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*(task for task in connections if task is not None))


@asynccontextmanager
async def stager_behind_cutting_proxy(
    settings: Settings, adapter: Adapter, *retry_delays_s: float
) -> AsyncIterator[Stager]:
    async with cutting_proxy(settings, adapter.size_bytes // 2) as endpoint:
        behind = settings.model_copy(update={"s3_endpoint": endpoint})
        async with open_store(behind) as store:
            stager = Stager(behind, store)
            stager.retry_delays_s = retry_delays_s
            yield stager


async def test_a_truncated_response_is_fetched_again(settings: Settings, adapters: list[Adapter]) -> None:
    async with stager_behind_cutting_proxy(settings, adapters[0], 0.0) as stager:
        assert adapter_digest(await stager.fetch(*adapters[0].row)) == adapters[0].digest


async def test_a_truncated_response_is_never_visible(settings: Settings, adapters: list[Adapter]) -> None:
    async with stager_behind_cutting_proxy(settings, adapters[0]) as stager:
        with pytest.raises(RetryableError, match="could not download"):
            await stager.fetch(*adapters[0].row)
        assert stager.cache.entries() == []


async def test_an_unreachable_store_is_retryable(settings: Settings, adapters: list[Adapter]) -> None:
    unreachable = settings.model_copy(update={"s3_endpoint": "http://127.0.0.1:9"})
    async with open_store(unreachable) as store:
        stager = Stager(unreachable, store)
        stager.retry_delays_s = ()
        with pytest.raises(RetryableError, match="could not download"):
            await stager.fetch(*adapters[0].row)
