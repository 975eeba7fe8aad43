"""Signals, exit status and health of a process: real processes for the first two, an event loop for the rest."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from services.errors import ConfigError
from services.process.lifecycle import Lifecycle, serve_health
from services.process.settings import Settings
from services.process.watchdog import LoopWatchdog
from tests.waiting import TIMEOUT_S, eventually, eventually_sync

PROGRAM = """
import asyncio, time
from services.process import lifecycle
from services.errors import ConfigError
from services.process.settings import Settings

async def die():
    await asyncio.sleep(0)
    raise RuntimeError("the work failed")

async def end():
    await asyncio.sleep(0)

async def run_until_cancelled():
    await asyncio.Event().wait()

async def serve(life):
    BODY

lifecycle.BLOCKED_AFTER_S = 0.5
lifecycle.run("sample", Settings(_env_file=None, drain_s=0.2), serve)
"""


@contextmanager
def program(body: str, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A process whose `serve` runs `body`, and its log file."""
    log = tmp_path / "log"
    environment = {**os.environ, "LORAQ_HTTP_PORT_FILE": str(tmp_path / "port")}
    source = PROGRAM.replace("BODY", body.strip().replace("\n", "\n    "))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", source], stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def wait_until_listening(tmp_path: Path) -> None:
    eventually_sync((tmp_path / "port").exists, what="the port file")


def test_a_signal_stops_it_with_status_0(tmp_path: Path) -> None:
    with program("await life.until_stopped()", tmp_path) as (process, log):
        wait_until_listening(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert "action=process_stopped" in log.read_text()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with program("await life.until_stopped()\nawait asyncio.Event().wait()", tmp_path) as (process, log):
        wait_until_listening(tmp_path)
        process.send_signal(signal.SIGTERM)
        eventually_sync(lambda: "action=stopping" in log.read_text(), what="the first signal to be handled")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('life.background("work", die())\nawait life.until_stopped()', "RuntimeError: the work failed"),
        ('life.background("work", die())\nawait asyncio.Event().wait()', "RuntimeError: the work failed"),
        (
            'life.background("work", end())\nawait life.until_stopped()',
            "The background task work ended before the process was stopped.",
        ),
        ('raise ConfigError("LORAQ_POOL: bad value")', "LORAQ_POOL: bad value"),
        ('raise ValueError("odd")', "ValueError: odd"),
    ],
)
def test_a_failure_ends_it_with_status_1_and_logs_the_reason(tmp_path: Path, body: str, reason: str) -> None:
    with program(body, tmp_path) as (process, log):
        assert process.wait(TIMEOUT_S) == 1
        assert reason in log.read_text()
        assert "action=process_failed" in log.read_text()


def test_our_own_errors_are_logged_without_a_traceback(tmp_path: Path) -> None:
    with program('raise ConfigError("LORAQ_POOL: bad value")', tmp_path) as (process, log):
        process.wait(TIMEOUT_S)
        assert "Traceback" not in log.read_text()


def test_a_blocked_loop_ends_it_and_logs_the_stack(tmp_path: Path) -> None:
    with program("time.sleep(600)", tmp_path) as (process, log):
        assert process.wait(TIMEOUT_S) == 1
        assert "action=loop_blocked" in log.read_text()
        assert "in serve" in log.read_text()


def test_a_suspended_process_continues_when_it_is_resumed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with program("await life.until_stopped()", tmp_path) as (process, log):
        wait_until_listening(tmp_path)
        process.send_signal(signal.SIGSTOP)
        with program("time.sleep(600)", other) as (blocked, _):
            assert blocked.wait(TIMEOUT_S) == 1, "by now the watchdog's limit has passed"
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert "loop_blocked" not in log.read_text()


def test_endless_tasks_get_no_grace_period_and_others_do(tmp_path: Path) -> None:
    body = """
life.background("endless", run_until_cancelled(), endless=True)
async def finish():
    await life.stop.wait()
    print("finished in time", flush=True)
life.background("finish", finish())
await life.until_stopped(grace_s=600)
"""
    with program(body, tmp_path) as (process, log):
        wait_until_listening(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert "finished in time" in log.read_text()


async def test_the_watchdog_ignores_a_loop_that_is_not_blocked() -> None:
    blocked = asyncio.Event()
    async with LoopWatchdog(0.2, blocked.set).watching():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await blocked.wait()


async def get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text(), answer.headers["Content-Type"]


async def test_health_readiness_and_metrics_are_served(tmp_path: Path) -> None:
    settings = Settings(_env_file=None, http_port_file=tmp_path / "port")
    life = Lifecycle()
    async with serve_health(life, "sample", settings) as port:
        url = f"http://127.0.0.1:{port}"
        assert int((tmp_path / "port").read_text()) == port
        assert await get(f"{url}/healthz") == (
            200,
            '{"process": "sample", "status": "ok"}',
            "application/json; charset=utf-8",
        )
        status, body, _ = await get(f"{url}/readyz")
        assert (status, "starting" in body) == (503, True)
        life.started()
        assert (await get(f"{url}/readyz"))[0] == 200
        life.health.set("kafka", "connecting")
        status, body, _ = await get(f"{url}/readyz")
        assert (status, '"kafka": "connecting"' in body) == (503, True)
        assert life.health.ready == "kafka: connecting"
        status, body, kind = await get(f"{url}/metrics")
        assert (status, kind.startswith("text/plain")) == (200, True)
        assert "loraq_jobs_finished_total" in body
        life.fail(RuntimeError("over"))
        assert (await get(f"{url}/healthz"))[0] == 503


async def test_an_address_in_use_is_named() -> None:
    async with serve_health(Lifecycle(), "sample", Settings(_env_file=None)) as port:
        same_port = Settings(_env_file=None, http_port=port)
        with pytest.raises(ConfigError, match=f"LORAQ_HTTP_PORT.*127.0.0.1:{port}"):
            async with serve_health(Lifecycle(), "sample", same_port):
                pass


async def test_a_port_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    settings = Settings(_env_file=None, http_port_file=tmp_path / "absent" / "port")
    with pytest.raises(ConfigError, match=r"LORAQ_HTTP_PORT_FILE: cannot write .*absent/port: No such file"):
        async with serve_health(Lifecycle(), "sample", settings):
            pass


async def test_a_task_that_dies_during_the_stop_is_a_failure() -> None:
    life = Lifecycle()

    async def fail_at_the_end() -> None:
        await life.stop.wait()
        raise ConfigError("too late")

    life.background("late", fail_at_the_end())
    waiting = asyncio.create_task(life.until_stopped(grace_s=5))
    await eventually(lambda: life.health.ready is None, what="readiness")
    life.stop.set()
    await waiting
    assert str(life.failure) == "too late"
