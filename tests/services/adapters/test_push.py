"""Pushing: refused before the upload where possible, idempotent, and one version per content."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine import adapter_digest
from services.adapters.push import Pushed, inspect, push, wait_for_admission
from services.adapters.versions import disable, list_adapters, show_adapter
from services.errors import InputError, RetryableError
from services.localstack.ports import free_ports
from services.parsing.names import checked_name
from services.postgres.pool import Pool, transaction
from services.process.settings import Settings
from services.registrar.registrar import Registrar
from services.s3.store import ObjectStore, open_store
from tests.services.conftest import MakeAdapter

PushDir = Callable[[str, str, Path], Awaitable[Pushed]]
LIMIT = 10_000_000


async def test_files_are_stored_under_tenant_name_and_digest(
    pool: Pool, store: ObjectStore, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    directory = adapter_dir()
    pushed = await push_dir(acme, "tone", directory)
    prefix = f"acme/tone/{adapter_digest(directory)}/"
    assert [item.key for item in await store.list(prefix)] == [
        prefix + "adapter_config.json",
        prefix + "adapter_model.safetensors",
    ]
    async with transaction(pool) as connection:
        (row,) = await show_adapter(connection, acme, pushed.ref)
    assert (row.status, row.version, row.uri) == ("pending", 1, f"s3://{store.bucket}/{prefix}")
    assert row.size_bytes == sum(file.stat().st_size for file in directory.iterdir())


async def test_the_same_content_again_creates_no_new_version(
    push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    first, other = adapter_dir("first", seed=1), adapter_dir("other", seed=2)
    pushes = [await push_dir(acme, "tone", directory) for directory in (first, first, other, first)]
    assert [(pushed.version, pushed.created) for pushed in pushes] == [(1, True), (1, False), (2, True), (3, True)]


async def test_concurrent_pushes_of_one_name_get_distinct_versions(
    push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    directories = [adapter_dir(f"variant-{seed}", seed=seed) for seed in range(6)]
    pushes = await asyncio.gather(*(push_dir(acme, "tone", directory) for directory in directories))
    assert sorted(pushed.version for pushed in pushes) == [1, 2, 3, 4, 5, 6]


async def test_concurrent_pushes_of_one_content_create_one_version(
    push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    directory = adapter_dir()
    pushes = await asyncio.gather(*(push_dir(acme, "tone", directory) for _ in range(5)))
    assert [pushed.version for pushed in pushes] == [1] * 5
    assert sum(pushed.created for pushed in pushes) == 1


async def test_rejected_content_pushed_again_is_checked_again(
    pool: Pool, registrar: Registrar, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    pushed = await push_dir(acme, "tone", adapter_dir(targets=("q_proj",), target_modules=["v_proj"]))
    await registrar.admit_next()
    assert (await wait_for_admission(pool, pushed, 0)).status == "rejected"
    again = await push_dir(acme, "tone", adapter_dir(targets=("q_proj",), target_modules=["v_proj"]))
    assert (again.version, again.created) == (1, False)
    assert (await wait_for_admission(pool, again, 0)).status == "pending"


async def test_disabled_content_pushed_again_stays_disabled(
    pool: Pool, push_dir: PushDir, adapter_dir: MakeAdapter, acme: str
) -> None:
    await push_dir(acme, "tone", adapter_dir())
    async with transaction(pool) as connection:
        await disable(connection, acme, "tone", "No.")
    again = await push_dir(acme, "tone", adapter_dir())
    assert (await wait_for_admission(pool, again, 0)).status == "disabled"


async def test_the_error_for_an_unknown_tenant_names_the_command_to_add_it(
    push_dir: PushDir, adapter_dir: MakeAdapter, store: ObjectStore
) -> None:
    with pytest.raises(InputError, match="there is no tenant nobody; add it with `loraq tenants add nobody`"):
        await push_dir("nobody", "tone", adapter_dir())
    assert await store.list("nobody/") == []


@pytest.mark.parametrize("name", ["", "Tone", "tone@3", "../tone", "-tone", "tone\n", "a" * 65])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is not a valid adapter name"):
        checked_name("adapter", name)


async def test_nothing_is_recorded_before_the_files_are_uploaded(
    pool: Pool, settings: Settings, adapter_dir: MakeAdapter, acme: str
) -> None:
    local = inspect(adapter_dir(), LIMIT)
    async with open_store(settings.model_copy(update={"s3_endpoint": f"http://127.0.0.1:{free_ports(1)[0]}"})) as down:
        with pytest.raises(RetryableError, match="could not upload adapter_config"):
            await push(pool, down, acme, "tone", local)
    async with transaction(pool) as connection:
        assert await list_adapters(connection, acme) == []


class TestInspect:
    """Checks before the upload."""

    def test_a_good_directory(self, adapter_dir: MakeAdapter) -> None:
        directory = adapter_dir()
        local = inspect(directory, LIMIT)
        assert local.digest == adapter_digest(directory)
        assert local.base_model == "someone/Tiny-Llama"

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="nowhere is not a directory"):
            inspect(tmp_path / "nowhere", LIMIT)

    def test_no_configuration(self, adapter_dir: MakeAdapter) -> None:
        directory = adapter_dir()
        (directory / "adapter_config.json").unlink()
        with pytest.raises(InputError, match=r"adapter_config\.json does not exist"):
            inspect(directory, LIMIT)

    def test_no_weights(self, adapter_dir: MakeAdapter) -> None:
        directory = adapter_dir()
        (directory / "adapter_model.safetensors").unlink()
        with pytest.raises(InputError, match=r"adapter_model\.safetensors does not exist"):
            inspect(directory, LIMIT)

    def test_a_pickle_instead(self, adapter_dir: MakeAdapter) -> None:
        directory = adapter_dir()
        (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
        with pytest.raises(InputError, match=r"adapter_model\.bin is a pickle"):
            inspect(directory, LIMIT)

    def test_a_pickle_under_the_right_name(self, adapter_dir: MakeAdapter) -> None:
        directory = adapter_dir()
        (directory / "adapter_model.safetensors").write_bytes(b"PK\x03\x04 and so on")
        with pytest.raises(InputError, match="pickle"):
            inspect(directory, LIMIT)

    def test_truncated_weights(self, adapter_dir: MakeAdapter) -> None:
        weights = adapter_dir() / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        with pytest.raises(InputError, match="truncated"):
            inspect(weights.parent, LIMIT)

    def test_broken_json(self, adapter_dir: MakeAdapter) -> None:
        directory = adapter_dir()
        (directory / "adapter_config.json").write_text("{")
        with pytest.raises(InputError, match=r"adapter_config\.json is not JSON"):
            inspect(directory, LIMIT)

    def test_too_large(self, adapter_dir: MakeAdapter) -> None:
        with pytest.raises(InputError, match="LORAQ_MAX_ADAPTER_BYTES"):
            inspect(adapter_dir(), 1000)
