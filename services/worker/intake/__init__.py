"""From Kafka records to accepted jobs: consume, validate, decide, reject. Independent of backlog and engine."""
