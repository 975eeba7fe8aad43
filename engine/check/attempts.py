"""Independent measurements: one that fails leaves its traceback, and the others continue."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.check.output import print_line


@dataclass
class Attempts:
    """By name: the seconds each measurement took, and the tracebacks of those that failed."""

    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Run the block; print and store an exception instead of raising it."""
        started = time.monotonic()
        try:
            yield
        except Exception:  # any: the other results are still useful, and the exit code reports the failure
            self.errors[name] = traceback.format_exc()
            print_line(self.errors[name])
        finally:
            self.seconds[name] = time.monotonic() - started
