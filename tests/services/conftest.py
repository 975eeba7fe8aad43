"""Fixtures for tests of services: settings for the store only; tenants, a tiny base model and adapters for it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.adapters.base import BaseModel, load_base
from services.adapters.push import Pushed, inspect, push
from services.adapters.staging import Stager
from services.localstack.servers import S3
from services.postgres.pool import Pool, open_pool, transaction
from services.process.settings import Settings
from services.registrar.registrar import Registrar
from services.s3.store import ObjectStore, open_store
from services.tenants.secrets import SecretBox
from services.tenants.tenants import add_tenant
from tests.builders import lora_adapter, tiny_llama

MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture
def settings_with_base(settings: Settings, tiny_base: Path) -> Settings:
    return settings.model_copy(update={"base_model": tiny_base})


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with open_pool(settings) as pool:
        yield pool


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[ObjectStore]:
    async with open_store(settings) as store:
        yield store


@pytest.fixture
async def acme(pool: Pool, settings: Settings) -> str:
    await add_tenants(pool, settings, "acme")
    return "acme"


async def add_tenants(pool: Pool, settings: Settings, *tenants: str) -> None:
    async with transaction(pool) as connection:
        for tenant in tenants:
            await add_tenant(connection, SecretBox(settings.secret_key), tenant)


@pytest.fixture
def adapter_dir(tmp_path: Path, tiny_base: Path) -> MakeAdapter:
    """Creates a PEFT directory for the tiny base model; a name and a seed make it distinct."""

    def make(name: str = "adapter", **changes: object) -> Path:
        named = {"rank": 4, "base_model_name_or_path": "someone/Tiny-Llama"}
        return lora_adapter(tmp_path / "adapters" / name, tiny_base, **(named | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def base(settings_with_base: Settings) -> BaseModel:
    return load_base(settings_with_base)


@pytest.fixture
async def registrar(pool: Pool, store: ObjectStore, settings: Settings, base: BaseModel) -> AsyncIterator[Registrar]:
    stager = Stager(settings, store)
    stager.retry_delays_s = ()
    yield Registrar(pool, stager, base, settings.poll_interval_s)
    await stager.close()


@pytest.fixture
def push_dir(pool: Pool, store: ObjectStore, settings: Settings) -> Callable[[str, str, Path], "object"]:
    async def push_one(tenant: str, name: str, directory: Path) -> Pushed:
        return await push(pool, store, tenant, name, inspect(directory, settings.max_adapter_bytes))

    return push_one


@pytest.fixture
def store_settings(s3_server: S3, bucket: str, tmp_path: Path) -> Settings:
    """Settings with a new bucket and cache directory; starts neither the database nor the broker."""
    return Settings(
        _env_file=None,
        s3_endpoint=s3_server.endpoint,
        s3_access_key=s3_server.access_key,
        s3_secret_key=s3_server.secret_key,
        s3_bucket=bucket,
        cache_dir=tmp_path / "cache",
    )
