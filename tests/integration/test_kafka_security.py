"""SASL, TLS and ACLs on Apache Kafka: the rules of docs/security.md suffice, and allow nothing else."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from schemas.common import Lane
from services.errors import ConfigError, ServiceError
from services.kafka import clients as kafka
from services.localstack.ports import free_ports
from services.postgres.pool import open_pool, transaction
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.conftest import ServerFiles, skip_or_fail
from tests.integration.world import job_request
from tests.processes import Process, loraq, spawn
from tests.servers.certificates import write_authority
from tests.servers.kafka import KafkaUnavailableError
from tests.servers.secure_kafka import SecureKafka

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
RULES = [" ".join(rule.split()) for rule in re.findall(r"^    kafka-acls (.*(?:\n      .*)*)", PAGE, re.MULTILINE)]
TENANT, OTHER, WORKER, DISPATCHER, OPERATOR = "acme", "globex", "loraq-worker", "loraq-dispatcher", "loraq-operator"
PREFIX = "secured"


@pytest.fixture(scope="module")
def cluster(server_files: ServerFiles) -> Iterator[SecureKafka]:
    """A cluster with the page's rules and topics."""
    try:
        server = SecureKafka(
            *server_files.data("secure-kafka"), free_ports(2), [TENANT, OTHER, WORKER, DISPATCHER, OPERATOR]
        )
    except KafkaUnavailableError as error:
        skip_or_fail(error)
    server.start()
    assert len(RULES) == 7
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(server.kafka_acls, [rule.replace("loraq.default.", f"{PREFIX}.default.") for rule in RULES]))
    yield server
    server.stop()


@pytest.fixture
def secured(settings: Settings) -> Settings:
    """A pool with required signatures on that cluster."""
    return settings.model_copy(update={"topic_prefix": PREFIX, "require_signed_jobs": True, "worker_id": "secured"})


async def test_only_a_signed_job_over_sasl_and_tls_is_served(
    cluster: SecureKafka, secured: Settings, tmp_path: Path
) -> None:
    key = await add_tenants(secured)
    operator = cluster.as_user(secured, OPERATOR)
    assert (created := loraq("topics", settings=operator)).returncode == 0, created.stderr
    with (
        spawn(["worker", "--engine", "echo"], cluster.as_user(secured, WORKER)),
        spawn(["dispatcher"], cluster.as_user(secured, DISPATCHER)) as dispatcher,
    ):
        tenant = cluster.as_user(secured, TENANT, producer_key=key)
        prompt = ["submit", "--tenant", TENANT, "--prompt", "hello there", "--wait"]
        served = loraq(*prompt, settings=tenant)
        assert (served.returncode, served.stdout) == (0, "hello there\n"), served.stderr
        await check_that_a_wrong_signature_is_dead_lettered_for_operators_only(cluster, secured, operator)
        await check_that_the_rules_allow_tenants_nothing_else(cluster, secured)
        check_that_a_wrong_password_is_refused(cluster, secured)
        await check_that_errors_name_the_wrong_setting(cluster, secured, tmp_path)
        check_events_sent(dispatcher)


async def add_tenants(settings: Settings) -> str:
    """Add two tenants; returns the first one's producer key."""
    async with open_pool(settings) as pool, transaction(pool) as connection:
        first, _ = [await add_tenant(connection, SecretBox(settings.secret_key), name) for name in (TENANT, OTHER)]
    return first.producer_key


async def check_that_a_wrong_signature_is_dead_lettered_for_operators_only(
    cluster: SecureKafka, secured: Settings, operator: Settings
) -> None:
    other = cluster.as_user(secured, TENANT, producer_key="lqpk_of_somebody_else")
    sent = loraq("submit", "--tenant", TENANT, "--prompt", "forged", settings=other)
    assert sent.returncode == 0, sent.stderr
    dead_letters = await until_listed(operator)
    assert [(each["error_code"], each["error_message"]) for each in dead_letters] == [
        ("unauthenticated", f"the loraq-signature header does not match the producer key of tenant '{TENANT}'")
    ]
    again = loraq("dlq", "replay", "--all", "--json", settings=operator)
    assert json.loads(again.stdout)["outcome"] == "replayed", again.stderr
    hidden = loraq("dlq", "list", settings=other)
    assert hidden.stderr.startswith(f"loraq: there is no topic {PREFIX}.default.jobs.dead on {cluster.bootstrap};")


async def until_listed(operator: Settings) -> list[dict[str, Any]]:
    for _ in range(20):
        listed = await asyncio.to_thread(loraq, "dlq", "list", "--json", settings=operator)
        if listed.stdout:
            return [json.loads(line) for line in listed.stdout.splitlines()]
    raise AssertionError(f"no dead letter was listed: {listed.stderr}")


async def check_that_the_rules_allow_tenants_nothing_else(cluster: SecureKafka, secured: Settings) -> None:
    tenant = cluster.as_user(secured, OTHER)
    for topic in (secured.jobs_topic(Lane.BATCH), secured.dead_topic, secured.events_topic):
        with pytest.raises(ConfigError, match="denied access to this user; check its ACLs"):
            await produce(tenant, topic)
    allowed = cluster.as_user(secured, TENANT)
    await produce(allowed, secured.jobs_topic(Lane.BATCH))
    for topic in (secured.dead_topic, secured.events_topic):
        with pytest.raises(ConfigError, match="denied access to this user; check its ACLs"):
            await produce(allowed, topic)
    for topic in (secured.jobs_topic(Lane.BATCH), secured.dead_topic, secured.events_topic, secured.control_topic):
        with pytest.raises(ConfigError, match="denied access to this user; check its ACLs"):
            await read(allowed, topic)


async def produce(settings: Settings, topic: str) -> None:
    producer = kafka.producer(settings)
    with kafka.errors_translated(settings):
        await producer.start()
        try:
            await producer.send_and_wait(topic, json.dumps(job_request()).encode())
        finally:
            await producer.stop()


async def read(settings: Settings, topic: str) -> None:
    consumer = AIOKafkaConsumer(topic, group_id=None, auto_offset_reset="earliest", **kafka.client_options(settings))
    try:
        with kafka.errors_translated(settings):
            await consumer.start()
            while True:
                await consumer.getmany(timeout_ms=500)
    finally:
        await consumer.stop()


def check_that_a_wrong_password_is_refused(cluster: SecureKafka, secured: Settings) -> None:
    wrong = cluster.as_user(secured, WORKER, kafka_sasl_password="wrong", producer_key="lqpk_x")
    refused = (
        f"Kafka at {cluster.bootstrap} refused the credentials; check LORAQ_KAFKA_SASL_USERNAME and _PASSWORD:"
        " [Error 58] SaslAuthenticationFailed: Authentication failed during authentication due to invalid credentials"
        " with SASL mechanism SCRAM-SHA-512"
    )
    for command in (
        ["topics"],
        ["submit", "--tenant", TENANT, "--prompt", "x"],
        ["dlq", "list"],
        ["dlq", "replay", "--all"],
        ["jobs", "cancel", "01930000-0000-7000-8000-000000000000", "--tenant", TENANT],
    ):
        failed = loraq(*command, settings=wrong)
        assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", f"loraq: {refused}\n"), command
    with spawn(["worker", "--engine", "echo"], wrong, ready_timeout_s=None) as worker:
        assert worker.wait() == 1
        assert refused in worker.log


async def check_that_errors_name_the_wrong_setting(cluster: SecureKafka, secured: Settings, directory: Path) -> None:
    untrusted, _ = write_authority(directory, "another")
    at = f"Kafka at {cluster.bootstrap}"
    for changes, sentence in (
        ({"kafka_ssl_cafile": untrusted}, f"the certificate of {at} cannot be trusted; check LORAQ_KAFKA_SSL_CAFILE"),
        ({"kafka_sasl_mechanism": "PLAIN"}, f"{at} does not support LORAQ_KAFKA_SASL_MECHANISM=PLAIN"),
        ({"kafka_security_protocol": "PLAINTEXT"}, "LORAQ_KAFKA_SECURITY_PROTOCOL=PLAINTEXT"),
    ):
        with pytest.raises(ServiceError, match=re.escape(sentence)):
            await kafka.check_reachable(cluster.as_user(secured, OPERATOR, **changes))
    elsewhere = cluster.as_user(secured, OPERATOR, kafka_bootstrap=f"localhost:{cluster.port}")
    with pytest.raises(ConfigError, match="Hostname mismatch"):
        await kafka.check_reachable(elsewhere)


def check_events_sent(dispatcher: Process) -> None:
    _, metrics = dispatcher.get("/metrics")
    assert re.search(
        r'^messaging_client_sent_messages_total\{destination="[^"]*events"\} 1\.0', metrics, re.MULTILINE
    ), metrics
