"""The files of a run and what it prints."""
