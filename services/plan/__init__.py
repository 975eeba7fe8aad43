"""`loraq plan`: how many adapters to keep where, and how many GPUs to pool."""
