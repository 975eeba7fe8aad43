"""Ports and secrets of a stack: generated at the first `loraq up` and kept, so that settings and data stay valid."""

import secrets
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.errors import ConfigError
from services.localstack.files import StackFiles, write_whole
from services.localstack.ports import free_ports, is_free
from services.localstack.servers import S3, Broker, Postgres
from services.localstack.servers.s3 import NUM_PORTS

BUCKET = "loraq"
DATABASE = "loraq"
ServerName = Literal["broker", "postgres", "s3"]
Port = Annotated[int, Field(ge=1, le=65535)]


class StackConfig(BaseModel):
    """The contents of stack.json. `chosen` are the servers whose port the user set; those ports never change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    broker_port: Port
    postgres_port: Port
    s3_ports: Annotated[tuple[Port, ...], Field(min_length=NUM_PORTS, max_length=NUM_PORTS)]
    chosen: frozenset[ServerName] = frozenset()
    postgres_password: str
    s3_access_key: str
    s3_secret_key: str
    secret_key: str

    @classmethod
    def new(cls) -> "StackConfig":
        """A configuration with free ports and new secrets."""
        broker, postgres, *s3 = free_ports(2 + NUM_PORTS)
        return cls(
            broker_port=broker,
            postgres_port=postgres,
            s3_ports=tuple(s3),
            postgres_password=secrets.token_urlsafe(18),
            s3_access_key=secrets.token_hex(10),
            s3_secret_key=secrets.token_urlsafe(30),
            secret_key=b64encode(secrets.token_bytes(32)).decode(),
        )

    @property
    def ports(self) -> dict[ServerName, int]:
        """The client port of each server."""
        return {"broker": self.broker_port, "postgres": self.postgres_port, "s3": self.s3_ports[0]}

    def with_ports(self, wanted: Mapping[ServerName, int]) -> "StackConfig":
        """A copy with the ports that the user set."""
        changes: dict[str, object] = {"chosen": frozenset(self.chosen | wanted.keys())}
        for server, port in wanted.items():
            changes |= {"s3_ports": (port, *self.s3_ports[1:])} if server == "s3" else {f"{server}_port": port}
        return self.model_copy(update=changes)

    def with_free_ports(self) -> "StackConfig":
        """A copy in which occupied ports are replaced by free ones, except those that the user set."""
        changes: dict[str, object] = {}
        spare = iter(free_ports(2 + NUM_PORTS))
        if "broker" not in self.chosen and not is_free(self.broker_port):
            changes["broker_port"] = next(spare)
        if "postgres" not in self.chosen and not is_free(self.postgres_port):
            changes["postgres_port"] = next(spare)
        s3 = [port if is_free(port) else next(spare) for port in self.s3_ports]
        changes["s3_ports"] = (self.s3_ports[0], *s3[1:]) if "s3" in self.chosen else tuple(s3)
        return self.model_copy(update=changes)

    def environment(self, base_model: Path) -> dict[str, str]:
        """The LORAQ_ settings of a process that uses the stack."""
        broker, postgres, s3 = servers(self, StackFiles(Path()))
        return {
            "LORAQ_KAFKA_BOOTSTRAP": broker.bootstrap,
            "LORAQ_DATABASE_URL": postgres.url(DATABASE),
            "LORAQ_S3_ENDPOINT": s3.endpoint,
            "LORAQ_S3_BUCKET": BUCKET,
            "LORAQ_S3_ACCESS_KEY": self.s3_access_key,
            "LORAQ_S3_SECRET_KEY": self.s3_secret_key,
            "LORAQ_SECRET_KEY": self.secret_key,
            "LORAQ_BASE_MODEL": str(base_model),
        }


def servers(config: StackConfig, files: StackFiles) -> tuple[Broker, Postgres, S3]:
    """The stack's servers, not started."""
    return (
        Broker(files.data("broker"), files.log("broker"), config.broker_port),
        Postgres(files.data("postgres"), files.log("postgres"), config.postgres_port, config.postgres_password),
        S3(files.data("s3"), files.log("s3"), config.s3_ports, config.s3_access_key, config.s3_secret_key),
    )


def read_config(files: StackFiles) -> StackConfig | None:
    """The stack's configuration; None before the first `loraq up`. Raises ConfigError for a damaged file."""
    try:
        return StackConfig.model_validate_json(files.config.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(
            f"{files.config} is damaged ({where}: {problem['msg']}): restore it, or delete {files.directory}"
        ) from error


def write_config(files: StackFiles, config: StackConfig) -> None:
    """Write the configuration to stack.json."""
    write_whole(files.config, config.model_dump_json(indent=2) + "\n")
