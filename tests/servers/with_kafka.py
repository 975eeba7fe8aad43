"""Run a command with a temporary Apache Kafka, which LORAQ_KAFKA_BOOTSTRAP names and which stops with the command.

python -m tests.servers.with_kafka COMMAND …
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from services.localstack.ports import free_ports
from tests.servers.kafka import ApacheKafka


class FastKafka(ApacheKafka):
    """Java as in production: full compilation, with the garbage collector of Kafka's start script."""

    machine = ("-XX:+UseG1GC",)


def main(command: list[str]) -> int:
    """Returns the command's exit status."""
    if not command:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(prefix="loraq-kafka-") as directory:
        server = FastKafka(Path(directory, "kafka"), Path(directory, "kafka.log"), free_ports(2))
        server.start()
        try:
            environment = {**os.environ, "LORAQ_KAFKA_BOOTSTRAP": server.bootstrap}
            return subprocess.run(command, env=environment, check=False).returncode  # the caller handles it
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
