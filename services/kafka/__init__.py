"""Kafka: clients with safe options, error translation, topics and headers. Knows no job or table."""
