"""Waiting for a condition, never for a time."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
INTERVAL_S = 0.05
PATIENCE_S = 60.0
"""How long a condition may take where other work has the cores: a bound for what never comes, not for what is slow."""


async def eventually(
    check: Callable[[], T | Awaitable[T]], timeout_s: float = PATIENCE_S, what: str = "the condition to hold"
) -> T:
    """Call `check` (sync or async) until it returns something true; returns that.

    An AssertionError of `check` counts as not yet. After `timeout_s` the test fails with `what` and the newest reason.
    """
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            result = check()
            seen = await result if inspect.isawaitable(result) else result
            if seen:
                return seen
            reason = f"the newest answer was {seen!r}"
        except AssertionError as error:
            reason = str(error)
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}: {reason}")
        await asyncio.sleep(INTERVAL_S)


def eventually_sync(check: Callable[[], T], timeout_s: float = PATIENCE_S, what: str = "the condition to hold") -> T:
    """`eventually` for tests that run no event loop."""
    return asyncio.run(eventually(check, timeout_s, what))
