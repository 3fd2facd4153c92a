"""Finding this package's states in the nested states of Optax's wrappers."""

from collections.abc import Callable
from typing import Any

import jax

from mars_optax._src import previous


def with_previous_gradient(state: Any) -> list[Any]:
    """The states, at any depth, that keep a previous gradient."""
    return [node for node in jax.tree.leaves(state, is_leaf=_keeps) if _keeps(node)]


def map_previous_gradients(fn: Callable[[Any], Any], state: Any) -> Any:
    """Replaces each state that keeps a previous gradient by what `fn` makes of it."""
    return jax.tree.map(lambda node: fn(node) if _keeps(node) else node, state, is_leaf=_keeps)


def previous_gradients(node: Any) -> dict[tuple[Any, ...], Any]:
    """The previous gradients that a state keeps, by the path of their parameter."""
    return dict(jax.tree_util.tree_leaves_with_path(previous.stored_gradients(node)))


# A user's own tuple of parameters may have a field of one of these names, but not all of them.
_FIELDS = frozenset({"count", "prev_grad", "prev_grad_scale", "prev_params"})


def _keeps(node: Any) -> bool:
    return _FIELDS.issubset(getattr(node, "_fields", ())) and node.prev_grad is not None
