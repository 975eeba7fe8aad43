"""`loraq bench service`: the plane around the engine, through the real broker and the real database."""
