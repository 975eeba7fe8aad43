"""adapter_config.json: the modules that an adapter targets, their ranks and scales.

Features that the engine does not implement are rejected by name.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import AdapterError
from engine.files.model_config import LINEAR_PROJECTIONS
from engine.lora.patterns import ModulePattern, ends_with

MAX_RANK = 512
MAX_CONFIG_BYTES = 1024**2
MAX_ALPHA = 1_000_000

# Fields of features that the engine does not implement, with each feature's name for the error message.
UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained modules",
    "lora_bias": "a bias in lora_B",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trained tokens",
    "alora_invocation_tokens": "activated LoRA",
    "target_parameters": "adapting parameters that are not modules",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "ensure_weight_tying": "adapters shared by tied modules",
}
# Initialisations that do not modify the base weights.
HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")


Modules = ModulePattern | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of adapter_config.json that affect what an adapter computes."""

    rank: int
    alpha: float
    use_rslora: bool
    ranks: tuple[tuple[ModulePattern, int], ...]
    alphas: tuple[tuple[ModulePattern, float], ...]
    targets: Modules | None
    excluded: Modules
    layers: frozenset[int] | None
    base_model: str | None

    def rank_of(self, module: str) -> int:
        """The configured rank of a module."""
        return next((rank for pattern, rank in self.ranks if pattern.matches_ending(module)), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """The scale of a module: alpha / rank, or alpha / √rank with rank-stabilised LoRA."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.matches_ending(module)), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def adapts(self, module: str, layer: int | None) -> bool:
        """True if target_modules, exclude_modules and layers_to_transform together select this module."""
        if _matches(self.excluded, module) or (self.targets is not None and not _matches(self.targets, module)):
            return False
        return self.layers is None or layer in self.layers


def read_peft_config(path: Path) -> PeftConfig:
    """Parse adapter_config.json; raises AdapterError naming the field at fault."""
    raw = _read_object(path)
    _refuse_unsupported(raw)
    targets = raw.get("target_modules")
    return PeftConfig(
        rank=_rank("r", raw.get("r")),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        use_rslora=bool(raw.get("use_rslora")),
        ranks=tuple((pattern, _rank(field, value)) for pattern, field, value in _table(raw, "rank_pattern")),
        alphas=tuple((pattern, _alpha(field, value)) for pattern, field, value in _table(raw, "alpha_pattern")),
        targets=None if targets is None else _modules("target_modules", targets),
        excluded=_modules("exclude_modules", raw.get("exclude_modules") or ()),
        layers=_layers(raw),
        base_model=_text("base_model_name_or_path", raw.get("base_model_name_or_path")),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise AdapterError(f"{path} does not exist; an adapter is a PEFT directory")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path} is {path.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are allowed")
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise AdapterError(f"{path} must contain a JSON object, not a {type(parsed).__name__}")
    return parsed


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {raw.get('peft_type')!r}; only 'LORA' is supported")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"bias is {raw['bias']!r}; trained biases are not supported: train with bias='none'")
    for field, feature in UNSUPPORTED.items():
        if raw.get(field):
            raise AdapterError(f"{field} is set: {feature} is not supported")
    unknown = [key for key in raw if key.startswith("use_") and raw[key] and key not in ("use_rslora", *UNSUPPORTED)]
    if unknown:
        raise AdapterError(f"{unknown[0]} is set: this variant of LoRA is not supported")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init not in HARMLESS_INITS:
        raise AdapterError(
            f"init_lora_weights is {init!r}, which changes the base weights; convert the adapter to plain LoRA "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _rank(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"{field} is {value!r}; a rank must be a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise AdapterError(f"{field} is {reprlib.repr(value)}; it must be a number from -{MAX_ALPHA} to {MAX_ALPHA}")
    return float(value)


def _text(field: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise AdapterError(f"{field} is {value!r}; it must be a string")
    return value


def _table(raw: Mapping[str, Any], field: str) -> Iterator[tuple[ModulePattern, str, object]]:
    table = raw.get(field) or {}
    if not isinstance(table, dict):
        raise AdapterError(f"{field} is {table!r}; it must be an object keyed by module name")
    for key, value in table.items():
        yield ModulePattern(key, field), f"{field}[{key!r}]", value


def _modules(field: str, value: object) -> Modules:
    """A list contains module names, a string is an expression for full names; `all-linear` excludes the head."""
    if value == "all-linear":
        return LINEAR_PROJECTIONS
    if isinstance(value, str):
        return ModulePattern(value, field)
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{field} is {value!r}; it must be a list of module names or one expression")
    return tuple(value)


def _matches(modules: Modules, module: str) -> bool:
    if isinstance(modules, ModulePattern):
        return modules.matches(module)
    return ends_with(module, modules)


def _layers(raw: Mapping[str, Any]) -> frozenset[int] | None:
    value = raw.get("layers_to_transform")
    if value is None or value == [] or isinstance(raw.get("target_modules"), str):
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise AdapterError(f"layers_to_transform is {value!r}; it must be a layer's index or a list of them")
    return frozenset(layers)
