"""Sizes against the engine's own."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine import Engine, EngineConfig
from engine.device.cpu import CpuDevice
from engine.files.model_config import ModelConfig, read_model_config
from engine.memory.storage import Storage
from services.bench.engine.adapters import adapter_dirs
from services.simulate.engines.hardware import MODELS, ModelShape
from tests.builders import tiny_llama


def shape_of(model: ModelConfig, value_bytes: int) -> ModelShape:
    return ModelShape(
        model.num_layers,
        model.hidden_size,
        model.intermediate_size,
        model.q_size,
        model.kv_size,
        model.vocab_size,
        model.tie_word_embeddings,
        value_bytes,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_and_adapters_have_the_engine_s_sizes(tmp_path: Path, dtype: str) -> None:
    path = tiny_llama(tmp_path / "base", dtype=dtype)
    model = read_model_config(path)
    value_bytes = 4 if dtype == "float32" else 2
    shape = shape_of(model, value_bytes)
    storage = Storage(model, getattr(torch, dtype), 16, 1 << 22, CpuDevice())
    pages = shape.pages()
    assert pages.tokens_per_page == storage.tokens_per_page
    assert pages.tiles_per_page == storage.tiles_per_page
    assert pages.bytes_per_page == storage.bytes_per_page_id
    engine = Engine(EngineConfig(model=path, dtype=dtype, pool_bytes=1 << 24))  # type: ignore[arg-type]
    with adapter_dirs(None, model, 4) as directories:
        for number, directory in enumerate(directories):
            info = engine.load_adapter(str(number), directory)
            assert shape.adapter_pages(info.rank, pages) * pages.bytes_per_page == info.num_bytes
    engine.close()


def test_the_parameters_of_a_model_are_counted_without_its_norms(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "base")
    shape = shape_of(read_model_config(path), 4)
    with safe_open(path / "model.safetensors", "np") as file:
        matrices = [file.get_tensor(name).size for name in file.keys() if file.get_tensor(name).ndim == 2]  # noqa: SIM118
    assert shape.num_parameters == sum(matrices)


def test_the_presets_have_the_published_sizes() -> None:
    assert MODELS["llama-8b"].num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert MODELS["llama-8b"].kv_bytes_per_token == 131072
    assert MODELS["smollm2-135m"].num_parameters == pytest.approx(134.5e6, rel=0.001)
