"""LLM serving on JAX with attention and FFN on separate submeshes.

`from jaxserve import LLM, SamplingParams` is the Python face. The names are resolved on first
use, so importing the package loads neither JAX nor an accelerator: a follower, a test or a
launcher may still set devices and flags after it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.engine.request import SamplingParams
    from jaxserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOME = {"LLM": "jaxserve.llm", "SamplingParams": "jaxserve.engine.request"}


def __getattr__(name: str) -> object:
    """Imports a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
