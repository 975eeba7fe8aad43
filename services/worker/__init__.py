"""The worker process: consumes records, runs the engine, writes a batch per transaction, then commits offsets."""
