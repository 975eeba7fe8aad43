"""The life of any process: settings, logs, metrics, signals, health, watchdog. Knows no job, topic or table."""
