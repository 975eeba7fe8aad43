"""The dispatcher as a process."""

from pydantic import SecretStr

from services.kafka import clients as kafka
from services.tenants.secrets import new_secret_key
from services.webhooks.receiver import WebhookReceiver
from tests.processes import loraq, spawn
from tests.services.dispatcher.conftest import World
from tests.waiting import eventually


async def test_it_runs_until_sigterm_and_resumes_after_a_kill(world: World) -> None:
    async with WebhookReceiver(world.secret) as receiver:
        with spawn(["dispatcher"], world.settings) as process:
            first = await world.add_webhook(receiver.url)
            await receiver.wait_for(1)
            assert process.get("/healthz")[0] == 200
            delivered = 'loraq_webhook_attempts_total{outcome="delivered"} 1.0'
            await eventually(lambda: delivered in process.get("/metrics")[1], what="the attempt to be counted")
            process.kill()
        second = await world.add_webhook(receiver.url)
        with spawn(["dispatcher"], world.settings) as process:
            await receiver.wait_for(2)
            assert process.stop() == 0
        assert set(receiver.verified) == {str(first), str(second)}


async def test_a_missing_secret_key_or_a_malformed_network_is_reported_at_start(world: World) -> None:
    bad_network = world.settings.model_copy(update={"webhook_allow_networks": ("everything",)})
    ended = loraq("dispatcher", settings=bad_network)
    assert ended.returncode == 1
    assert "LORAQ_WEBHOOK_ALLOW_NETWORKS" in ended.stderr
    no_key = world.settings.model_copy(update={"secret_key": None})
    ended = loraq("dispatcher", settings=no_key)
    assert ended.returncode == 1
    assert "LORAQ_SECRET_KEY is not set" in ended.stderr


async def test_a_secret_key_that_does_not_match_the_stored_secrets_is_reported_at_start(world: World) -> None:
    other = world.settings.model_copy(update={"secret_key": SecretStr(new_secret_key())})
    ended = loraq("dispatcher", settings=other)
    assert ended.returncode == 1
    assert "LORAQ_SECRET_KEY is not the key that the tenants' secrets were sealed with" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_mistyped_pool_ends_the_process_and_creates_no_topic(world: World) -> None:
    mistyped = world.settings.model_copy(update={"pool": "defualt"})
    ended = loraq("dispatcher", settings=mistyped)
    assert ended.returncode == 1
    topic = f"{world.settings.topic_prefix}.defualt.events"
    assert f"there is no topic {topic} on" in ended.stderr
    assert "correct LORAQ_POOL=defualt" in ended.stderr
    assert "Traceback" not in ended.stderr
    async with kafka.admin(world.settings) as admin:
        assert topic not in await admin.list_topics()
