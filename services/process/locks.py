"""Locks of files: held by a living process, and by no dead one, whatever its file says."""

import fcntl
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[str] | None:
    """The locked file, to be held open; None while another process holds it."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(path: Path) -> bool:
    """Whether a living process holds the file's lock; a file that is not there is not made."""
    if not path.exists():
        return False
    lock = try_lock(path)
    if lock is None:
        return True
    lock.close()
    return False
