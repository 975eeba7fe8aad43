"""The same workload on transformers and PEFT: one batch in which every row names its adapter."""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.check.model import RandomModel
from engine.check.speed import Case, requests_of


def measure_peft(
    model: RandomModel, directories: Sequence[Path], case: Case, decode_steps: int, wait: Callable[[], None]
) -> float:
    """Decode tokens per second: the time for several tokens minus the time for one, which excludes the prompts.

    Changes the base model permanently.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the two libraries warn about each other
        return _measure(_with_adapters(model, directories, case.adapters), model, case, decode_steps, wait)


def _measure(peer: Any, model: RandomModel, case: Case, decode_steps: int, wait: Callable[[], None]) -> float:
    requests = requests_of(case, model.shape.vocabulary, 1)
    ids = torch.tensor([request.prompt_token_ids for request in requests], device=model.peer.device)
    names = [str(request.adapter) for request in requests]

    def seconds(count: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            peer.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                adapter_names=names,
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        wait()
        return time.perf_counter() - started

    seconds(1)
    return case.requests * decode_steps / max(seconds(1 + decode_steps) - seconds(1), 1e-9)


def _with_adapters(model: RandomModel, directories: Sequence[Path], count: int) -> Any:
    """Load the adapters in the base model's dtype, as in the engine: by default PEFT widens them to float32.

    `low_cpu_mem_usage` reads the matrices from the files without initializing them at random first.
    """
    from peft import PeftModel

    options: dict[str, Any] = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
    peer: Any = PeftModel.from_pretrained(model.peer, directories[0], adapter_name="0", **options)
    for index in range(1, count):
        peer.load_adapter(directories[index % len(directories)], adapter_name=str(index), **options)
    return peer.eval()
