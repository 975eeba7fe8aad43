"""Progress output, flushed immediately."""

import sys


def print_line(text: str) -> None:
    """Write text and a newline to stdout."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
