"""`loraq bench`: measures performance on this machine and reports one JSON object per run."""
