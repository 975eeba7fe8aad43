"""The Node.js and Java producers of docs/clients.md: the worker accepts their records, and keys map as ours do."""

import asyncio
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer

from schemas.common import Lane
from schemas.job import JobRequest
from services.client.producer import JobProducer, record_key
from services.kafka import clients as kafka
from services.process.settings import Settings
from services.tenants.secrets import new_producer_key
from services.worker.intake.records import TenantKey, authenticate, parse, record_of
from services.worker.jobs import Candidate
from tests.servers.kafka import KafkaUnavailableError, kafka_jars

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text(encoding="utf-8")
PARTITIONS = 12
TIMEOUT_S = 120.0


def snippet(language: str) -> str:
    """The page's only block in this language."""
    [code] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(code)


def node(directory: Path, topic: str) -> list[str]:
    """Install kafkajs into the directory; returns the command that runs the page's program."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no `node` and `npm` on the PATH")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(directory), "kafkajs@2"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert installed.returncode == 0, installed.stderr
    program = directory / "submit.mjs"
    program.write_text(snippet("javascript").replace("loraq.default.jobs.standard", topic), encoding="utf-8")
    return ["node", str(program)]


def java(directory: Path, topic: str) -> list[str]:
    """The command that compiles and runs the page's program."""
    if shutil.which("javac") is None:
        pytest.skip("there is no `javac` on the PATH")
    try:
        jars = kafka_jars()
    except KafkaUnavailableError as error:
        pytest.skip(str(error))
    program = directory / "SubmitJob.java"
    program.write_text(snippet("java").replace("loraq.default.jobs.standard", topic), encoding="utf-8")
    return ["java", "-cp", f"{jars}{os.sep}*", str(program)]


@pytest.mark.parametrize("prepare", [node, java])
async def test_the_worker_accepts_a_signed_job_of_another_language(
    broker_settings: Settings, tmp_path: Path, prepare: Callable[[Path, str], list[str]]
) -> None:
    settings = broker_settings.model_copy(update={"partitions": PARTITIONS})
    topic, producer_key = settings.jobs_topic(Lane.STANDARD), new_producer_key()
    command = prepare(tmp_path, topic)
    await kafka.ensure_topics(settings)
    variables = {"KAFKA_BOOTSTRAP": settings.kafka_bootstrap, "PRODUCER_KEY": producer_key}
    ran = await asyncio.to_thread(run, command, variables)
    assert ran.returncode == 0, ran.stderr
    message = await only_message(settings, topic)
    assert ran.stdout.split()[-3:] == [topic, str(message.partition), "0"], ran.stderr

    candidate = parse(record_of(message, {topic: Lane.STANDARD}), "cluster", 0.0, 0)
    assert isinstance(candidate, Candidate), candidate
    request = candidate.request
    assert (request.tenant, request.adapter, request.sampling.max_tokens) == ("acme", "my-adapter", 64)
    assert request.messages is not None
    assert request.messages[0].content == "Where is my parcel? 📦"
    tenants = {"acme": TenantKey(producer_key.encode(), disabled=False)}
    assert authenticate(candidate, tenants, require_signature=True) is None
    without_prefix = {"acme": TenantKey(producer_key.removeprefix("lqpk_").encode(), disabled=False)}
    assert authenticate(candidate, without_prefix, require_signature=True) is not None

    assert message.key == record_key(request)
    assert message.partition != zlib.crc32(message.key) % PARTITIONS, "another hash leads to the same partition"
    assert message.partition == await partition_of_ours(settings, request)


def run(command: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


async def only_message(settings: Settings, topic: str) -> object:
    consumer = AIOKafkaConsumer(topic, auto_offset_reset="earliest", **kafka.client_options(settings))
    await consumer.start()
    try:
        return await consumer.getone()
    finally:
        await consumer.stop()


async def partition_of_ours(settings: Settings, request: JobRequest) -> int:
    """Where the Python producer puts a job with the same key."""
    async with JobProducer.from_settings(settings) as producer:
        return (await producer.send(request)).partition
