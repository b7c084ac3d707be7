"""Launchers: one run on the nodes of a scheduler."""
