"""docker-compose.yml and the Dockerfile are consistent. Tests cannot run containers, so they check each section."""

import importlib.resources
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from services.cli.main import COMMANDS
from services.process.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OURS = "loraq:"
PROCESSES = {"worker", "worker-gpu", "dispatcher", "registrar"}
ONE_SHOTS = {"migrate": "postgres", "topics": "kafka", "bucket": "s3"}
TAG = re.compile(r"^[a-z0-9./-]+:v?\d+(\.\d+)+[a-z0-9.-]*$")
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE)
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compose["services"]
    return found


def test_it_is_valid_under_the_compose_specification(compose: dict[str, Any]) -> None:
    resource = importlib.resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json")
    schema = json.loads(resource.read_text(encoding="utf-8"))
    assert [error.message for error in Draft7Validator(schema).iter_errors(compose)] == []


def test_every_server_and_process_is_a_service(services: dict[str, Any]) -> None:
    assert {"kafka", "postgres", "s3"} | PROCESSES | ONE_SHOTS.keys() <= services.keys()


def test_every_image_is_pinned(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert TAG.match(service["image"]), name


def test_our_image_has_the_version_of_the_package(services: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {s["image"] for s in services.values() if s["image"].startswith(OURS)} == {OURS + project["version"]}


def test_every_command_of_our_image_exists(services: dict[str, Any]) -> None:
    ours = {name: service for name, service in services.items() if service["image"].startswith(OURS)}
    assert ours.keys() == PROCESSES | ONE_SHOTS.keys() | {"cli"}
    for name, service in ours.items():
        assert service["command"][0] in COMMANDS or name == "cli"


def test_every_loraq_variable_is_a_setting(services: dict[str, Any]) -> None:
    known = {f"LORAQ_{name.upper()}" for name in Settings.model_fields}
    for name, service in services.items():
        given = {key for key in service["environment"] if key.startswith("LORAQ_")}
        assert given <= known, name
    assert set(re.findall(r"LORAQ_[A-Z0-9_]+", DOCKERFILE)) <= known


def test_given_values_are_accepted_by_the_settings(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for service in services.values():
        for key, value in service["environment"].items():
            if key.startswith("LORAQ_") and key != "LORAQ_BASE_MODEL":
                monkeypatch.setenv(key, VARIABLE.sub("x", value).replace(":?set it in .env}", ""))
    Settings(_env_file=None)


def test_every_required_variable_is_in_the_example() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    offered = set(re.findall(r"^#? ?([A-Z0-9_]+)=", example, re.MULTILINE))
    assert set(VARIABLE.findall(COMPOSE)) == offered
    assert not any(name.startswith("LORAQ_") for name in offered), "the local stack would read it from .env as well"


def test_no_secret_has_a_default_or_a_value_in_the_file() -> None:
    for name in ("POSTGRES_PASSWORD", "S3_SECRET_KEY", "SECRET_KEY"):
        uses = re.findall(r"\$\{" + name + r"([^}]*)\}", COMPOSE)
        assert uses
        assert all(use.startswith(":?") for use in uses)


def test_ports_are_open_on_the_loopback_interface_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_servers_have_health_checks_and_processes_wait_for_them(services: dict[str, Any]) -> None:
    for name in ("kafka", "postgres", "s3"):
        assert services[name]["healthcheck"]["test"][0] == "CMD"
    for name, server in ONE_SHOTS.items():
        assert services[name]["depends_on"] == {server: {"condition": "service_healthy"}}
    for name in PROCESSES:
        conditions = {other: need["condition"] for other, need in services[name]["depends_on"].items()}
        assert conditions == dict.fromkeys(ONE_SHOTS, "service_completed_successfully")


def test_persistent_data_is_on_volumes(compose: dict[str, Any], services: dict[str, Any]) -> None:
    used = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert compose["volumes"].keys() == {name for name in used if name.isalnum()}
    assert compose["volumes"].keys() == {"kafka", "postgres", "s3", "cache"}


def test_the_gpu_worker_has_a_profile_and_a_device(services: dict[str, Any]) -> None:
    gpu = services["worker-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert gpu["environment"]["LORAQ_DEVICE"] == "cuda"
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_the_grace_period_of_a_container_exceeds_that_of_its_process(services: dict[str, Any]) -> None:
    worker = services["worker"]
    assert float(worker["stop_grace_period"].removesuffix("s")) > float(worker["environment"]["LORAQ_DRAIN_S"])


def test_the_image_is_pinned_multi_stage_unprivileged_and_health_checked() -> None:
    bases = re.findall(r"^FROM (\S+)(?: AS (\w+))?", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    assert all(TAG.match(base) for base, _ in bases)
    final = DOCKERFILE.split("FROM ")[-1]
    assert re.search(r"^USER loraq$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final
    assert "requirements/runtime.txt" in DOCKERFILE


def test_no_file_that_the_image_copies_is_ignored() -> None:
    allowed = {line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert source.split("/")[0] in allowed
        assert (ROOT / source).exists()
