"""Checks and measurements of the engine on a device; `python3 -m engine.check.gpu` runs them all."""
