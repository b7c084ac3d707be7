"""The config: its keys are checked, overridden and explained, and its plugs loaded, before anything
is built."""
