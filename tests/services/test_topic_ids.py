"""The ids of topics, which the Kafka library does not tell: asked for on both brokers."""

from uuid import uuid4

from services import kafka
from services.settings import Settings
from services.topic_ids import KnownTopics, topic_ids


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


def test_another_id_is_told_once_and_a_topic_that_is_away_is_not_forgotten() -> None:
    known, old, new = KnownTopics(), uuid4(), uuid4()
    assert known.made_anew({"jobs": old, "control": old}) == set()
    assert known.made_anew({}) == set()
    assert known.made_anew({"jobs": new, "control": old}) == {"jobs"}
    assert known.made_anew({"jobs": new}) == set()
