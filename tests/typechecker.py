"""How the tests check annotations at run time: beartype, set up by `--jaxtyping-packages`.

Every function of both packages is decorated with `check`, so that a wrong shape, dtype or type is
an error where it is passed and not three layers further down. jaxtyping is there for the shapes of
arrays: it remembers the names of axes for the time of a call, for which it binds every argument and
checks twice. Functions without arrays are left to beartype alone, a tenth of the time.

A function that is defined inside another one is decorated at every call of that one, and beartype
writes and compiles a wrapper for it, a millisecond; the wrapper of the first is used again.
"""

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Literal, TypeAliasType, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

# An int is accepted where a float is annotated, as mypy does (PEP 484).
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a function's arguments and result on every call.

    Two kinds of annotation cannot be checked on a lone function, `typing.Self` and a protocol that
    is not `runtime_checkable`; functions that have one are left to mypy.
    """
    if "<locals>" not in function.__qualname__:
        return _decorated(function)
    known = _wrappers.get(function.__code__)
    if known is not None and known[0] == function.__annotations__:
        return _same_for(known[1], function)
    wrapper = _decorated(function)
    if _FUNCTION in (getattr(wrapper, "__kwdefaults__", None) or {}):
        _wrappers[function.__code__] = function.__annotations__, wrapper
    return wrapper


_FUNCTION = "__beartype_func"
"""Where a wrapper of beartype has the function: the default of an argument."""
_wrappers: dict[CodeType, tuple[dict[str, Any], Any]] = {}
"""Annotations of inner functions, by their code, and a wrapper that checks them."""


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return _beartype(function)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        return function


def _same_for(wrapper: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper, for another function of the same code."""
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__)
    made.__kwdefaults__ = wrapper.__kwdefaults__ | {_FUNCTION: function}
    return functools.update_wrapper(made, function)


_with_shapes = jaxtyping.jaxtyped


def _may_have_shapes(annotation: Any) -> bool:
    """Whether jaxtyping has something to do for it; of one that is still text nobody knows."""
    if isinstance(annotation, TypeAliasType):
        return _may_have_shapes(annotation.__value__)
    if get_origin(annotation) is Literal:  # Its values may be text.
        return False
    if isinstance(annotation, str) or getattr(annotation, "__module__", "").startswith("jaxtyping"):
        return True
    parts = annotation if isinstance(annotation, list) else get_args(annotation)
    return any(map(_may_have_shapes, parts))


def _checked(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """Decorator that `--jaxtyping-packages` applies to functions and classes."""
    if function is None:
        return functools.partial(_checked, typechecker=typechecker)
    has_shapes = any(map(_may_have_shapes, getattr(function, "__annotations__", {}).values()))
    if inspect.isfunction(function) and not has_shapes:
        return typechecker(function)
    return _with_shapes(function, typechecker=typechecker)


jaxtyping.jaxtyped = _checked
