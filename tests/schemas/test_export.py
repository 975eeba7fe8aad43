"""docs/reference matches the code, and its AsyncAPI document is consistent."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from schemas.common import ErrorCode, Lane
from schemas.export import MODELS, reference_files, write
from services.process.settings import Settings
from services.worker.intake.dead_letters import dead_letter
from services.worker.jobs import Record, Rejection
from services.worker.offsets.ledger import Partition, Place

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_the_reference_is_current() -> None:
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.iterdir()}
    assert on_disk == reference_files(), "run `make reference`"


def test_writing_removes_schemas_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "gone.schema.json").write_text("{}")
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == reference_files().keys()


@pytest.mark.parametrize("name", MODELS)
def test_every_schema_is_valid_and_refuses_unknown_fields(name: str) -> None:
    schema = json.loads(reference_files()[f"{name}.schema.json"])
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(reference_files()["asyncapi.yaml"])
    return loaded


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def test_every_reference_of_the_asyncapi_document_resolves(document: dict[str, Any]) -> None:
    for reference in _references(document):
        if reference.startswith("#/"):
            node: Any = document
            for part in reference.removeprefix("#/").split("/"):
                node = node[part]
        else:
            assert reference.removeprefix("./") in reference_files()


def test_operations_send_and_receive_messages_of_their_own_channel(document: dict[str, Any]) -> None:
    assert document["asyncapi"] == "3.0.0"
    for operation in document["operations"].values():
        assert operation["action"] in {"send", "receive"}
        for message in operation["messages"]:
            assert message["$ref"].startswith(operation["channel"]["$ref"] + "/messages/")


def test_channel_addresses_are_the_topics_of_the_settings(document: dict[str, Any]) -> None:
    settings = Settings(topic_prefix="p", pool="q")
    expected = {settings.jobs_topic(lane) for lane in Lane}
    expected |= {settings.dead_topic, settings.events_topic, settings.control_topic}
    lanes = document["components"]["parameters"]["lane"]["enum"]
    addresses = {channel["address"] for channel in document["channels"].values()}
    topics = {a.format(prefix="p", pool="q", lane=lane) for a in addresses for lane in lanes}
    assert topics == expected


def test_every_parameter_of_an_address_is_declared(document: dict[str, Any]) -> None:
    for channel in document["channels"].values():
        for name in channel["parameters"]:
            assert "{" + name + "}" in channel["address"]
        assert channel["address"].count("{") == len(channel["parameters"])


def test_documented_headers_of_dead_records_are_those_that_the_worker_adds(document: dict[str, Any]) -> None:
    too_large = b"{" * 3 * 1024 * 1024
    record = Record(Place(Partition("jobs", 1), 2), Lane.BATCH, None, too_large, (), 0)
    added = [name for name, _ in dead_letter(Rejection(record, ErrorCode.INVALID_MESSAGE, "not JSON")).headers]
    assert list(document["components"]["messages"]["DeadRecord"]["headers"]["properties"]) == added
