"""The checker reports nothing for a good run and reports each kind of violation."""

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from services.worker.offsets.ledger import Partition, Place
from tests.faults.checker import check, figures
from tests.faults.snapshot import (
    Call,
    DeadLetter,
    Delivery,
    EarlyCommit,
    Effect,
    Event,
    Job,
    Key,
    Result,
    Sent,
    Snapshot,
    Usage,
    Webhook,
)

PARTITION = Partition("loraq.default.jobs.standard", 0)
COMMITTED_AT = 1000.0
KEYS = tuple(Key("acme", UUID(int=number)) for number in range(1, 6))
IDS = {key: UUID(int=100 + key.job_id.int) for key in KEYS}
EXPIRED = KEYS[-1]


def good() -> Snapshot:
    """Four jobs that succeeded, one that expired, an invalid record, and a webhook that needed two attempts."""
    served = KEYS[:-1]
    return Snapshot(
        sent=(
            *(Sent(key, Place(PARTITION, number), deadline=2000.0) for number, key in enumerate(served)),
            Sent(KEYS[0], Place(PARTITION, 4), deadline=2000.0),
            Sent(EXPIRED, Place(PARTITION, 5), deadline=10.0),
            Sent(Key("acme", UUID(int=9)), Place(PARTITION, 6), fate="dead letter", webhook=False),
            Sent(Key("acme", UUID(int=10)), None),
        ),
        jobs=(
            *(Job(key, "succeeded", 1, 1, "w", None, COMMITTED_AT) for key in served),
            Job(EXPIRED, "expired", 0, 1, "w", "deadline_exceeded", COMMITTED_AT),
        ),
        results=tuple(Result(key, "out", 3, 1, 2, 50.0, COMMITTED_AT) for key in served),
        outbox=tuple(Effect(IDS[key], kind, key, "done") for key in KEYS for kind in ("event", "webhook")),
        deliveries=(
            *(Delivery(IDS[key], key, 1, "delivered") for key in KEYS[1:]),
            Delivery(IDS[KEYS[0]], KEYS[0], 1, "retrying"),
            Delivery(IDS[KEYS[0]], KEYS[0], 2, "delivered"),
        ),
        usage=(Usage("acme", "", 0, len(served), 3 * len(served), len(served), 2 * len(served), 7),),
        events=tuple(_event(key) for key in KEYS),
        webhooks=(
            *(_webhook(key) for key in KEYS[1:]),
            replace(_webhook(KEYS[0]), status=503),
            replace(_webhook(KEYS[0]), at=COMMITTED_AT + 2, timestamp=1002),
        ),
        dead_letters=(DeadLetter(Place(PARTITION, 6), "invalid_message"),),
        calls=tuple(Call(key, 900.0) for key in served),
    )


def _state(key: Key) -> str:
    return "expired" if key == EXPIRED else "succeeded"


def _output(key: Key) -> str | None:
    return None if key == EXPIRED else "out"


def _event(key: Key) -> Event:
    return Event(IDS[key], key, _state(key), _output(key), COMMITTED_AT)


def _webhook(key: Key) -> Webhook:
    return Webhook(IDS[key], key, _state(key), _output(key), COMMITTED_AT + 1, 1001, signed=True, status=204)


def test_a_run_that_kept_the_promises_passes() -> None:
    assert check(good()) == []
    assert figures(good()).jobs == len(KEYS)
    assert (figures(good()).lost, figures(good()).duplicates, figures(good()).orphan_webhooks) == (0, 0, 0)


def lost_job(run: Snapshot) -> Snapshot:
    gone = KEYS[1]
    return replace(run, jobs=_without(run.jobs, gone), results=_without(run.results, gone))


def stuck_job(run: Snapshot) -> Snapshot:
    return replace(run, jobs=(replace(run.jobs[0], state="running"), *run.jobs[1:]))


def lost_dead_letter(run: Snapshot) -> Snapshot:
    return replace(run, dead_letters=())


def valid_record_dead_lettered(run: Snapshot) -> Snapshot:
    return replace(run, dead_letters=(*run.dead_letters, DeadLetter(Place(PARTITION, 1), "invalid_message")))


def row_without_record(run: Snapshot) -> Snapshot:
    return replace(run, jobs=(*run.jobs, replace(run.jobs[0], key=Key("acme", uuid4()), state="failed")))


def offset_before_commit(run: Snapshot) -> Snapshot:
    return replace(run, early_commits=(EarlyCommit(Place(PARTITION, 3), Place(PARTITION, 1)),))


def offset_never_committed(run: Snapshot) -> Snapshot:
    return replace(run, uncommitted=(Place(PARTITION, 5),))


def no_fence(run: Snapshot) -> Snapshot:
    """A stale attempt wrote its outbox row and its tokens in addition to those of the valid attempt."""
    effect, usage = replace(run.outbox[0], event_id=uuid4()), run.usage[0]
    counted = replace(usage, jobs=usage.jobs + 1, completion_tokens=usage.completion_tokens + 2)
    return replace(run, outbox=(*run.outbox, effect), usage=(counted,))


def tokens_counted_twice(run: Snapshot) -> Snapshot:
    return replace(run, usage=(replace(run.usage[0], completion_tokens=10),))


def two_results(run: Snapshot) -> Snapshot:
    return replace(run, results=(*run.results, run.results[0]))


def result_of_a_failed_job(run: Snapshot) -> Snapshot:
    return replace(run, jobs=(replace(run.jobs[0], state="failed"), *run.jobs[1:]))


def result_changed(run: Snapshot) -> Snapshot:
    return replace(run, results=(replace(run.results[0], committed_at=COMMITTED_AT + 9), *run.results[1:]))


def different_result_announced(run: Snapshot) -> Snapshot:
    return replace(run, results=(replace(run.results[0], output="another"), *run.results[1:]))


def new_webhook_id_per_attempt(run: Snapshot) -> Snapshot:
    return replace(run, webhooks=(*run.webhooks[:-1], replace(run.webhooks[-1], webhook_id=uuid4())))


def row_without_outbox(run: Snapshot) -> Snapshot:
    return replace(
        run,
        outbox=_without(run.outbox, KEYS[2]),
        events=_without(run.events, KEYS[2]),
        webhooks=_without(run.webhooks, KEYS[2]),
        deliveries=_without(run.deliveries, KEYS[2]),
    )


def webhook_never_accepted(run: Snapshot) -> Snapshot:
    return replace(run, webhooks=tuple(replace(each, status=503) for each in run.webhooks))


def bad_signature(run: Snapshot) -> Snapshot:
    return replace(run, webhooks=(replace(run.webhooks[0], signed=False), *run.webhooks[1:]))


def older_timestamp(run: Snapshot) -> Snapshot:
    return replace(run, webhooks=(*run.webhooks[:-1], replace(run.webhooks[-1], timestamp=5)))


def pending_indefinitely(run: Snapshot) -> Snapshot:
    return replace(run, outbox=(replace(run.outbox[0], state="pending"), *run.outbox[1:]))


def webhook_before_row(run: Snapshot) -> Snapshot:
    return replace(run, webhooks=(replace(run.webhooks[0], at=COMMITTED_AT - 0.3), *run.webhooks[1:]))


def webhook_without_row(run: Snapshot) -> Snapshot:
    return replace(run, webhooks=(*run.webhooks, replace(run.webhooks[0], key=Key("acme", uuid4()))))


def event_before_row(run: Snapshot) -> Snapshot:
    return replace(run, events=(replace(run.events[0], at=COMMITTED_AT - 0.3), *run.events[1:]))


def started_after_deadline(run: Snapshot) -> Snapshot:
    return replace(run, calls=(*run.calls, Call(EXPIRED, 11.0)))


def expired_without_deadline(run: Snapshot) -> Snapshot:
    return replace(run, sent=tuple(replace(sent, deadline=None) for sent in run.sent))


def _without(items: tuple, key: Key) -> tuple:  # type: ignore[type-arg]
    return tuple(item for item in items if item.key != key)


MUTANTS: list[tuple[Callable[[Snapshot], Snapshot], set[str]]] = [
    (lost_job, {"P1"}),
    (stuck_job, {"P1"}),
    (lost_dead_letter, {"P1"}),
    (valid_record_dead_lettered, {"P1"}),
    (row_without_record, {"P1"}),
    (offset_before_commit, {"P1"}),
    (offset_never_committed, {"P1"}),
    (no_fence, {"P2", "P3"}),
    (tokens_counted_twice, {"P3"}),
    (two_results, {"P2"}),
    (result_of_a_failed_job, {"P2"}),
    (result_changed, {"P2"}),
    (different_result_announced, {"P2"}),
    (new_webhook_id_per_attempt, {"P4"}),
    (row_without_outbox, {"P4"}),
    (webhook_never_accepted, {"P4"}),
    (bad_signature, {"P4"}),
    (older_timestamp, {"P4"}),
    (pending_indefinitely, {"P4"}),
    (webhook_before_row, {"P5"}),
    (webhook_without_row, {"P5"}),
    (event_before_row, {"P5"}),
    (started_after_deadline, {"P6"}),
    (expired_without_deadline, {"P6"}),
]


@pytest.mark.parametrize(("mutant", "promises"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_is_caught(mutant: Callable[[Snapshot], Snapshot], promises: set[str]) -> None:
    assert promises <= {violation.promise for violation in check(mutant(good()))}


def test_a_record_that_the_fault_itself_deleted_is_not_lost() -> None:
    exempt = tuple(replace(sent, exempt=sent.key == KEYS[1]) for sent in good().sent)
    assert "P1" not in {violation.promise for violation in check(replace(lost_job(good()), sent=exempt))}


def test_a_record_that_no_broker_acknowledged_may_or_may_not_have_been_served() -> None:
    unacknowledged = Key("acme", UUID(int=10))
    row = Job(unacknowledged, "failed", 1, 1, "w", "timeout", COMMITTED_AT)
    assert "P1" not in {violation.promise for violation in check(replace(good(), jobs=(*good().jobs, row)))}
