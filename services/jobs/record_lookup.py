"""Finds the record that a job was made of in its lane's topic: rows keep no prompts."""

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
from services.client.identifiers import moment_of
from services.errors import InputError
from services.kafka import clients as kafka
from services.kafka import headers as names
from services.kafka.headers import Origin, RawHeaders
from services.kafka.reading import scan
from services.process.settings import Settings

SKEW = timedelta(hours=1)
"""How far producers' clocks, the broker's and the database's may lie apart before all of the topic is read."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job as its row and its key tell it."""

    tenant: str
    job_id: UUID
    lane: Lane
    fingerprint: bytes
    accepted_at: datetime


@dataclass(frozen=True, slots=True)
class Found:
    """The request as sent, and the record's key and headers."""

    request: JobRequest
    key: bytes | None
    headers: RawHeaders


async def find_record(settings: Settings, wanted: Wanted) -> Found:
    """The record whose request has the job's id and fingerprint; raises InputError if Kafka has it no longer.

    The newest records are not read if the job's id tells its time: from there to its acceptance is where it stands.
    """
    topic, cluster = settings.jobs_topic(wanted.lane), await kafka.cluster_id(settings)
    if wanted.job_id.version == 7:
        sent_at = moment_of(wanted.job_id.int >> 80)
        found = await _search(settings, topic, cluster, wanted, sent_at - SKEW, wanted.accepted_at + SKEW)
        if found is not None:
            return found
        click.echo(f"The record does not stand where its time says; reading all of {topic}.", err=True)
    found = await _search(settings, topic, cluster, wanted, None, None)
    if found is None:
        reason = "Kafka has deleted it by now, or it came by another cluster or prefix"
        raise InputError(f"the record of job {wanted.job_id} is not in {topic}: {reason}; submit the job anew")
    return found


async def _search(
    settings: Settings, topic: str, cluster: str, wanted: Wanted, since: datetime | None, until: datetime | None
) -> Found | None:
    named = re.compile(str(wanted.job_id).encode(), re.IGNORECASE)
    async with aclosing(scan(settings, topic, since=since, until=until)) as messages:
        async for message in messages:
            if message.value is not None and (
                named.search(message.value) or _derived(message, cluster) == wanted.job_id
            ):
                request = _request(message.value)
                if request is not None and _is(request, wanted):
                    return Found(request, message.key, tuple(message.headers))
    return None


def _derived(message: Any, cluster: str) -> UUID | None:
    """The id of a record that carries none, as the worker derives it."""
    origin = names.last(tuple(message.headers), names.ORIGIN)
    here = Origin(message.topic, message.partition, message.offset, message.timestamp)
    try:
        return derived_job_id(cluster, *(here if origin is None else Origin.parsed(origin)), message.value)
    except ValueError:
        return None


def _request(value: bytes) -> JobRequest | None:
    try:
        return JobRequest.model_validate_json(value)
    except ValidationError:
        return None


def _is(request: JobRequest, wanted: Wanted) -> bool:
    return (
        request.tenant == wanted.tenant
        and request.job_id in (None, wanted.job_id)
        and fingerprint(request) == wanted.fingerprint
    )
