"""If Apache Kafka cannot run, tests that need it are skipped with the reason; in CI they fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.kafka.clients import cluster_id
from services.process.settings import Settings
from tests.servers.kafka import KafkaUnavailableError, kafka_jars

KAFKA_TEST = """
def test_needs_kafka(apache_kafka):
    pass
"""


@pytest.mark.parametrize(("ci", "outcome"), [({}, "SKIPPED"), ({"CI": "true"}, "ERROR")])
def test_without_java_the_reason_is_reported(tmp_path: Path, ci: dict[str, str], outcome: str) -> None:
    (tmp_path / "test_kafka.py").write_text(KAFKA_TEST)
    options = ["-q", "-ra", "-p", "tests.conftest", "-p", "no:randomly", "-p", "no:cacheprovider"]
    without_java = {name: value for name, value in os.environ.items() if name != "CI"} | {"PATH": str(tmp_path)} | ci
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        env=without_java,
        capture_output=True,
        text=True,
        check=False,
    )
    reason = "Apache Kafka needs a Java 17 runtime: there is no `java` on the PATH"
    assert [line for line in finished.stdout.splitlines() if line.startswith(outcome) and reason in line]
    assert finished.returncode == (1 if ci else 0)


def test_without_maven_the_reason_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "java").write_text("#!/bin/sh\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KafkaUnavailableError, match="needs Maven: there is no `mvn` on the PATH"):
        kafka_jars()


async def test_both_brokers_report_their_cluster_id(broker_settings: Settings) -> None:
    assert await cluster_id(broker_settings)
