"""The ledger never lets a position pass an unfinished record, and loses none, whatever the order of events."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.ledger import Ledger, Partition, Place

P, Q = Partition("jobs", 0), Partition("jobs", 1)


def ledger_of(*offsets: int) -> Ledger:
    ledger = Ledger()
    ledger.assign([P])
    for offset in offsets:
        assert ledger.receive(Place(P, offset))
    return ledger


def test_only_the_contiguous_finished_prefix_is_due() -> None:
    ledger = ledger_of(10, 11, 12)
    ledger.finish(Place(P, 11))
    assert ledger.due() == {}
    ledger.finish(Place(P, 10))
    assert ledger.due() == {P: 12}
    assert ledger.num_open("jobs") == 1


def test_gaps_between_offsets_do_not_hold_the_prefix() -> None:
    ledger = ledger_of(3, 7, 20)
    for offset in (20, 3, 7):
        ledger.finish(Place(P, offset))
    assert ledger.due() == {P: 21}


def test_a_reader_that_lost_its_place_goes_on_behind_the_newest_record() -> None:
    ledger = ledger_of(3, 7)
    assert (ledger.next_offset(P), ledger.next_offset(Q)) == (8, None)
    ledger.finish(Place(P, 3))
    ledger.finish(Place(P, 7))
    assert ledger.next_offset(P) == 8
    ledger.assign([P])
    assert ledger.next_offset(P) is None


def test_what_the_broker_acknowledged_is_not_due_again() -> None:
    ledger = ledger_of(0, 1)
    ledger.finish(Place(P, 0))
    ledger.committed(ledger.due())
    assert ledger.due() == {}
    ledger.finish(Place(P, 1))
    assert ledger.due() == {P: 2}


def test_finishes_of_a_revoked_partition_are_of_no_consequence() -> None:
    ledger = ledger_of(0)
    ledger.revoke([P])
    assert not ledger.finish(Place(P, 0))
    ledger.committed({P: 1})
    assert ledger.due() == {}


def test_a_new_assignment_takes_the_same_records_again() -> None:
    ledger = ledger_of(0, 1)
    ledger.finish(Place(P, 1))
    ledger.assign([P])
    assert ledger.receive(Place(P, 0))
    assert ledger.receive(Place(P, 1))
    assert ledger.finish(Place(P, 0))
    assert ledger.due() == {P: 1}


def test_a_record_is_noted_once_and_in_order() -> None:
    ledger = ledger_of(5)
    assert not ledger.receive(Place(P, 5))
    assert not ledger.receive(Place(P, 4))
    assert not ledger.receive(Place(Q, 0))


def test_what_stands_finished_above_the_prefix_can_be_told() -> None:
    ledger = ledger_of(0, 1, 2, 3)
    ledger.finish(Place(P, 3))
    ledger.finish(Place(P, 1))
    assert ledger.finished_above(P) == [1, 3]


@given(st.permutations(range(30)))
def test_in_whatever_order_jobs_finish_everything_is_due_at_the_end(order: list[int]) -> None:
    ledger = ledger_of(*range(30))
    for offset in order:
        assert ledger.finish(Place(P, offset))
    assert ledger.due() == {P: 30}


class LedgerMachine(RuleBasedStateMachine):
    """A broker beside the ledger: it remembers what was committed and hands out records from there."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.finished: dict[Partition, set[int]] = {P: set(), Q: set()}
        self.committed = {P: 0, Q: 0}
        self.next: dict[Partition, int] = {}

    @rule(which=st.sampled_from([(P,), (Q,), (P, Q), ()]))
    def rebalance(self, which: tuple[Partition, ...]) -> None:
        self.ledger.revoke(list(self.next))
        self.ledger.assign(which)
        self.next = {partition: self.committed[partition] for partition in which}

    @rule(partition=st.sampled_from([P, Q]))
    def deliver(self, partition: Partition) -> None:
        if partition in self.next:
            offset = self.next[partition]
            assert self.ledger.receive(Place(partition, offset))
            self.next[partition] = offset + 1

    @rule(partition=st.sampled_from([P, Q]), back=st.integers(1, 8))
    def finish(self, partition: Partition, back: int) -> None:
        """A job ends; its row is committed even if the partition was lost meanwhile."""
        offset = self.next.get(partition, self.committed[partition]) - back
        if offset >= 0:
            self.finished[partition].add(offset)
            self.ledger.finish(Place(partition, offset))

    @rule(acknowledged=st.booleans())
    def commit(self, acknowledged: bool) -> None:
        due = self.ledger.due()
        if acknowledged:
            self.committed |= due
            self.ledger.committed(due)

    @invariant()
    def nothing_unfinished_lies_below_a_committed_position(self) -> None:
        for partition, position in self.committed.items():
            assert set(range(position)) <= self.finished[partition]


TestLedgerMachine = LedgerMachine.TestCase
