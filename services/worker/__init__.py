"""The worker process: Kafka records in, engine runs, one transaction per finished batch, then offsets."""
