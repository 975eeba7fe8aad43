"""Writes the pages of docs/ that say what the code says: configuration.md and errors.md."""

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

Every process reads the same settings, once, from the environment; `.env` and the file that `loraq up` writes
(`.loraq/stack.env`) in the working directory count too, and the environment wins. An empty variable is an absent one.
A bad value stops the process at once with one line that names it. Lists are written as JSON. A variable of the
environment that begins with `LORAQ_` and is none of these is warned of, with the nearest that is.

Values left empty below have no default. This page is generated from the code by `make reference`.

| variable | default | unit or bounds | what it is |
|---|---|---|---|
"""
ENGINE_VARIABLES = """
These are read by the engine, which also runs without the rest, or by Triton below it. They count in the environment
alone, not in `.env`.

| variable | default | what it is |
|---|---|---|
| `LORAQ_KERNEL_CACHE` | `loraq/kernels` below `XDG_CACHE_HOME`, else `~/.cache/loraq/kernels` | Directory of the \
engine's compiled operators. `LORAQ_CACHE_DIR` does not move it. |
| `CXX` | `g++`, `c++` or `clang++` | C++ compiler of those operators. |
| `CC` | `gcc` or `clang` | C compiler that Triton needs for a CUDA device. |
| `TRITON_CACHE_DIR` | `~/.triton/cache` | Directory of Triton's compiled kernels. |
"""
ERRORS = """\
# Error codes

Codes are stable: programs may branch on them. The sentence says what the code means; the `error_message` of a row and
the `message` of a webhook name the culprit of that one job, as do the headers `loraq-error-code` and
`loraq-error-message` of a record in the dead-letter topic. This page is generated from the code by `make reference`.

*At fault* is who can do something about it. *Tried again* says whether loraq tried more than once before it gave up.
*Counted* says whether it counts in the row's `attempts`, that is whether the job was handed to an engine; a job gets
`LORAQ_MAX_ATTEMPTS` of those.

| code | where it shows | at fault | tried again | counted | meaning |
|---|---|---|---|---|---|
"""
INCIDENTS = """
A request that only the engine finds wrong (a token id that the model has not) ends as `invalid_message` in a row and is
counted; one that names an endpoint that its tenant has not ends so as well, uncounted. A job that is cancelled while it
runs keeps the attempt that it had begun.

## What gets no code

These end no job; the job goes on when they are over.

| what goes wrong | at fault | tried again | counted |
|---|---|---|---|
"""
INCIDENT_ROWS = (
    (
        "Kafka, Postgres or S3 does not answer, or refuses for a time",
        Fault.INFRASTRUCTURE,
        "until it answers; partitions are paused meanwhile",
        "no",
    ),
    (
        "the dead-letter topic is missing or refuses",
        Fault.INFRASTRUCTURE,
        "until it takes the record, whose offset stands still meanwhile",
        "no",
    ),
    (
        "a worker is stopped, killed or cut off while it holds a job",
        Fault.INFRASTRUCTURE,
        "by the worker that gets the record next",
        "if it was running",
    ),
    (
        "the engine process dies, hangs or runs out of memory",
        Fault.SERVICE,
        "in the next engine process, in halves until one job ends it alone",
        "for the job that was alone in it",
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


def _yes(answer: bool) -> str:  # a cell with one meaning
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
