"""A view of runs: pages in a browser, static files, text in a terminal. `python -m experiments.view
--help`."""
