"""When lanes are paused and when they go on."""

from schemas.common import Lane
from services.worker.intake.pressure import Pressure

BATCH, INTERACTIVE = Lane.BATCH, Lane.INTERACTIVE


def test_a_full_lane_is_paused_until_a_quarter_of_it_is_free_and_alone() -> None:
    pressure = Pressure(bound=10)
    assert not pressure.paused(BATCH, 9)
    assert pressure.paused(BATCH, 10)
    assert pressure.paused(BATCH, 8)
    assert not pressure.paused(INTERACTIVE, 9)
    assert not pressure.paused(BATCH, 7)
    assert not pressure.paused(BATCH, 9)


def test_a_reason_pauses_every_lane_for_as_long_as_it_stands() -> None:
    pressure = Pressure(bound=10)
    pressure.pause("database")
    pressure.pause("drain")
    pressure.resume("database")
    assert pressure.paused(BATCH, 0)
    pressure.resume("drain")
    assert not pressure.paused(BATCH, 0)


def test_room_is_what_is_left_of_the_bound() -> None:
    assert [Pressure(bound=10).room(num_jobs) for num_jobs in (0, 9, 10, 15)] == [10, 1, 0, 0]
