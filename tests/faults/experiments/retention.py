"""Row 22: the broker deletes records that no worker has read."""

from aiokafka import TopicPartition
from aiokafka.admin.records_to_delete import RecordsToDelete

from schemas.common import Lane
from services.kafka import clients as kafka
from services.worker.offsets.ledger import Place
from tests.faults.experiment import experiment
from tests.faults.run import Run


@experiment(
    "22",
    "offsets out of range (retention shorter than the outage)",
    "counted and alarmed, never a silent jump to the end",
    jobs=800,
)
async def records_deleted(run: Run) -> None:
    async with run.dispatcher():
        async with run.worker():
            await run.traffic.send(run.count // 2)
            await run.wait_settled()
        await run.traffic.send(run.count // 4)
        gone = await delete_some(run)
        run.exempt(lambda place: place.offset in gone.get(TopicPartition(*place.partition), ()))
        kept = await run.traffic.send(run.count - run.count // 2 - run.count // 4)
        async with run.worker() as worker:
            await run.wait_settled()
            counted = await worker.metric("loraq_offsets_out_of_range_total")
            alarms = await worker.metric("loraq_alarms_total")
    ended = await run.tables.ended()
    run.expect(set(kept) <= ended, "jobs after the gap were not served")
    run.expect(counted >= len(gone), f"{counted:.0f} partitions were counted, {len(gone)} had lost records")
    run.expect(alarms > 0, "no alarm was raised")
    run.notes.append(f"{len(gone)} partitions lost records")


async def delete_some(run: Run) -> dict[TopicPartition, range]:
    """Delete the older part of the unread records of some lanes; returns the deleted offsets."""
    unread = {TopicPartition(*place.partition): place for place in await run.uncommitted()}
    lanes = {run.settings.jobs_topic(lane) for lane in run.random.sample(list(Lane), run.random.randint(1, 3))}
    begins = {place: middle(run, at) for place, at in unread.items() if place.topic in lanes}
    async with kafka.admin(run.settings) as admin:
        await admin.delete_records({place: RecordsToDelete(before_offset=at) for place, at in begins.items()})
    return {place: range(unread[place].offset, at) for place, at in begins.items()}


def middle(run: Run, first: Place) -> int:
    """An offset between the first unread record and the last, so that some are deleted and some remain."""
    last = max(sent.place.offset for sent in run.traffic.sent if sent.place and sent.place.partition == first.partition)
    return run.random.randint(first.offset + 1, last) if last > first.offset else last + 1
