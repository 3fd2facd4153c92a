"""Transformations that show how they were made."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import optax

from mars_optax._src import arguments

Factory = TypeVar("Factory", bound=Callable[..., optax.GradientTransformationExtraArgs])


class Transformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A transformation that knows its settings, and maybe how to make new parameters itself.

    By contract it is a tuple of two functions: all else are attributes. They are None in one that
    lacks them, or was made anew of another's `init` and `update`.
    """

    # Of a rule: (updates, state, finish, extra_args) -> (new parameters, new state), with what
    # follows the directions as `finish`; which leaves are matrices if none are declared; its state
    # with True for each field that the settings keep; its estimator.
    step: Callable[..., tuple[Any, Any]] | None = None
    default: Any = None
    kept: Any = None
    estimator: Any = None
    # Of an optimizer: (updates, state, params, extra_args) -> (new parameters, new state).
    fused_step: Callable[..., tuple[Any, Any]] | None = None
    # The name of the public function that made it, and the arguments that it was given.
    made_by: tuple[str, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        if self.made_by is None:
            return str(super().__repr__())
        name, settings = self.made_by
        return f"{name}({', '.join(f'{key}={_text(value)}' for key, value in settings.items())})"


def named(factory: Factory) -> Factory:
    """Makes what a factory returns show name and settings; completes the factory's docstring."""
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Transformation:
        result = factory(*args, **kwargs)
        if not isinstance(result, Transformation):
            result = Transformation(*result)
        given, known = signature.bind(*args, **kwargs).arguments, signature.parameters
        own = {k: x for k, x in given.items() if not _is_plainly(x, known[k].default)}
        result.made_by = factory.__name__, own
        return result

    if factory.__doc__ is not None:  # as under -OO
        build.__doc__ = arguments.complete(factory.__doc__, signature.parameters)
    return cast(Factory, build)


def _is_plainly(value: Any, default: Any) -> bool:
    """Whether they are equal, and no arrays, whose comparison would be one."""
    return type(value) is type(default) and bool(value == default)


def _text(value: Any) -> str:
    """A setting on one short line; of a function its name, and of what Optax made its maker's."""
    if isinstance(value, optax.GradientTransformation) and not hasattr(value, "made_by"):
        return f"{_text(value.update).partition('.')[0]}(...)"
    name = str(getattr(value, "__qualname__", "")).replace(".<locals>", "")
    text = name or re.sub(" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
    return text if len(text) <= 80 else f"{text[:77]}..."
