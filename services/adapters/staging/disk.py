"""The directory of staged adapters, `<cache_dir>/adapters/<digest>/`. Several processes may share it.

An entry appears and disappears by a rename, so it is always complete. A process that uses an entry holds a shared lock
on its directory; a process that fills or removes one holds the exclusive lock. Locks end with their process.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from services.adapters.staging.eviction import Entry, plan_eviction
from services.errors import ConfigError, RetryableError
from services.process import telemetry

FILES = ("adapter_config.json", "adapter_model.safetensors")
DIGEST = re.compile(r"[0-9a-f]{64}")
EVICTION_ROUNDS = 5


class DiskCache:
    """Content-addressed directories within `budget_bytes`. All methods block and may raise OSError."""

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self.root = root
        self.partial = root / ".partial"
        self.budget_bytes = budget_bytes
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self.sweep()
        except OSError as error:
            raise ConfigError(f"LORAQ_CACHE_DIR: cannot write to {root}: {error.strerror}") from error

    def path(self, digest: str) -> Path:
        """Directory of the adapter with that digest, whether it exists or not."""
        return self.root / digest

    def sweep(self) -> None:
        """Remove incomplete directories that dead processes left behind."""
        for leftover in self.partial.iterdir():
            self._remove(leftover)

    def acquire(self, digest: str, size_bytes: int) -> int | None:
        """A descriptor that protects the entry from eviction until it is closed; None if there is no such entry.

        An entry whose files have the wrong size is removed.
        """
        path = self.path(digest)
        holder = _lock_directory(path, fcntl.LOCK_SH)
        if holder is None:
            return None
        if _size(path) == size_bytes:
            now = time.time_ns()  # the kernel's own timestamp is coarser, so that ties would occur
            os.utime(path, ns=(now, now))
            return holder
        os.close(holder)
        self._remove(path)
        return None

    @contextmanager
    def filling(self, digest: str) -> Iterator[Path]:
        """A new, empty directory for the two files; it is removed at the end unless it was published."""
        directory = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=self.partial))
        holder = _lock_directory(directory, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            if holder is not None:
                os.close(holder)

    def publish(self, directory: Path, digest: str) -> None:
        """Turn a filled and verified directory into the entry. If another process was faster, its entry stays."""
        for name in FILES:
            _flush(directory / name)
        _flush(directory)
        try:
            directory.rename(self.path(digest))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _flush(self.root)

    def make_room(self, incoming_bytes: int) -> None:
        """Evict until `incoming_bytes` more fit the budget; raises RetryableError if too much is in use."""
        self._shrink(incoming_bytes, self.budget_bytes, "raise LORAQ_DISK_CACHE_BYTES")

    def free(self, num_bytes: int) -> None:
        """Evict `num_bytes` because the disk is full before the budget is; raises RetryableError if it cannot."""
        present = sum(entry.size_bytes for entry in self.entries())
        self._shrink(num_bytes, min(present, self.budget_bytes), "free space on the disk")

    def _shrink(self, incoming_bytes: int, budget_bytes: int, what_to_do: str) -> None:
        for _ in range(EVICTION_ROUNDS):  # another process may use or probe an entry meanwhile
            victims = plan_eviction(self.entries(), incoming_bytes, budget_bytes)
            if victims is not None and all(self._evict(victim) for victim in victims):
                return
        raise RetryableError(
            f"the adapter cache {self.root} has no room for {incoming_bytes} more bytes because the rest is in use; "
            + what_to_do
        )

    def digests(self) -> frozenset[str]:
        """Digests of all entries, without a look into them."""
        return frozenset(path.name for path in self.root.iterdir() if DIGEST.fullmatch(path.name))

    def entries(self) -> list[Entry]:
        """All entries, including those of other processes."""
        found = [entry for path in self.root.iterdir() if DIGEST.fullmatch(path.name) and (entry := _entry(path))]
        telemetry.ADAPTER_BYTES.labels(tier="disk").set(sum(entry.size_bytes for entry in found))
        return found

    def _evict(self, entry: Entry) -> bool:
        removed = self._remove(self.path(entry.digest))
        if removed:
            telemetry.ADAPTER_EVICTIONS.labels(tier="disk").inc()
        return removed

    def _remove(self, path: Path) -> bool:
        """Remove a directory unless a process uses it; returns True if it is gone."""
        holder = _lock_directory(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if holder is None:
            return not path.exists()
        evicted = self.partial / f"evicted.{uuid4().hex}"  # a rename needs no space on a full disk
        try:
            path.rename(evicted)
        finally:
            os.close(holder)
        shutil.rmtree(evicted, ignore_errors=True)
        return True


def _lock_directory(path: Path, operation: int) -> int | None:
    """A descriptor of the locked directory; None if it does not exist or another process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, operation)
        still_there = os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except (BlockingIOError, FileNotFoundError):
        still_there = False
    if still_there:
        return descriptor
    os.close(descriptor)
    return None


def _size(path: Path) -> int | None:
    try:
        return sum((path / name).stat().st_size for name in FILES)
    except FileNotFoundError:
        return None


def _entry(path: Path) -> Entry | None:
    """The entry at `path` with the total size of its files; None if it has been removed meanwhile."""
    with suppress(FileNotFoundError):
        probe = _lock_directory(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if probe is not None:
            os.close(probe)
        size_bytes = sum(file.stat().st_size for file in path.iterdir())
        return Entry(path.name, size_bytes, path.stat().st_mtime, in_use=probe is None)
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
