"""Information about a process by its id."""

from contextlib import suppress
from types import ModuleType

from services.localstack.wheels import MissingExtraError


def started_at(pid: int) -> float | None:
    """Start time of the process in seconds since the epoch; None if it is not running, or is a zombie."""
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def command_line(pid: int) -> list[str]:
    """Program and arguments; empty if there is no such process."""
    psutil = _psutil()
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    """Send SIGKILL, unless the process has already ended."""
    psutil = _psutil()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()


def _psutil() -> ModuleType:
    try:
        import psutil
    except ImportError as error:
        raise MissingExtraError("psutil") from error
    return psutil
