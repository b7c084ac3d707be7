"""The processes of a run: several hosts, and signals that end it."""
