"""`loraq submit` and `loraq jobs` against a worker."""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import NewTopic
from pydantic import SecretStr

from schemas.common import Lane
from services.client.identifiers import uuid7
from services.kafka import clients as kafka
from services.process.settings import Settings
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.builders import lora_adapter, tiny_llama
from tests.integration.workers import running_worker
from tests.integration.world import TENANT, World, open_world
from tests.processes import loraq
from tests.services.dispatcher.conftest import dispatching
from tests.waiting import eventually

pytestmark = pytest.mark.slow


async def run(settings: Settings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a thread, while the worker runs in this event loop."""
    return await asyncio.to_thread(loraq, *arguments, settings=settings)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_jobs_are_submitted_awaited_listed_and_shown(settings: Settings, tmp_path: Path) -> None:
    async with open_world(settings) as world, running_worker(settings):
        await one_job_prints_its_output(settings)
        await a_failed_job_fails_the_command(settings)
        await a_misspelt_adapter_gets_a_suggestion(settings, world, tmp_path)
        await options_set_every_field_of_a_request(settings)
        await the_result_of_another_request_is_not_returned(settings, tmp_path)
        await a_file_of_jobs_is_sent_completely_or_not_at_all(settings, world, tmp_path)
        await jobs_are_listed_and_shown(settings, world)


async def one_job_prints_its_output(settings: Settings) -> None:
    ended = await run(settings, "submit", "--tenant", TENANT, "--prompt", "hello there", "--wait")
    assert (ended.returncode, ended.stdout) == (0, "hello there\n"), ended.stderr


async def a_failed_job_fails_the_command(settings: Settings) -> None:
    ended = await run(settings, "submit", "--tenant", TENANT, "--adapter", "none", "--prompt", "x", "--wait", "--json")
    [row] = lines(ended.stdout)
    assert (ended.returncode, row["state"], row["error_code"]) == (1, "failed", "unknown_adapter")
    assert ended.stderr.startswith("loraq: 1 of 1 jobs did not succeed; failed, unknown_adapter: tenant 'acme' has no")


async def a_misspelt_adapter_gets_a_suggestion(settings: Settings, world: World, directory: Path) -> None:
    await world.add_adapter(lora_adapter(directory / "tone", tiny_llama(directory / "base")), "support-tone")
    for adapter, hint in (("suport-tone", "did you mean support-tone?"), ("support-tone@7", "it has support-tone@1")):
        ended = await run(settings, "submit", "--tenant", TENANT, "--adapter", adapter, "--prompt", "x", "--wait")
        assert ended.stderr.endswith(f"; {hint}\n"), ended.stderr


async def options_set_every_field_of_a_request(settings: Settings) -> None:
    job_id, options = str(uuid7()), ["--tenant", TENANT, "--prompt", "x", "--wait", "--json"]
    metadata = ["--metadata", "ticket=17", "--metadata", "source=the form"]
    [row] = lines((await run(settings, "submit", *options, "--job-id", job_id, *metadata)).stdout)
    assert (row["job_id"], row["metadata"]) == (job_id, {"ticket": 17, "source": "the form"})
    shown = await run(settings, "jobs", job_id)
    [written] = re.findall(r"^metadata +(.*)", shown.stdout, re.MULTILINE)
    assert json.loads(written) == row["metadata"], "the metadata is not JSON"
    late = await run(settings, "submit", *options, "--deadline", "2026-01-01T00:00:00Z")
    assert lines(late.stdout)[0]["state"] == "expired"


async def the_result_of_another_request_is_not_returned(settings: Settings, directory: Path) -> None:
    file, job_id, ended = directory / "job.jsonl", str(uuid7()), []
    for prompt in ("one", "one", "two"):
        file.write_text(json.dumps({"job_id": job_id, "prompt": prompt}))
        ended.append(await run(settings, "submit", "--tenant", TENANT, "--file", str(file), "--wait"))
    *same, other = ended
    assert [(each.returncode, each.stdout) for each in same] == [(0, "one\n")] * 2
    assert (other.returncode, other.stdout) == (1, "")
    assert other.stderr.startswith(f"loraq: tenant '{TENANT}' already used job_id {job_id} for a different request")


async def a_file_of_jobs_is_sent_completely_or_not_at_all(settings: Settings, world: World, directory: Path) -> None:
    file = directory / "jobs.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(5)))
    options = ["--file", str(file), "--tenant", TENANT, "--lane", "batch", "--json"]
    ended = await run(settings, "submit", *options, "--wait")
    assert ended.returncode == 0, ended.stderr
    assert [row["output_text"] for row in lines(ended.stdout)] == [f"prompt {number}" for number in range(5)]
    assert {row["lane"] for row in lines(ended.stdout)} == {Lane.BATCH}
    known = len(await world.jobs())
    file.write_text(file.read_text() + '{"prompt": "x", "colour": "red"}\n')
    refused = await run(settings, "submit", *options)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"loraq: {file} line 6: field 'colour' is not known\n"
    assert len(await world.jobs()) == known


async def jobs_are_listed_and_shown(settings: Settings, world: World) -> None:
    listed = await run(settings, "jobs", "--json", "--limit", "100")
    rows = lines(listed.stdout)
    assert {row["job_id"] for row in rows} == {str(job_id) for job_id in await world.jobs()}
    assert (await run(settings, "jobs", "list", "--json", "--limit", "100")).stdout == listed.stdout
    failed = await run(settings, "jobs", "list", "--state", "failed")
    assert "unknown_adapter" in failed.stdout
    assert "batch" not in failed.stdout
    job_id = next(row["job_id"] for row in rows if row["state"] == "succeeded")
    shown = await run(settings, "jobs", job_id, "--tenant", TENANT)
    assert "output_text" in shown.stdout
    [detail] = lines((await run(settings, "jobs", job_id, "--json")).stdout)
    assert detail["finish_reason"] == "stop"
    assert "T" in detail["accepted_at"]
    absent = await run(settings, "jobs", "01930000-0000-7000-8000-000000000000")
    assert absent.stderr.startswith("loraq: no such job: 01930000-0000-7000-8000-000000000000")


async def test_a_wait_ends_for_dead_letters_and_shows_the_rest(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(json.dumps({"tenant": name, "prompt": name}) + "\n" for name in ("other", TENANT)))
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world, running_worker(settings):
        async with world.pool.acquire() as connection:
            await add_tenant(connection, SecretBox(settings.secret_key), "other")
        signing = settings.model_copy(update={"producer_key": SecretStr(world.producer_key)})
        ended = await run(signing, "submit", "--file", str(file), "--wait", "--json", "--wait-timeout", "60")
        assert ended.returncode == 1
        assert [row["output_text"] for row in lines(ended.stdout)] == [TENANT]
        assert re.match("loraq: 1 of 2 jobs did not succeed; job .* was dead-lettered, unauthenticated: ", ended.stderr)
        assert "does not match the producer key of tenant 'other'; see `loraq dlq show " in ended.stderr


async def test_a_wait_continues_if_dead_letters_cannot_be_read(settings: Settings) -> None:
    elsewhere = settings.model_copy(update={"topic_prefix": f"{settings.topic_prefix}.elsewhere"})
    async with open_world(settings):
        await kafka_without_dead_letters(elsewhere)
        ended = await run(elsewhere, "submit", "--tenant", TENANT, "--prompt", "x", "--wait", "--wait-timeout", "8")
    assert ended.stderr.startswith(
        f"Cannot tell whether jobs were dead-lettered: there is no topic {elsewhere.dead_topic}"
    )
    assert "1 of 1 jobs did not end within 8 s" in ended.stderr


async def kafka_without_dead_letters(settings: Settings) -> None:
    async with kafka.admin(settings) as admin:
        await admin.create_topics([NewTopic(settings.jobs_topic(Lane.STANDARD), 1, 1)])


async def test_a_job_is_shown_with_the_results_of_its_webhooks(settings: Settings) -> None:
    async def webhooks() -> Any:
        [row] = lines((await run(settings, "jobs", str(job_id), "--json")).stdout)
        return row["webhooks"]

    async with open_world(settings) as world, running_worker(settings):
        job_id = await world.send_job(webhook={"url": "http://127.0.0.1:8080/hook?token=secret"})
        await world.ended(job_id)
        [pending] = await webhooks()
        assert (pending["host"], pending["outcome"], pending["attempts"]) == ("127.0.0.1:8080", "pending", 0)
        assert pending["next_attempt_at"] is not None
        async with dispatching(settings):
            await eventually(lambda: world.rows("select from loraq.webhook_deliveries"), what="an attempt")
        [blocked] = await webhooks()
        shown = await run(settings, "jobs", str(job_id))
        listed = await run(settings, "webhooks", "list")
    assert blocked == {
        "host": "127.0.0.1:8080",
        "outcome": "blocked",
        "attempts": 1,
        "next_attempt_at": None,
        "status_code": None,
        "reason": "address not allowed",
    }
    assert re.search(r"^host .*\n127\.0\.0\.1:8080 +blocked +1 +- +- +address not allowed", shown.stdout, re.MULTILINE)
    [headings] = re.findall(r"^host .*", shown.stdout, re.MULTILINE)
    assert headings.split() == list(blocked)
    assert set(blocked) <= set(listed.stdout.splitlines()[0].split())
    assert "secret" not in shown.stdout


@pytest.mark.parametrize("more", [(), ("--wait",)])
async def test_an_unknown_tenant_is_refused_and_nothing_is_sent(settings: Settings, more: tuple[str, ...]) -> None:
    async with open_world(settings) as world:
        ended = await run(settings, "submit", "--tenant", "nobody", "--prompt", "x", *more)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == "loraq: there is no tenant nobody; add it with `loraq tenants add nobody`\n"
        first = await world.send(b"{}", partition=0)
        others = [await world.send(b"{}", partition=number) for number in range(1, settings.partitions)]
    assert {sent.offset for sent in (first, *others)} == {0}, "the refused job was sent"


async def test_a_submission_without_a_database_names_it_and_sends_nothing(settings: Settings) -> None:
    away = settings.model_copy(update={"database_url": SecretStr("postgresql://loraq@127.0.0.1:1/loraq")})
    ended = await run(away, "submit", "--tenant", TENANT, "--prompt", "x")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("loraq: could not connect to Postgres at 127.0.0.1:1 (LORAQ_DATABASE_URL)")


async def test_a_wait_ends_after_its_timeout_with_a_hint(settings: Settings) -> None:
    async with open_world(settings):
        ended = await run(settings, "submit", "--tenant", TENANT, "--prompt", "x", "--wait", "--wait-timeout", "0.5")
    assert ended.returncode == 1
    assert "1 of 1 jobs did not end within 0.5 s" in ended.stderr
    assert "check that a worker is running" in ended.stderr


async def test_a_wait_reports_that_no_worker_consumes_the_jobs(settings: Settings) -> None:
    async with open_world(settings):
        ended = await run(settings, "submit", "--tenant", TENANT, "--prompt", "x", "--wait", "--wait-timeout", "11")
    assert "No worker has consumed the jobs yet" in ended.stderr


def test_wrong_usage_is_status_2(settings: Settings) -> None:
    assert loraq("submit", "--tenant", TENANT, settings=settings).returncode == 2
    assert loraq("jobs", "not-a-uuid", settings=settings).returncode == 2
    with_state = loraq("jobs", str(uuid7()), "--state", "failed", settings=settings)
    assert (with_state.returncode, "cannot be combined with JOB_ID" in with_state.stderr) == (2, True)
    assert (
        "for instance ticket=17" in loraq("submit", "--prompt", "x", "--metadata", "ticket", settings=settings).stderr
    )
    with_file = ["submit", "--file", "/dev/null", "--job-id", str(uuid7())]
    assert "each line has its own" in loraq(*with_file, settings=settings).stderr
    assert "JOB_ID" in loraq("jobs", "--help", settings=settings).stdout
