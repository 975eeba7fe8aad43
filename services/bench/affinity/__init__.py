"""`loraq bench affinity`: how many jobs find their adapter in their worker's memory."""
