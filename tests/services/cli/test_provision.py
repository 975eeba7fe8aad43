"""`loraq topics` and `loraq bucket` make what is missing, and say so when nothing is."""

import pytest
from click.testing import CliRunner

from schemas.common import Lane
from services.cli.provision import bucket, topics
from services.process.settings import Settings
from tests.processes import settings_environment


@pytest.fixture
def runner(settings: Settings) -> CliRunner:
    return CliRunner(env=settings_environment(settings))


def test_topics_are_made_once(runner: CliRunner, settings: Settings) -> None:
    first, second = runner.invoke(topics, catch_exceptions=False), runner.invoke(topics, catch_exceptions=False)
    assert first.exit_code == second.exit_code == 0
    for lane in Lane:
        assert f"Made topic {settings.jobs_topic(lane)}." in first.stderr
    assert second.stderr == f"The topics of pool {settings.pool} are there already.\n"
    assert first.stdout == second.stdout == ""


def test_the_bucket_is_there_afterwards_however_often_it_is_asked_for(runner: CliRunner, settings: Settings) -> None:
    for _ in range(2):
        done = runner.invoke(bucket, catch_exceptions=False)
        assert done.exit_code == 0
        assert done.stderr == f"The bucket {settings.s3_bucket} is there.\n"
