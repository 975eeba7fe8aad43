"""The store from its wheel: it needs the keys, and its objects survive a crash and a change of ports."""

from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from services.localstack.ports import free_ports
from services.localstack.servers import S3
from services.localstack.servers.s3 import NUM_PORTS

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def client(server: S3, secret: str | None = None) -> "S3Client":
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret or server.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def test_objects_survive_a_crash_and_a_change_of_ports(tmp_path: Path) -> None:
    first = S3(tmp_path / "data", tmp_path / "log", free_ports(NUM_PORTS), "key", "secret")
    first.start()
    client(first).create_bucket(Bucket="kept")
    client(first).put_object(Bucket="kept", Key="a", Body=b"1" * 100_000)
    first.kill()
    assert any(path.exists() for path in first.leftovers())
    second = S3(tmp_path / "data", tmp_path / "log", free_ports(NUM_PORTS), "key", "secret")
    second.start()
    try:
        assert client(second).get_object(Bucket="kept", Key="a")["Body"].read() == b"1" * 100_000
        client(second).put_object(Bucket="kept", Key="b", Body=b"2")
    finally:
        second.stop()
        first.discard_leftovers()
    assert not any(path.exists() for path in second.leftovers())


def test_other_keys_are_refused(s3_server: S3, bucket: str) -> None:
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client(s3_server, secret="guessed").list_objects_v2(Bucket=bucket)


def test_keys_are_readable_by_their_owner_only(s3_server: S3) -> None:
    assert (s3_server.directory / "s3.json").stat().st_mode & 0o777 == 0o600


def test_needs_all_its_ports(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs 8 ports, got 1"):
        S3(tmp_path, tmp_path / "log", [1], "key", "secret")
