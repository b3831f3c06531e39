"""The programs of a step, as functions over one device's slices, with the shapes they take.

With attention and FFN apart they are several (`afd.py`), colocated it is one (`colocated.py`). Both
are the same blocks (`model.py`) and differ only in what happens at the link.
`pipeline/executables.py` compiles them, `pipeline/driver.py` runs them.
"""

from jaxserve.programs.afd import AFDPrograms, step_multiple
from jaxserve.programs.colocated import ColocatedPrograms
from jaxserve.programs.program import ROWS, Program

__all__ = ["ROWS", "AFDPrograms", "ColocatedPrograms", "Program", "step_multiple"]
