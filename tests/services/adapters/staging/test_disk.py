"""The cache directory: entries are complete or absent, and no process evicts an entry that another one uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.adapters.staging.disk import FILES, DiskCache
from services.errors import ConfigError, RetryableError

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
HOLD = """
import sys
from pathlib import Path
from services.adapters.staging.disk import DiskCache
cache = DiskCache(Path(sys.argv[1]), 100)
print("held" if cache.acquire(sys.argv[2], 10) is not None else "absent", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "adapters", budget_bytes=30)


def fill(cache: DiskCache, digest: str, used_at: float = 0.0) -> None:
    """An entry of 10 bytes."""
    with cache.filling(digest) as directory:
        for name in FILES:
            (directory / name).write_bytes(b"12345")
        cache.publish(directory, digest)
    os.utime(cache.path(digest), (used_at, used_at))


def names(cache: DiskCache) -> set[str]:
    return {entry.digest for entry in cache.entries()}


def test_a_published_entry_can_be_acquired(cache: DiskCache) -> None:
    assert cache.acquire(A, 10) is None
    fill(cache, A)
    holder = cache.acquire(A, 10)
    assert holder is not None
    os.close(holder)
    assert list(cache.partial.iterdir()) == []


def test_an_unpublished_directory_is_removed(cache: DiskCache) -> None:
    with cache.filling(A) as directory:
        (directory / FILES[0]).write_bytes(b"half")
    assert names(cache) == set()
    assert list(cache.partial.iterdir()) == []


def test_the_slower_of_two_publishers_keeps_the_existing_entry(cache: DiskCache) -> None:
    with cache.filling(A) as slow:
        for name in FILES:
            (slow / name).write_bytes(b"54321")
        fill(cache, A)
        cache.publish(slow, A)
    assert (cache.path(A) / FILES[0]).read_bytes() == b"12345"
    assert list(cache.partial.iterdir()) == []


def test_an_entry_of_the_wrong_size_is_removed(cache: DiskCache) -> None:
    fill(cache, A)
    (cache.path(A) / FILES[1]).write_bytes(b"")
    assert cache.acquire(A, 10) is None
    assert names(cache) == set()


def test_a_used_entry_is_evicted_last(cache: DiskCache) -> None:
    fill(cache, A, used_at=1.0)
    fill(cache, B, used_at=2.0)
    holder = cache.acquire(A, 10)
    assert holder is not None
    os.close(holder)
    cache.make_room(20)
    assert names(cache) == {A}


def test_entries_in_use_stay_and_the_error_names_the_setting(cache: DiskCache) -> None:
    fill(cache, A, used_at=1.0)
    fill(cache, B, used_at=2.0)
    holder = cache.acquire(A, 10)
    assert holder is not None
    cache.make_room(20)
    assert names(cache) == {A}
    with pytest.raises(RetryableError, match="LORAQ_DISK_CACHE_BYTES"):
        cache.make_room(25)
    os.close(holder)
    cache.make_room(25)
    assert names(cache) == set()


def test_a_full_disk_evicts_idle_entries_even_within_the_budget(cache: DiskCache) -> None:
    fill(cache, A, used_at=1.0)
    fill(cache, B, used_at=2.0)
    cache.free(10)
    assert names(cache) == {B}


def test_leftovers_of_dead_processes_are_removed_and_directories_being_filled_are_not(cache: DiskCache) -> None:
    leftover = cache.partial / f"{B}.dead"
    leftover.mkdir()
    (leftover / FILES[0]).write_bytes(b"half")
    with cache.filling(A) as directory:
        DiskCache(cache.root, cache.budget_bytes)
        assert directory.exists()
        assert not leftover.exists()


def test_an_entry_that_another_process_uses_stays_until_that_process_dies(cache: DiskCache) -> None:
    fill(cache, A)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(cache.root), A], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert [entry.in_use for entry in cache.entries()] == [True]
        with pytest.raises(RetryableError):
            cache.make_room(25)
        other.kill()
    cache.make_room(25)
    assert names(cache) == set()


def test_a_directory_that_cannot_be_created_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"LORAQ_CACHE_DIR: cannot write to .*Not a directory"):
        DiskCache(tmp_path / "file" / "adapters", 1)


def test_other_directories_are_not_entries(cache: DiskCache) -> None:
    (cache.root / "notes").mkdir()
    (cache.root / C[:-1]).mkdir()
    fill(cache, C)
    assert names(cache) == {C}
