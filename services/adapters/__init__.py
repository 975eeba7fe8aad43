"""Adapters outside the engine: versions in the registry, pushing, the base model that they fit, staging to disk."""
