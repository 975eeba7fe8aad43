"""Waiting for a condition instead of sleeping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
INTERVAL_S = 0.05
TIMEOUT_S = 60.0
"""Generous, because other work may occupy the cores: it catches a condition that never holds, not a slow one."""


async def eventually(
    check: Callable[[], T | Awaitable[T]], timeout_s: float = TIMEOUT_S, what: str = "the condition to hold"
) -> T:
    """Call `check` (sync or async) until it returns a true value; returns that value.

    An AssertionError in `check` means "not yet". After `timeout_s` the test fails with `what` and the last reason.
    """
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
            if value:
                return value
            reason = f"the last value was {value!r}"
        except AssertionError as error:
            reason = str(error)
        if time.monotonic() > give_up_at:
            raise AssertionError(f"timed out after {timeout_s:g} s waiting for {what}: {reason}")
        await asyncio.sleep(INTERVAL_S)


def eventually_sync(check: Callable[[], T], timeout_s: float = TIMEOUT_S, what: str = "the condition to hold") -> T:
    """`eventually` for tests that run no event loop."""
    return asyncio.run(eventually(check, timeout_s, what))
