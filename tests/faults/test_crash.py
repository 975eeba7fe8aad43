"""Every crash point still exists in the product, and kills the process at the requested hit only."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.crash import POINTS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio
from services.webhooks.outcome import Responded
from services.dispatcher.sender import Sender
from tests.faults import crash

async def send(self, status):
    return Responded(status)

Sender.send = send
crash.arm("after_webhook_answer", 2, "kill")

async def main():
    for status in (200, 503, 503, 204, 200):
        print((await Sender.send(None, status)).status, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", POINTS)
def test_a_point_names_a_method_of_the_product(name: str) -> None:
    assert callable(getattr(POINTS[name].owner, POINTS[name].method))


def test_the_process_is_killed_at_the_requested_hit() -> None:
    finished = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == -signal.SIGKILL
    assert finished.stdout.split() == ["200", "503", "503"]
