"""Deleting and creating topics, as an operator does."""

from services.kafka import clients as kafka
from services.process.settings import Settings
from tests.waiting import eventually


async def recreate_topic(settings: Settings, topic: str) -> None:
    """Delete a topic, and create it again once the brokers no longer list it."""
    async with kafka.admin(settings) as admin:
        await admin.delete_topics([topic])

        async def is_gone() -> bool:
            return topic not in await admin.list_topics()

        await eventually(is_gone, what="the topic to be deleted")
    await kafka.ensure_topics(settings)
