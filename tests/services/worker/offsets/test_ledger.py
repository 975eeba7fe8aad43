"""The committed position never passes an unfinished record, in any order of events."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.offsets.commits import Commits
from services.worker.offsets.finished import FinishedOffsets, decode
from services.worker.offsets.ledger import Ledger, Partition, Place

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


def test_gaps_between_offsets_do_not_block_the_prefix() -> None:
    ledger = ledger_of(3, 7, 20)
    for offset in (20, 3, 7):
        ledger.finish(Place(P, offset))
    assert ledger.due() == {P: 21}


def test_the_next_offset_follows_the_newest_record() -> None:
    ledger = ledger_of(3, 7)
    assert (ledger.next_offset(P), ledger.next_offset(Q)) == (8, None)
    ledger.finish(Place(P, 3))
    ledger.finish(Place(P, 7))
    assert ledger.next_offset(P) == 8
    ledger.assign([P])
    assert ledger.next_offset(P) is None


def test_restarting_a_partition_forgets_everything_about_it() -> None:
    ledger = ledger_of(3, 7)
    ledger.finish(Place(P, 3))
    ledger.restart(P, 1)
    assert (ledger.next_offset(P), ledger.due()) == (1, {P: 1})
    assert not ledger.finish(Place(P, 7))
    assert ledger.receive(Place(P, 3))


def test_an_acknowledged_position_is_not_due_again() -> None:
    ledger = ledger_of(0, 1)
    ledger.finish(Place(P, 0))
    ledger.committed(ledger.due())
    assert ledger.due() == {}
    ledger.finish(Place(P, 1))
    assert ledger.due() == {P: 2}


def test_finishing_records_of_a_revoked_partition_has_no_effect() -> None:
    ledger = ledger_of(0)
    ledger.revoke([P])
    assert not ledger.finish(Place(P, 0))
    ledger.committed({P: 1})
    assert ledger.due() == {}


def test_a_new_assignment_receives_only_unfinished_records_again() -> None:
    ledger = ledger_of(0, 1, 2)
    ledger.finish(Place(P, 1))
    ledger.revoke([P])
    assert not ledger.finish(Place(P, 2))
    ledger.assign([P])
    assert [ledger.receive(Place(P, offset)) for offset in range(4)] == [True, False, False, True]
    assert ledger.finish(Place(P, 0))
    assert ledger.due() == {P: 3}


def test_a_commit_after_a_restart_keeps_the_metadata_of_the_previous_one() -> None:
    ledger = Ledger()
    ledger.assign([P], {P: FinishedOffsets(10, frozenset({2, 4}))})
    assert ledger.receive(Place(P, 2))
    assert not ledger.receive(Place(P, 3))
    assert ledger.commit_state(P)[:3] == (2, 10, [2, 4])
    assert ledger.receive(Place(P, 4))
    ledger.finish(Place(P, 2))
    assert ledger.commit_state(P)[:3] == (4, 10, [4])


def test_a_record_is_received_once_and_in_order() -> None:
    ledger = ledger_of(5)
    assert not ledger.receive(Place(P, 5))
    assert not ledger.receive(Place(P, 4))
    assert not ledger.receive(Place(Q, 0))


def test_finished_offsets_above_the_prefix_are_listed() -> None:
    ledger = ledger_of(0, 1, 2, 3)
    ledger.finish(Place(P, 3))
    ledger.finish(Place(P, 1))
    assert ledger.finished_above(P) == [1, 3]


@given(st.permutations(range(30)))
def test_in_any_order_of_finishes_everything_is_due_at_the_end(order: list[int]) -> None:
    ledger = ledger_of(*range(30))
    for offset in order:
        assert ledger.finish(Place(P, offset))
    assert ledger.due() == {P: 30}


class LedgerMachine(RuleBasedStateMachine):
    """A model of a broker next to the ledger: it keeps commits with their metadata and delivers records from there.

    `finished` is the ground truth: the jobs whose rows are terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.commits = Commits(self.ledger, max_chars=60)
        self.finished: dict[Partition, set[int]] = {P: set(), Q: set()}
        self.committed = {P: (0, ""), Q: (0, "")}
        self.next: dict[Partition, int] = {}

    @rule(which=st.sampled_from([(P,), (Q,), (P, Q), ()]), keeps_metadata=st.booleans(), restarted=st.booleans())
    def rebalance(self, which: tuple[Partition, ...], keeps_metadata: bool, restarted: bool) -> None:
        """Change the assignment, or start a new process, which knows only the commits' metadata."""
        if restarted:
            self.ledger = Ledger()
            self.commits = Commits(self.ledger, max_chars=60)
        else:
            self.ledger.revoke(list(self.next))
        metadata = {each: decode(*self.committed[each]) for each in which} if keeps_metadata else {}
        self.ledger.assign(which, {each: known for each, known in metadata.items() if known is not None})
        self.next = {partition: self.committed[partition][0] for partition in which}

    @rule(partition=st.sampled_from([P, Q]))
    def deliver(self, partition: Partition) -> None:
        if partition in self.next:
            offset = self.next[partition]
            received = self.ledger.receive(Place(partition, offset))
            assert received or offset in self.finished[partition]
            self.next[partition] = offset + 1

    @rule(partition=st.sampled_from([P, Q]), back=st.integers(1, 8))
    def finish(self, partition: Partition, back: int) -> None:
        """A job ends; its row is committed even if the partition was revoked meanwhile."""
        offset = self.next.get(partition, self.committed[partition][0]) - back
        if offset >= 0:
            self.finished[partition].add(offset)
            self.ledger.finish(Place(partition, offset))

    @rule(acknowledged=st.booleans(), urgent=st.booleans())
    def commit(self, acknowledged: bool, urgent: bool) -> None:
        due = self.commits.due(0.0, set(self.next), urgent=urgent)
        if acknowledged:
            self.committed |= {partition: (commit.position, commit.metadata) for partition, commit in due.items()}
            self.commits.acknowledged(due, 0.0)

    @invariant()
    def no_commit_covers_an_unfinished_record(self) -> None:
        for partition, (position, metadata) in self.committed.items():
            assert set(range(position)) <= self.finished[partition]
            decoded = decode(position, metadata)
            if decoded is not None:
                assert {offset for offset in range(decoded.frontier) if offset in decoded} <= self.finished[partition]


TestLedgerMachine = LedgerMachine.TestCase
