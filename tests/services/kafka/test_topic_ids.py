"""Topic ids, which the Kafka library does not expose, on both brokers."""

from types import SimpleNamespace
from uuid import uuid4

import pytest
from aiokafka.errors import IncompatibleBrokerVersion

from services.kafka import clients as kafka
from services.kafka import topic_ids as module
from services.kafka.topic_ids import KnownTopics, topic_ids
from services.process.settings import Settings


async def test_existing_topics_have_an_id_and_requesting_others_creates_none(broker_settings: Settings) -> None:
    await kafka.ensure_topics(broker_settings)
    lane, missing = broker_settings.control_topic, f"{broker_settings.topic_prefix}-missing"
    consumer = kafka.control_consumer(broker_settings)
    await consumer.start()
    try:
        first, second = [await topic_ids(consumer, [lane, missing]) for _ in range(2)]
    finally:
        await consumer.stop()
    assert first == second
    assert first.keys() == {lane}
    async with kafka.admin(broker_settings) as admin:
        assert missing not in await admin.list_topics()


async def test_a_broker_that_is_too_old_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class TooOld:
        def get_random_node(self) -> int:
            return 0

        async def send(self, *_: object) -> None:
            raise IncompatibleBrokerVersion("metadata 12")

    logged: list[str] = []
    monkeypatch.setattr(module._log, "warning", lambda event, **fields: logged.append(event))
    for _ in range(2):
        assert await topic_ids(SimpleNamespace(_client=TooOld()), ["jobs"]) == {}
    assert logged == [logged[0]]
    assert "are not noticed" in logged[0]


def test_a_changed_id_is_reported_once_and_a_missing_topic_is_remembered() -> None:
    known, old, new = KnownTopics(), uuid4(), uuid4()
    assert known.recreated({"jobs": old, "control": old}) == set()
    assert known.recreated({}) == set()
    assert known.recreated({"jobs": new, "control": old}) == {"jobs"}
    assert known.recreated({"jobs": new}) == set()
