"""A disk that answers when the test says so."""

import os
from pathlib import Path


class Gate:
    """A FIFO in an adapter's directory, at which a check of the stub engines stands still until it is opened."""

    def __init__(self, adapter: Path) -> None:
        self._path = adapter / "gate"
        self._writer: int | None = None
        os.mkfifo(self._path)

    def is_reached(self) -> bool:
        """True once a check stands at the gate; from then on it stays until `open`."""
        try:
            self._writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            return False
        return True

    def open(self) -> None:
        """Let the check that stands there go on, and later ones pass."""
        assert self._writer is not None
        self._path.unlink()
        os.close(self._writer)
