"""S3-compatible stores: boto3 in a bounded thread pool, and one table of its errors."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import ConnectionError as UnreachableError

from services.errors import ConfigError, PermanentError, RetryableError, ServiceError
from services.process.settings import MIB, Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[int], object]
"""Called from a transfer's thread with the number of bytes transferred since the last call."""

CHUNK_BYTES = 1 * MIB
CONNECT_TIMEOUT_S = 5.0
ATTEMPTS = 3


class MissingObjectError(PermanentError):
    """No object has that key."""


@dataclass(frozen=True)
class Location:
    """The location of an object or a prefix."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, uri: str) -> "Location":
        """From `s3://bucket/key`; raises PermanentError for anything else."""
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not parts.netloc:
            raise PermanentError(f"{uri!r} is not an s3:// address")
        return cls(parts.netloc, uri.removeprefix(f"s3://{parts.netloc}").lstrip("/"))

    @property
    def uri(self) -> str:
        """`s3://bucket/key`."""
        return f"s3://{self.bucket}/{self.key}"

    def child(self, name: str) -> "Location":
        """The object `name` under this prefix."""
        return Location(self.bucket, f"{self.key.rstrip('/')}/{name}")


@dataclass(frozen=True)
class StoredObject:
    """The metadata of an object, as a listing or HEAD returns it."""

    key: str
    size_bytes: int
    etag: str


Listing: TypeAlias = list[StoredObject]


class ObjectStore:
    """A client of the store. Its methods raise RetryableError, ConfigError, MissingObjectError or PermanentError.

    `key` may be a plain key in the settings' bucket, or a `Location` anywhere.
    """

    def __init__(self, settings: Settings) -> None:
        self.bucket = settings.s3_bucket
        self.name = settings.s3_endpoint or f"S3 in {settings.s3_region}"
        self._client = _client(settings)
        self._threads = ThreadPoolExecutor(settings.s3_concurrency, thread_name_prefix="s3")

    def at(self, key: str | Location) -> Location:
        """The location of a key in the settings' bucket; a Location stays as it is."""
        return key if isinstance(key, Location) else Location(self.bucket, key)

    async def ensure_bucket(self) -> None:
        """Create the settings' bucket if it does not exist."""
        await self._call(f"create the bucket {self.bucket}", self._ensure_bucket)

    async def put_file(self, key: str | Location, path: Path, progress: Progress | None = None) -> None:
        """Upload a file, in parts if it is large. The object appears only when it is complete."""
        place = self.at(key)
        await self._call(f"upload {path.name} to {place.uri}", self._put_file, place, path, progress)

    async def put_bytes(self, key: str | Location, content: bytes, content_type: str) -> None:
        """Store `content` under `key`."""
        place = self.at(key)
        put = self._client.put_object
        await self._call(
            f"write {place.uri}", put, Bucket=place.bucket, Key=place.key, Body=content, ContentType=content_type
        )

    async def get_to(self, key: str | Location, path: Path, max_bytes: int, progress: Progress | None = None) -> int:
        """Download into the new file `path`; returns its size in bytes. Raises OSError for errors of the disk.

        Cancelling ends the transfer at the next chunk. The content is not verified, but it never exceeds `max_bytes`:
        a larger object raises RetryableError.
        """
        place, abandoned = self.at(key), threading.Event()
        try:
            return await self._call(f"download {place.uri}", self._get_to, place, path, max_bytes, progress, abandoned)
        finally:
            abandoned.set()

    async def head(self, key: str | Location) -> StoredObject | None:
        """Size and ETag of an object; None if it does not exist."""
        place = self.at(key)
        try:
            found = await self._call(f"look up {place.uri}", self._head, place)
        except MissingObjectError:
            return None
        return StoredObject(place.key, found["ContentLength"], found["ETag"].strip('"'))

    async def list(self, prefix: str | Location) -> Listing:
        """All objects under a prefix, ordered by key."""
        place = self.at(prefix)
        return await self._call(f"list {place.uri}", self._list, place)

    async def delete(self, key: str | Location) -> None:
        """Delete an object. Deleting one that does not exist is not an error."""
        place = self.at(key)
        await self._call(f"delete {place.uri}", self._client.delete_object, Bucket=place.bucket, Key=place.key)

    def presigned_url(self, key: str | Location, valid_s: int) -> str:
        """A URL with which anyone can read the object for `valid_s` seconds. Sends no request."""
        place = self.at(key)
        with translated(f"sign a URL of {place.uri}"):
            url: str = self._client.generate_presigned_url(
                "get_object", Params={"Bucket": place.bucket, "Key": place.key}, ExpiresIn=valid_s
            )
        return url

    def close(self) -> None:
        """Close the client without waiting for running transfers. Call no other method afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def _call(self, action: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            with translated(f"{action} ({self.name})"):
                return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _ensure_bucket(self) -> None:
        try:
            self._client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if _status(error) != 404:
                raise
            self._create_bucket()

    def _create_bucket(self) -> None:
        region = self._client.meta.region_name
        place: Any = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self._client.create_bucket(Bucket=self.bucket, **place)
        except ClientError as error:
            if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    def _put_file(self, place: Location, path: Path, progress: Progress | None) -> None:
        one_thread = TransferConfig(use_threads=False)
        with path.open("rb") as file:
            self._client.upload_fileobj(file, place.bucket, place.key, Callback=progress, Config=one_thread)

    def _get_to(
        self, place: Location, path: Path, max_bytes: int, progress: Progress | None, abandoned: threading.Event
    ) -> int:
        body = self._client.get_object(Bucket=place.bucket, Key=place.key)["Body"]
        received = 0
        try:
            with path.open("xb") as file:
                while not abandoned.is_set() and (chunk := body.read(CHUNK_BYTES)):
                    received += len(chunk)
                    if received > max_bytes:
                        raise RetryableError(f"{place.uri} is larger than the {max_bytes} bytes it should have")
                    file.write(chunk)
                    if progress:
                        progress(len(chunk))
        finally:
            body.close()
        return received

    def _head(self, place: Location) -> Any:
        return self._client.head_object(Bucket=place.bucket, Key=place.key)

    def _list(self, place: Location) -> Listing:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.key)
        found = (entry for page in pages for entry in page.get("Contents", ()))
        return [StoredObject(entry["Key"], entry["Size"], entry["ETag"].strip('"')) for entry in found]


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[ObjectStore]:
    """An ObjectStore that is closed at the end of the block."""
    store = await asyncio.to_thread(ObjectStore, settings)
    try:
        yield store
    finally:
        store.close()


def _client(settings: Settings) -> "S3Client":
    secret = settings.s3_secret_key.get_secret_value() if settings.s3_secret_key else None
    with translated("set up the S3 client (LORAQ_S3_ENDPOINT, LORAQ_S3_REGION)"):
        return boto3.session.Session().client(
            "s3",
            endpoint_url=settings.s3_endpoint,
            region_name=settings.s3_region,
            aws_access_key_id=settings.s3_access_key,
            aws_secret_access_key=secret,
            config=Config(
                connect_timeout=min(CONNECT_TIMEOUT_S, settings.s3_timeout_s),
                read_timeout=settings.s3_timeout_s,
                max_pool_connections=settings.s3_concurrency,
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                s3={"addressing_style": "path" if settings.s3_endpoint else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


# Our error for each error of the client; the first matching class wins. ClientError is mapped by its code below.
CLIENT_ERRORS: tuple[tuple[type[Exception], type[ServiceError]], ...] = (
    (NoCredentialsError, ConfigError),
    (PartialCredentialsError, ConfigError),
    (CredentialRetrievalError, RetryableError),
    (SSLError, ConfigError),
    (UnreachableError, RetryableError),  # refused, name not found, not connected in time
    (HTTPClientError, RetryableError),  # reset, no answer in time
    (IncompleteReadError, RetryableError),
    (ResponseStreamingError, RetryableError),
    (BotoCoreError, PermanentError),  # a malformed request or setting
    (ValueError, ConfigError),  # an endpoint that is not a URL
)
CODES: dict[str, type[ServiceError]] = {
    "NoSuchKey": MissingObjectError,
    "NoSuchBucket": ConfigError,
    "InvalidBucketName": ConfigError,
    "ExpiredToken": RetryableError,
    "RequestTimeout": RetryableError,
    "SlowDown": RetryableError,
}
# 403 is retryable because credentials expire and are rotated.
STATUSES: dict[int, type[ServiceError]] = {
    403: RetryableError,
    404: MissingObjectError,
    408: RetryableError,
    409: RetryableError,
    429: RetryableError,
}
HINTS: dict[int | str, str] = {
    "NoSuchBucket": "check LORAQ_S3_BUCKET",
    "InvalidBucketName": "check LORAQ_S3_BUCKET",
    403: "check LORAQ_S3_ACCESS_KEY, LORAQ_S3_SECRET_KEY and their permissions",
}


def translate(error: Exception, action: str) -> ServiceError:
    """Our error for one of the client's errors."""
    if isinstance(error, ClientError):
        code, status = _code(error), _status(error)
        kind = CODES.get(code) or STATUSES.get(status) or (RetryableError if status >= 500 else PermanentError)
        hint = HINTS.get(code) or HINTS.get(status)
        message = str(error.response.get("Error", {}).get("Message") or code)
        return kind(f"could not {action}: {message}" + (f"; {hint}" if hint else ""))
    kind = next(ours for theirs, ours in CLIENT_ERRORS if isinstance(error, theirs))
    return kind(f"could not {action}: {error}")


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Translates the client's errors raised in the block: "could not <action>: …"."""
    try:
        yield
    except (BotoCoreError, ClientError, ValueError) as error:
        raise translate(error, action) from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
