"""Models of one engine: what its steps cost, its pages, and where its adapters come from."""
