"""A wall clock that steps: a small library, preloaded into a process, moves what it reads for the time of day."""

import struct
import subprocess
from pathlib import Path

VARIABLE = "LORAQ_FAULTS_CLOCK"
OFFSET = struct.Struct("=q")
SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The clock of the processes that preload `library` with `environment`."""

    def __init__(self, directory: Path) -> None:
        self.library = directory / "clock.so"
        self._offset = directory / "clock"
        self._offset.write_bytes(OFFSET.pack(0))
        compile_it = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(self.library), str(SOURCE), "-ldl"]
        subprocess.run(compile_it, check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), VARIABLE: str(self._offset)}

    def step(self, seconds: int) -> None:
        """From now on these processes' clocks are off by so many seconds."""
        with self._offset.open("r+b") as shared:  # in place: the processes have mapped it
            shared.write(OFFSET.pack(seconds))
