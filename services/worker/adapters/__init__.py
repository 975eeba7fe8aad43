"""The adapters in the engine: loads, evictions, failures. Called by execution; independent of records and rows."""
