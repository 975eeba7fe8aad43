"""Fetches adapters from S3 into the disk cache: one download per digest, however many callers wait for it."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine import adapter_digest
from schemas.common import ErrorCode
from services.adapters.staging.disk import FILES, DiskCache
from services.errors import ConfigError, JobError, PermanentError, RetryableError
from services.process import telemetry
from services.process.settings import Settings
from services.s3.store import Location, ObjectStore

MIN_BYTES_PER_S = 256 * 1024
"""A slower transfer is abandoned, so that a stalled store cannot block a thread indefinitely."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_REFETCHES = 5

log = telemetry.get_logger()


class Stager:
    """Adapters on disk by digest. Close it before the store, so that no download outlives the store."""

    def __init__(self, settings: Settings, store: ObjectStore) -> None:
        self.cache = DiskCache(settings.cache_dir / "adapters", settings.disk_cache_bytes)
        self.retry_delays_s: tuple[float, ...] = (0.2, 1.0)
        self._store = store
        self._max_bytes = min(settings.max_adapter_bytes, settings.disk_cache_bytes)
        self._timeout_s = settings.s3_timeout_s
        self._slots = asyncio.Semaphore(max(1, settings.s3_concurrency // 2))
        self._downloads: dict[str, asyncio.Task[None]] = {}
        self._incoming_bytes = 0

    async def fetch(self, digest: str, uri: str, size_bytes: int) -> Path:
        """The adapter's directory on disk, downloaded if necessary. It may be evicted at any time: see `hold`.

        `uri` is the s3:// prefix of the two files, `size_bytes` their total size. Raises JobError
        (adapter_load_failed) if the adapter can never be fetched, RetryableError if the store or the disk failed.
        """
        async with self.hold(digest, uri, size_bytes) as path:
            return path

    @asynccontextmanager
    async def hold(self, digest: str, uri: str, size_bytes: int) -> AsyncIterator[Path]:
        """Like `fetch`, but the directory is not evicted inside the block."""
        holder = await self._acquire(digest, uri, size_bytes)
        try:
            yield self.cache.path(digest)
        finally:
            os.close(holder)

    async def close(self) -> None:
        """Abandon running downloads."""
        running = list(self._downloads.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _acquire(self, digest: str, uri: str, size_bytes: int) -> int:
        outcome = "hit"
        for _ in range(MAX_REFETCHES):
            holder = await self._acquire_cached(digest, size_bytes)
            if holder is not None:
                telemetry.ADAPTER_FETCHES.labels(outcome=outcome).inc()
                return holder
            await self._download_once(digest, uri, size_bytes)
            outcome = "fetched"
        raise RetryableError(f"adapter {digest} is evicted right after each download; raise LORAQ_DISK_CACHE_BYTES")

    async def _acquire_cached(self, digest: str, size_bytes: int) -> int | None:
        acquiring = asyncio.ensure_future(asyncio.to_thread(self.cache.acquire, digest, size_bytes))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(_release)  # the thread cannot be cancelled
            raise
        except OSError as error:
            raise _disk_error(self.cache.root, error) from error

    async def _download_once(self, digest: str, uri: str, size_bytes: int) -> None:
        task = self._downloads.get(digest)
        if task is None:
            task = asyncio.create_task(self._download(digest, uri, size_bytes), name=f"fetch {digest[:12]}")
            self._downloads[digest] = task
            task.add_done_callback(lambda done: self._forget(digest, done))
        await asyncio.shield(task)

    def _forget(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._downloads[digest]
        if not task.cancelled() and task.exception() is not None:
            telemetry.ADAPTER_FETCHES.labels(outcome="failed").inc()

    async def _download(self, digest: str, uri: str, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            limit = f"{self._max_bytes} (LORAQ_MAX_ADAPTER_BYTES and LORAQ_DISK_CACHE_BYTES)"
            raise JobError(ErrorCode.ADAPTER_LOAD_FAILED, f"the adapter has {size_bytes} bytes, more than {limit}")
        prefix = _prefix(uri)
        attributes = {telemetry.ADAPTER_DIGEST: digest}
        async with self._slots:
            with (
                telemetry.tracer().start_as_current_span(telemetry.SPAN_FETCH_ADAPTER, attributes=attributes),
                telemetry.ADAPTER_FETCH_SECONDS.time(),
            ):
                await self._attempt_with_retries(digest, prefix, size_bytes)

    async def _attempt_with_retries(self, digest: str, prefix: Location, size_bytes: int) -> None:
        for delay_s in self.retry_delays_s:
            try:
                return await self._attempt(digest, prefix, size_bytes)
            except RetryableError as error:
                log.warning("Adapter fetch retried", action="adapter_retry", digest=digest, reason=str(error))
            await asyncio.sleep(delay_s)
        return await self._attempt(digest, prefix, size_bytes)

    async def _attempt(self, digest: str, prefix: Location, size_bytes: int) -> None:
        self._incoming_bytes += size_bytes
        try:
            await asyncio.to_thread(self.cache.make_room, self._incoming_bytes)
            await self._fill(digest, prefix, size_bytes)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise _disk_error(self.cache.root, error) from error
            await asyncio.to_thread(self.cache.free, size_bytes)
            raise RetryableError(f"the disk of the adapter cache {self.cache.root} is full") from error
        finally:
            self._incoming_bytes -= size_bytes

    async def _fill(self, digest: str, prefix: Location, size_bytes: int) -> None:
        with self.cache.filling(digest) as directory:
            await self._transfer(prefix, directory, size_bytes)
            found = await asyncio.to_thread(adapter_digest, directory)
            if found != digest:
                raise RetryableError(f"{prefix.uri} has other content than was pushed: its digest is {found}")
            await asyncio.to_thread(self.cache.publish, directory, digest)

    async def _transfer(self, prefix: Location, directory: Path, size_bytes: int) -> None:
        received = 0
        try:
            async with asyncio.timeout(2 * self._timeout_s + size_bytes / MIN_BYTES_PER_S):
                for name in FILES:
                    missing = size_bytes - received
                    received += await self._store.get_to(prefix.child(name), directory / name, missing)
        except TimeoutError as error:
            raise RetryableError(f"{prefix.uri} downloads slower than {MIN_BYTES_PER_S} bytes per second") from error
        except ConfigError as error:
            raise RetryableError(str(error)) from error  # an operator can fix it; the adapter is not the cause
        except PermanentError as error:
            raise JobError(ErrorCode.ADAPTER_LOAD_FAILED, f"the adapter's file is missing: {error}") from error
        if received != size_bytes:
            raise RetryableError(f"{prefix.uri} has {received} bytes instead of {size_bytes}")


def _release(acquired: asyncio.Future[int | None]) -> None:
    if not acquired.cancelled() and acquired.exception() is None and (holder := acquired.result()) is not None:
        os.close(holder)


def _prefix(uri: str) -> Location:
    try:
        return Location.parse(uri)
    except PermanentError as error:
        raise JobError(ErrorCode.ADAPTER_LOAD_FAILED, f"the adapter's address is invalid: {error}") from error


def _disk_error(root: Path, error: OSError) -> RetryableError:
    return RetryableError(f"the adapter cache {root} (LORAQ_CACHE_DIR) cannot be written: {error.strerror}")
