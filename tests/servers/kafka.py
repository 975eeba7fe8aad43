"""A real Apache Kafka: jars from Maven, one KRaft node (broker and controller) on Java, on loopback."""

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from services.localstack.ports import LOOPBACK, accepts_connections
from services.localstack.servers import Server
from services.settings import default_cache_dir

VERSION = "4.1.1"

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>loraq.tests</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""


class KafkaUnavailableError(Exception):
    """Apache Kafka cannot run here; says what is missing."""


def kafka_jars() -> Path:
    """Directory with Kafka's jars, fetched once into the cache. Raises KafkaUnavailableError."""
    for program, package in (("java", "a Java 17 runtime"), ("mvn", "Maven")):
        if shutil.which(program) is None:
            raise KafkaUnavailableError(f"Apache Kafka needs {package}: there is no `{program}` on the PATH")
    jars = default_cache_dir() / "kafka" / VERSION
    if not jars.exists():
        _fetch(jars)
    return jars


def _fetch(jars: Path) -> None:
    jars.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=jars.parent, prefix=".fetch-") as scratch:
        pom, fetched = Path(scratch, "pom.xml"), Path(scratch, "jars")
        pom.write_text(POM)
        copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={fetched}"]
        maven = subprocess.run(
            ["mvn", "-B", "-q", "-f", str(pom), *copy],  # noqa: S607  # Maven is wherever the PATH says
            capture_output=True,
            text=True,
            check=False,
        )
        if maven.returncode != 0:
            raise KafkaUnavailableError(f"Maven could not fetch Apache Kafka {VERSION}: {maven.stdout.strip()[-2000:]}")
        try:
            fetched.rename(jars)
        except OSError:
            if not jars.exists():
                raise


class ApacheKafka(Server):
    """One KRaft node, freshly formatted when its directory is empty; ports: clients, controller."""

    name = "Apache Kafka"
    stop_signal = signal.SIGKILL

    def __init__(self, directory: Path, log: Path, ports: list[int]) -> None:
        super().__init__(directory, log, ports)
        self.jars = kafka_jars()

    @property
    def bootstrap(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        if (self.directory / "data" / "meta.properties").exists():
            return
        super().prepare()
        configuration = self.directory / "server.properties"
        configuration.write_text("\n".join(f"{name}={value}" for name, value in self.properties().items()))
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self.run_tool(
            [*self._java("64m"), "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(configuration)]
        )

    def properties(self) -> dict[str, str]:
        """server.properties. Topics are made by those who need them, never by a typing mistake."""
        clients, controller = self.ports
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{controller}",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{clients},CONTROLLER://{LOOPBACK}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{clients}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.directory / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "3",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "3",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
        }

    def _java(self, heap: str) -> list[str]:
        java = shutil.which("java")
        assert java is not None
        quick_start = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        return [java, f"-Xmx{heap}", *quick_start, "-Djava.awt.headless=true", "-cp", f"{self.jars}{os.sep}*"]

    def command(self) -> list[str]:
        return [*self._java("512m"), "kafka.Kafka", str(self.directory / "server.properties")]

    def is_ready(self) -> bool:
        return self.pid is not None and accepts_connections(self.port)
