"""Nodes of parameter trees, shared by all tests.

JAX takes the definitions of two registered dataclasses with as many fields for equal, and where
their hashes meet, too, a compiled function returns the class it saw first. So these differ in their
number of fields, and a test that wants such a class takes one of them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Any
    bias: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CallableDense:
    """A module as Equinox has them: a tree that can be called."""

    weight: Any
    offset: Any
    scale: Any = None

    def __call__(self, x: Any) -> Any:
        return x @ self.weight + self.offset
