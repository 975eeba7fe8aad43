"""Measures that do not depend on each other: one that fails leaves its traceback, and the others go on."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.check.output import say


@dataclass
class Attempts:
    """By name: what each took, and the tracebacks of those that failed."""

    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def make(self, name: str) -> Iterator[None]:
        """Do what is within; whatever it raises is told and kept, and goes no further."""
        started = time.monotonic()
        try:
            yield
        except Exception:  # any: what the others find is worth as much, and the exit code tells
            self.errors[name] = traceback.format_exc()
            say(self.errors[name])
        finally:
            self.seconds[name] = time.monotonic() - started
