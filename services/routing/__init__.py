"""Which worker should run a job: what workers report, and which adapters spread over several partitions."""
