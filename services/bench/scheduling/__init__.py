"""`loraq bench scheduling`: the worker's queue policy on the real engine, without a broker or a database."""
