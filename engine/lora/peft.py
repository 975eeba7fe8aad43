"""Checks a PEFT directory completely before any weight is loaded.

Needs no torch, because the registrar checks adapters in a process without it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import AdapterError
from engine.files.digest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_digest
from engine.files.model_config import EMBEDDING, LINEAR_PROJECTIONS, LM_HEAD, ModelConfig, Module, read_model_config
from engine.files.tensorfile import BITS, Bytes, StoredTensor, TensorFileError, map_file, read_tensor_file
from engine.lora.peft_config import PeftConfig, read_peft_config
from engine.types import AdapterInfo

MAX_NAME_LENGTH = 512
TENSOR_ENTRY_BYTES = MAX_NAME_LENGTH + 256
"""Upper bound of what the header of a weights file needs for one tensor."""
METADATA_BYTES = 1024**2
PICKLED_WEIGHTS = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

# `….lora_A.weight` as PEFT saves it, `….lora_A.default.weight` as a raw state dict has it; no `.weight` for embeddings.
TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.(?!weight$)[^.]+)?(?:\.weight)?"
)
# PEFT adds the base model's own embeddings to the file by default.
BASE_COPY = re.compile(r"(?:embed_tokens|lm_head)(?:\.base_layer)?\.weight$")
LAYER_NAME = re.compile(r"(?:.+\.)?layers\.(?P<layer>\d+)\..+")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """y += scale · B A x for one module: `down` is A (rank, in), `up` is B (out, rank).

    For the embedding, A is (rank, vocabulary) and B is (hidden, rank): token t adds scale · B A[:, t].
    """

    module: Module
    rank: int
    scale: float
    down: StoredTensor
    up: StoredTensor


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A checked PEFT directory; its tensors are still on disk."""

    info: AdapterInfo
    modules: tuple[LoraModule, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of the file and the module that its name refers to."""

    name: str
    path: str
    side: str
    tensor: StoredTensor


def check_adapter(peft_dir: Path, model_dir: Path) -> AdapterInfo:
    """Check the structure of an adapter against a base model's config.json.

    Raises AdapterError naming the file, field or tensor at fault, or ModelError if config.json is invalid.
    """
    return read_adapter(peft_dir, read_model_config(model_dir)).info


def read_adapter(peft_dir: Path, model: ModelConfig) -> PeftAdapter:
    """Parse and check a PEFT directory. Reads every value once, to find NaN, and copies none.

    `info.name` is the directory's name.
    """
    config = read_peft_config(peft_dir / ADAPTER_CONFIG)
    tensors = _read_tensors(peft_dir, 2 * len(model.modules) * TENSOR_ENTRY_BYTES + METADATA_BYTES)
    file = map_file(peft_dir / ADAPTER_WEIGHTS)
    found = (_locate(name, tensor, file, model) for name, tensor in tensors.items())
    modules = tuple(_lora_module(path, pair, config, model) for path, pair in _pairs(found))
    if not modules:
        raise AdapterError(f"{peft_dir / ADAPTER_WEIGHTS} contains no tensors; save the adapter with its weights")
    info = AdapterInfo(
        name=peft_dir.name,
        digest=adapter_digest(peft_dir),
        rank=max(module.rank for module in modules),
        target_modules=tuple(sorted({module.module.projection for module in modules})),
        num_bytes=sum(module.down.num_bytes + module.up.num_bytes for module in modules),
        base_model=config.base_model,
    )
    return PeftAdapter(info, modules)


def _read_tensors(peft_dir: Path, max_header_bytes: int) -> Mapping[str, StoredTensor]:
    path = peft_dir / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = [name for name in PICKLED_WEIGHTS if (peft_dir / name).exists()]
        if pickled:
            raise AdapterError(f"{peft_dir / pickled[0]} is a pickle, which can run code; save it as {ADAPTER_WEIGHTS}")
        raise AdapterError(
            f"{path} does not exist; an adapter is a PEFT directory with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        )
    try:
        return read_tensor_file(path, max_header_bytes)
    except TensorFileError as error:
        raise AdapterError(str(error)) from error


def _locate(name: str, tensor: StoredTensor, file: Bytes, model: ModelConfig) -> _Found:
    """Find the module that a tensor's name refers to, with or without PEFT's and the decoder's prefixes."""
    match = TENSOR_NAME.fullmatch(name) if len(name) <= MAX_NAME_LENGTH else None
    if match is None and BASE_COPY.search(name[-MAX_NAME_LENGTH:]):
        raise AdapterError(
            f"tensor {name[:MAX_NAME_LENGTH]} is a full weight of the base model, not a LoRA matrix; "
            "save the adapter with save_embedding_layers=False"
        )
    if match is None:
        raise AdapterError(
            f"tensor {name[:MAX_NAME_LENGTH]} is neither lora_A nor lora_B of a module; only plain LoRA is supported"
        )
    for path in (match["module"], f"model.{match['module']}"):
        if path in model.modules:
            _check_values(
                name,
                tensor,
                file,
                embedding=model.modules[path].projection == EMBEDDING,
                named=bool(match["embedding"]),
            )
            return _Found(name, path, match["side"], tensor)
    raise AdapterError(f"tensor {name} matches no module of the base model: {_why_unknown(match['module'], model)}")


def _why_unknown(path: str, model: ModelConfig) -> str:
    layer = LAYER_NAME.fullmatch(path)
    projection = path.rsplit(".", 1)[-1]
    known = (*LINEAR_PROJECTIONS, EMBEDDING, LM_HEAD)
    if layer is not None and int(layer["layer"]) >= model.num_layers:
        return f"there is no layer {layer['layer']}; the model has {model.num_layers}"
    if projection not in known:
        return f"there is no projection {projection}; the model has {', '.join(known)}"
    return f"there is no {path}; names look like model.layers.0.self_attn.q_proj"


def _check_values(name: str, tensor: StoredTensor, file: Bytes, *, embedding: bool, named: bool) -> None:
    if embedding != named:
        kind = "an embedding; its tensors are lora_embedding_A and _B" if embedding else "not an embedding"
        raise AdapterError(f"tensor {name} does not fit its module, which is {kind}")
    if tensor.dtype not in BITS:
        raise AdapterError(f"tensor {name} has dtype {tensor.dtype}; supported are {', '.join(BITS)}")
    if len(tensor.shape) != 2:
        raise AdapterError(f"tensor {name} has shape {tensor.shape}; a LoRA matrix has two dimensions")
    if 0 not in tensor.shape and not tensor.is_finite(file):
        raise AdapterError(
            f"tensor {name} contains NaN or infinite values; the training diverged or the file is damaged"
        )


def _pairs(found: Iterable[_Found]) -> Iterator[tuple[str, tuple[_Found, _Found]]]:
    """A and B of each module; raises AdapterError if one is missing or duplicated."""
    sides: dict[str, dict[str, _Found]] = {}
    for entry in found:
        other = sides.setdefault(entry.path, {}).setdefault(entry.side, entry)
        if other is not entry:
            raise AdapterError(f"tensors {other.name} and {entry.name} are the same matrix; keep one of them")
    for path, pair in sides.items():
        if len(pair) == 1:
            (single,) = pair.values()
            missing = "B" if single.side == "A" else "A"
            raise AdapterError(f"tensor {single.name} has no matching lora_{missing}; the file is incomplete")
        yield path, (pair["A"], pair["B"])


def _lora_module(path: str, pair: tuple[_Found, _Found], config: PeftConfig, model: ModelConfig) -> LoraModule:
    down, up = pair
    module = model.modules[path]
    if not config.adapts(path, module.layer) and not config.adapts(path.removeprefix("model."), module.layer):
        raise AdapterError(f"tensor {down.name} belongs to a module that {ADAPTER_CONFIG} does not target")
    inputs, outputs = module.in_features, module.out_features
    if module.projection == EMBEDDING:
        inputs, outputs = outputs, inputs
    _check_size(down, 1, inputs, "inputs", module)
    _check_size(up, 0, outputs, "outputs", module)
    rank = config.rank_of(path)
    for entry, axis in ((down, 0), (up, 1)):
        if entry.tensor.shape[axis] != rank:
            raise AdapterError(
                f"tensor {entry.name} has rank {entry.tensor.shape[axis]}, but {ADAPTER_CONFIG} gives it rank {rank}"
            )
    return LoraModule(module, rank, config.scale_of(path, rank), down.tensor, up.tensor)


def _check_size(entry: _Found, axis: int, size: int, kind: str, module: Module) -> None:
    if entry.tensor.shape[axis] != size:
        raise AdapterError(
            f"tensor {entry.name} has shape {entry.tensor.shape}, but {module.projection} of this base model has "
            f"{size} {kind}; the adapter was trained for another base model"
        )
