"""The files of a stack in its directory, and how they are written.

stack.json        ports and generated secrets: created once, kept               (mode 600)
stack.env         the LORAQ_ settings of all programs that use the stack        (mode 600)
running.json      the servers that the supervisor currently owns
supervisor.lock   held by the supervisor as long as it lives; contains its process id
lock              held by `loraq up` and `loraq down` while they run
demo.lock         held by `loraq demo` while it runs in the directory
data/  logs/      one entry per process
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from services.errors import ConfigError
from services.parsing.validation import shown


@dataclass(frozen=True)
class StackFiles:
    """Paths in the stack's directory."""

    directory: Path

    @property
    def config(self) -> Path:
        """Ports and secrets."""
        return self.directory / "stack.json"

    @property
    def env(self) -> Path:
        """Settings for other processes."""
        return self.directory / "stack.env"

    @property
    def running(self) -> Path:
        """The servers that the supervisor currently owns."""
        return self.directory / "running.json"

    @property
    def supervisor_lock(self) -> Path:
        """Locked by the running supervisor."""
        return self.directory / "supervisor.lock"

    @property
    def demo_lock(self) -> Path:
        """Locked by the running demo."""
        return self.directory / "demo.lock"

    def data(self, server: str) -> Path:
        """Data directory of a server."""
        return self.directory / "data" / server

    def log(self, process: str) -> Path:
        """Log file of a server or of the supervisor."""
        return self.directory / "logs" / f"{process}.log"

    @property
    def exist(self) -> bool:
        """Whether the directory exists; raises ConfigError if it cannot be read."""
        try:
            return self.directory.is_dir()
        except OSError as error:
            raise ConfigError(
                f"cannot read {shown(str(self.directory))}: {error.strerror}; choose another directory with --dir"
            ) from error

    def create(self) -> None:
        """Create the directory, private and ignored by git. Raises ConfigError if that is impossible."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.directory / "logs").mkdir(exist_ok=True)
            (self.directory / "data").mkdir(exist_ok=True)
            (self.directory / ".gitignore").write_text("*\n")
        except OSError as error:
            raise ConfigError(
                f"cannot write to {shown(str(self.directory))}: {error.strerror}; choose another directory with --dir"
            ) from error

    @property
    def contain_stack(self) -> bool:
        """Whether a stack was created here, even if only partly."""
        return any(path.exists() for path in (self.config, self.running, self.supervisor_lock))

    def check_stack(self) -> None:
        """Raise ConfigError if the directory contains no stack."""
        if not self.config.exists():
            raise ConfigError(f"{self.directory} contains no stack (no {self.config.name}); it was not deleted")

    def delete(self) -> list[Path]:
        """Remove the stack's files, and the directory unless it contains other files; returns those.

        Raises ConfigError if the directory contains no stack.
        """
        self.check_stack()
        unfinished = [path for file in (self.env, self.running, self.config) for path in _unfinished(file)]
        # The configuration identifies a stack, so remove it late: then a failed deletion can be repeated.
        for path in (
            *(self.directory / "data", self.directory / "logs", self.env, self.running, *unfinished),
            *(self.supervisor_lock, self.demo_lock, self.config, self.directory / "lock"),
        ):
            _remove(path)
        ignored = self.directory / ".gitignore"
        left = sorted(path for path in self.directory.iterdir() if path != ignored)
        if not left:
            ignored.unlink(missing_ok=True)
            self.directory.rmdir()
        return left

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Exclude other `loraq up` and `loraq down` commands of this directory; waits for one that is running."""
        with self._lock() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock(self) -> IO[str]:
        try:
            return (self.directory / "lock").open("a")
        except OSError as error:
            raise ConfigError(f"cannot write to {shown(str(self.directory))}: {error.strerror}") from error


def _remove(path: Path) -> None:
    """Remove a file, a directory with its contents, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unfinished(path: Path) -> Iterator[Path]:
    """Temporary files that `write_whole` leaves when it is killed."""
    return path.parent.glob(f".{path.name}.*")


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically; only its owner may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)
