"""Prepares the running servers for loraq: database, schema, topics, bucket and settings."""

import asyncio
import shlex
from pathlib import Path

from services.kafka.clients import ensure_topics
from services.localstack.config import DATABASE, StackConfig, servers
from services.localstack.files import StackFiles, write_whole
from services.postgres.migrate import upgrade
from services.process.settings import Settings, load_settings
from services.s3.store import open_store


def stack_settings(config: StackConfig, base_model: Path) -> Settings:
    """Settings for this stack; they override the environment."""
    values = config.environment(base_model)
    return load_settings(_env_file=None, **{name.removeprefix("LORAQ_").lower(): text for name, text in values.items()})


def ensure_schema(config: StackConfig, files: StackFiles) -> str:
    """Create and migrate the database; returns its version."""
    _, postgres, _ = servers(config, files)
    if not postgres.has_database(DATABASE):
        postgres.sql(f"create database {DATABASE}")
    _, version = upgrade(postgres.url(DATABASE))
    return version or "empty"


def ensure_topics_and_bucket(settings: Settings) -> list[str]:
    """Create missing topics and the bucket; returns the names of the created topics."""
    return asyncio.run(_ensure_topics_and_bucket(settings))


async def _ensure_topics_and_bucket(settings: Settings) -> list[str]:
    async with open_store(settings) as store:
        topics, _ = await asyncio.gather(ensure_topics(settings), store.ensure_bucket())
        return topics


def write_env(config: StackConfig, files: StackFiles, base_model: Path) -> None:
    """Write stack.env, which Settings and a shell can both read."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in config.environment(base_model).items()]
    write_whole(files.env, "\n".join(["# Written by `loraq up`: settings of the embedded stack.", *lines, ""]))
