"""How the nightly tests check annotations at run time: beartype, set up by `--jaxtyping-packages`.

Every function of both packages is decorated with `check`, so that a wrong shape, dtype or type is
an error where it is passed and not three layers further down.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype, roar

# An int is accepted where a float is annotated, as mypy does (PEP 484).
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
_UNCHECKABLE = (
    roar.BeartypeDecorHintPep673Exception,
    roar.BeartypeDecorHintPep695Exception,
    roar.BeartypeDecorHintPep3119Exception,
    roar.BeartypeDecorHintPepUnsupportedException,
)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a function's arguments and result on every call.

    Four kinds of annotation cannot be checked on a lone function: `typing.Self`, a protocol that
    is not `runtime_checkable`, a generic NamedTuple, and an alias of types that are imported for
    mypy alone. Functions that have one are left to mypy.
    """
    try:
        return _beartype(function)
    except _UNCHECKABLE:
        return function
