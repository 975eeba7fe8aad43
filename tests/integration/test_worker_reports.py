"""Workers report their load and adapters, for operators, for other workers and for routers."""

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.process import telemetry
from services.process.settings import Settings
from tests.builders import lora_adapter, tiny_llama
from tests.integration.workers import FAULTY_ENGINE, running_worker
from tests.integration.world import TENANT, open_world
from tests.processes import loraq
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def labels_of_adapters() -> dict[str, str]:
    [sample] = telemetry.VLLM_LORAS.collect()[0].samples
    return dict(sample.labels)


async def test_a_worker_is_listed_with_its_jobs_and_adapters_until_it_ends(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"worker_id": "one", "host_cache_bytes": 2**30})
    async with open_world(settings) as world:
        await world.add_adapter(lora_adapter(tmp_path / "tone", tiny_llama(tmp_path / "base")), "tone")
        async with running_worker(settings, FAULTY_ENGINE):
            await world.ended(await world.send_job(adapter="tone"))
            endless = await world.send_job(adapter="tone", prompt="wait")

            async def reported() -> bool:
                rows = await world.rows("select running, resident_adapters, tokens_per_s from loraq.worker_status")
                return [tuple(row.values())[:2] for row in rows] == [(1, 1)] and rows[0]["tokens_per_s"] > 0

            await eventually(reported, what="the running job and its adapter to be reported")
            listed = await asyncio.to_thread(loraq, "workers", "--json", settings=settings)
            shown = await asyncio.to_thread(loraq, "workers", settings=settings)
            [row] = [json.loads(line) for line in listed.stdout.splitlines()]
            assert (row["worker"], row["state"], row["running"], row["waiting"]) == ("one", "ready", 1, 0)
            assert row["lanes"] == ["interactive", "standard", "batch"]
            assert row["partitions"] == 3 * settings.partitions
            assert (row["device_adapters"], row["host_adapters"]) == (1, 0)
            assert "tokens_per_s" in shown.stdout.splitlines()[0]
            assert labels_of_adapters() == {
                "max_lora": str(settings.max_batch_size),
                "running_lora_adapters": f"{TENANT}/tone",
                "waiting_lora_adapters": "",
            }
            assert REGISTRY.get_sample_value("loraq_adapters", {"tier": "device"}) == 1
            await world.rows("select loraq.cancel_job($1, $2)", TENANT, endless)
            await world.ended(endless)
        assert await world.rows("select from loraq.worker_status") == []
        assert await world.rows("select from loraq.worker_adapters") == []
        nothing = await asyncio.to_thread(loraq, "workers", settings=settings)
        assert (nothing.stdout, nothing.stderr) == ("", "No worker has reported within the last minute.\n")
