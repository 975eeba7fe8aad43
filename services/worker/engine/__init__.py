"""The engine process and the bridge to it: frames, start, restart. Handles requests and adapters, not jobs."""
