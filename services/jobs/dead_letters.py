"""Which of the jobs that were sent are dead letters by now: they get no row, so that nobody need wait for one."""

from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from uuid import UUID

import click

from services.client.producer import Receipt
from services.dlq.dead_letters import letter_of
from services.errors import ServiceError
from services.kafka.reading import scan
from services.process.settings import Settings

SKEW = timedelta(minutes=1)
"""How far this clock and the workers' may lie apart; where they lie further, a wait ends only with its time."""


class Refusals:
    """Reads the dead-letter topic from `since` on, when the jobs were not yet sent; each time only what came anew."""

    def __init__(self, settings: Settings, receipts: Sequence[Receipt], since: datetime) -> None:
        self._settings = settings
        self._sent = {(receipt.topic, receipt.partition, receipt.offset): receipt.job_id for receipt in receipts}
        self._since = since
        self._known: dict[UUID, str] = {}
        self._was_told = False

    async def known(self) -> dict[UUID, str]:
        """Why each job was put aside, of all that were. A topic that cannot be read hides them, which is said once."""
        begun = datetime.now(UTC)
        topic = self._settings.dead_topic
        try:
            async with aclosing(scan(self._settings, topic, since=self._since - SKEW)) as messages:
                async for message in messages:
                    letter = letter_of(message)
                    job_id = self._sent.get(letter.source[:3]) if letter.source else None
                    if job_id is not None:
                        self._known[job_id] = f"{letter.code}: {letter.message}; see `loraq dlq show {letter.place}`"
        except ServiceError as error:
            if not self._was_told:
                click.echo(f"Whether jobs were put aside is not known: {error}", err=True)
            self._was_told = True
        else:
            self._since = begun
        return self._known
