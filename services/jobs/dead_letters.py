"""Finds out which submitted jobs were dead-lettered: those get no row, so a wait for them must end."""

from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from uuid import UUID

import click

from services.client.producer import Receipt
from services.dlq.dead_letters import dead_letter_of
from services.errors import ServiceError
from services.kafka.reading import scan
from services.process.settings import Settings

SKEW = timedelta(minutes=1)
"""The largest difference between this clock and the workers'; beyond it, a wait ends only by its timeout."""


class DeadLetterLookup:
    """Reads the dead-letter topic from `since`, a time before the jobs were sent; each lookup continues the last."""

    def __init__(self, settings: Settings, receipts: Sequence[Receipt], since: datetime) -> None:
        self._settings = settings
        self._sent = {(receipt.topic, receipt.partition, receipt.offset): receipt.job_id for receipt in receipts}
        self._since = since
        self._reasons: dict[UUID, str] = {}
        self._warned = False

    async def reasons(self) -> dict[UUID, str]:
        """The dead-lettered jobs so far, each with the reason. Warns once if the topic cannot be read."""
        started = datetime.now(UTC)
        topic = self._settings.dead_topic
        try:
            async with aclosing(scan(self._settings, topic, since=self._since - SKEW)) as messages:
                async for message in messages:
                    letter = dead_letter_of(message)
                    job_id = self._sent.get(letter.source[:3]) if letter.source else None
                    if job_id is not None:
                        reason = f"{letter.code}: {letter.message}; see `loraq dlq show {letter.position}`"
                        self._reasons[job_id] = reason
        except ServiceError as error:
            if not self._warned:
                click.echo(f"Cannot tell whether jobs were dead-lettered: {error}", err=True)
            self._warned = True
        else:
            self._since = started
        return self._reasons
