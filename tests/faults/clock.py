"""A wall clock that can step: a small preloaded library shifts the time of day that a process reads."""

import struct
import subprocess
from pathlib import Path

PRELOAD, VARIABLE = "LD_PRELOAD", "LORAQ_FAULTS_CLOCK"
OFFSET = struct.Struct("=q")
SOURCE = Path(__file__).with_name("clock.c")


def compile_library(directory: Path) -> Path:
    """Compile the library into the directory, unless it is already there; returns its path."""
    library = directory / "clock.so"
    if not library.exists():
        compile_it = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(compile_it, check=True)
    return library


class Clock:
    """The clock of the processes that preload `library` and have `environment` set, at or after their start."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._library = library
        self._offset = directory / "clock"
        self._offset.write_bytes(OFFSET.pack(0))

    @property
    def environment(self) -> dict[str, str]:
        return {PRELOAD: str(self._library), VARIABLE: str(self._offset)}

    def step(self, seconds: int) -> None:
        """Set the offset of these processes' clocks."""
        with self._offset.open("r+b") as shared:  # in place, because the processes have mapped the file
            shared.write(OFFSET.pack(seconds))
