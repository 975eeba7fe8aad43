"""Log lines, trace context, and the names of metrics and attributes."""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from opentelemetry import trace
from prometheus_client import Counter, Gauge, Histogram

from services.process import telemetry
from services.process.settings import Settings
from tests.services.dispatcher.servers import raw_server, responding
from tests.spans import recorded_spans

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers = handlers
    structlog.reset_defaults()
    telemetry.get_logger()


def configure(log_format: str, log_level: str = "info") -> None:
    telemetry.configure(Settings(_env_file=None, log_format=log_format, log_level=log_level), "sample")


def test_a_json_line_contains_sentence_fields_process_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    with recorded_spans(), telemetry.tracer().start_as_current_span("work") as span:
        telemetry.get_logger().info("Job finished", action="job_finished", tokens=3)
    out, err = capsys.readouterr()
    line = json.loads(err)
    assert out == ""
    assert (line["event"], line["action"], line["tokens"]) == ("Job finished", "job_finished", 3)
    assert (line["process"], line["level"]) == ("sample", "info")
    assert line["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line["timestamp"])


def test_libraries_log_in_the_same_format_from_warning_up(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("aiokafka").info("chatter")
    logging.getLogger("aiokafka").warning("broker %s is away", "b1")
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["event"], line["level"], line["process"]) == ("broker b1 is away", "warning", "sample")


def test_tracebacks_contain_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    password = "hunter" + str(2)
    try:
        raise ValueError("odd")
    except ValueError as error:
        telemetry.get_logger().error("Work failed", action="work_failed", exc_info=error)
    line = json.loads(capsys.readouterr().err)
    assert "ValueError: odd" in line["exception"]
    assert password not in line["exception"]


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console", "error")
    telemetry.get_logger().warning("Dropped", action="dropped")
    assert capsys.readouterr() == ("", "")


def test_before_configuration_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    telemetry.get_logger().warning("Careful", action="careful")
    telemetry.get_logger().info("Chatter", action="chatter")
    out, err = capsys.readouterr()
    assert out == ""
    assert "Careful" in err
    assert "Chatter" not in err


def test_configuring_twice_logs_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    configure("json")
    logging.getLogger("library").warning("once")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_traceparent_is_propagated_unchanged() -> None:
    span = trace.get_current_span(telemetry.context_from(TRACEPARENT))
    with trace.use_span(span):
        assert telemetry.current_traceparent() == TRACEPARENT
    assert telemetry.current_traceparent() is None


@pytest.mark.parametrize("bad", [None, "", "nonsense", "00-0-0-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_bad_traceparent_starts_a_new_trace(bad: str | None) -> None:
    with recorded_spans() as spans:
        with telemetry.tracer().start_as_current_span("work", context=telemetry.context_from(bad)):
            pass
        [span] = spans.named("work")
    assert span.parent is None


def test_an_alarm_is_logged_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    before = telemetry.ALARMS.labels(action="sample_alarm")._value.get()
    telemetry.alarm(telemetry.get_logger(), "Look here", action="sample_alarm", tenant="acme")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["alarm"], line["tenant"]) == ("error", True, "acme")
    assert telemetry.ALARMS.labels(action="sample_alarm")._value.get() == before + 1


@pytest.mark.parametrize(("action", "former"), telemetry.RENAMED_ALARMS.items())
def test_a_renamed_alarm_is_also_counted_under_its_former_label(
    capsys: pytest.CaptureFixture[str], action: str, former: str
) -> None:
    labels = [telemetry.ALARMS.labels(action=each) for each in (action, former)]
    before = [each._value.get() for each in labels]
    telemetry.alarm(telemetry.get_logger(), "Look here", action=action)
    assert [each._value.get() for each in labels] == [count + 1 for count in before]
    assert former not in capsys.readouterr().err, "the log line has the new action only"


def test_metric_names_start_with_our_prefix_or_a_conventional_one() -> None:
    metrics = [each for each in vars(telemetry).values() if isinstance(each, Counter | Gauge | Histogram)]
    names = [metric._name for metric in metrics]
    assert len(names) > 30
    assert len(set(names)) == len(names)
    aliases = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:lora_requests_info"}
    assert aliases <= set(names)
    assert all(re.fullmatch(r"(loraq|messaging|gen_ai)_[a-z_]+", name) for name in set(names) - aliases)


def test_no_other_module_spells_out_attribute_or_metric_names() -> None:
    quoted = re.compile(r"""["'](?:messaging|gen_ai|loraq)[._][a-z_.]+["']""")
    names = {value for name, value in vars(telemetry).items() if name.isupper() and isinstance(value, str)}
    services = Path(telemetry.__file__).parents[1]
    for source in services.rglob("*.py"):
        if source.name != "telemetry.py":
            found = {text.strip("\"'") for text in quoted.findall(source.read_text())}
            assert not found & names, f"{source} spells out {found & names}"


EXPORTING = """
from services.process import lifecycle, telemetry
from services.process.settings import Settings

async def serve(life):
    with telemetry.tracer().start_as_current_span("work"):
        pass

lifecycle.run("sample", Settings(_env_file=None, otlp_endpoint="ENDPOINT"), serve)
"""


async def test_spans_are_exported_before_the_process_ends() -> None:
    async with raw_server(responding(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as collector:
        source = EXPORTING.replace("ENDPOINT", f"http://127.0.0.1:{collector.port}/")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", source)
        assert await process.wait() == 0
        assert [head.splitlines()[0] for head in collector.heads] == ["POST /v1/traces HTTP/1.1"]
