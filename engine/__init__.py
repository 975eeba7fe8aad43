"""The multi-LoRA engine: torch, triton, safetensors, tokenizers, jinja2 and numpy only."""
