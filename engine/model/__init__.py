"""The base model: its configuration, weights, tokenizer and forward pass."""
