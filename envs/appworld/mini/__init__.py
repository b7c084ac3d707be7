"""Tasks of our own for AppWorld's engine, usable without downloading AppWorld's data."""
