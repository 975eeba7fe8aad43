"""A short set of the fault suite and one live mutant, on every run of the tests; `make faults` is the rest."""

import asyncio
from collections.abc import Iterator

import pytest

from services.localstack.servers import S3
from tests.faults.experiment import EXPERIMENTS, carry_out
from tests.faults.experiments import load
from tests.faults.mutant_runs import caught
from tests.faults.stack import Stack, furnish, running_stack
from tests.servers.kafka import ApacheKafka

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
JOBS = 200
load()


@pytest.fixture(scope="module")
def stack(apache_kafka: ApacheKafka, s3_server: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("faults"), apache_kafka, s3_server) as stack:
        asyncio.run(furnish(stack))
        yield stack


@pytest.mark.parametrize("row", ["2", "4", "5"])
def test_the_promises_hold_when_a_process_is_killed(stack: Stack, row: str) -> None:
    verdict = asyncio.run(carry_out(stack, EXPERIMENTS[row], seed=2, jobs=JOBS))
    assert verdict.problems == ()
    assert (verdict.figures.lost, verdict.figures.duplicates, verdict.figures.orphan_webhooks) == (0, 0, 0)


def test_a_live_defect_is_caught(stack: Stack) -> None:
    verdict = asyncio.run(caught(stack, "webhook_before_row", JOBS))
    assert any(problem.startswith("P5") for problem in verdict.problems)
