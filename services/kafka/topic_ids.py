"""Topic ids: a topic that is deleted and recreated keeps its name and gets another id.

The Kafka library identifies topics by name only, and an offset does not show whether its topic is still the same one.
So this module defines the one request that returns ids, Metadata version 12.
"""

import functools
from collections.abc import Collection, Mapping
from io import BytesIO
from typing import Any
from uuid import UUID

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from services.process import telemetry

METADATA = 3
VERSION = 12
NAME = CompactString("utf-8")
TAGS = ("tags", TaggedFields)
NO_ID = UUID(int=0)
_log = telemetry.get_logger()


class Uuid(AbstractType):  # type: ignore[misc]  # the library is untyped
    """16 bytes."""

    @classmethod
    def encode(cls, value: UUID) -> bytes:
        """The wire format."""
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        """Read the next 16 bytes."""
        return UUID(bytes=data.read(16))


class _MetadataResponse(Response):  # type: ignore[misc]
    API_KEY = METADATA
    API_VERSION = VERSION
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", CompactArray(("node_id", Int32), ("host", NAME), ("port", Int32), ("rack", NAME), TAGS)),
        ("cluster_id", NAME),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", NAME),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        TAGS,
                    ),
                ),
                ("authorized_operations", Int32),
                TAGS,
            ),
        ),
        TAGS,
    )


class _MetadataStruct(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY = METADATA
    API_VERSION = VERSION
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", Uuid), ("name", NAME), TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        TAGS,
    )


class _MetadataRequest(Request[_MetadataStruct]):  # type: ignore[misc]
    API_KEY = METADATA

    def __init__(self, topics: Collection[str]) -> None:
        self._topics: list[tuple[UUID, str, dict[int, bytes]]] = [(NO_ID, topic, {}) for topic in topics]

    def build(self, request_struct_class: type[_MetadataStruct]) -> _MetadataStruct:
        return request_struct_class(self._topics, False, False, {})


async def topic_ids(consumer: Any, topics: Collection[str]) -> dict[str, UUID]:
    """Ids of the topics that exist; empty if the broker is too old to report ids. Creates no topic.

    `consumer` is a started consumer of the Kafka library; raises that library's errors.
    """
    client = consumer._client  # noqa: SLF001  # the library has no public method for it
    try:
        response = await client.send(client.get_random_node(), _MetadataRequest(topics))
    except (IncompatibleBrokerVersion, NotImplementedError) as error:  # the library raises either
        _warn_too_old(repr(error))
        return {}
    return {name: topic_id for code, name, topic_id, *_ in response.topics if code == 0 and topic_id != NO_ID}


@functools.cache
def _warn_too_old(reason: str) -> None:
    """Log once per process, because ids are requested every second."""
    _log.warning(
        "The broker is too old to report topic ids: recreated topics are not noticed",
        action="topic_ids_unknown",
        reason=reason,
    )


class KnownTopics:
    """The ids of topics when they were last checked. Pure."""

    def __init__(self) -> None:
        self._ids: dict[str, UUID] = {}

    @property
    def names(self) -> frozenset[str]:
        """Topics whose id is known."""
        return frozenset(self._ids)

    def recreated(self, ids: Mapping[str, UUID]) -> set[str]:
        """Update the ids and return the topics whose id changed. A topic that is missing from `ids` keeps its id."""
        changed = {topic for topic, found in ids.items() if self._ids.get(topic, found) != found}
        self._ids |= ids
        return changed
