"""`python -m schemas.export DIR`: writes the JSON Schema of every message and row, and the topics as AsyncAPI."""

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from schemas.asyncapi import document
from schemas.control import Cancellation
from schemas.events import CloudEvent, WebhookBody
from schemas.job import JobRequest
from schemas.rows import AdapterRow, JobRow, ResultRow, TenantLimitRow, UsageRow, WebhookDeliveryRow

MODELS: dict[str, type[BaseModel]] = {
    "job-request": JobRequest,
    "webhook-body": WebhookBody,
    "cloud-event": CloudEvent,
    "cancellation": Cancellation,
    "job-row": JobRow,
    "result-row": ResultRow,
    "adapter-row": AdapterRow,
    "webhook-delivery-row": WebhookDeliveryRow,
    "usage-row": UsageRow,
    "tenant-limit-row": TenantLimitRow,
}


def reference_files() -> dict[str, str]:
    """All exported files: file name → content."""
    files = {f"{name}.schema.json": _json_schema(name, model) for name, model in MODELS.items()}
    return files | {"asyncapi.yaml": _yaml(document())}


def write(directory: Path) -> None:
    """Write the reference and remove schema files whose model no longer exists."""
    directory.mkdir(parents=True, exist_ok=True)
    files = reference_files()
    for stale in {path.name for path in directory.glob("*.schema.json")} - files.keys():
        (directory / stale).unlink()
    for name, content in files.items():
        (directory / name).write_text(content, encoding="utf-8")


def _json_schema(name: str, model: type[BaseModel]) -> str:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:loraq:{name}"}
    return json.dumps(head | model.model_json_schema(), indent=2) + "\n"


def _yaml(content: object) -> str:
    import yaml  # a development package, needed only to write the reference

    text: str = yaml.safe_dump(content, sort_keys=False, width=110)
    return text


if __name__ == "__main__":
    write(Path(sys.argv[1]))
