"""Times of the kernels, estimated from their compiled programs.

The command is `python -m pallas_kernels.estimate`. Nothing is run: `count.py` compiles and counts
(`sass.py` reads Hopper's machine code), `model.py` turns counts into microseconds by what
`assumptions.py` takes for granted.
"""
