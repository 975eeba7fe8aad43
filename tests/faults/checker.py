"""Check that a run kept the promises P1 to P6. Pure functions over a snapshot; each yields a sentence per violation."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from services.worker.offsets.ledger import Place
from tests.faults.snapshot import Job, Key, Sent, Snapshot, Usage

TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})
CLOCK_S = 0.002  # events carry whole milliseconds

KeyT = TypeVar("KeyT", bound=Hashable)
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Violation:
    """A promise and how it was broken."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


@dataclass(frozen=True)
class Figures:
    """A run in numbers. `lost`: records without a final outcome; `duplicates`: rows beyond the expected one."""

    jobs: int
    lost: int
    duplicates: int
    orphan_webhooks: int
    calls: int


def check(snapshot: Snapshot) -> list[Violation]:
    """Every violation in the snapshot; empty when all promises were kept."""
    return [Violation(promise, what) for promise, rule in RULES for what in rule(snapshot)]


def figures(snapshot: Snapshot) -> Figures:
    """The numbers in the report."""
    return Figures(
        jobs=len(_acknowledged_jobs(snapshot)),
        lost=len(list(_lost(snapshot))),
        duplicates=len(list(_duplicates(snapshot))),
        orphan_webhooks=len(list(_early_webhooks(snapshot))),
        calls=len(snapshot.calls),
    )


def _by_key(items: Iterable[ItemT], key: Callable[[ItemT], KeyT]) -> dict[KeyT, list[ItemT]]:
    found: dict[KeyT, list[ItemT]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def _rows(snapshot: Snapshot) -> dict[Key, Job]:
    return {job.key: job for job in snapshot.jobs}


def _acknowledged_jobs(snapshot: Snapshot) -> dict[Key, Sent]:
    """The jobs that must have ended: the broker acknowledged at least one of their records."""
    return {
        sent.key: sent for sent in snapshot.sent if sent.fate == "job" and sent.place is not None and not sent.exempt
    }


def _lost(snapshot: Snapshot) -> Iterator[str]:
    rows, dead = _rows(snapshot), {dead_letter.source for dead_letter in snapshot.dead_letters}
    for key in _acknowledged_jobs(snapshot):
        if key not in rows:
            yield f"the job {key} has no row"
        elif rows[key].state not in TERMINAL:
            yield f"the job {key} is stuck in state {rows[key].state}"
    for sent in snapshot.sent:
        if sent.fate == "dead letter" and sent.place is not None and not sent.exempt and sent.place not in dead:
            yield f"the record at {_at(sent.place)} is not a valid job and was not dead-lettered"


def _never_both(snapshot: Snapshot) -> Iterator[str]:
    fates = {sent.place: sent.fate for sent in snapshot.sent if sent.place is not None}
    known = {sent.key for sent in snapshot.sent if sent.fate == "job"}
    for dead_letter in snapshot.dead_letters:
        if fates.get(dead_letter.source) == "job":
            yield f"the valid record at {_at(dead_letter.source)} was dead-lettered as {dead_letter.code}"
    for job in snapshot.jobs:
        if job.key not in known:
            yield f"the row of {job.key} belongs to a job that was never sent"


def _offsets_follow(snapshot: Snapshot) -> Iterator[str]:
    for committed, unsettled in snapshot.early_commits:
        yield f"offset {_at(committed)} was committed while the record at {_at(unsettled)} had not ended"
    for place in snapshot.uncommitted:
        yield f"the record at {_at(place)} would be delivered again: its offset was never committed"


def _duplicates(snapshot: Snapshot) -> Iterator[str]:
    for key, count in Counter(job.key for job in snapshot.jobs).items():
        yield from [f"the job {key} has {count} rows"] * (count - 1)
    for key, count in Counter(result.key for result in snapshot.results).items():
        yield from [f"the job {key} has {count} results"] * (count - 1)
    for (key, kind), count in Counter((effect.key, effect.kind) for effect in snapshot.outbox).items():
        yield from [f"the job {key} has {count} outbox rows of kind {kind}"] * (count - 1)


def _results_of_succeeded(snapshot: Snapshot) -> Iterator[str]:
    rows = _rows(snapshot)
    with_result = {result.key for result in snapshot.results}
    for key, job in rows.items():
        if (job.state == "succeeded") != (key in with_result):
            yield f"the job {key} is {job.state} and has {'a' if key in with_result else 'no'} result"
    for key in with_result - set(rows):
        yield f"a result belongs to {key}, which has no row"


def _never_changed(snapshot: Snapshot) -> Iterator[str]:
    """The same transaction wrote job and result last, and both match the event and the webhook."""
    rows = _rows(snapshot)
    outputs = {result.key: result.output for result in snapshot.results}
    for result in snapshot.results:
        job = rows.get(result.key)
        if job is not None and job.committed_at != result.committed_at:
            yield f"the result of {result.key} was not written by the transaction that ended the job"
    for message in (*snapshot.events, *snapshot.webhooks):
        job = rows.get(message.key)
        if job is not None and job.state != message.state:
            yield f"the job {message.key} is {job.state}, but its event or webhook reported {message.state}"
        elif message.state == "succeeded" and message.key in outputs and outputs[message.key] != message.output:
            yield f"the result of {message.key} differs from the one in its event or webhook"


def _usage_once(snapshot: Snapshot) -> Iterator[str]:
    counted = {(each.tenant, each.adapter, each.adapter_version): each for each in snapshot.usage}
    due = _due_usage(snapshot)
    for key in sorted(counted.keys() | due.keys()):
        found = _tokens(counted[key]) if key in counted else (0, 0, 0, 0)
        if found != due.get(key, (0, 0, 0, 0)):
            yield f"usage of {key} (jobs, prompt, cached, completion) is {found}, the results sum up to {due.get(key)}"


def _due_usage(snapshot: Snapshot) -> dict[tuple[str, str, int], tuple[int, int, int, int]]:
    rows = _rows(snapshot)
    due: dict[tuple[str, str, int], tuple[int, int, int, int]] = {}
    for result in snapshot.results:
        if (job := rows.get(result.key)) is not None:
            key = (result.key.tenant, job.adapter, job.adapter_version)
            jobs, prompt, cached, completion = due.get(key, (0, 0, 0, 0))
            due[key] = (
                jobs + 1,
                prompt + result.prompt_tokens,
                cached + result.cached_tokens,
                completion + result.completion_tokens,
            )
    return due


def _tokens(usage: Usage) -> tuple[int, int, int, int]:
    return usage.jobs, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def _one_chain(snapshot: Snapshot) -> Iterator[str]:
    """Each terminal job has its event and, if requested, its webhook."""
    effects = {(effect.key, effect.kind): effect for effect in snapshot.outbox}
    wants_webhook = {sent.key for sent in snapshot.sent if sent.webhook and sent.fate == "job"}
    published = {event.key for event in snapshot.events}
    accepted = {webhook.key for webhook in snapshot.webhooks if webhook.signed and 200 <= webhook.status < 300}
    for key, job in _rows(snapshot).items():
        if job.state not in TERMINAL:
            continue
        if (key, "event") not in effects or key not in published:
            yield f"no event on the events topic reports the end of {key}"
        if key in wants_webhook and ((key, "webhook") not in effects or key not in accepted):
            yield f"the receiver never accepted the webhook of {key}"
    for effect in snapshot.outbox:
        if effect.state == "pending":
            yield f"the {effect.kind} of {effect.key} is still pending"


def _one_id(snapshot: Snapshot) -> Iterator[str]:
    ids = {(effect.key, effect.kind): effect.event_id for effect in snapshot.outbox}
    for webhook in snapshot.webhooks:
        if webhook.webhook_id != ids.get((webhook.key, "webhook")):
            yield f"a webhook of {webhook.key} carried the id {webhook.webhook_id}, not the id of its outbox row"
        if not webhook.signed:
            yield f"a webhook of {webhook.key} carried a bad signature"
    for event in snapshot.events:
        if event.event_id != ids.get((event.key, "event")):
            yield f"an event of {event.key} carried the id {event.event_id}, not the id of its outbox row"


def _attempts_rise(snapshot: Snapshot) -> Iterator[str]:
    for key, chain in _by_key(snapshot.deliveries, lambda delivery: (delivery.key, delivery.webhook_id)).items():
        attempts = [delivery.attempt for delivery in chain]
        if len(set(attempts)) != len(attempts):
            yield f"an attempt of the webhook {key} was recorded twice"
        ended = [delivery for delivery in chain if delivery.outcome != "retrying"]
        if len(ended) > 1:
            made = [(delivery.attempt, delivery.outcome, delivery.began_at) for delivery in chain]
            yield f"the webhook {key} ended {len(ended)} times: attempt, outcome and claim time are {made}"
    for webhook_id, got in _by_key(snapshot.webhooks, lambda webhook: webhook.webhook_id).items():
        times = [webhook.timestamp for webhook in sorted(got, key=lambda webhook: webhook.at)]
        if times != sorted(times):
            yield f"the timestamps of the webhook {webhook_id} decrease between attempts: {times}"


def _early_webhooks(snapshot: Snapshot) -> Iterator[str]:
    rows = _rows(snapshot)
    for webhook in snapshot.webhooks:
        job = rows.get(webhook.key)
        if job is None or job.state not in TERMINAL:
            yield f"a webhook arrived for {webhook.key}, which has not ended"
        elif webhook.at < job.committed_at:
            early_s = job.committed_at - webhook.at
            yield f"the webhook of {webhook.key} arrived {early_s:.3f} s before its row was committed"


def _early_events(snapshot: Snapshot) -> Iterator[str]:
    rows = _rows(snapshot)
    for event in snapshot.events:
        job = rows.get(event.key)
        if job is None or job.state not in TERMINAL:
            yield f"an event was published for {event.key}, which has not ended"
        elif event.at + CLOCK_S < job.committed_at:
            early_s = job.committed_at - event.at
            yield f"the event of {event.key} was published {early_s:.3f} s before its row was committed"


def _never_late(snapshot: Snapshot) -> Iterator[str]:
    deadlines = {sent.key: sent.deadline for sent in snapshot.sent if sent.deadline is not None}
    for call in snapshot.calls:
        deadline = deadlines.get(call.key)
        if deadline is not None and call.at > deadline:
            yield f"the job {call.key} was started {call.at - deadline:.3f} s after its deadline"
    called = {call.key for call in snapshot.calls}
    for job in snapshot.jobs:
        if job.state == "expired" and job.key not in deadlines:
            yield f"the job {job.key} expired but had no deadline"
        if job.state == "expired" and job.attempts == 0 and job.key in called:
            yield f"the job {job.key} expired with no attempt, but it reached an engine"


def _at(place: Place) -> str:
    return f"{place.partition.topic}[{place.partition.number}]@{place.offset}"


RULES: tuple[tuple[str, Callable[[Snapshot], Iterator[str]]], ...] = (
    ("P1", _lost),
    ("P1", _never_both),
    ("P1", _offsets_follow),
    ("P2", _duplicates),
    ("P2", _results_of_succeeded),
    ("P2", _never_changed),
    ("P3", _usage_once),
    ("P4", _one_chain),
    ("P4", _one_id),
    ("P4", _attempts_rise),
    ("P5", _early_webhooks),
    ("P5", _early_events),
    ("P6", _never_late),
)
