"""Memory: the page pool and the owners of its pages."""
