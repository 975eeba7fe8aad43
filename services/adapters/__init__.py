"""Adapters outside the engine: registry versions, pushing, the base model that they must fit, staging to disk."""
