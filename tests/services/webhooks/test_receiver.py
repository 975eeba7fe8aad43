"""The receiver of the demo, the quickstart and the tests."""

import asyncio
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from standardwebhooks import Webhook

from services.errors import ConfigError, RetryableError
from services.tenants.secrets import new_webhook_secret
from services.webhooks.receiver import WebhookReceiver, listen
from services.webhooks.signature import SecretError
from tests.waiting import eventually

SECRET = new_webhook_secret()
BODY = '{"type": "job.succeeded"}'


async def post(url: str, secret: str, webhook_id: str = "msg_1", body: str = BODY) -> int:
    """Send a webhook signed by the standardwebhooks package."""
    now = datetime.now(UTC)
    headers = {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(webhook_id, now, body),
    }
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        return answer.status


async def test_it_verifies_signatures_of_another_implementation() -> None:
    async with WebhookReceiver(SECRET) as receiver:
        assert await post(receiver.url, SECRET) == 204
        assert await post(receiver.url, SECRET) == 204
        assert await post(receiver.url, new_webhook_secret(), "msg_2") == 401
        [webhook] = await receiver.wait_for(1)
    assert webhook.payload == {"type": "job.succeeded"}
    assert list(receiver.verified) == ["msg_1"]
    assert len(receiver.received) == 3


async def test_a_timeout_names_the_refused_signatures() -> None:
    async with WebhookReceiver(SECRET) as receiver:
        await post(receiver.url, new_webhook_secret())
        with pytest.raises(RetryableError, match=r"received only 0 of 1 webhooks .* no signature"):
            await receiver.wait_for(1, timeout_s=0.01)


async def test_a_port_in_use_a_malformed_secret_and_an_invalid_host_are_reported() -> None:
    with pytest.raises(SecretError, match="base64"):
        WebhookReceiver("whsec_?")
    with pytest.raises(ConfigError, match=r"'aaa.* it is not a valid host name"):
        WebhookReceiver(SECRET, host="a" * 300)
    async with WebhookReceiver(SECRET) as receiver:
        with pytest.raises(ConfigError, match=str(receiver.port)):
            async with WebhookReceiver(SECRET, port=receiver.port):
                pass


@pytest.mark.parametrize(
    ("secret", "problem"),
    [("abc", "begins with whsec_"), ("whsec_?", "not base64"), (SECRET[:20], "copied completely"), ("whsec_", "empty")],
    ids=["no prefix", "not base64", "cut off", "empty"],  # the secret differs in each process
)
def test_the_command_refuses_a_malformed_secret(secret: str, problem: str) -> None:
    refused = CliRunner().invoke(listen, ["--secret", secret])
    assert refused.exit_code == 2
    assert problem in refused.output


async def test_the_command_prints_each_webhook_with_its_verdict(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "listen", "--secret", SECRET, "--count", "1"]
    err = tmp_path / "err"
    with err.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=stderr)
        found = await eventually(lambda: re.search(r"http://\S+", err.read_text()), what="the address")
        await post(found.group(), new_webhook_secret(), "msg_bad")
        await post(found.group(), SECRET, "msg_good")
        out, _ = await process.communicate()
    assert process.returncode == 0
    bad, good = out.decode().splitlines()
    assert bad.startswith("signature bad (no signature")
    assert good == f"signature ok  msg_good  {BODY}"
