"""Blocks adapter checks until the test opens a gate."""

import os
from pathlib import Path


class Gate:
    """A FIFO in an adapter's directory; a stub engine's check blocks on it until `open`."""

    def __init__(self, adapter: Path) -> None:
        self._path = adapter / "gate"
        self._writer: int | None = None
        os.mkfifo(self._path)

    def is_reached(self) -> bool:
        """Whether a check blocks at the gate; once True, it blocks until `open`."""
        try:
            self._writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no check reads it yet
            return False
        return True

    def open(self) -> None:
        """Release the check, and let later ones pass."""
        assert self._writer is not None
        self._path.unlink()
        os.close(self._writer)
