"""Waiting for due rows: NOTIFY wakes the dispatcher at once, polling finds rows whose notification was lost."""

import asyncio

CHANNEL = "loraq_outbox"


async def first_of(*events: asyncio.Event, timeout_s: float | None) -> None:
    """Return when one of the events is set, or after `timeout_s` seconds (None: no limit)."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()
