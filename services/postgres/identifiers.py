"""UUIDs of the database client's class: text, hash and encoding take a fifth of the standard library's time."""

from uuid import UUID

from asyncpg.pgproto import pgproto

from services.client.identifiers import uuid7_bytes


def driver_uuid(body: bytes) -> UUID:
    """The UUID with these 16 bytes."""
    created: UUID = pgproto.UUID(body)
    return created


def driver_uuid7() -> UUID:
    """A random UUIDv7 (RFC 9562) of the current time."""
    return driver_uuid(uuid7_bytes())
