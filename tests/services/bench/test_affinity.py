"""`loraq bench affinity`: keys keep adapters warm, and nothing is lost while workers come and go."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from services.bench.affinity.warmth import Ran, recovery_s, share
from services.process.settings import Settings
from tests.processes import loraq

pytestmark = pytest.mark.slow

EVENT = datetime(2026, 12, 1, tzinfo=UTC)


def jobs(*warm: int, first_s: int = 0) -> list[Ran]:
    """One job each second."""
    return [Ran(EVENT + timedelta(seconds=first_s + index), bool(each)) for index, each in enumerate(warm)]


def test_the_share_of_no_jobs_is_zero() -> None:
    assert share([]) == 0
    assert share(jobs(1, 1, 0, 1)) == 0.75


@pytest.mark.parametrize(
    ("warm", "recovered_s"),
    [
        ((1, 1, 1, 1), 0.0),
        ((0, 0, 1, 1), 3.0),
        ((0, 1, 1, 0, 0, 1, 1, 1), 6.0),
        ((1, 1, 0, 0), None),
        ((1,), None),
    ],
)
def test_a_recovery_ends_with_the_last_window_below_the_share(warm: tuple[int, ...], recovered_s: float | None) -> None:
    assert recovery_s([*jobs(0, 0, first_s=-2), *jobs(*warm)], EVENT, 0.5 + 0.01, 2) == recovered_s


def test_keys_keep_adapters_warm_and_nothing_is_lost_while_workers_come_and_go(settings: Settings) -> None:
    settings = settings.model_copy(update={"kafka_session_timeout_s": 6.0, "lease_s": 3.0})
    sizes = ("--jobs", "1200", "--adapters", "60", "--room", "24", "--rate", "150", "--churn-jobs", "1200")
    found = loraq("bench", "affinity", *sizes, "--window", "200", "--json", settings=settings, timeout_s=240)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout.splitlines()[-1])
    by_key, at_random, churn = report["by_key"], report["at_random"], report["churn"]
    for each in (by_key, at_random, churn):
        assert (each["jobs"], each["lost"], each["duplicates"]) == (1200, 0, 0)
    assert by_key["warm_share"] > at_random["warm_share"] + 0.1
