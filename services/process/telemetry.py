"""Logs, traces and metrics, and every name that appears in them.

Span, attribute and metric names follow the OpenTelemetry conventions for messaging and generative AI where those
define one; the rest begin with `loraq`. Add new names here; other modules never spell them out.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO, cast

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter, Gauge, Histogram
from structlog.typing import EventDict, Processor, WrappedLogger

from services.process.settings import Settings

TRACEPARENT_HEADER = "traceparent"

# Spans: `{operation} {destination}` for messaging, `{operation} {model}` for generation.
SPAN_CREATE_JOB = "create job"
SPAN_FETCH_ADAPTER = "fetch adapter"
SPAN_COMPLETE_JOBS = "complete jobs"
SPAN_SEND_WEBHOOK = "send webhook"


def send_span_name(topic: str) -> str:
    """Span of a record handed to the broker; kind PRODUCER."""
    return f"send {topic}"


def process_span_name(topic: str) -> str:
    """Span of one record from its arrival to its terminal row; kind CONSUMER."""
    return f"process {topic}"


def generate_span_name(operation: str, model: str) -> str:
    """Span of one generation; kind INTERNAL. `operation` is `chat` or `text_completion`."""
    return f"{operation} {model}"


# Attributes of spans.
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION_NAME = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_DESTINATION_NAME = "messaging.destination.name"
MESSAGING_DESTINATION_PARTITION_ID = "messaging.destination.partition.id"
MESSAGING_CONSUMER_GROUP_NAME = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID = "messaging.message.id"
MESSAGING_KAFKA_OFFSET = "messaging.kafka.offset"
MESSAGING_KAFKA_MESSAGE_KEY = "messaging.kafka.message.key"

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_REQUEST_RESEND_COUNT = "http.request.resend_count"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"

TENANT = "loraq.tenant"
JOB_ID = "loraq.job_id"
LANE = "loraq.lane"
JOB_STATE = "loraq.job.state"
ADAPTER = "loraq.adapter"
ADAPTER_VERSION = "loraq.adapter.version"
ADAPTER_DIGEST = "loraq.adapter.digest"
ATTEMPT = "loraq.attempt"
EVENT_ID = "loraq.event_id"
OUTCOME = "loraq.outcome"

# Metrics. Durations are seconds.
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

MESSAGES_CONSUMED = Counter("messaging_client_consumed_messages", "Records consumed from the broker.", ["lane"])
PROCESS_SECONDS = Histogram(
    "messaging_process_duration_seconds", "Time from a record's arrival to its terminal row.", ["lane"], buckets=_SLOW_S
)
MESSAGES_SENT = Counter("messaging_client_sent_messages", "Records acknowledged by the broker.", ["destination"])
REQUEST_SECONDS = Histogram(
    "gen_ai_server_request_duration_seconds", "Time of one generation, excluding waiting.", buckets=_SLOW_S
)
FIRST_TOKEN_SECONDS = Histogram(
    "gen_ai_server_time_to_first_token_seconds", "Time from an attempt's start to its first token.", buckets=_SLOW_S
)
OUTPUT_TOKEN_SECONDS = Histogram(
    "gen_ai_server_time_per_output_token_seconds", "Time per generated token after the first.", buckets=_FAST_S
)
TOKENS = Counter("loraq_tokens", "Tokens: prompt, cached, completion or wasted.", ["kind"])

JOBS_FINISHED = Counter("loraq_jobs_finished", "Jobs that reached a terminal state.", ["lane", "state", "error_code"])
JOBS_DUPLICATE = Counter("loraq_jobs_duplicate", "Deliveries of a job that was already known.", ["lane"])
JOBS_REQUEUED = Counter("loraq_jobs_requeued", "Jobs that went back to the backlog.", ["reason"])
JOBS_PARKED = Counter("loraq_jobs_parked", "Jobs parked in the database: adapter, retry, lease or limit.", ["reason"])
JOBS_UNPARKED = Counter("loraq_jobs_unparked", "Parked jobs that a worker claimed again.")
STALE_WRITES = Counter("loraq_stale_writes", "Attempts discarded because a newer fence exists.")
RECORDS_DEAD = Counter("loraq_records_dead", "Records sent to the dead-letter topic.", ["reason"])
BREAKER_STATE = Gauge("loraq_breaker_state", "Dead-letter breaker: 0 closed, 1 probing, 2 open.")
CONTROL_REFUSED = Counter("loraq_control_refused", "Control records that were malformed or not authorised.")
BACKLOG_JOBS = Gauge("loraq_backlog_jobs", "Jobs in memory that wait for the engine.")
RUNNING_JOBS = Gauge("loraq_running_jobs", "Jobs that the engine is running.")
PARTITIONS_PAUSED = Gauge("loraq_partitions_paused", "Partitions paused by back-pressure.")
PARTITIONS_ASSIGNED = Gauge("loraq_partitions_assigned", "Partitions assigned to this worker.")
CONSUMER_LAG = Gauge("loraq_consumer_lag", "Records between the committed offset and the end.", ["topic", "partition"])
OFFSETS_OUT_OF_RANGE = Counter("loraq_offsets_out_of_range", "Partitions whose committed offset no longer exists.")
REBALANCES = Counter("loraq_rebalances", "Assignments received from the group.")
QUEUE_SECONDS = Histogram("loraq_queue_seconds", "Time in the backlog.", ["lane"], buckets=_SLOW_S)
COMPLETION_SECONDS = Histogram(
    "loraq_completion_seconds", "Time of the transaction that completes a batch.", buckets=_FAST_S
)
ENGINE_RESTARTS = Counter("loraq_engine_restarts", "Engine processes that were replaced.")
ENGINE_STEP_SECONDS = Histogram("loraq_engine_step_seconds", "Time of one engine step.", buckets=_FAST_S)

ADAPTER_FETCHES = Counter("loraq_adapter_fetches", "Adapter downloads: fetched, failed or hit.", ["outcome"])
ADAPTER_FETCH_SECONDS = Histogram(
    "loraq_adapter_fetch_seconds", "Time to download and verify an adapter.", buckets=_SLOW_S
)
ADAPTER_LOAD_SECONDS = Histogram(
    "loraq_adapter_load_seconds", "Time to load an adapter into the engine.", buckets=_SLOW_S
)
ADAPTER_EVICTIONS = Counter("loraq_adapter_evictions", "Adapters evicted from a tier: disk or host.", ["tier"])
ADAPTER_BYTES = Gauge("loraq_adapter_bytes", "Bytes of adapters in a tier: disk or host.", ["tier"])
ADAPTERS = Gauge("loraq_adapters", "Adapters of this worker by their fastest tier: device, host or disk.", ["tier"])
JOBS_CLAIMED = Counter("loraq_jobs_claimed", "Claimed jobs by their adapter: warm, cold or base.", ["adapter"])
# Routers for inference servers read these names.
VLLM_RUNNING = Gauge("vllm:num_requests_running", "Alias: jobs that the engine is running.")
VLLM_WAITING = Gauge("vllm:num_requests_waiting", "Alias: jobs in memory that wait for the engine.")
VLLM_LORAS = Gauge(
    "vllm:lora_requests_info",
    "Alias: adapters of running and waiting jobs, as tenant/name; the value is the time of the report.",
    ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
)
ADAPTERS_ADMITTED = Counter(
    "loraq_adapters_admitted", "Adapter versions that the registrar admitted or rejected.", ["status"]
)

WEBHOOK_ATTEMPTS = Counter(
    "loraq_webhook_attempts", "Webhook attempts: delivered, retrying, failed or blocked.", ["outcome"]
)
WEBHOOK_SECONDS = Histogram("loraq_webhook_seconds", "Time of one webhook attempt.", buckets=_SLOW_S)
WEBHOOKS_IN_FLIGHT = Gauge("loraq_webhooks_in_flight", "Webhook attempts in progress.")
OUTBOX_PENDING = Gauge("loraq_outbox_pending", "Unfinished outbox rows.", ["kind"])
OUTBOX_OLDEST_SECONDS = Gauge("loraq_outbox_oldest_seconds", "Age of the oldest due outbox row.", ["kind"])
ALARMS = Counter("loraq_alarms", "Conditions that need an operator.", ["action"])
RENAMED_ALARMS = {"topic_recreated": "topic_made_anew"}
"""Former `action` label of each alarm renamed in this version; removed in the next one."""

_propagator = TraceContextTextMapPropagator()


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, so that a redirect or a test's capture works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # an attribute in the base class
        return sys.stderr


def configure(settings: Settings, process: str) -> None:
    """Set up logs on stderr and, if `settings.otlp_endpoint` is set, the export of spans."""
    _configure_logs(settings.log_format, settings.log_level, process)
    if settings.otlp_endpoint:
        # Imported here because its protobuf and HTTP client would cost every command a tenth of a second.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint.rstrip("/") + "/v1/traces")
        trace_to(BatchSpanProcessor(exporter), process)


def trace_to(processor: SpanProcessor, process: str = "test") -> None:
    """Record spans from now on and pass each to `processor`. Without this call, spans only propagate `traceparent`."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        instance = f"{socket.gethostname()}-{os.getpid()}"
        resource = Resource.create(
            {"service.name": f"loraq-{process}", "service.namespace": "loraq", "service.instance.id": instance}
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        trace.set_tracer_provider(provider)
    provider.add_span_processor(processor)


def flush(timeout_s: float = 5.0) -> None:
    """Export the buffered spans; called at the end of a process."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.force_flush(int(timeout_s * 1000))


def tracer() -> trace.Tracer:
    """The tracer of every process."""
    return trace.get_tracer("loraq")


def recording() -> bool:
    """Whether spans are exported; if not, processes only propagate `traceparent`."""
    return isinstance(trace.get_tracer_provider(), TracerProvider)


def propagated(traceparent: str | None) -> str | None:
    """The sender's `traceparent` for propagation where no span is recorded; None if absent or malformed."""
    if traceparent is None:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context_from(traceparent))
    return carrier.get(TRACEPARENT_HEADER)


def current_traceparent() -> str | None:
    """W3C `traceparent` of the current span; None outside a trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(TRACEPARENT_HEADER)


def context_from(traceparent: str | None) -> otel_context.Context:
    """A context whose parent is the sender's span, or none if `traceparent` is absent or malformed."""
    carrier = {TRACEPARENT_HEADER: traceparent} if traceparent else {}
    return _propagator.extract(carrier, otel_context.Context())


def get_logger(**fields: Any) -> structlog.typing.FilteringBoundLogger:
    """A logger. A line is a constant sentence plus fields, including `action`.

    Before `configure` (in commands and tests), warnings and errors go to stderr; stdout is for a command's output.
    """
    if not structlog.is_configured():
        _configure_logs("console", "warning", None)
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**fields))


def alarm(logger: structlog.typing.FilteringBoundLogger, sentence: str, *, action: str, **fields: Any) -> None:
    """Log an error that needs an operator and count it in `loraq_alarms_total{action=…}`.

    A renamed alarm is also counted under its former label, so that existing alert rules still fire.
    """
    ALARMS.labels(action=action).inc()
    if (former := RENAMED_ALARMS.get(action)) is not None:
        ALARMS.labels(action=former).inc()
    logger.error(sentence, action=action, alarm=True, **fields)


def _configure_logs(log_format: str, log_level: str, process: str | None) -> None:
    level = logging.getLevelNamesMapping()[log_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_process(process),
        _add_trace_ids,
    ]
    rendering: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if log_format == "console":
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    _adopt_library_logs(shared, rendering, max(level, logging.WARNING))


def _adopt_library_logs(shared: list[Processor], rendering: list[Processor], level: int) -> None:
    """Send the log lines of aiokafka, aiohttp and others to the same stream in the same format."""
    handler = _StderrHandler()
    handler.setLevel(level)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, *rendering])
    )
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if isinstance(each, _StderrHandler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)


def _add_process(process: str | None) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def add(_logger: WrappedLogger, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if process is not None:
            event["process"] = process
        return event

    return add


def _add_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = f"{span.trace_id:032x}"
        event["span_id"] = f"{span.span_id:016x}"
    return event
