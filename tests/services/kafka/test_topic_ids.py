"""The ids of topics, which the Kafka library does not tell: asked for on both brokers."""

from types import SimpleNamespace
from uuid import uuid4

import pytest
from aiokafka.errors import IncompatibleBrokerVersion

from services.kafka import clients as kafka
from services.kafka import topic_ids as module
from services.kafka.topic_ids import KnownTopics, topic_ids
from services.process.settings import Settings


async def test_topics_that_exist_have_an_id_and_asking_for_others_makes_none(broker_settings: Settings) -> None:
    await kafka.ensure_topics(broker_settings)
    lane, away = broker_settings.control_topic, f"{broker_settings.topic_prefix}-away"
    consumer = kafka.control_consumer(broker_settings)
    await consumer.start()
    try:
        first, second = [await topic_ids(consumer, [lane, away]) for _ in range(2)]
    finally:
        await consumer.stop()
    assert first == second
    assert first.keys() == {lane}
    async with kafka.admin(broker_settings) as admin:
        assert away not in await admin.list_topics()


async def test_a_broker_that_is_too_old_to_tell_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class TooOld:
        def get_random_node(self) -> int:
            return 0

        async def send(self, *_: object) -> None:
            raise IncompatibleBrokerVersion("metadata 12")

    said: list[str] = []
    monkeypatch.setattr(module._log, "warning", lambda event, **fields: said.append(event))
    for _ in range(2):
        assert await topic_ids(SimpleNamespace(_client=TooOld()), ["jobs"]) == {}
    assert said == [said[0]]
    assert "is not noticed" in said[0]


def test_another_id_is_told_once_and_a_topic_that_is_away_is_not_forgotten() -> None:
    known, old, new = KnownTopics(), uuid4(), uuid4()
    assert known.made_anew({"jobs": old, "control": old}) == set()
    assert known.made_anew({}) == set()
    assert known.made_anew({"jobs": new, "control": old}) == {"jobs"}
    assert known.made_anew({"jobs": new}) == set()
