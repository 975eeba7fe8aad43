"""Which adapters the engine holds: loads, evictions, failures. Called by execution; knows no record and no row."""
