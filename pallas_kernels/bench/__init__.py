"""`python -m pallas_kernels.bench`: times the ops at real models' sizes. See `__main__.py`."""
