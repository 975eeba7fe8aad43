"""`loraq bench engine`: the engine alone, without a broker or a database."""
