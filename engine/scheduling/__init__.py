"""Which sequences compute in the next step, from a validated request to its output. Owns no tensors."""
