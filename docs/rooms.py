"""The table of rooms in docs/architecture.md, read from the code: first lines, imports, contracts, lines."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->\n"
HEAD = "| room | owns | entry points | must not import | lines |\n|---|---|---|---|---|\n"
LAYERED = {"engine": "engine-layers", "services": "services-layers", "services.worker": "worker-layers"}
MAX_ENTRIES = 5
MAX_NAMES = 4


def rooms() -> list[str]:
    """Every room by its dotted name: the packages, and the folders of those whose layers are checked."""
    found = ["schemas"]
    for container in LAYERED:
        folders = sorted((ROOT / container.replace(".", "/")).glob("*/__init__.py"))
        found += [f"{container}.{path.parent.name}" for path in folders]
    return sorted(set(found) - {"services.worker"} | {"services.worker"})


def table() -> str:
    """One row per room."""
    layers = _layers()
    users = _users()
    return HEAD + "".join(_row(room, layers, users) for room in rooms())


def _row(room: str, layers: dict[str, list[list[str]]], users: dict[str, dict[str, int]]) -> str:
    owns = _first_line(ROOT / room.replace(".", "/") / "__init__.py")
    entries = sorted(users.get(room, {}), key=lambda name: (-users[room][name], name))[:MAX_ENTRIES]
    shown = ", ".join(f"`{name}`" for name in entries) or "commands only"
    return f"| `{room.replace('.', '/')}/` | {owns} | {shown} | {_forbidden(room, layers)} | {_lines(room)} |\n"


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _layers() -> dict[str, list[list[str]]]:
    """Container to its layers, the uppermost first, each with the names that stand in it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    by_id: dict[str, Any] = {contract["id"]: contract for contract in contracts}
    return {
        container: [re.split(r" [|:] ", layer) for layer in by_id[name]["layers"]]
        for container, name in LAYERED.items()
    }


def _forbidden(room: str, layers: dict[str, list[list[str]]]) -> str:
    container, _, name = room.rpartition(".")
    if container not in layers:
        return "`engine`, `services`, any I/O"
    above = next(index for index, names in enumerate(layers[container]) if name in names)
    names = [name for layer in layers[container][:above] for name in layer]
    shown = [f"`{each}`" for each in names]
    if len(shown) > MAX_NAMES:
        shown = [f"all above it: {shown[0]} to {shown[-1]}"]
    return ", ".join([*shown, *(["`services`"] if container == "engine" else [])]) or "nothing is above it"


def _users() -> dict[str, dict[str, int]]:
    """Room to its modules that code outside it imports, with the number of importers."""
    known = rooms()
    users: dict[str, dict[str, int]] = {}
    for importer, module in _imports():
        room = next((each for each in sorted(known, key=len, reverse=True) if module.startswith(f"{each}.")), None)
        if room is None or importer == room or importer.startswith(f"{room}."):
            continue
        entry = module.removeprefix(f"{room}.").partition(".")[0]
        users.setdefault(room, {})
        users[room][entry] = users[room].get(entry, 0) + 1
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


def _lines(room: str) -> int:
    """Lines of the room's sources, those of rooms inside it not counted."""
    folder = ROOT / room.replace(".", "/")
    inner = [ROOT / each.replace(".", "/") for each in rooms() if each.startswith(f"{room}.")]
    sources = [path for kind in ("*.py", "*.h", "*.cpp", "*.sql") for path in folder.rglob(kind)]
    own = [path for path in sources if not any(path.is_relative_to(each) for each in inner)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own)


def with_table(page: str) -> str:
    """The page with its table written again between the marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    document = ROOT / "docs" / "architecture.md"
    document.write_text(with_table(document.read_text(encoding="utf-8")), encoding="utf-8")
