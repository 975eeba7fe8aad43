"""File locks (flock) that the kernel releases when their process dies."""

import fcntl
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[str] | None:
    """The locked file, which the caller must keep open; None while another process holds the lock."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(path: Path) -> bool:
    """Whether a living process holds the file's lock. Does not create the file."""
    if not path.exists():
        return False
    lock = try_lock(path)
    if lock is None:
        return True
    lock.close()
    return False
