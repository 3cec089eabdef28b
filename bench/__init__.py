"""Measures Baton beside the limits of the machine it runs on. `python -m bench --help`."""
