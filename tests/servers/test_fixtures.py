"""The fixtures that all other tests depend on."""

import asyncpg
import pytest

from services.kafka.clients import ensure_topics
from services.process.settings import Settings
from tests.processes import settings_environment


async def test_settings_point_to_a_migrated_database(settings: Settings) -> None:
    connection = await asyncpg.connect(settings.database_url.get_secret_value())
    assert await connection.fetchval("select count(*) from loraq.jobs") == 0
    await connection.close()


async def test_settings_point_to_a_broker_that_creates_topics(broker_settings: Settings) -> None:
    await ensure_topics(broker_settings)


def test_another_process_reads_the_same_settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings(_env_file=None) == settings
