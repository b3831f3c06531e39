"""Faults on purpose, under load with known answers: `python -m jaxserve.chaos`."""
