"""What the command prints, at once: whoever waits for a GPU wants to see how far it is."""

import sys


def say(text: str) -> None:
    """A line, or some."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
