"""Request validation and scheduling: from a request to its output. Owns no tensors."""
