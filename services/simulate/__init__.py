"""`loraq simulate`: a fleet of workers in simulated time, with the worker's own queue policy."""
