"""The pool is one allocation that contains all KV and all adapters."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.files.model_config import read_model_config
from engine.kernels import PROJECTIONS
from engine.kernels.reference import adapter_matrices
from engine.lora.layout import Stripes
from tests.builders import ALL_LINEAR, lora_adapter, tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    return Engine(EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=8, pool_bytes=2**22))


class Spy:
    """Kernels that record the tensors they are called with."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.seen = kernels, {}  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            for tensor in tensors_in((*args, *options.values())):
                self.seen.setdefault(name, {})[tensor.data_ptr()] = tensor.untyped_storage().data_ptr()
            return getattr(self._kernels, name)(*args, **options)

        return call


def tensors_in(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "__dataclass_fields__"):
            yield from tensors_in(tuple(getattr(value, name) for name in value.__dataclass_fields__))


def test_operands_alias_the_pool_and_no_step_allocates_activations(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    engine.load_adapter("a", lora_adapter(tmp_path / "a", model_dir, rank=12))
    spy = Spy(engine._backend.kernels)
    engine._decoder._kernels = spy
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for _ in range(2):
        engine.generate([Request(prompt_token_ids=[5] * 20, adapter="a", sampling=sampling)])
    pool = engine._storage.pool.untyped_storage().data_ptr()
    for name in ("lora_linear", "rope_write_kv", "paged_attention"):
        assert pool in spy.seen[name].values()
    assert engine._storage.tiles.untyped_storage().data_ptr() == pool
    before = {name: set(kinds.values()) for name, kinds in spy.seen.items()}
    engine.generate([Request(prompt_token_ids=[7] * 20, adapter="a", sampling=sampling)])
    activations = set(workspace_pointers(engine)) | {pool}
    for name in ("silu_mul", "rms_norm"):
        weights = before[name]
        assert set(spy.seen[name].values()) <= weights | activations


def workspace_pointers(engine: Engine) -> Iterator[int]:
    rows = engine._decoder._workspace.rows(1)
    for name in type(rows).__slots__:
        yield getattr(rows, name).untyped_storage().data_ptr()


@pytest.mark.parametrize("rank", [1, 8, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_hold_the_adapter_once_at_its_rank(
    engine: Engine, model_dir: Path, tmp_path: Path, rank: int, dtype: str
) -> None:
    targets = (*ALL_LINEAR, "embed_tokens", "lm_head")
    path = lora_adapter(tmp_path / "a", model_dir, rank=rank, targets=targets, dtype=dtype)
    info = engine.load_adapter("a", path)
    stored = load_file(path / "adapter_model.safetensors")
    adapter = engine._adapters["a"]  # type: ignore[index]
    tables = engine._adapters.tables
    modules = read_model_config(model_dir).modules
    for name, module in modules.items():
        if module.layer is None:
            continue
        projection = PROJECTIONS.index(module.projection.removesuffix("_proj"))
        found = adapter_matrices(
            tables.layers,
            adapter.slot,
            module.layer,
            projection,
            module.in_features,
            module.out_features,
            torch.float32,
        )
        assert found is not None
        a, b, scale = found
        assert scale == 2.0
        assert torch.equal(a[:rank], stored[f"base_model.model.{name}.lora_A.weight"].float())
        assert torch.equal(b[:rank].T, stored[f"base_model.model.{name}.lora_B.weight"].float())
        assert not a[rank:].any()
        assert not b[rank:].any()
    for layer, columns in Stripes.of(engine.model_config):
        found = adapter_matrices(tables.edges, adapter.slot, layer, 0, 64, columns.stop - columns.start, torch.float32)
        assert found is not None
        assert torch.equal(found[1][:rank].T, stored["base_model.model.lm_head.lora_B.weight"][columns].float())
    num_used = engine._pool.num_pages - engine._pool.num_free
    assert info.num_bytes == num_used * engine._storage.bytes_per_page_id


def test_no_tensor_outlives_a_load(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    """Neither the file mapping nor a converted copy remains; only the slot tables grow. The adapter has 800 KB."""
    path = lora_adapter(tmp_path / "a", model_dir, rank=64, dtype="bfloat16")
    gc.collect()
    before = {id(item) for item in gc.get_objects() if type(item) is torch.Tensor}
    engine.load_adapter("a", path)
    gc.collect()
    new = [item for item in gc.get_objects() if type(item) is torch.Tensor and id(item) not in before]
    assert sum(item.nbytes for item in new if item.untyped_storage().nbytes() < 2**22) < 100_000
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_page_contains_whole_tiles_and_whole_tokens(model_dir: Path) -> None:
    for asked, tokens in ((1, 8), (8, 8), (9, 16), (16, 16)):
        engine = Engine(EngineConfig(model_dir, dtype="float32", threads=1, tokens_per_page=asked, pool_bytes=2**20))
        assert engine._storage.tokens_per_page == tokens
        assert engine._storage.page_bytes % 2048 == 0
