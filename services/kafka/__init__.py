"""Kafka: clients with safe options, error translation, topics and headers. Knows no job and no table."""
