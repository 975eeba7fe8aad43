"""The demo's plan of jobs and adapters."""

from collections import Counter
from pathlib import Path

import pytest

from schemas.common import Lane
from services.demo.commands import EXAMPLES
from services.demo.plan import Adapter, find_adapters, plan_jobs
from services.errors import ConfigError
from tests.builders import lora_adapter, tiny_llama

ADAPTERS = [Adapter("acme", name, Path(name)) for name in ("brief", "json", "pirate", "triage")]


def test_the_default_plan_has_every_adapter_in_every_lane() -> None:
    jobs = plan_jobs(ADAPTERS, 30, "run")
    pairs = {(job.adapter, job.lane) for job in jobs}
    assert pairs == {(adapter, lane) for adapter in (None, "brief", "json", "pirate", "triage") for lane in Lane}


def test_jobs_are_distributed_evenly_and_have_distinct_ids() -> None:
    jobs = plan_jobs(ADAPTERS, 30, "run")
    assert set(Counter(job.adapter for job in jobs).values()) == {6}
    assert len({job.key for job in jobs}) == 30


def test_the_first_prompt_goes_to_the_base_and_every_adapter() -> None:
    first, *rest = plan_jobs(ADAPTERS, 5, "run")
    assert {job.prompt for job in rest} == {first.prompt}


def test_a_plan_may_be_longer_than_the_list_of_prompts() -> None:
    assert len(plan_jobs(ADAPTERS, 1_000, "run")) == 1_000


def test_requests_are_valid_and_contain_the_run() -> None:
    for job in plan_jobs(ADAPTERS, 6, "run"):
        request = job.request("http://127.0.0.1:1/webhooks")
        assert request.metadata["demo"] == "run"
        assert request.job_id == job.job_id


def test_adapters_that_do_not_fit_the_base_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    lora_adapter(tmp_path / "adapters" / "fits", base)
    lora_adapter(tmp_path / "adapters" / "other", tiny_llama(tmp_path / "wide", hidden_size=96))
    adapters, remarks = find_adapters(tmp_path / "adapters", base)
    assert [adapter.name for adapter in adapters] == ["fits"]
    assert len(remarks) == 1
    assert remarks[0].startswith("other does not fit the base model and is left out: ")


def test_a_missing_directory_of_adapters_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*--adapters"):
        find_adapters(tmp_path / "nowhere", tmp_path)


def test_the_example_adapters_belong_to_two_tenants(base_model_dir: Path) -> None:
    adapters, remarks = find_adapters(EXAMPLES, base_model_dir)
    assert not remarks
    assert {adapter.name: adapter.tenant for adapter in adapters} == {
        "brief": "acme",
        "json": "globex",
        "pirate": "acme",
        "triage": "globex",
    }
