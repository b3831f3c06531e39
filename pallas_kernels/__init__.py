"""Pallas kernels of jaxserve, one folder an operation; imports nothing of jaxserve."""
