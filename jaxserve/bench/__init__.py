"""Measurements: `python -m jaxserve.bench NAME`. Every number is printed next to its target.

Nothing here is a test: a number depends on the machine and on what else runs there.
"""
