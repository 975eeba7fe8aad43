"""`loraq bench service`: everything around the engine, with a real broker and a real database."""
