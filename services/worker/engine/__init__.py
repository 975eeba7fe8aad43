"""The engine process and the bridge to it: frames, start, restart. Knows no job, only requests and adapters."""
