"""What is there before a test file is exempt from garbage collection, and engines leave it so.

An engine collects and exempts everything when it is warm, and lifts that when it ends, with another
collection (`jaxserve/engine/runtime.py`). Here either would visit the modules of all tests, some
million objects.
"""

import gc
import warnings

freeze, unfreeze = gc.freeze, gc.unfreeze
"""Python's own, for those who test the exemption."""


def take_over() -> None:
    """From now on `gc.freeze` and `gc.unfreeze` do nothing."""
    gc.freeze = gc.unfreeze = lambda: None


def exempt() -> None:
    """Exempts what is there and no garbage; between two files, when no engine of a file runs. What
    garbage has left open is not the fault of the test that follows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    freeze()
