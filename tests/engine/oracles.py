"""Independent references: transformers with PEFT, and a model with the adapter merged into its weights."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from engine import Output, Request

logging.disable_progress_bar()


class Oracle:
    """Teacher-forced log-probabilities in fp32 of a base model, alone or with one adapter."""

    def __init__(self, model_dir: Path, adapter: Path | None = None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT warns about tied embeddings, which are intended
                self._model = PeftModel.from_pretrained(self._model, adapter)
        self._model.eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 (tokens, vocabulary): row i predicts token i + 1."""
        logits = self._model(torch.tensor([list(token_ids)])).logits
        return torch.log_softmax(logits[0].float(), dim=-1)


class MergedOracle(Oracle):
    """An oracle with W + s·BA computed here, only from the files and the definition of LoRA."""

    def __init__(self, model_dir: Path, adapter: Path, scale_of: Callable[[str, int], float]) -> None:
        super().__init__(model_dir)
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            down, up = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
            weight = self._model.get_submodule(module).weight.data
            weight.copy_(weight.double() + scale_of(module, len(down)) * up @ down)


def differences(oracle: Oracle, request: Request, output: Output) -> list[float]:
    """Distance of every reported log-probability from the oracle's, in nats."""
    assert request.prompt_token_ids is not None
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    truth = oracle.logprobs([*request.prompt_token_ids, *output.token_ids])[len(request.prompt_token_ids) - 1 :]
    return [
        abs(value - float(row[token]))
        for row, reported in zip(truth, output.logprobs, strict=False)
        for token, value in reported.items()
    ]
