"""A wall clock that steps: a small library, preloaded into a process, moves what it reads for the time of day."""

import struct
import subprocess
from pathlib import Path

PRELOAD, VARIABLE = "LD_PRELOAD", "LORAQ_FAULTS_CLOCK"
OFFSET = struct.Struct("=q")
SOURCE = Path(__file__).with_name("clock.c")


def compiled(directory: Path) -> Path:
    """The library, made in the directory unless it is there."""
    library = directory / "clock.so"
    if not library.exists():
        compile_it = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(compile_it, check=True)
    return library


class Clock:
    """The clock of the processes that have preloaded `library` and are given `environment`, even if that is later."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._library = library
        self._offset = directory / "clock"
        self._offset.write_bytes(OFFSET.pack(0))

    @property
    def environment(self) -> dict[str, str]:
        return {PRELOAD: str(self._library), VARIABLE: str(self._offset)}

    def step(self, seconds: int) -> None:
        """From now on these processes' clocks are off by so many seconds."""
        with self._offset.open("r+b") as shared:  # in place: the processes have mapped it
            shared.write(OFFSET.pack(seconds))
