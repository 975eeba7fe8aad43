"""`loraq bench`: how fast it is on this machine, as one JSON object per run."""
