"""Jobs through a real worker process on real servers: what goes in, and the rows that come out."""

from pathlib import Path

import pytest

from services.settings import Settings
from tests.builders import lora_adapter, tiny_llama
from tests.integration.world import open_world
from tests.processes import spawn

ADAPTERS = {"formal": 1, "pirate": 2, "terse": 3}


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base") / "tiny-llama")


async def test_jobs_of_several_adapters_end_as_rows_with_their_own_outputs(
    broker_settings: Settings, tiny_base: Path, tmp_path: Path
) -> None:
    settings = broker_settings.model_copy(update={"base_model": tiny_base, "dtype": "float32"})
    async with open_world(settings) as world:
        for name, seed in ADAPTERS.items():
            directory = lora_adapter(tmp_path / name, tiny_base, rank=4 * seed, seed=seed, strength=1.0)
            await world.add_adapter(directory, name)
        with spawn(["worker"], settings):
            ids = {
                adapter: [await world.send_job(adapter=adapter) for _ in range(3)] for adapter in [None, *ADAPTERS]
            }
            rows = await world.ended(*[job_id for group in ids.values() for job_id in group])
        results = await world.results()
    assert {row["state"] for row in rows} == {"succeeded"}
    assert {row["adapter_version"] for row in rows} == {None, 1}
    texts = {adapter: {results[job_id]["output_text"] for job_id in group} for adapter, group in ids.items()}
    assert all(len(each) == 1 for each in texts.values()), "the same prompt and adapter gave different outputs"
    assert len(set.union(*texts.values())) == len(texts), "two adapters gave the same output"
