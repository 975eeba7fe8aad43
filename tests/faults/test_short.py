"""A short part of the fault suite and one live mutant, for every test run; `make faults` runs the whole suite."""

import asyncio
from collections.abc import Iterator

import pytest

from services.localstack.servers import S3
from tests.faults.experiment import EXPERIMENTS, run_experiment
from tests.faults.experiments import load
from tests.faults.mutant_runs import run_mutant
from tests.faults.stack import Stack, populate_template, running_stack
from tests.servers.kafka import ApacheKafka

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
JOBS = 200
load()


@pytest.fixture(scope="module")
def stack(apache_kafka: ApacheKafka, s3_server: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("faults"), apache_kafka, s3_server) as stack:
        asyncio.run(populate_template(stack))
        yield stack


@pytest.mark.parametrize("row", ["2", "4", "5"])
def test_the_promises_hold_when_a_process_is_killed(stack: Stack, row: str) -> None:
    verdict = asyncio.run(run_experiment(stack, EXPERIMENTS[row], seed=2, jobs=JOBS))
    assert verdict.problems == ()
    assert (verdict.figures.lost, verdict.figures.duplicates, verdict.figures.orphan_webhooks) == (0, 0, 0)


def test_a_live_defect_is_caught(stack: Stack) -> None:
    verdict = asyncio.run(run_mutant(stack, "webhook_before_row", JOBS))
    assert any(problem.startswith("P5") for problem in verdict.problems)
