"""All results as one Markdown table."""

from collections.abc import Iterator, Mapping

from engine.check.findings import Findings
from engine.check.speed import Overlap, Speed
from engine.check.suite import EngineReport, PeftReport, Row
from engine.kernels.triton.measure.gpu_check import KernelReport, Measurement

PEFT_FACTOR, MAX_STEP_COST = 20.0, 0.05
MAX_SECONDS = 480

HEADER = (
    "| measurement | case | result | comparison | target |",
    "| --- | --- | ---: | --- | --- |",
)


def table(findings: Findings) -> str:
    """A row per measurement; the target is "reached", "missed" or, where there is none, empty."""
    rows = [
        *_test_rows(findings.tests_exit_code),
        *(_kernel_rows(findings.kernels) if findings.kernels is not None else ()),
        *_engine_rows(findings.engine),
        *(_peft_rows(findings.peft, findings.engine.plain) if findings.peft is not None else ()),
        *_error_rows(findings.errors),
        *_time_rows(findings),
    ]
    return "\n".join((*HEADER, *(f"| {' | '.join(cells)} |" for cells in rows)))


def _test_rows(exit_code: int | None) -> Iterator[tuple[str, ...]]:
    if exit_code is not None:
        yield "tests on the device", "all files", f"exit code {exit_code}", "", _target(exit_code == 0)


def _error_rows(errors: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The last line of each traceback; the report has all of it."""
    for part, trace in errors.items():
        last = trace.strip().splitlines()[-1].replace("|", "/")
        yield part, "not completed", "failed", last, _target(False)


def _time_rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """The time of each part, with the engine's measurements in the comparison column, and of all parts."""
    parts = findings.parts.seconds
    for part, seconds in parts.items():
        own = findings.engine.attempts.seconds if part == "engine" else {}
        comparison = ", ".join(f"{name} {took:.0f} s" for name, took in own.items())
        yield "time", part, f"{seconds:.0f} s", comparison, ""
    total = sum(parts.values())
    yield "time", "all parts", f"{total:.0f} s", "", _target(total < MAX_SECONDS)


def _kernel_rows(report: KernelReport) -> Iterator[tuple[str, ...]]:
    yield (
        "error of the kernels",
        "all cases",
        f"{report.worst_error:.2f}",
        "tolerances",
        _target(report.worst_error < 1),
    )
    yield "copy on the device", "1 GiB moved", f"{report.copy_bandwidth / 1e12:.2f} TB/s", "", ""
    for found in report.measurements:
        yield found.kernel, found.case, f"{found.seconds * 1e6:.1f} µs", _comparison(found), _target(found.reached)


def _comparison(found: Measurement) -> str:
    words = [f"{found.share_of_copy:.2f} of a copy of {found.num_bytes / 1e6:.1f} MB"]
    if found.loop_factor is not None:
        words.append(f"torch loop {found.loop_factor:.1f}x as long")
    if found.gathered_factor is not None:
        words.append(f"padded gather and bmm {found.gathered_factor:.1f}x")
    return ", ".join(words)


def _engine_rows(report: EngineReport) -> Iterator[tuple[str, ...]]:
    for row in report.rows:
        yield "prefill", row.speed.case, f"{row.speed.prefill_tokens_per_s:.0f} tokens/s", "", ""
        yield _decode_row(row)
    for option, speed in (("batch_invariant", report.invariant), ("lora_stream", report.lora_stream)):
        if report.plain is not None and speed is not None:
            comparison = f"{speed.decode_tokens_per_s / report.plain.decode_tokens_per_s:.3f} of without it"
            yield f"decode, {option}", report.plain.case, f"{speed.decode_tokens_per_s:.0f} tokens/s", comparison, ""
    if report.overlap is not None:
        yield _overlap_row(report.overlap)


def _overlap_row(overlap: Overlap) -> tuple[str, ...]:
    return (
        "cold adapters during decode",
        f"{overlap.adapter_bytes / 1e6:.1f} MB each",
        f"{overlap.step_cost:.1%} of the others' tokens lost",
        f"first token after {overlap.arrival_s * 1e3:.0f} ms",
        _target(overlap.step_cost < MAX_STEP_COST),
    )


def _peft_rows(report: PeftReport, plain: Speed | None) -> Iterator[tuple[str, ...]]:
    comparison, target = "", ""
    if plain is not None:
        factor = plain.decode_tokens_per_s / report.decode_tokens_per_s
        comparison, target = f"the engine is {factor:.1f}x as fast", _target(factor >= PEFT_FACTOR)
    yield "decode, transformers + PEFT", report.case, f"{report.decode_tokens_per_s:.0f} tokens/s", comparison, target


def _decode_row(row: Row) -> tuple[str, ...]:
    comparison, target = "", ""
    if row.of_base is not None and row.allowed is not None:
        comparison = f"{row.of_base:.3f} of base; bytes allow {row.allowed:.3f}"
        target = _target(row.reached)
    return "decode", row.speed.case, f"{row.speed.decode_tokens_per_s:.0f} tokens/s", comparison, target


def _target(is_reached: bool | None) -> str:
    return "reached" if is_reached else "missed"
