"""Model configuration, safetensors files, and the digests that identify models and adapters. Owns no tensors."""
