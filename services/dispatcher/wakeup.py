"""Waking up: NOTIFY from Postgres says at once that something is due, polling says so in the end."""

import asyncio
from collections.abc import Callable
from typing import Any

from services import telemetry
from services.database import Pool, translated
from services.errors import RetryableError

CHANNEL = "loraq_outbox"
RECONNECT_AFTER_S = 1.0
_log = telemetry.get_logger()


async def first_of(*events: asyncio.Event, timeout_s: float | None) -> None:
    """Return when one of the events is set, or after `timeout_s` seconds (None: no limit)."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()


async def listen(database: Pool, wake: Callable[[], None], stop: asyncio.Event) -> None:
    """Call `wake` whenever the channel is notified, until `stop`; reconnects, and wakes once after each connection."""
    while not stop.is_set():
        try:
            await _listen_once(database, wake, stop)
        except RetryableError as error:
            _log.warning("Listening interrupted; polling meanwhile", action="listen_interrupted", reason=str(error))
            await first_of(stop, timeout_s=RECONNECT_AFTER_S)


async def _listen_once(database: Pool, wake: Callable[[], None], stop: asyncio.Event) -> None:
    lost = asyncio.Event()

    def on_notify(*_: Any) -> None:
        wake()

    def on_lost(_: Any) -> None:
        lost.set()

    with translated(f"listen on {CHANNEL}"):
        async with database.acquire() as connection:
            connection.add_termination_listener(on_lost)
            await connection.add_listener(CHANNEL, on_notify)
            wake()
            try:
                await first_of(stop, lost, timeout_s=None)
            finally:
                if not connection.is_closed():
                    connection.remove_termination_listener(on_lost)
                    await connection.remove_listener(CHANNEL, on_notify)
    if lost.is_set():
        raise RetryableError("the listening connection to Postgres was lost")
