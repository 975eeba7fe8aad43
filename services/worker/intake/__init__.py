"""From Kafka records to accepted jobs: consume, validate, decide, reject. Knows no backlog, engine or result."""
