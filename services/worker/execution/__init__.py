"""From waiting jobs to outcomes: feeds the engine, enforces timeouts, finds jobs that crash it. Writes no row."""
