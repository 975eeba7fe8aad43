"""Topics as an operator deletes and makes them."""

from services.kafka import clients as kafka
from services.process.settings import Settings
from tests.waiting import eventually


async def make_anew(settings: Settings, topic: str) -> None:
    """Delete a topic, and make it again once no broker lists it any more."""
    async with kafka.admin(settings) as admin:
        await admin.delete_topics([topic])

        async def is_gone() -> bool:
            return topic not in await admin.list_topics()

        await eventually(is_gone, what="the topic to be gone")
    await kafka.ensure_topics(settings)
