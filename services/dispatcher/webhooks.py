"""Claims due webhooks, sends each in a task of its own within the slots, and writes every attempt down."""

import asyncio
import random
import time
from dataclasses import dataclass
from datetime import timedelta

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from services.dispatcher.outbox import Outbox, WebhookRow, delivery_outcome
from services.dispatcher.schedule import RetryPolicy, decide
from services.dispatcher.sender import Sender
from services.dispatcher.slots import HostSlots
from services.dispatcher.wakeup import first_of
from services.errors import ConfigError, InputError, RetryableError
from services.process import telemetry
from services.process.lifecycle import Health
from services.tenants.secrets import SecretBox
from services.webhooks.outcome import (
    HOW_TO_ALLOW,
    Answer,
    Answered,
    Blocked,
    Delivered,
    Failed,
    NotAllowed,
    Outcome,
    Unreachable,
)

MAX_CLAIM = 100
CLAIM_SLACK = timedelta(seconds=30)
RECORD_PAUSES_S = (0.1, 1.0, 5.0)  # together well within the slack
NO_SECRET = "the tenant's webhook secret cannot be used; the operator is told"  # noqa: S105  # a sentence
BROKE = "the attempt broke; the operator is told"
_log = telemetry.get_logger()


@dataclass(frozen=True)
class WebhookTimes:
    """How long an attempt may take, how long to wait for a wake-up, and how long for attempts under way at the end."""

    timeout: timedelta
    poll_interval_s: float
    drain_s: float


class WebhookLoop:
    """Runs until stopped. `wake` is set by whoever knows that something may be due."""

    def __init__(
        self, outbox: Outbox, sender: Sender, box: SecretBox, slots: HostSlots, policy: RetryPolicy, times: WebhookTimes
    ) -> None:
        self.wake = asyncio.Event()
        self._outbox = outbox
        self._sender = sender
        self._box = box
        self._slots = slots
        self._policy = policy
        self._times = times
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_back = False

    async def run(self, stop: asyncio.Event, health: Health) -> None:
        """Send until `stop`; then wait for the attempts under way, `drain_s` seconds at most."""
        while not stop.is_set():
            self.wake.clear()
            try:
                started = await self._start_due()
                health.set("webhooks", None)
            except RetryableError as error:
                health.set("webhooks", str(error))
                _log.warning("Webhooks held up", action="webhooks_held_up", reason=str(error))
                await first_of(stop, timeout_s=max(1.0, self._times.poll_interval_s))
                continue
            if not started:
                await first_of(stop, self.wake, timeout_s=self._times.poll_interval_s)
        await self._drain()

    async def _start_due(self) -> int:
        """Claim what the slots allow and start it; returns how many attempts were started."""
        room = self._slots.room(MAX_CLAIM)
        self._held_back = room.total <= 0 or 0 in room.by_host.values()
        if room.total <= 0:
            return 0
        rows = await self._outbox.claim_webhooks(room, self._times.timeout + CLAIM_SLACK)
        surplus = [row for row in rows if not self._start(row)]
        await self._outbox.give_back(surplus)
        return len(rows) - len(surplus)

    def _start(self, row: WebhookRow) -> bool:
        if not self._slots.take(row.host):
            return False
        task = asyncio.create_task(self._attempt(row), name=f"webhook {row.event_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _drain(self) -> None:
        """Those cut off keep their claim; another dispatcher sends them when it lapses."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._times.drain_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attempt(self, row: WebhookRow) -> None:
        timed_out = False
        telemetry.WEBHOOKS_IN_FLIGHT.inc()
        try:
            timed_out = await self._send_and_record(row)
        except RetryableError as error:
            _log.warning(
                "Webhook attempt not recorded; it will be repeated",
                action="webhook_not_recorded",
                webhook_id=str(row.event_id),
                reason=str(error),
            )
        except Exception as error:
            telemetry.alarm(
                _log,
                "Webhook attempt broke; it will be repeated",
                action="webhook_broke",
                webhook_id=str(row.event_id),
                reason=repr(error),
                exc_info=error,
            )
        finally:
            telemetry.WEBHOOKS_IN_FLIGHT.dec()
            self._slots.give_back(row.host, timed_out)
            if self._held_back:
                self.wake.set()

    async def _send_and_record(self, row: WebhookRow) -> bool:
        """One attempt from span to row; returns whether it used up its time."""
        with telemetry.tracer().start_as_current_span(
            telemetry.SPAN_SEND_WEBHOOK,
            context=telemetry.context_from(row.traceparent),
            kind=SpanKind.CLIENT,
            attributes=_attributes(row),
        ) as span:
            begun = time.monotonic()
            answer = await self._answer(row)
            duration = timedelta(seconds=time.monotonic() - begun)
            outcome = self._outcome(row, answer, duration)
            _describe(span, answer, outcome)
            await self._record(row, outcome, _status(answer), duration)
            _report(row, answer, outcome, duration)
            return isinstance(answer, Unreachable) and answer.timed_out

    async def _record(self, row: WebhookRow, outcome: Outcome, status: int | None, duration: timedelta) -> None:
        """Write it down, again if the database stumbles: a receiver should not see a webhook twice for that."""
        for pause_s in RECORD_PAUSES_S:
            try:
                return await self._outbox.finish_webhook(row, outcome, status, duration)
            except RetryableError:
                await asyncio.sleep(pause_s)
        return await self._outbox.finish_webhook(row, outcome, status, duration)

    async def _answer(self, row: WebhookRow) -> Answer:
        """What the receiver said; an unusable secret is the operator's fault, so it raises an alarm and is retried."""
        try:
            if row.sealed_secret is None:
                raise ConfigError(f"the tenant {row.tenant} has no webhook secret")
            secret = self._box.open(row.sealed_secret).decode()
            return await self._sender.send(row.target, str(row.event_id), row.body.encode(), secret, row.claimed_at)
        except (ConfigError, InputError, UnicodeDecodeError) as error:
            telemetry.alarm(
                _log,
                "Webhook secret unusable",
                action="webhook_secret_unusable",
                tenant=row.tenant,
                webhook_id=str(row.event_id),
                reason=str(error),
            )
            return Unreachable(NO_SECRET)
        except Exception as error:  # whatever a receiver did to us: it counts as an attempt, so that it ends some time
            telemetry.alarm(
                _log,
                "Webhook attempt broke",
                action="webhook_broke",
                tenant=row.tenant,
                webhook_id=str(row.event_id),
                reason=repr(error),
                exc_info=error,
            )
            return Unreachable(BROKE)

    def _outcome(self, row: WebhookRow, answer: Answer, duration: timedelta) -> Outcome:
        return decide(
            answer,
            attempt=row.tries,
            begun_at=row.begun_at,
            policy=self._policy,
            now=row.claimed_at + duration,
            random=random.random(),
        )


def _attributes(row: WebhookRow) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        telemetry.HTTP_REQUEST_METHOD: "POST",
        telemetry.SERVER_ADDRESS: row.host,
        telemetry.TENANT: row.tenant,
        telemetry.JOB_ID: str(row.job_id),
        telemetry.EVENT_ID: str(row.event_id),
        telemetry.ATTEMPT: row.attempts,
    }
    if row.attempts > 1:
        attributes[telemetry.HTTP_REQUEST_RESEND_COUNT] = row.attempts - 1
    return attributes


def _status(answer: Answer) -> int | None:
    return answer.status if isinstance(answer, Answered) else None


def _describe(span: Span, answer: Answer, outcome: Outcome) -> None:
    span.set_attribute(telemetry.OUTCOME, delivery_outcome(outcome))
    if (status := _status(answer)) is not None:
        span.set_attribute(telemetry.HTTP_RESPONSE_STATUS_CODE, status)
    if not isinstance(outcome, Delivered):
        span.set_attribute(telemetry.ERROR_TYPE, str(status or type(answer).__name__))
        span.set_status(Status(StatusCode.ERROR, outcome.reason))


def _report(row: WebhookRow, answer: Answer, outcome: Outcome, duration: timedelta) -> None:
    """The operator's log; unlike the tenant's row it says which address was refused, and what would allow it."""
    word = delivery_outcome(outcome)
    telemetry.WEBHOOK_ATTEMPTS.labels(outcome=word).inc()
    telemetry.WEBHOOK_SECONDS.observe(duration.total_seconds())
    log = _log.warning if isinstance(outcome, Failed | Blocked) else _log.info
    log(
        "Webhook attempted",
        action=f"webhook_{word}",
        webhook_id=str(row.event_id),
        tenant=row.tenant,
        job_id=str(row.job_id),
        attempt=row.attempts,
        status=_status(answer),
        reason=getattr(outcome, "reason", None),
        refused_address=answer.address if isinstance(answer, NotAllowed) else None,
        hint=HOW_TO_ALLOW if isinstance(answer, NotAllowed) else None,
        duration_ms=round(duration / timedelta(milliseconds=1), 1),
    )
