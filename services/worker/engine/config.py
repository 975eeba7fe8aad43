"""The engine's configuration from the settings."""

from engine import EngineConfig, EngineError
from services.errors import ConfigError
from services.process.settings import Settings


def engine_config(settings: Settings) -> EngineConfig:
    """Build the configuration; raises ConfigError if the engine rejects it."""
    try:
        return EngineConfig(
            model=settings.base_model or "",
            device=settings.device,
            dtype=settings.dtype,
            max_batch_size=settings.max_batch_size,
            max_batch_tokens=settings.max_batch_tokens,
            pool_bytes=settings.pool_bytes,
            threads=settings.engine_threads,
            host_bytes=settings.host_bytes,
            graphs=settings.graphs,
            batch_invariant=settings.batch_invariant,
            lora_stream=settings.lora_stream,
        )
    except EngineError as error:
        raise ConfigError(f"the engine cannot be configured: {error}") from error
