"""The demo's processes: registrar, worker and dispatcher, started as an operator would start them."""

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from services.localstack.files import StackFiles
from services.localstack.running import read_running, supervisor_pid
from services.localstack.servers import Server, ServerError

POLL_S = 0.1
# The first start of a worker on a machine compiles the kernels.
READY_TIMEOUT_S = 300.0


class LoraqProcess(Server):
    """`loraq <name>` as a child of this process; ready when its /readyz returns 200."""

    def __init__(self, files: StackFiles, variables: Mapping[str, str]) -> None:
        super().__init__(files.data(self.name), files.log(self.name), [])
        self._port_file = self.directory / "port"
        self._variables = {**variables, "LORAQ_HTTP_PORT_FILE": str(self._port_file)}

    def prepare(self) -> None:
        """Remove the port file and the log of an earlier run."""
        super().prepare()
        self._port_file.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)

    def command(self) -> list[str]:
        """The same entry point as on the command line."""
        return [sys.executable, "-m", "services.cli.main", self.name]

    def environment(self) -> Mapping[str, str]:
        """Its settings."""
        return self._variables

    @property
    def address(self) -> str | None:
        """Base URL of /healthz, /readyz and /metrics once they are served."""
        try:
            return f"http://127.0.0.1:{int(self._port_file.read_text())}"
        except FileNotFoundError:
            return None

    def is_ready(self) -> bool:
        """Whether /readyz answers 200."""
        return self.unready_because() is None

    def unready_because(self) -> str | None:
        """The reasons that /readyz reports; None when the process is ready."""
        if self.address is None:
            return "starting"
        try:
            with urllib.request.urlopen(f"{self.address}/readyz", timeout=2.0):  # noqa: S310  # loopback
                return None
        except urllib.error.HTTPError as refusal:
            with refusal:
                reasons = json.load(refusal)["reasons"]
            return ", ".join(why if part == "process" else f"{part} {why}" for part, why in reasons.items())
        except OSError:
            return "not answering"

    async def until_ready(self, report: Callable[[str], None]) -> None:
        """Wait until ready, reporting the reasons. Raises ServerError with the end of the log."""
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while (reason := await asyncio.to_thread(self.unready_because)) is not None:
            report(reason)
            self.check_alive()
            if time.monotonic() > give_up_at:
                problem = f"{self.name} was not ready after {READY_TIMEOUT_S:g} s ({reason})"
                raise ServerError(f"{problem}; {self._log_tail()}")
            await asyncio.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raises ServerError with the end of the log if the process has ended."""
        if self.pid is None:
            raise ServerError(f"{self.name} exited with status {self.exit_status}; {self._log_tail()}")


class Registrar(LoraqProcess):
    """`loraq registrar`."""

    name = "registrar"


class Worker(LoraqProcess):
    """`loraq worker`."""

    name = "worker"


class Dispatcher(LoraqProcess):
    """`loraq dispatcher`."""

    name = "dispatcher"


@contextmanager
def running(processes: Sequence[LoraqProcess]) -> Iterator[None]:
    """Start all without waiting for them; at the end, stop them in parallel and wait until they have ended."""
    with ThreadPoolExecutor(len(processes)) as threads:
        try:
            for process in processes:
                process.launch()
            yield
        finally:
            list(threads.map(lambda process: process.stop(), processes))


async def watch(processes: Sequence[LoraqProcess], files: StackFiles) -> None:
    """Raises ServerError as soon as one of the demo's processes or a server of its stack ends."""
    while True:
        for process in processes:
            process.check_alive()
        for server in read_running(files).dead:
            raise ServerError(server.problem or f"{server.name} exited; see {files.log(server.name)}")
        if supervisor_pid(files) is None:
            raise ServerError(f"another command stopped the stack; see {files.log('supervisor')}")
        await asyncio.sleep(POLL_S)
