"""The table of folders in docs/architecture.md, read from the code: first lines, imports, contracts, lines."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- folders: begin -->\n", "<!-- folders: end -->\n"
HEAD = "| folder | owns | entry points | must not import | lines |\n|---|---|---|---|---|\n"
LAYERED = {"engine": "engine-layers", "services": "services-layers", "services.worker": "worker-layers"}
MAX_ENTRIES = 5
MAX_NAMES = 4


def folders() -> list[str]:
    """Dotted names of `schemas` and of the folders whose layers are checked."""
    found = ["schemas"]
    for container in LAYERED:
        inner = sorted((ROOT / container.replace(".", "/")).glob("*/__init__.py"))
        found += [f"{container}.{path.parent.name}" for path in inner]
    return sorted(set(found) - {"services.worker"} | {"services.worker"})


def table() -> str:
    """One row per folder."""
    layers = _layers()
    users = _users()
    return HEAD + "".join(_row(folder, layers, users) for folder in folders())


def _row(folder: str, layers: dict[str, list[list[str]]], users: dict[str, dict[str, int]]) -> str:
    owns = _first_line(ROOT / folder.replace(".", "/") / "__init__.py")
    entries = sorted(users.get(folder, {}), key=lambda name: (-users[folder][name], name))[:MAX_ENTRIES]
    shown = ", ".join(f"`{name}`" for name in entries) or "commands only"
    return f"| `{folder.replace('.', '/')}/` | {owns} | {shown} | {_forbidden(folder, layers)} | {_lines(folder)} |\n"


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _layers() -> dict[str, list[list[str]]]:
    """For each container, its layers from top to bottom, each with its names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    by_id: dict[str, Any] = {contract["id"]: contract for contract in contracts}
    return {
        container: [re.split(r" [|:] ", layer) for layer in by_id[name]["layers"]]
        for container, name in LAYERED.items()
    }


def _forbidden(folder: str, layers: dict[str, list[list[str]]]) -> str:
    container, _, name = folder.rpartition(".")
    if container not in layers:
        return "`engine`, `services`, any I/O"
    above = next(index for index, names in enumerate(layers[container]) if name in names)
    names = [name for layer in layers[container][:above] for name in layer]
    shown = [f"`{each}`" for each in names]
    if len(shown) > MAX_NAMES:
        shown = [f"all above it: {shown[0]} to {shown[-1]}"]
    return ", ".join([*shown, *(["`services`"] if container == "engine" else [])]) or "nothing is above it"


def _users() -> dict[str, dict[str, int]]:
    """For each folder, its modules that other code imports, with the number of importers."""
    known = folders()
    users: dict[str, dict[str, int]] = {}
    for importer, module in _imports():
        folder = next((each for each in sorted(known, key=len, reverse=True) if module.startswith(f"{each}.")), None)
        if folder is None or importer == folder or importer.startswith(f"{folder}."):
            continue
        entry = module.removeprefix(f"{folder}.").partition(".")[0]
        users.setdefault(folder, {})
        users[folder][entry] = users[folder].get(entry, 0) + 1
    return users


def _imports() -> Iterator[tuple[str, str]]:
    for package in ("engine", "services", "schemas"):
        for path in sorted((ROOT / package).rglob("*.py")):
            importer = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        is_module = (ROOT / node.module.replace(".", "/") / f"{alias.name}.py").is_file()
                        yield importer, f"{node.module}.{alias.name}" if is_module else node.module


def _lines(folder: str) -> int:
    """Number of source lines of a folder, without listed folders inside it."""
    path = ROOT / folder.replace(".", "/")
    inner = [ROOT / each.replace(".", "/") for each in folders() if each.startswith(f"{folder}.")]
    sources = [source for kind in ("*.py", "*.h", "*.cpp", "*.sql") for source in path.rglob(kind)]
    own = [source for source in sources if not any(source.is_relative_to(each) for each in inner)]
    return sum(len(source.read_text(encoding="utf-8").splitlines()) for source in own)


def with_table(page: str) -> str:
    """The page with a new table between the markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    document = ROOT / "docs" / "architecture.md"
    document.write_text(with_table(document.read_text(encoding="utf-8")), encoding="utf-8")
