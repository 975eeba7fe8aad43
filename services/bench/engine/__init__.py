"""`loraq bench engine`: the engine alone, without broker and database."""
