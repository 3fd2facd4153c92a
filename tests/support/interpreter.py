"""Turning Pallas's interpreter on and off, as a decorator or in a `with`."""

import contextlib
import os
from collections.abc import Iterator

import jax

_VARIABLE = "MARS_OPTAX_PALLAS_INTERPRET"


@contextlib.contextmanager
def _set(value: str) -> Iterator[None]:
    # Only this variable: what Pallas itself puts into the environment has to stay.
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def always() -> contextlib.AbstractContextManager[None]:
    """With the interpreter."""
    return _set("1")


def never() -> contextlib.AbstractContextManager[None]:
    """Without it."""
    return _set("0")


def elsewhere() -> contextlib.AbstractContextManager[None]:
    """With it, but on a GPU with the kernels themselves."""
    return _set("0" if jax.default_backend() == "gpu" else "1")
