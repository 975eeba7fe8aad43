"""What every process needs: settings, logs, metrics, signals, health, watchdog. Knows no job, topic or table."""
