"""`loraq topics` and `loraq bucket` create what is missing, and report if nothing is."""

import pytest
from click.testing import CliRunner

from schemas.common import Lane
from services.cli.provision import bucket, topics
from services.process.settings import Settings
from tests.processes import settings_environment


@pytest.fixture
def runner(settings: Settings) -> CliRunner:
    return CliRunner(env=settings_environment(settings))


def test_topics_are_created_once(runner: CliRunner, settings: Settings) -> None:
    first, second = runner.invoke(topics, catch_exceptions=False), runner.invoke(topics, catch_exceptions=False)
    assert first.exit_code == second.exit_code == 0
    for lane in Lane:
        assert f"Created topic {settings.jobs_topic(lane)}." in first.stderr
    assert second.stderr == f"The topics of pool {settings.pool} already exist.\n"
    assert first.stdout == second.stdout == ""


def test_the_bucket_exists_after_one_or_more_runs(runner: CliRunner, settings: Settings) -> None:
    for _ in range(2):
        done = runner.invoke(bucket, catch_exceptions=False)
        assert done.exit_code == 0
        assert done.stderr == f"The bucket {settings.s3_bucket} exists.\n"
