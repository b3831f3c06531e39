"""Objects made before a test file are exempt from garbage collection, and engines leave it so.

An engine collects and exempts everything when it is warm, and lifts that when it ends, with another
collection (`jaxserve/engine/runtime.py`). Here either would visit the modules of all tests, some
million objects.
"""

import gc
import warnings

freeze, unfreeze = gc.freeze, gc.unfreeze
"""Python's own, for the tests of the exemption."""


def take_over() -> None:
    """Makes `gc.freeze` and `gc.unfreeze` do nothing, and collects nothing before `exempt`: a fifth
    of the time that importing all test files takes."""
    gc.freeze = gc.unfreeze = lambda: None
    gc.disable()


def exempt() -> None:
    """Exempts every object but garbage; between two files, when no engine of a file runs. What
    garbage has left open is not the fault of the test that follows."""
    gc.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    freeze()
