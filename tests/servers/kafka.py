"""A real Apache Kafka: jars from Maven, one KRaft node (broker and controller) on loopback."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path

from services.localstack.ports import LOOPBACK, accepts_connections
from services.localstack.servers import Server
from services.process.settings import default_cache_dir

VERSION = "4.1.1"

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>loraq.tests</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>{artifact}</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""


class KafkaUnavailableError(Exception):
    """Apache Kafka cannot run here; the message names what is missing."""


def kafka_jars() -> Path:
    """The directory of Kafka's jars, downloaded once into the cache. Raises KafkaUnavailableError."""
    return _jars("kafka_2.13", VERSION)


def tools_jars() -> Path:
    """The directory with the jar of Kafka's command line tools, which also needs the jars of `kafka_jars`."""
    return _jars("kafka-tools", f"{VERSION}-tools", "-DexcludeTransitive=true")


def _jars(artifact: str, directory: str, *options: str) -> Path:
    for program, package in (("java", "a Java 17 runtime"), ("mvn", "Maven")):
        if shutil.which(program) is None:
            raise KafkaUnavailableError(f"Apache Kafka needs {package}: there is no `{program}` on the PATH")
    jars = default_cache_dir() / "kafka" / directory
    if not jars.exists():
        jars.parent.mkdir(parents=True, exist_ok=True)
        with (jars.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two Maven processes must not share its directory
            if not jars.exists():
                _fetch(artifact, jars, options)
    return jars


def _fetch(artifact: str, jars: Path, options: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=jars.parent, prefix=".fetch-") as scratch:
        pom, fetched = Path(scratch, "pom.xml"), Path(scratch, "jars")
        pom.write_text(POM.format(artifact=artifact, version=VERSION))
        copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={fetched}", *options]
        maven = subprocess.run(
            ["mvn", "-B", "-q", "-f", str(pom), *copy],  # noqa: S607  # Maven is found on the PATH
            capture_output=True,
            text=True,
            check=False,
        )
        if maven.returncode != 0:
            output = maven.stdout.strip()[-2000:]
            raise KafkaUnavailableError(f"Maven could not fetch {artifact} {VERSION} of Apache Kafka: {output}")
        fetched.rename(jars)


class ApacheKafka(Server):
    """One KRaft node, formatted if its directory is empty; ports: clients, controller."""

    name = "Apache Kafka"
    stop_signal = signal.SIGKILL
    # Java options for a fast start rather than for throughput.
    machine = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

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
        # One id in 64 begins with a hyphen, which only this form of the option accepts.
        format_it = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(configuration)]
        self.run_tool([*self.java("64m"), *format_it, *self.format_options()])

    def format_options(self) -> list[str]:
        """Additional arguments of the tool that formats the data directory."""
        return []

    def properties(self) -> dict[str, str]:
        """server.properties. Topics are not created automatically, so that a typo in a name fails."""
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
            "group.min.session.timeout.ms": "1000",
        }

    def java(self, heap: str, *more_jars: Path) -> list[str]:
        """The beginning of a command line that runs a Kafka class."""
        java = shutil.which("java")
        assert java is not None
        class_path = os.pathsep.join(f"{jars}{os.sep}*" for jars in (self.jars, *more_jars))
        return [java, f"-Xmx{heap}", *self.machine, "-Djava.awt.headless=true", "-cp", class_path]

    def command(self) -> list[str]:
        return [*self.java("512m"), "kafka.Kafka", str(self.directory / "server.properties")]

    def is_ready(self) -> bool:
        return self.pid is not None and accepts_connections(self.port)
