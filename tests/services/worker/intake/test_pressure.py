"""When lanes are paused and resumed."""

from schemas.common import Lane
from services.worker.intake.pressure import Pressure

BATCH, INTERACTIVE = Lane.BATCH, Lane.INTERACTIVE


def test_only_a_full_lane_is_paused_until_a_quarter_of_it_is_free() -> None:
    pressure = Pressure(bound=10)
    assert not pressure.paused(BATCH, 9)
    assert pressure.paused(BATCH, 10)
    assert pressure.paused(BATCH, 8)
    assert not pressure.paused(INTERACTIVE, 9)
    assert not pressure.paused(BATCH, 7)
    assert not pressure.paused(BATCH, 9)


def test_a_reason_pauses_every_lane_until_it_is_withdrawn() -> None:
    pressure = Pressure(bound=10)
    pressure.pause("database")
    pressure.pause("drain")
    pressure.resume("database")
    assert pressure.paused(BATCH, 0)
    pressure.resume("drain")
    assert not pressure.paused(BATCH, 0)


def test_room_is_the_rest_of_the_bound() -> None:
    assert [Pressure(bound=10).room(num_jobs) for num_jobs in (0, 9, 10, 15)] == [10, 1, 0, 0]
