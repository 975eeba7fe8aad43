"""`loraq dlq` against a worker that dead-letters records and serves the replayed ones."""

import asyncio
import json
import subprocess
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from schemas.common import ErrorCode, Lane
from services.client.signing import SIGNATURE_HEADER, signature
from services.dlq.edits import Edit
from services.dlq.filters import DeadLetterFilter
from services.dlq.listing import newest
from services.dlq.replay import ReplayRequest, replay
from services.kafka import headers as names
from services.process.settings import Settings
from services.tenants.secrets import SecretBox, new_secret_key
from services.tenants.tenants import add_tenant
from services.worker.intake.dead_letters import dead_letter
from services.worker.jobs import Record, Rejection
from services.worker.offsets.ledger import Partition, Place
from tests.integration.workers import running_worker
from tests.integration.world import TENANT, World, job_request, open_world
from tests.processes import loraq
from tests.services.dlq.dead_letters import request
from tests.waiting import eventually

pytestmark = pytest.mark.slow

UNREGISTERED = Rejection(
    Record(Place(Partition("loraq.default.jobs.standard", 0), 7), Lane.STANDARD, None, request(), (), 0),
    ErrorCode.UNAUTHENTICATED,
    "no tenant 'acme' is registered",
)
TYPO = {"max_token": 3}


async def dlq(settings: Settings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a thread, while the worker runs in this event loop."""
    return await asyncio.to_thread(loraq, "dlq", *arguments, settings=settings)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_dead_letters_are_listed_edited_and_replayed_once(settings: Settings) -> None:
    async with open_world(settings) as world, running_worker(settings):
        await world.send(b"\xff", key=b"acme/tone", headers=[("mine", b"kept")])
        await world.send(json.dumps(job_request(sampling=TYPO)).encode(), lane=Lane.BATCH)
        await world.send(json.dumps(job_request(tenant="later")).encode(), key=b"later/x")
        await world.dead_letters(3)
        await dead_letters_are_listed(settings)
        await records_that_fail_again_are_refused_and_a_dry_run_sends_nothing(settings, world)
        await a_tenant_that_was_added_later_gets_its_job(settings, world)
        await a_field_is_corrected(settings, world)
        assert len(await world.dead_letters(3)) == 3


async def dead_letters_are_listed(settings: Settings) -> None:
    listed = await dlq(settings, "list", "--json")
    found = {letter["error_code"] + str(letter["tenant"]): letter for letter in lines(listed.stdout)}
    assert listed.stderr == "3 dead letters: 2 invalid_message, 1 unauthenticated.\n"
    assert found["invalid_messageacme"]["source"]["topic"] in map(settings.jobs_topic, (Lane.STANDARD, Lane.BATCH))
    [garbage] = lines((await dlq(settings, "list", "--json", "--adapter", "tone")).stdout)
    assert (garbage["key"], garbage["value_base64"], garbage["replays"]) == ("acme/tone", "/w==", 0)
    assert garbage["headers"] == [{"name": "mine", "value": "kept"}]
    table = (await dlq(settings, "list", "--code", "unauthenticated", "--since", "1h")).stdout
    assert "no tenant 'later' is registered" in table
    assert "invalid_message" not in table
    shown = await dlq(settings, "show", garbage["letter"])
    assert "value_base64" in shown.stdout
    unsent = await dlq(settings, "replay", "--letter", "0:999")
    assert (unsent.returncode, "no such dead letters in" in unsent.stderr) == (1, True)
    absent = await dlq(settings, "show", "0:999")
    assert absent.stderr.startswith(f"loraq: no such dead letter in {settings.dead_topic}: 0:999")


async def records_that_fail_again_are_refused_and_a_dry_run_sends_nothing(settings: Settings, world: World) -> None:
    planned = await dlq(settings, "replay", "--all", "--dry-run", "--json")
    assert planned.returncode == 1
    outcomes = sorted(row["outcome"] for row in lines(planned.stdout))
    assert outcomes == ["refused", "refused", "would_replay"]
    assert any("field 'sampling.max_token' is not known" in str(row["reason"]) for row in lines(planned.stdout))
    assert "loraq: 2 of 3 dead letters were not replayed" in planned.stderr
    assert await world.jobs() == {}


async def a_tenant_that_was_added_later_gets_its_job(settings: Settings, world: World) -> None:
    too_early = await dlq(settings, "replay", "--tenant", "later")
    assert (too_early.returncode, too_early.stdout) == (1, "")
    assert too_early.stderr == "loraq: there is no tenant later; add it with `loraq tenants add later`\n"
    renamed = await dlq(settings, "replay", "--tenant", "later", "--set", f"tenant={TENANT}", "--dry-run")
    assert renamed.stderr == "1 would be replayed\n"
    async with world.pool.acquire() as connection:
        await add_tenant(connection, SecretBox(settings.secret_key), "later")
    first = await dlq(settings, "replay", "--tenant", "later")
    assert (first.returncode, first.stderr) == (0, "1 replayed\n")
    rows = await eventually(world.jobs, what="the job's row")
    again = await dlq(settings, "replay", "--tenant", "later", "--json")
    assert again.returncode == 0
    [row] = lines(again.stdout)
    assert (row["outcome"], row["reason"]) == (
        "already_replayed",
        "already replayed once; give --again to replay it again",
    )
    assert "once, to " in (await dlq(settings, "list", "--tenant", "later")).stdout
    once_more = await dlq(settings, "replay", "--tenant", "later", "--again", "--lane", "interactive")
    assert once_more.stderr == "1 replayed\n"
    await world.ended(await world.send_job(lane=Lane.INTERACTIVE))
    twice = {job_id: row for job_id, row in (await world.jobs()).items() if row["tenant"] == "later"}
    assert twice.keys() == rows.keys(), "a dead letter that was replayed twice became two jobs"


async def a_field_is_corrected(settings: Settings, world: World) -> None:
    edit = ["--set", "sampling.max_tokens=3", "--unset", "sampling.max_token"]
    corrected = await dlq(settings, "replay", "--message", "max_token", *edit, "--json")
    [row] = lines(corrected.stdout)
    assert (corrected.returncode, row["outcome"]) == (0, "replayed"), corrected.stderr
    assert row["to"].startswith(settings.jobs_topic(Lane.BATCH))

    async def served() -> bool:
        return "batch" in {row["lane"] for row in (await world.jobs()).values() if row["state"] == "succeeded"}

    await eventually(served, what="the corrected job's row")


async def test_dead_letters_are_listed_and_replayed_on_both_brokers(broker_settings: Settings) -> None:
    settings = broker_settings
    replay_request = ReplayRequest(
        DeadLetterFilter(), Edit(), None, limit=2, force=True, sign=False, again=False, dry_run=False
    )
    async with open_world(settings) as world:
        async with running_worker(settings):
            for number in range(5):
                await world.send(b"\xff", partition=number % 3)
            await world.dead_letters(5)
        letters, counts = await newest(settings, DeadLetterFilter(), 3)
        assert (len(letters), counts["invalid_message"]) == (3, 5)
        assert sorted(letters, key=lambda letter: letter.dead_lettered_at, reverse=True) == letters
        since, _ = await newest(settings, DeadLetterFilter(since=letters[0].dead_lettered_at), 10)
        assert letters[0] in since
        for expected in (2, 2, 1, 0):
            reports = [report async for batch in replay(settings, replay_request) for report in batch]
            assert sum(report.outcome == "replayed" for report in reports) == expected
        assert await newest(settings, DeadLetterFilter(since=letters[0].dead_lettered_at + timedelta(days=1)), 1) == (
            [],
            Counter(),
        )


async def test_a_new_value_replaces_one_dead_letter_and_is_signed_for_its_tenant(
    settings: Settings, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"require_signed_jobs": True})
    file = tmp_path / "value.json"
    file.write_text(json.dumps(job_request()))
    async with open_world(settings) as world, running_worker(settings):
        for value in (b"one", b"two"):
            signed = signature(world.producer_key.encode(), value).encode()
            await world.send(value, key=b"acme/tone", headers=[(SIGNATURE_HEADER, signed)])
        await world.dead_letters(2)
        both = await dlq(settings, "replay", "--all", "--edit", str(file), "--sign")
        assert "--edit applies to one dead letter, but several match" in both.stderr
        place = lines((await dlq(settings, "list", "--json")).stdout)[0]["letter"]
        unsigned = await dlq(settings, "replay", "--letter", place, "--edit", str(file))
        assert "--sign signs it with the tenant's key" in unsigned.stdout
        done = await dlq(settings, "replay", "--letter", place, "--edit", str(file), "--sign")
        assert (done.returncode, done.stderr) == (0, "1 replayed\n")
        await eventually(world.jobs, what="the job's row")
        assert len(await world.dead_letters(2)) == 2


DAMAGE = "update loraq.tenants set producer_key = '\\x01' where tenant = $1"


async def test_a_damaged_producer_key_affects_its_tenants_dead_letters_only(settings: Settings) -> None:
    settings = settings.model_copy(update={"require_signed_jobs": True})
    async with open_world(settings) as world:
        async with world.pool.acquire() as connection:
            await add_tenant(connection, SecretBox(settings.secret_key), "damaged")
            await connection.execute(DAMAGE, "damaged")
        async with running_worker(settings):
            for tenant in ("damaged", TENANT):
                await world.send(json.dumps(job_request(tenant=tenant, sampling=TYPO)).encode())
            await world.dead_letters(2)
            edit = ["--set", "sampling.max_tokens=3", "--unset", "sampling.max_token", "--sign", "--json"]
            done = await dlq(settings, "replay", "--all", *edit)
            outcomes = {row["outcome"]: row["reason"] for row in lines(done.stdout)}
            assert done.returncode == 1
            assert outcomes.keys() == {"replayed", "refused"}
            assert "the producer key of tenant 'damaged' is damaged" in outcomes["refused"]
            assert "loraq: 1 of 2 dead letters were not replayed" in done.stderr
            rows = await eventually(world.jobs, what="the other tenant's job")
            assert {row["tenant"] for row in rows.values()} == {TENANT}
        other_key = settings.model_copy(update={"secret_key": SecretStr(new_secret_key())})
        wrong = await dlq(other_key, "replay", "--all", "--again", *edit)
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "LORAQ_SECRET_KEY is not the key that the tenants' secrets were sealed with" in wrong.stderr


async def test_a_record_that_loraq_did_not_write_is_reported_and_delays_no_other(settings: Settings) -> None:
    async with open_world(settings) as world:
        for header in (names.VALUE_OMITTED, names.SOURCE_PARTITION, names.ERROR_CODE, None):
            headers = dead_letter(UNREGISTERED).headers + ([(header, b"-1")] if header else [])
            await world.producer.send_and_wait(
                settings.dead_topic, request(), headers=headers, timestamp_ms=2**62 if header else None
            )
        letters, counts = await newest(settings, DeadLetterFilter(), 10)
        assert counts == {"not loraq's": 3, "unauthenticated": 1}
        listed = await dlq(settings, "list", "--message", "loraq-value-omitted must be a number")
        assert "9999-12-31" in listed.stdout
        strange = next(each for each in letters if each.code is None)
        shown = await dlq(settings, "show", str(strange.position), "--json")
        assert [each["letter"] for each in lines(shown.stdout)] == [str(strange.position)]
        replayed = await dlq(settings, "replay", "--all", "--lane", "standard", "--json")
        outcomes = Counter(row["outcome"] for row in lines(replayed.stdout))
        assert outcomes == {"replayed": 1, "refused": 3}, replayed.stderr


async def test_a_missing_topic_or_database_is_reported(settings: Settings) -> None:
    no_topic = await dlq(settings, "list")
    assert no_topic.returncode == 1
    assert no_topic.stderr == (
        f"loraq: there is no topic {settings.dead_topic} on {settings.kafka_bootstrap}; create it with `loraq topics`,"
        " or allow this user to describe it\n"
    )
    async with open_world(settings) as world:
        async with running_worker(settings):
            await world.send(b"\xff")
            await world.dead_letters(1)
        away = settings.model_copy(update={"database_url": "postgresql://loraq@127.0.0.1:1/loraq"})
        listed = await dlq(away, "list", "--json")
        assert [row["replayed_at"] for row in lines(listed.stdout)] == [None]
        assert listed.stderr.startswith("Cannot tell which dead letters were replayed: could not connect to Postgres")
        failed = await dlq(away, "replay", "--all", "--force")
        assert (failed.returncode, failed.stdout) == (1, "")


def test_wrong_usage_is_status_2(settings: Settings) -> None:
    for arguments in (
        ["replay"],
        ["show", "17"],
    ):
        refused = loraq("dlq", *arguments, settings=settings)
        assert (refused.returncode, refused.stdout) == (2, ""), arguments
