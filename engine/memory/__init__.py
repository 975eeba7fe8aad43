"""Memory: the page pool and who holds which page."""
