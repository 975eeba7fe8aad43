"""Free loopback ports."""

import random
import socket
import time
from collections.abc import Sequence

POLL_S = 0.02
LOOPBACK = "127.0.0.1"
# Below the range of ephemeral ports, so that outgoing connections do not use a port that was found free.
CANDIDATES = range(15_000, 32_000)


def is_free(port: int) -> bool:
    """Whether nothing listens on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def wait_until_free(ports: Sequence[int], timeout_s: float) -> None:
    """Return when nothing listens on the ports any more, or after `timeout_s` seconds."""
    give_up_at = time.monotonic() + timeout_s
    while not all(is_free(port) for port in ports) and time.monotonic() < give_up_at:
        time.sleep(POLL_S)


def accepts_connections(port: int) -> bool:
    """Whether a process accepts connections on the loopback port."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0):
            return True
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """`count` different ports on which nothing listens."""
    found: list[int] = []
    # From the system's generator: two processes with the same seed of `random` would find the same ports.
    for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    return found
