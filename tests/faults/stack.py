"""The servers of the suite, started once for all runs: Apache Kafka, a Postgres with durable commits, and S3."""

import secrets
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.adapters.push import inspect, push
from services.localstack.ports import free_ports
from services.localstack.servers import S3, Postgres
from services.localstack.servers.s3 import NUM_PORTS
from services.postgres.migrate import upgrade
from services.postgres.pool import open_pool, transaction
from services.s3.store import open_store
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.builders import lora_adapter, tiny_llama
from tests.faults.clock import compile_library
from tests.faults.entry import FaultSettings
from tests.faults.fork_server import ForkServer
from tests.servers.kafka import ApacheKafka

TENANTS = ("acme", "globex")
ADAPTERS = ("brief", "pirate", "triage")
TEMPLATE = "faults_template"
ADMIT = "update loraq.adapters set status = 'ready'"


class TimedPostgres(Postgres):
    """Commits synchronously and tracks commit timestamps, which the checker compares with the webhooks' times."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "track_commit_timestamp=on", "-c", "synchronous_commit=on", "-c", "fsync=on"]


@dataclass
class Stack:
    """The servers, and a template database with tenants and adapters that is copied for every run."""

    directory: Path
    kafka: ApacheKafka
    postgres: Postgres
    s3: S3
    fork_server: ForkServer
    secret_key: str
    webhook_secrets: dict[str, str]
    clocked: ForkServer | None = None

    def clocked_fork_server(self) -> ForkServer:
        """The fork server whose processes can have their own clocks; started on the first call, in the main thread."""
        if self.clocked is None:
            self.clocked = ForkServer(preloaded=compile_library(self.directory))
        return self.clocked

    def settings(self, name: str, database: str) -> FaultSettings:
        """Settings of one run: its own names, short leases and sessions, and webhooks to loopback."""
        return FaultSettings(
            _env_file=None,
            topic_prefix=name,
            partitions=3,
            kafka_bootstrap=self.kafka.bootstrap,
            kafka_session_timeout_s=2.0,
            database_url=self.postgres.url(database),
            database_timeout_s=10.0,
            s3_endpoint=self.s3.endpoint,
            s3_access_key=self.s3.access_key,
            s3_secret_key=self.s3.secret_key,
            s3_bucket="faults",
            cache_dir=self.directory / "cache",
            secret_key=self.secret_key,
            lease_s=1.5,
            drain_s=10.0,
            max_batch_size=32,
            engine_threads=1,
            poll_interval_s=0.2,
            webhook_timeout_s=2.0,
            webhook_retry_delays_s=(0.3, 1.0, 2.0),
            webhook_concurrency=32,
            webhook_per_host=32,
            webhook_allow_networks=("127.0.0.0/8",),
            dtype="float32",
        )

    def base_model(self) -> Path:
        """A tiny model for the runs with the real engine."""
        return self.directory / "tiny-llama"


@contextmanager
def running_stack(directory: Path, kafka: ApacheKafka | None = None, s3: S3 | None = None) -> Iterator[Stack]:
    """Start the servers that are not given, and stop them at the end. Call it from the main thread."""
    ours: list[ApacheKafka | Postgres | S3] = []
    if kafka is None:
        kafka = ApacheKafka(directory / "kafka", directory / "kafka.log", free_ports(2))
        ours.append(kafka)
    if s3 is None:
        keys = (secrets.token_hex(10), secrets.token_hex(20))
        s3 = S3(directory / "s3", directory / "s3.log", free_ports(NUM_PORTS), *keys)
        ours.append(s3)
    postgres = TimedPostgres(directory / "postgres", directory / "postgres.log", free_ports(1)[0], secrets.token_hex(8))
    ours.append(postgres)
    secret_key = b64encode(secrets.token_bytes(32)).decode()
    fork_server = ForkServer()
    try:
        for server in ours:
            server.start()
        postgres.sql(f"create database {TEMPLATE}")
        upgrade(postgres.url(TEMPLATE))
        stack = Stack(directory, kafka, postgres, s3, fork_server, secret_key, {})
        try:
            yield stack
        finally:
            if stack.clocked is not None:
                stack.clocked.close()
    finally:
        fork_server.close()
        for server in reversed(ours):
            server.stop()


async def populate_template(stack: Stack) -> None:
    """Add tenants and adapters to the template, so that no run has to."""
    settings = stack.settings("faults", TEMPLATE)
    base = tiny_llama(stack.base_model())
    box = SecretBox(settings.secret_key)
    async with open_pool(settings) as pool, open_store(settings) as store:
        await store.ensure_bucket()
        for number, name in enumerate(ADAPTERS):
            lora_adapter(stack.directory / name, base, rank=4, targets=("q_proj",), seed=number)
        for tenant in TENANTS:
            async with transaction(pool) as connection:
                stack.webhook_secrets[tenant] = (await add_tenant(connection, box, tenant)).webhook_secret
            for name in ADAPTERS:
                await push(pool, store, tenant, name, inspect(stack.directory / name, 2**30))
        async with transaction(pool) as connection:
            await connection.execute(ADMIT)
