"""Calls on a real store, and the table of its errors."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from services.errors import ConfigError, PermanentError, RetryableError, ServiceError
from services.process.settings import MIB, Settings
from services.s3.store import Location, MissingObjectError, ObjectStore, open_store, translate


@pytest.fixture
async def store(store_settings: Settings) -> AsyncIterator[ObjectStore]:
    async with open_store(store_settings) as store:
        yield store


async def test_an_uploaded_file_downloads_unchanged(store: ObjectStore, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096
    (tmp_path / "out").write_bytes(content)
    sent: list[int] = []
    received: list[int] = []
    await store.put_file("some/key", tmp_path / "out", sent.append)
    size = await store.get_to("some/key", tmp_path / "in", 2 * MIB, received.append)
    assert (tmp_path / "in").read_bytes() == content
    assert size == sum(sent) == sum(received) == len(content)


async def test_a_large_file_is_uploaded_in_parts(store: ObjectStore, tmp_path: Path) -> None:
    content = b"loraq" * (4 * MIB)
    (tmp_path / "out").write_bytes(content)
    await store.put_file("large", tmp_path / "out")
    assert await store.get_to("large", tmp_path / "in", len(content)) == len(content)
    assert (tmp_path / "in").read_bytes() == content


async def test_heads_lists_and_deletes(store: ObjectStore) -> None:
    for key in ("a/2", "a/1", "b/1"):
        await store.put_bytes(key, key.encode(), "text/plain")
    assert [item.key for item in await store.list("a/")] == ["a/1", "a/2"]
    found = await store.head("a/1")
    assert found is not None
    assert found.size_bytes == 3
    await store.delete("a/1")
    await store.delete("a/1")
    assert await store.head("a/1") is None


async def test_a_missing_object_has_its_own_error(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(MissingObjectError, match="could not download s3://"):
        await store.get_to("nowhere", tmp_path / "in", 100)
    assert not (tmp_path / "in").exists()


async def test_an_object_larger_than_expected_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    await store.put_bytes("key", b"x" * 1000, "text/plain")
    with pytest.raises(RetryableError, match="larger than the 999 bytes"):
        await store.get_to("key", tmp_path / "in", 999)


async def test_concurrent_creation_of_the_bucket_succeeds(store_settings: Settings) -> None:
    fresh = store_settings.model_copy(update={"s3_bucket": f"{store_settings.s3_bucket}-new"})
    async with open_store(fresh) as store:
        await asyncio.gather(store.ensure_bucket(), store.ensure_bucket())
        await store.put_bytes("key", b"content", "text/plain")
        await store.delete("key")
        await asyncio.to_thread(store._client.delete_bucket, Bucket=fresh.s3_bucket)


async def test_a_presigned_url_needs_no_keys(store: ObjectStore) -> None:
    await store.put_bytes("key", b"content", "text/plain")
    async with aiohttp.ClientSession() as session, session.get(store.presigned_url("key", 60)) as answer:
        assert await answer.read() == b"content"


async def test_wrong_keys_are_named_and_retryable(store_settings: Settings) -> None:
    async with open_store(store_settings.model_copy(update={"s3_access_key": "wrong"})) as store:
        with pytest.raises(RetryableError, match="LORAQ_S3_ACCESS_KEY"):
            await store.list("")


def test_locations() -> None:
    place = Location.parse("s3://bucket/acme/tone/")
    assert place == Location("bucket", "acme/tone/")
    assert place.child("file").uri == "s3://bucket/acme/tone/file"
    for wrong in ("http://bucket/key", "bucket/key", "s3:///key"):
        with pytest.raises(PermanentError, match="is not an s3:// address"):
            Location.parse(wrong)


def client_error(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Get"
    )


TABLE: list[tuple[Exception, type[ServiceError]]] = [
    (client_error("NoSuchKey", 404), MissingObjectError),
    (client_error("404", 404), MissingObjectError),
    (client_error("NoSuchBucket", 404), ConfigError),
    (client_error("AccessDenied", 403), RetryableError),
    (client_error("ExpiredToken", 400), RetryableError),
    (client_error("SlowDown", 503), RetryableError),
    (client_error("InternalError", 500), RetryableError),
    (client_error("TooManyRequests", 429), RetryableError),
    (client_error("InvalidArgument", 400), PermanentError),
    (EndpointConnectionError(endpoint_url="x"), RetryableError),
    (ConnectTimeoutError(endpoint_url="x"), RetryableError),
    (ReadTimeoutError(endpoint_url="x"), RetryableError),
    (IncompleteReadError(actual_bytes=1, expected_bytes=2), RetryableError),
    (ResponseStreamingError(error="reset"), RetryableError),
    (SSLError(endpoint_url="x", error="bad certificate"), ConfigError),
    (NoCredentialsError(), ConfigError),
    (ParamValidationError(report="x"), PermanentError),
    (BotoCoreError(), PermanentError),
    (ValueError("Invalid endpoint: x"), ConfigError),
]


@pytest.mark.parametrize(("theirs", "ours"), TABLE, ids=lambda value: type(value).__name__ if value else "")
def test_each_error_has_its_translation(theirs: Exception, ours: type[ServiceError]) -> None:
    translated = translate(theirs, "read it")
    assert type(translated) is ours
    assert str(translated).startswith("could not read it: ")
