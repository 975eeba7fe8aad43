"""Recorded spans. The SDK allows one provider per process, so all tests share it and each clears it first."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.process import telemetry


class Spans:
    """The spans recorded since the block began."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def of_trace(self, traceparent: str) -> Sequence[ReadableSpan]:
        """The spans of the trace in this `traceparent`."""
        trace_id = int(traceparent.split("-")[1], 16)
        return [span for span in self._exporter.get_finished_spans() if span.context.trace_id == trace_id]


@contextmanager
def recorded_spans() -> Iterator[Spans]:
    exporter = _exporter()
    exporter.clear()
    yield Spans(exporter)
    exporter.clear()


@cache
def _exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    telemetry.trace_to(SimpleSpanProcessor(exporter))
    return exporter
