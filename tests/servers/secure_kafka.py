"""An Apache Kafka that accepts only SASL over TLS and denies everything that no ACL allows."""

import secrets
import shlex
from pathlib import Path

from services.localstack.ports import LOOPBACK
from services.process.settings import Settings
from tests.servers.certificates import write_authority
from tests.servers.kafka import ApacheKafka, tools_jars

MECHANISM = "SCRAM-SHA-512"
ADMIN = "admin"


class SecureKafka(ApacheKafka):
    """One node with its own users; `admin` may do everything, the others what ACLs allow."""

    name = "Apache Kafka with SASL and TLS"

    def __init__(self, directory: Path, log: Path, ports: list[int], users: list[str]) -> None:
        super().__init__(directory, log, ports)
        self.tools = tools_jars()
        self.passwords = {user: secrets.token_hex(12) for user in [ADMIN, *users]}
        self.cafile, self._keystore = Path(), Path()

    def prepare(self) -> None:
        if not self.cafile.name:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.cafile, self._keystore = write_authority(self.directory, "authority")
        (self.directory / "admin.properties").write_text(
            f"security.protocol=SASL_SSL\nsasl.mechanism={MECHANISM}\nsasl.jaas.config={self._login(ADMIN)}\n"
            f"ssl.truststore.type=PEM\nssl.truststore.location={self.cafile}\n"
        )
        super().prepare()

    def properties(self) -> dict[str, str]:
        clients, controller = self.ports
        return super().properties() | {
            "listeners": f"SASL_SSL://{LOOPBACK}:{clients},CONTROLLER://{LOOPBACK}:{controller}",
            "advertised.listeners": f"SASL_SSL://{LOOPBACK}:{clients}",
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "SASL_SSL",
            "sasl.enabled.mechanisms": MECHANISM,
            "sasl.mechanism.inter.broker.protocol": MECHANISM,
            f"listener.name.sasl_ssl.{MECHANISM.lower()}.sasl.jaas.config": self._login(ADMIN),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._keystore),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.cafile),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:ANONYMOUS",  # the controller's listener, on loopback, has no users
            "allow.everyone.if.no.acl.found": "false",
        }

    def format_options(self) -> list[str]:
        return [
            option
            for user, password in self.passwords.items()
            for option in ("--add-scram", f"{MECHANISM}=[name={user},password={password}]")
        ]

    def _login(self, user: str) -> str:
        module = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return f'{module} required username="{user}" password="{self.passwords[user]}";'

    def kafka_acls(self, arguments: str) -> None:
        """Run `kafka-acls` as the administrator."""
        connect = ["--bootstrap-server", self.bootstrap, "--command-config", str(self.directory / "admin.properties")]
        tool = [*self.java("64m", self.tools), "org.apache.kafka.tools.AclCommand"]
        self.run_tool([*tool, *connect, *shlex.split(arguments)])

    def as_user(self, settings: Settings, user: str, **changes: object) -> Settings:
        """Settings that connect as a user."""
        secured = {
            "kafka_bootstrap": self.bootstrap,
            "kafka_security_protocol": "SASL_SSL",
            "kafka_sasl_mechanism": MECHANISM,
            "kafka_sasl_username": user,
            "kafka_sasl_password": self.passwords[user],
            "kafka_ssl_cafile": self.cafile,
        }
        return Settings(_env_file=None, **settings.model_dump(exclude_unset=True) | secured | changes)  # type: ignore[arg-type]
