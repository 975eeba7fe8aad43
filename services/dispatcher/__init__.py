"""The dispatcher process: outbox rows become signed webhooks and events on Kafka."""
