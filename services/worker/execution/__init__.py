"""From waiting jobs to outcomes: feeds the engine, bounds running times, finds jobs that end it. Writes no row."""
