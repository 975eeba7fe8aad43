"""Row 18: clocks that are wrong."""

import time

from services.webhooks.receiver import ReceivedWebhook
from services.webhooks.signature import TIMESTAMP_HEADER
from tests.faults.experiment import experiment
from tests.faults.run import Run

HOUR_S = 3600
TOLERANCE_S = 300
FEW_MINUTES_S, MANY_MINUTES_S = 180, 600
CLOSE_S = 5


@experiment(
    "18",
    "receiver's clock off by minutes; worker's and dispatcher's clocks step back an hour",
    "leases and deadlines unaffected; signatures carry the attempt's time",
    kafka_session_timeout_s=6.0,
    lease_s=6.0,
)
async def wrong_clocks(run: Run) -> None:
    clock = await run.clock()
    receiver = Receiver()
    run.recorder.answer = receiver.answer
    async with run.dispatcher(clock=clock), run.worker(clock=clock) as worker:
        await run.traffic.send(run.count // 2, latency_ms=(50, 300), deadline_s=600.0)
        await run.wait_ended(run.random.randint(20, 100))
        clock.step(-HOUR_S)
        receiver.off_s = FEW_MINUTES_S
        await run.traffic.send(run.count // 4, latency_ms=(50, 300), deadline_s=600.0)
        late = [await run.traffic.send_job(10, deadline_s=-5.0) for _ in range(20)]
        receiver.off_s = run.random.choice((-1, 1)) * MANY_MINUTES_S
        await run.traffic.send(run.count - run.count // 2 - run.count // 4, latency_ms=(50, 300))
        await run.wait_until(receiver.has_refused, "the receiver with the wrong clock to refuse webhooks", 60.0)
        receiver.off_s = 0
        await run.wait_settled()
        stale = await worker.metric("loraq_stale_writes_total")
    states = {job.key: job.state for job in await run.tables.jobs()}
    expired = {key for key, state in states.items() if state == "expired"}
    run.expect(expired == set(late), f"{len(expired)} jobs expired, {len(late)} had a deadline in the past")
    run.expect(stale == 0, f"a clock step cost {stale:.0f} attempts their lease")
    run.expect(len(run.calls()) == len({call.key for call in run.calls()}), "a job reached an engine twice")
    difference_s = max(abs(webhook.at - webhook.timestamp) for webhook in run.recorder.webhooks)
    run.expect(difference_s < CLOSE_S, f"a signature's time differs from its attempt's by {difference_s:.1f} s")
    run.notes.append(f"{receiver.refused} attempts refused, signatures within {difference_s:.1f} s")


class Receiver:
    """A receiver whose clock is off by `off_s`; it refuses signatures more than five minutes from its own time."""

    def __init__(self) -> None:
        self.off_s = 0
        self.refused = 0
        self._now = time.time

    def answer(self, webhook: ReceivedWebhook) -> int:
        away_s = self._now() + self.off_s - int(webhook.headers[TIMESTAMP_HEADER])
        if abs(away_s) <= TOLERANCE_S:
            return 204
        self.refused += 1
        return 401

    async def has_refused(self) -> bool:
        return self.refused > 0
