"""Writes the pages of docs/ that are generated from the code: configuration.md and errors.md."""

from pathlib import Path
from typing import Any

from schemas.common import ERROR_CLASSES, ERROR_SENTENCES, ErrorCode, Fault
from services.process.settings import Settings

DOCS = Path(__file__).parent
UNITS = {"_bytes": "bytes", "_s": "seconds", "_days": "days", "_ms": "milliseconds"}
SIZES = {1024**3: "GiB", 1024**2: "MiB", 1024: "KiB"}
SHOWN_IN = {
    ErrorCode.INVALID_MESSAGE: "dead-letter topic, row",
    ErrorCode.ID_CONFLICT: "dead-letter topic",
    ErrorCode.UNAUTHENTICATED: "dead-letter topic",
}

CONFIGURATION = """\
# Configuration

Every process reads the same settings once, at start. Sources, strongest first: the environment, `.env`, and the file
that `loraq up` writes (`.loraq/stack.env`), both in the working directory. An empty variable counts as unset. An
invalid value stops the process at once with one line that names it. Lists are written as JSON. A process warns of a
`LORAQ_` variable in the environment that is not listed here, and suggests the nearest one.

An empty default means that there is none. `make reference` generates this page from the code.

| variable | default | unit or bounds | description |
|---|---|---|---|
"""
ENGINE_VARIABLES = """
The engine, which also runs without the services, and Triton read these variables. They must be set in the environment,
not in `.env`.

| variable | default | description |
|---|---|---|
| `LORAQ_KERNEL_CACHE` | `loraq/kernels` below `XDG_CACHE_HOME`, else `~/.cache/loraq/kernels` | Directory of the \
engine's compiled operators. `LORAQ_CACHE_DIR` does not affect it. |
| `CXX` | `g++`, `c++` or `clang++` | C++ compiler of those operators. |
| `CC` | `gcc` or `clang` | C compiler that Triton needs for a CUDA device. |
| `TRITON_CACHE_DIR` | `~/.triton/cache` | Directory of Triton's compiled kernels. |
"""
ERRORS = """\
# Error codes

Codes are stable: programs may branch on them. The meaning below is general; the `error_message` of a row, the `message`
of a webhook and the header `loraq-error-message` of a dead letter name the culprit of that one job. The header
`loraq-error-code` of a dead letter holds the code. `make reference` generates this page from the code.

*At fault* names who can fix the error. *Retried* means that loraq tried more than once before it failed the job.
*Counted* means that the failure counts in the row's `attempts`, because an engine received the job; a job gets
`LORAQ_MAX_ATTEMPTS` of those.

| code | where it appears | at fault | retried | counted | meaning |
|---|---|---|---|---|---|
"""
INCIDENTS = """
A request that only the engine can reject (a token id outside the model's vocabulary) ends as `invalid_message` in a row
and is counted. A request with an endpoint that its tenant does not have ends the same way, but is not counted. A job
that is cancelled while it runs keeps the attempt that it had started.

## Failures without a code

These do not end a job; it continues when they are over.

| failure | at fault | retried | counted |
|---|---|---|---|
"""
INCIDENT_ROWS = (
    (
        "Kafka, Postgres or S3 does not answer, or refuses temporarily",
        Fault.INFRASTRUCTURE,
        "until it answers; partitions are paused meanwhile",
        "no",
    ),
    (
        "the dead-letter topic is missing or refuses a record",
        Fault.INFRASTRUCTURE,
        "until it accepts the record, whose offset is not committed meanwhile",
        "no",
    ),
    (
        "a worker is stopped, killed or cut off while a job is in flight",
        Fault.INFRASTRUCTURE,
        "by the worker that consumes the record next",
        "if it was running",
    ),
    (
        "the engine process dies, hangs or runs out of memory",
        Fault.SERVICE,
        "in the next engine process, in halves, until a single job crashes it",
        "for that single job",
    ),
)


def configuration() -> str:
    """The page of all settings."""
    properties = Settings.model_json_schema()["properties"]
    rows = [
        f"| `LORAQ_{name.upper()}` | {_default(name, field)} | {_bounds(name, field)} | {field['description']} |\n"
        for name, field in properties.items()
    ]
    return CONFIGURATION + "".join(rows) + ENGINE_VARIABLES


def errors() -> str:
    """The page of all error codes."""
    rows = [
        f"| `{code}` | {SHOWN_IN.get(code, 'row')} | {each.fault} | {_yes(each.retried)} | {_yes(each.charged)}"
        f" | {ERROR_SENTENCES[code]} |\n"
        for code, each in ERROR_CLASSES.items()
    ]
    return ERRORS + "".join(rows) + INCIDENTS + "".join(f"| {' | '.join(row)} |\n" for row in INCIDENT_ROWS)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def pages() -> dict[str, str]:
    """File name in docs/ → content."""
    return {"configuration.md": configuration(), "errors.md": errors()}


def _default(name: str, field: dict[str, Any]) -> str:
    if name == "cache_dir":
        return "`~/.cache/loraq`"
    value = field.get("default")
    if field.get("writeOnly"):
        secret = Settings.model_fields[name].default
        value = secret.get_secret_value() if secret else None
    if value is None:
        return ""
    if isinstance(value, list):
        return f"`{str(value).replace(chr(39), chr(34))}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    for size, unit in SIZES.items():
        if name.endswith("_bytes") and value % size == 0:
            return f"`{value}` ({value // size} {unit})"
    return f"`{value}`"


def _bounds(name: str, field: dict[str, Any]) -> str:
    option = next((o for o in field.get("anyOf", []) if o.get("type") != "null"), field) | field
    unit = next((word for suffix, word in UNITS.items() if name.endswith(suffix)), "")
    choices = ", ".join(f"`{choice}`" for choice in option.get("enum", []))
    lowest = option.get("minimum")
    limits = [
        f"> {option['exclusiveMinimum']:g}" if "exclusiveMinimum" in option else "",
        f"≥ {lowest}" if lowest is not None else "",
        f"≤ {option['maximum']}" if "maximum" in option else "",
        f"`{option['pattern']}`".replace("|", "\\|") if "pattern" in option else "",
    ]
    return ", ".join(part for part in [unit, choices, *limits] if part)


if __name__ == "__main__":
    for page, content in pages().items():
        (DOCS / page).write_text(content, encoding="utf-8")
