"""Every setting of every process, read once from the environment.

A bad value stops the process at once with one line that names it.
"""

import os
from functools import cached_property
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from schemas.common import NAME_PATTERN, Lane
from services.errors import ConfigError, MissingSettingError, RetryableError
from services.parsing.addresses import host_and_port, is_database_url, is_host, is_http_url, is_port
from services.parsing.validation import shown
from services.process.locks import is_locked

GIB = 1024**3
MIB = 1024**2
MAX_BYTES = 1024**5

STACK_ENV = Path(".loraq/stack.env")
SUPERVISOR_LOCK = STACK_ENV.with_name("supervisor.lock")
ENV_FILES = (STACK_ENV, Path(".env"))
ADDRESS_VARIABLES = ("LORAQ_DATABASE_URL", "LORAQ_KAFKA_BOOTSTRAP")
LIST_EXAMPLES = {"lanes": '["standard", "batch"]', "webhook_retry_delays_s": "[5, 300, 1800]"}

# Upper bound: PostgreSQL stores a timeout as 32 bits of milliseconds, and a transaction gets twice that of a statement.
# Lower bound: 0 ms would mean no timeout, and shorter polling intervals would leave no time for other work.
MIN_S, MAX_S = 0.01, 1_000_000.0
Seconds = Annotated[float, Field(ge=MIN_S, le=MAX_S)]
# A lease is renewed after a third of its time, in one or two round trips.
Lease = Annotated[float, Field(ge=1.0, le=MAX_S)]


def default_cache_dir() -> Path:
    """Default directory of converted models and staged adapters."""
    return Path.home() / ".cache" / "loraq"


class Settings(BaseSettings):
    """Frozen settings. Sources, strongest first: environment, `.env`, the env file that `loraq up` writes."""

    model_config = SettingsConfigDict(
        env_prefix="LORAQ_", env_file=ENV_FILES, extra="ignore", frozen=True, env_ignore_empty=True
    )

    pool: str = Field("default", pattern=NAME_PATTERN, description="Name of this deployment of one base model.")
    topic_prefix: str = Field(
        "loraq", pattern=r"^[a-zA-Z0-9._-]{1,64}$", description="First part of every topic's name."
    )
    partitions: int = Field(6, ge=1, le=1024, description="Partitions of each job topic, used when topics are created.")
    replication_factor: int = Field(1, ge=1, le=5, description="Replicas of each topic, used when topics are created.")

    kafka_bootstrap: str = Field("127.0.0.1:9092", description="Brokers, host:port, separated by commas.")
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="Security protocol of the broker connections."
    )
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "PLAIN", description="SASL mechanism."
    )
    kafka_sasl_username: str | None = Field(None, description="SASL user.")
    kafka_sasl_password: SecretStr | None = Field(None, description="SASL password.")
    kafka_ssl_cafile: Path | None = Field(
        None, description="PEM file of the authorities that sign the brokers' certificates."
    )
    kafka_ssl_certfile: Path | None = Field(None, description="PEM file of the client's certificate.")
    kafka_ssl_keyfile: Path | None = Field(None, description="PEM file of the client's key.")
    kafka_session_timeout_s: Lease = Field(
        10.0, description="Seconds without a heartbeat after which a worker loses its partitions."
    )

    database_url: SecretStr = Field(
        SecretStr("postgresql://loraq@127.0.0.1:5432/loraq"), description="URL of the Postgres database."
    )
    database_pool_size: int = Field(8, ge=1, le=100, description="Connections per process.")
    database_timeout_s: Seconds = Field(30.0, description="Longest wait for a connection or a statement, seconds.")

    s3_endpoint: str | None = Field(None, description="Endpoint of an S3-compatible store; empty for AWS.")
    s3_bucket: str = Field("loraq", description="Bucket of pushed adapters and large outputs.")
    s3_region: str = Field("us-east-1", description="Region that requests are signed for.")
    s3_access_key: str | None = Field(None, description="Access key; if unset, the usual AWS credential chain applies.")
    s3_secret_key: SecretStr | None = Field(None, description="Secret key.")
    s3_concurrency: int = Field(8, ge=1, le=64, description="Concurrent S3 transfers.")
    s3_timeout_s: Seconds = Field(
        30.0, description="Time without a response from the store after which a request is retried, seconds."
    )

    base_model: Path | None = Field(None, description="Hugging Face directory of the base model.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Device that the engine runs on.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Type of weights and activations.")
    max_batch_size: int = Field(32, ge=1, le=1024, description="Sequences in one engine step.")
    max_batch_tokens: int = Field(
        2048, ge=1, le=1_048_576, description="Tokens in one engine step; at least LORAQ_MAX_BATCH_SIZE."
    )
    pool_bytes: int = Field(
        1 * GIB,
        ge=16 * MIB,
        le=MAX_BYTES,
        description="Memory of the engine's page pool, shared by KV and adapters, bytes.",
    )
    host_bytes: int = Field(
        2 * GIB,
        ge=16 * MIB,
        le=MAX_BYTES,
        description="Page-locked host memory that keeps adapters ready for a CUDA device, bytes.",
    )
    graphs: bool = Field(True, description="Capture decode steps on a CUDA device as graphs and replay them.")
    batch_invariant: bool = Field(
        False, description="Give a request the same tokens in every batch on a CUDA device too; this costs speed."
    )
    lora_stream: bool = Field(
        False,
        description="On a CUDA device, compute part of the adapters' products in parallel with the base model's.",
    )
    engine_threads: int = Field(0, ge=0, le=256, description="CPU threads of the engine; 0 means one per core.")
    engine_start_timeout_s: Seconds = Field(
        300.0, description="Time limit for the start of the engine process, seconds."
    )

    cache_dir: Path = Field(
        default_factory=default_cache_dir, description="Directory of staged adapters and converted models."
    )
    disk_cache_bytes: int = Field(
        10 * GIB, ge=16 * MIB, le=MAX_BYTES, description="Budget of the adapter cache on disk, bytes."
    )
    host_cache_bytes: int = Field(
        2 * GIB, ge=16 * MIB, le=MAX_BYTES, description="Budget of adapters in host memory, bytes."
    )
    adapter_load_timeout_s: Seconds = Field(60.0, description="Longest time that a job waits for its adapter, seconds.")
    max_adapter_bytes: int = Field(2 * GIB, ge=1, le=MAX_BYTES, description="Largest adapter that is admitted, bytes.")

    worker_id: str | None = Field(None, description="Name of this worker; by default host name and process id.")
    lanes: tuple[Lane, ...] = Field(
        tuple(Lane), min_length=1, description="Lanes that this worker serves, as a JSON list."
    )
    max_backlog_jobs: int = Field(512, ge=1, description="Jobs in memory at which the worker pauses its partitions.")
    overtake_tokens_interactive: int | None = Field(
        None,
        ge=0,
        description="Tokens of later arrivals of its tenant that may go before an interactive job, so that jobs of one"
        " adapter run together; 0 is first come, first served, without a value 2 s of the measured rate.",
    )
    overtake_tokens_standard: int | None = Field(
        None, ge=0, description="The same for the standard lane; without a value 10 s of the measured rate."
    )
    overtake_tokens_batch: int | None = Field(
        None, ge=0, description="The same for the batch lane; without a value 60 s of the measured rate."
    )
    max_attempts: int = Field(3, ge=1, le=100, description="Engine attempts before a job fails.")
    lease_s: Lease = Field(15.0, description="Seconds that a claimed job belongs to its worker without renewal.")
    default_timeout_s: Seconds = Field(600.0, description="Time limit of a job that sets no timeout_ms, seconds.")
    drain_s: Seconds = Field(20.0, description="Grace period for running jobs after SIGTERM, seconds.")
    park_after_s: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Wait in memory for an adapter or another worker's lease before a job is parked, seconds.",
    )
    retry_delay_s: float = Field(
        1.0, ge=0, le=60, description="Delay before a job's second attempt, doubled for each further one, seconds."
    )
    cancellation_retention_days: int = Field(
        14, ge=1, le=365, description="Days that a cancellation is stored for a job that no worker has read yet."
    )
    revoke_drain_s: float = Field(
        2.0,
        ge=0,
        le=30,
        description="Time that running jobs get to finish before their partitions move to another worker, seconds.",
    )
    progress_timeout_s: float = Field(
        120.0, ge=5, le=3600, description="Time without progress, with work to do, after which a worker exits, seconds."
    )
    max_result_bytes: int = Field(1 * MIB, ge=1024, le=MAX_BYTES, description="Largest output text, bytes of UTF-8.")
    require_signed_jobs: bool = Field(False, description="Refuse records without a valid loraq-signature header.")
    breaker_min_jobs: int = Field(
        40, ge=0, le=100_000, description="Jobs in the window that the breaker needs to open; 0 switches it off."
    )
    breaker_ratio: float = Field(
        0.8,
        gt=0.5,
        le=1.0,
        description="Share of failed and dead-lettered jobs at which the breaker stops consumption.",
    )
    breaker_min_tenants: int = Field(
        2, ge=1, le=1000, description="A tenant counts for at most LORAQ_BREAKER_MIN_JOBS divided by this number."
    )
    breaker_window_s: Seconds = Field(60.0, description="Length of the breaker's window, seconds.")
    breaker_probe_s: Seconds = Field(
        30.0, description="Seconds until an open breaker probes with a few jobs; doubled while probes fail."
    )
    producer_key: SecretStr | None = Field(
        None, description="A tenant's producer key, which signs the jobs that it submits."
    )

    secret_key: SecretStr | None = Field(None, description="32 bytes, base64; encrypts tenants' secrets at rest.")
    webhook_allow_networks: tuple[str, ...] = Field(
        (), description="Internal networks (CIDR) that webhooks may reach, JSON list."
    )
    webhook_timeout_s: Seconds = Field(
        15.0, description="Time limit for the response of a webhook's receiver, seconds."
    )
    webhook_concurrency: int = Field(64, ge=1, le=4096, description="Webhooks in flight per dispatcher.")
    webhook_max_attempts: int = Field(8, ge=1, le=50, description="Attempts before a webhook fails.")
    webhook_per_host: int = Field(8, ge=1, le=1024, description="Webhooks in flight to one host and port.")
    webhook_retry_delays_s: Annotated[tuple[Seconds, ...], Field(min_length=1)] = Field(
        (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400),
        description="Delays after the first, second, ... attempt, seconds, JSON list; the last repeats.",
    )
    webhook_ttl_s: Seconds = Field(259_200, description="Age at which a webhook fails, seconds.")
    poll_interval_s: Seconds = Field(
        1.0, description="Polling interval of dispatcher and registrar when no notification arrives, seconds."
    )
    outbox_retention_days: int = Field(7, ge=1, le=365, description="Days that finished outbox rows are kept.")

    http_host: str = Field("127.0.0.1", description="Address of /healthz, /readyz and /metrics.")
    http_port: int = Field(
        0, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0 picks a free one and logs it."
    )
    http_port_file: Path | None = Field(None, description="File to which the process writes its port, for supervisors.")
    log_format: Literal["console", "json"] = Field("console", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    otlp_endpoint: str | None = Field(
        None, description="OTLP/HTTP collector, for example http://127.0.0.1:4318; if empty, spans are not exported."
    )

    @field_validator("base_model")
    @classmethod
    def _is_model_dir(cls, path: Path | None) -> Path | None:
        try:
            if path is not None and not (path / "config.json").is_file():
                raise ValueError(f"{path} is not a Hugging Face model directory: it has no config.json")
        except OSError as error:
            raise ValueError(f"the directory cannot be read: {error.strerror}") from error
        return path

    @field_validator("kafka_bootstrap")
    @classmethod
    def _are_brokers(cls, bootstrap: str) -> str:
        for broker in map(str.strip, bootstrap.split(",")):
            host, port = host_and_port(broker)
            if not (is_host(host) and is_port(port)):
                raise ValueError(f"{shown(broker)} is not host:port, with a port from 1 to 65535")
        return bootstrap

    @field_validator("database_url", "kafka_sasl_password", "producer_key", "s3_secret_key", "secret_key")
    @classmethod
    def _is_text(cls, secret: SecretStr | None) -> SecretStr | None:
        try:
            if secret is not None:
                secret.get_secret_value().encode()
        except UnicodeEncodeError as error:
            raise ValueError("it is not UTF-8; copy it again") from error
        return secret

    @field_validator("database_url")
    @classmethod
    def _is_database_url(cls, url: SecretStr) -> SecretStr:
        if not is_database_url(url.get_secret_value()):
            raise ValueError(
                "it is not a Postgres URL; write it as postgresql://user:password@host:5432/name, with a port"
                " from 1 to 65535, and percent-encode / ? # @ : [ ] in the password"
            )
        return url

    @field_validator("otlp_endpoint", "s3_endpoint")
    @classmethod
    def _is_http_url(cls, url: str | None) -> str | None:
        if url is not None and not is_http_url(url):
            raise ValueError("it is not a URL; write it as http://host:port, with a port from 1 to 65535")
        return url

    @field_validator("webhook_allow_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ip_network(network, strict=False)
            except ValueError as error:
                raise ValueError(f"{shown(network)} is not a network; write it as 10.1.0.0/16") from error
        return networks

    @field_validator("http_host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        if not is_host(host):
            raise ValueError("it is neither an IP address nor a valid host name")
        return host

    def jobs_topic(self, lane: Lane) -> str:
        """Topic of a lane's job records."""
        return f"{self.topic_prefix}.{self.pool}.jobs.{lane}"

    @cached_property
    def dead_topic(self) -> str:
        """Topic of records that are not valid jobs."""
        return f"{self.topic_prefix}.{self.pool}.jobs.dead"

    @cached_property
    def events_topic(self) -> str:
        """Topic of lifecycle events."""
        return f"{self.topic_prefix}.{self.pool}.events"

    @cached_property
    def control_topic(self) -> str:
        """Topic of cancellations."""
        return f"{self.topic_prefix}.{self.pool}.control"

    @cached_property
    def consumer_group(self) -> str:
        """Kafka group of this pool's workers."""
        return f"{self.topic_prefix}.{self.pool}.workers"


def load_settings(**overrides: object) -> Settings:
    """Read the settings; raises ConfigError that names the first bad one, or the env file that cannot be read."""
    try:
        return Settings(**overrides)  # type: ignore[arg-type]  # pydantic checks the values
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])  # further parts are positions in a list
        is_secret = SecretStr in (kind := Settings.model_fields[field].annotation, *get_args(kind))
        got = "" if is_secret else f" (got {shown(first['input'])})"
        raise ConfigError(f"LORAQ_{field.upper()}: {first['msg'].removeprefix('Value error, ')}{got}") from error
    except SettingsError as error:  # a list that is not JSON; the field is named only in the library's message
        field = next(name for name in Settings.model_fields if f'"{name}"' in str(error))
        example = LIST_EXAMPLES.get(field, '["10.0.0.0/8"]')
        raise ConfigError(f"LORAQ_{field.upper()}: it is not a JSON list; write it as {example}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError | UnicodeDecodeError) -> ConfigError:
    """The error of the env file that cannot be read."""
    for path in ENV_FILES:
        try:
            path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as found:
            return ConfigError(f"{path} is not UTF-8: {found.reason} at byte {found.start}; save it as UTF-8")
        except OSError as found:
            return ConfigError(f"{path} cannot be read: {found.strerror}")
    return ConfigError(f"the settings cannot be read: {error}")


def hint_without_stack(error: Exception) -> str | None:
    """A hint to run `loraq up` if no setting names the servers, or if the stack that they name is down; else None."""
    if not isinstance(error, RetryableError | MissingSettingError) or any(
        name in os.environ for name in ADDRESS_VARIABLES
    ):
        return None
    if STACK_ENV.is_file() and isinstance(error, RetryableError) and not is_locked(SUPERVISOR_LOCK):
        return f"the settings come from {STACK_ENV}, whose stack is not running: run `loraq up`"
    if any(path.is_file() for path in ENV_FILES):
        return None
    return f"there is no {STACK_ENV} in {Path.cwd()}: run `loraq up` here, or change to the directory where you ran it"
