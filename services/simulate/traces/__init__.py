"""The jobs of a simulation, and the worker that each of them meets."""
