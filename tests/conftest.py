"""Fixtures shared by all tests: real servers once per session, and separate topics, databases and buckets per test."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import boto3
import pytest
from botocore.config import Config

from services.localstack.ports import free_ports
from services.localstack.servers import S3, Broker, Postgres, Server
from services.localstack.servers.s3 import NUM_PORTS
from services.process.settings import Settings, default_cache_dir
from tests.servers import janitor
from tests.servers.kafka import ApacheKafka, KafkaUnavailableError

TEMPLATE = "loraq_template"


@pytest.hookimpl(trylast=True)  # once they have been shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If two processes share the suite, slow files start first, so that neither process waits long at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> None:
    """Remove the shell's LORAQ_ settings, and restore the default SIGINT handler.

    A shell's background jobs ignore SIGINT, and the programs that tests start would inherit that.
    """
    for name in [name for name in os.environ if name.startswith("LORAQ_")]:
        del os.environ[name]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ServerFiles:
    """The directory of the session's servers; it is removed even if pytest is killed."""

    def __init__(self, directory: Path, janitor_pipe: "subprocess.Popen[str]") -> None:
        self.directory = directory
        self._janitor = janitor_pipe

    def data(self, name: str) -> tuple[Path, Path]:
        """A server's data directory and log file."""
        return self.directory / name, self.directory / f"{name}.log"

    def clean_up_later(self, *paths: Path) -> None:
        """Also remove these files, which are outside the directory."""
        assert self._janitor.stdin is not None
        self._janitor.stdin.writelines(f"{path}\n" for path in paths)
        self._janitor.stdin.flush()


@pytest.fixture(scope="session")
def server_files() -> Iterator[ServerFiles]:
    directory = Path(tempfile.mkdtemp(prefix="loraq-tests-"))
    command = [sys.executable, "-I", "-S", janitor.__file__, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True) as cleaning:
        yield ServerFiles(directory, cleaning)


def running(server: Server) -> Iterator[Server]:
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def embedded_broker(server_files: ServerFiles) -> Iterator[Server]:
    """The embedded broker; `.bootstrap`. It loses all records and topics at `.stop()` or `.kill()`."""
    yield from running(Broker(*server_files.data("broker"), free_ports(1)[0]))


def skip_or_fail(error: KafkaUnavailableError) -> NoReturn:
    """Skip the test for that reason; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(str(error))
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def apache_kafka(server_files: ServerFiles) -> Iterator[Server]:
    """A real Apache Kafka; `.bootstrap`. Tests that use it have the marker `kafka`."""
    try:
        server = ApacheKafka(*server_files.data("kafka"), free_ports(2))
    except KafkaUnavailableError as error:
        skip_or_fail(error)
    yield from running(server)


@pytest.fixture(params=["embedded", pytest.param("apache", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> Broker | ApacheKafka:
    """The test runs twice: on the embedded broker and on Apache Kafka."""
    found = request.getfixturevalue({"embedded": "embedded_broker", "apache": "apache_kafka"}[request.param])
    assert isinstance(found, Broker | ApacheKafka)
    return found


@pytest.fixture(scope="session")
def s3_server(server_files: ServerFiles) -> Iterator[Server]:
    """An S3-compatible store; `.endpoint`, `.access_key`, `.secret_key`."""
    keys = (secrets.token_hex(10), secrets.token_hex(20))
    server = S3(*server_files.data("s3"), free_ports(NUM_PORTS), *keys)
    server_files.clean_up_later(*server.leftovers())
    yield from running(server)


@pytest.fixture(scope="session")
def postgres_server(server_files: ServerFiles) -> Iterator[Server]:
    """A PostgreSQL; `.url(database)`, `.sql(statement, …, database=…)`."""
    directory, log = server_files.data("postgres")
    yield from running(Postgres(directory, log, free_ports(1)[0], secrets.token_hex(8), durable=False))


@pytest.fixture(scope="session")
def _template_database(postgres_server: Postgres) -> str:
    """A migrated database without connections, used as a template."""
    from services.postgres.migrate import upgrade

    postgres_server.sql(f"create database {TEMPLATE}")
    with ThreadPoolExecutor(1) as thread:  # a new thread, because the test's event loop may run in this one
        thread.submit(upgrade, postgres_server.url(TEMPLATE)).result()
    return TEMPLATE


@pytest.fixture
def database_url(postgres_server: Postgres, _template_database: str) -> Iterator[str]:
    """A fresh, migrated database, dropped afterwards."""
    name = f"test_{secrets.token_hex(6)}"
    postgres_server.sql(f"create database {name} template {_template_database}")
    yield postgres_server.url(name)
    if postgres_server.pid is not None:
        postgres_server.sql(f"drop database {name} with (force)")


@pytest.fixture(scope="session")
def _s3_client(s3_server: S3) -> object:
    return boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint,
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard"}),
    )


@pytest.fixture
def bucket(_s3_client: object) -> Iterator[str]:
    """The name of a new bucket, removed with its objects afterwards."""
    name = f"test-{secrets.token_hex(6)}"
    _s3_client.create_bucket(Bucket=name)  # type: ignore[attr-defined]  # boto3 creates its methods at run time
    yield name
    _s3_client.delete_bucket(Bucket=name)  # type: ignore[attr-defined]


def make_settings(broker: Broker | ApacheKafka, database_url: str, s3: S3, bucket: str, directory: Path) -> Settings:
    """Settings for a test: a new topic prefix and all servers of the session."""
    return Settings(
        _env_file=None,
        topic_prefix=f"test-{secrets.token_hex(6)}",
        partitions=3,
        kafka_bootstrap=broker.bootstrap,
        database_url=database_url,
        s3_endpoint=s3.endpoint,
        s3_access_key=s3.access_key,
        s3_secret_key=s3.secret_key,
        s3_bucket=bucket,
        cache_dir=directory / "cache",
        secret_key=b64encode(secrets.token_bytes(32)).decode(),
        poll_interval_s=0.1,
        engine_threads=1,
    )


@pytest.fixture
def settings(embedded_broker: Broker, database_url: str, s3_server: S3, bucket: str, tmp_path: Path) -> Settings:
    """A new topic prefix, migrated database, bucket and cache directory, on the embedded broker. No base model."""
    return make_settings(embedded_broker, database_url, s3_server, bucket, tmp_path)


@pytest.fixture
def broker_settings(
    broker: Broker | ApacheKafka, database_url: str, s3_server: S3, bucket: str, tmp_path: Path
) -> Settings:
    """`settings`, on the embedded broker and then on Apache Kafka."""
    return make_settings(broker, database_url, s3_server, bucket, tmp_path)


@pytest.fixture
def apache_settings(
    apache_kafka: ApacheKafka, database_url: str, s3_server: S3, bucket: str, tmp_path: Path
) -> Settings:
    """`settings`, on Apache Kafka only."""
    return make_settings(apache_kafka, database_url, s3_server, bucket, tmp_path)


@pytest.fixture(scope="session")
def base_model_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, converted once per machine."""
    from services.localstack.base_model import ensure_base_model

    return ensure_base_model(default_cache_dir())
