"""The base model: weights, tokenizer and forward pass."""
