"""The import contracts hold, and each one catches a violation."""

import re
from collections.abc import Iterator
from copy import deepcopy
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter import configuration
from importlinter.application.use_cases import _register_built_in_contract_types, read_user_options
from importlinter.domain.contract import Contract, registry

ROOT = Path(__file__).parents[2]
configuration.configure()
OPTIONS = read_user_options(str(ROOT / "pyproject.toml"))
CONTRACTS = {options["id"]: options for options in OPTIONS.contracts_options}
LARGEST_FOLDER = 15

VIOLATIONS = [
    ("packages", "engine.step.runner", "services.process.settings"),
    ("packages", "schemas.job", "services.errors"),
    ("leaves", "engine.types", "schemas.common"),
    ("leaves", "schemas.common", "engine.types"),
    ("processes", "services.worker.results.completer", "services.dispatcher.sender"),
    ("processes", "services.dispatcher.app", "services.worker.jobs"),
    ("processes", "services.registrar.registrar", "services.localstack.stack"),
    ("engine-libraries", "engine.lora.transfer", "asyncio"),
    ("engine-libraries", "engine.config", "pydantic"),
    ("schemas-io", "schemas.identity", "socket"),
    ("schemas-io", "schemas.rows", "torch"),
    ("engine-layers", "engine.kernels.layout", "engine.model.decoder"),
    ("engine-layers", "engine.scheduling.scheduler", "engine.step.batch"),
    ("engine-layers", "engine.lora.store", "engine.scheduling.sequence"),
    ("engine-layers", "engine.errors", "engine.types"),
    ("worker-layers", "services.worker.intake.acceptor", "services.worker.queue.backlog"),
    ("worker-layers", "services.worker.queue.backlog", "services.worker.execution.runner"),
    ("worker-layers", "services.worker.queue.parking", "services.worker.adapters.loads"),
    ("worker-layers", "services.worker.execution.runner", "services.worker.results.completer"),
    ("worker-layers", "services.worker.engine.bridge", "services.worker.jobs"),
    ("worker-layers", "services.worker.store.rows", "services.worker.supervision.guard"),
    ("services-layers", "services.worker.app", "services.jobs.commands"),
    ("services-layers", "services.dispatcher.app", "services.demo.run"),
    ("services-layers", "services.kafka.clients", "services.client.producer"),
    ("services-layers", "services.process.settings", "services.postgres.pool"),
    ("services-layers", "services.parsing.names", "services.process.settings"),
    ("services-layers", "services.simulate.worker", "services.bench.engine.adapters"),
    ("policies", "services.worker.queue.backlog", "asyncio"),
    ("policies", "services.worker.offsets.ledger", "aiokafka"),
    ("policies", "engine.scheduling.scheduler", "time"),
    ("policies", "services.dispatcher.schedule", "random"),
    ("policies", "services.simulate.worker", "time"),
    ("policies", "services.plan", "random"),
    ("client", "services.client.producer", "services.worker.intake.records"),
    ("client", "services.client.identifiers", "asyncpg"),
    ("client", "services.client.signing", "torch"),
    ("kernels-measures", "engine.step.runner", "engine.kernels.triton.measure.cost"),
]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OPTIONS.session_options["root_packages"], include_external_packages=True, cache_dir=None)


def contract(name: str) -> Contract:
    _register_built_in_contract_types()
    options = {key: value for key, value in CONTRACTS[name].items() if key not in ("id", "name", "type")}
    kind: Any = registry.get_contract_class(CONTRACTS[name]["type"])
    built: Contract = kind(
        name=CONTRACTS[name]["name"], session_options=OPTIONS.session_options, contract_options=options
    )
    return built


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_holds(graph: grimp.ImportGraph, name: str) -> None:
    assert contract(name).check(deepcopy(graph), verbose=False).kept


@pytest.mark.parametrize(("name", "importer", "imported"), VIOLATIONS)
def test_a_violation_is_caught(graph: grimp.ImportGraph, name: str, importer: str, imported: str) -> None:
    assert importer in graph.modules, f"{importer} has moved"
    violated = deepcopy(graph)
    violated.add_import(importer=importer, imported=imported)
    assert not contract(name).check(violated, verbose=False).kept


def test_every_contract_has_a_violation_to_catch() -> None:
    assert {name for name, _, _ in VIOLATIONS} == set(CONTRACTS)


@pytest.mark.parametrize(
    ("name", "container"),
    [("engine-layers", "engine"), ("services-layers", "services"), ("worker-layers", "services.worker")],
)
def test_a_new_package_must_be_assigned_to_a_layer(graph: grimp.ImportGraph, name: str, container: str) -> None:
    grown = deepcopy(graph)
    grown.add_module(f"{container}.unassigned")
    assert not contract(name).check(grown, verbose=False).kept


def test_no_module_imports_itself_indirectly(graph: grimp.ImportGraph) -> None:
    ours = {module for module in graph.modules if not graph.is_module_squashed(module)}
    imports = {module: graph.find_modules_directly_imported_by(module) & ours for module in ours}
    _assert_no_cycle(imports)


def test_no_header_includes_itself_indirectly() -> None:
    include = re.compile(r'^#include "(.+)"', re.MULTILINE)
    sources = [*(ROOT / "engine").rglob("*.h"), *(ROOT / "engine").rglob("*.cpp")]
    _assert_no_cycle({source.name: set(include.findall(source.read_text(encoding="utf-8"))) for source in sources})


def _assert_no_cycle(edges: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' -> '.join(error.args[1])}")


def _folders() -> Iterator[Path]:
    for package in ("engine", "services", "schemas", "migrations"):
        yield from (path for path in [ROOT / package, *(ROOT / package).rglob("*")] if path.is_dir())


def test_no_folder_has_too_many_files() -> None:
    for folder in _folders():
        files = [path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".pyc"]
        assert len(files) <= LARGEST_FOLDER, f"{folder.relative_to(ROOT)} has {len(files)} files: {sorted(files)}"


def test_every_package_has_a_docstring() -> None:
    for folder in _folders():
        if (folder / "__init__.py").is_file():
            first = (folder / "__init__.py").read_text(encoding="utf-8").partition("\n")[0]
            assert first.startswith('"""'), f"{folder.relative_to(ROOT)} needs a docstring that states what it owns"
