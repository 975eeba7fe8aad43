"""Finds a job's record in its lane's topic, since rows contain no prompts."""

import re
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import click
from pydantic import ValidationError

from schemas.common import Lane
from schemas.identity import derived_job_id, fingerprint
from schemas.job import JobRequest
from services.client.identifiers import datetime_of
from services.errors import InputError
from services.kafka import clients as kafka
from services.kafka import headers as names
from services.kafka.headers import Origin, RawHeaders
from services.kafka.reading import scan
from services.process.settings import Settings

SKEW = timedelta(hours=1)
"""The largest difference between the clocks of producer, broker and database for which part of the topic is enough."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """What identifies a job's record: fields of its rows."""

    tenant: str
    job_id: UUID
    lane: Lane
    fingerprint: bytes
    accepted_at: datetime


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job's request as sent, and the key and headers of its record."""

    request: JobRequest
    key: bytes | None
    headers: RawHeaders


async def find_record(settings: Settings, wanted: JobIdentity) -> JobRecord:
    """The record whose request has the job's id and fingerprint; raises InputError if Kafka no longer has it.

    For a UUIDv7, the range from the id's time to the job's acceptance is read first, then the whole topic.
    """
    topic, cluster = settings.jobs_topic(wanted.lane), await kafka.cluster_id(settings)
    if wanted.job_id.version == 7:
        sent_at = datetime_of(wanted.job_id.int >> 80)
        found = await _search(settings, topic, cluster, wanted, sent_at - SKEW, wanted.accepted_at + SKEW)
        if found is not None:
            return found
        click.echo(f"The record is not where the time of its id suggests; reading all of {topic}.", err=True)
    found = await _search(settings, topic, cluster, wanted, None, None)
    if found is None:
        reason = "Kafka has deleted it, or it was sent to another cluster or topic prefix"
        raise InputError(f"the record of job {wanted.job_id} is not in {topic}: {reason}; submit the job again")
    return found


async def _search(
    settings: Settings, topic: str, cluster: str, wanted: JobIdentity, since: datetime | None, until: datetime | None
) -> JobRecord | None:
    id_pattern = re.compile(str(wanted.job_id).encode(), re.IGNORECASE)
    async with aclosing(scan(settings, topic, since=since, until=until)) as messages:
        async for message in messages:
            if message.value is not None and (
                id_pattern.search(message.value) or _derived(message, cluster) == wanted.job_id
            ):
                request = _request(message.value)
                if request is not None and _matches(request, wanted):
                    return JobRecord(request, message.key, tuple(message.headers))
    return None


def _derived(message: Any, cluster: str) -> UUID | None:
    """The id that the worker derives for a record without one."""
    origin = names.last(tuple(message.headers), names.ORIGIN)
    position = Origin(message.topic, message.partition, message.offset, message.timestamp)
    try:
        return derived_job_id(cluster, *(position if origin is None else Origin.parsed(origin)), message.value)
    except ValueError:
        return None


def _request(value: bytes) -> JobRequest | None:
    try:
        return JobRequest.model_validate_json(value)
    except ValidationError:
        return None


def _matches(request: JobRequest, wanted: JobIdentity) -> bool:
    return (
        request.tenant == wanted.tenant
        and request.job_id in (None, wanted.job_id)
        and fingerprint(request) == wanted.fingerprint
    )
