"""The states of rules and optimizers, and finding them in the nested states of Optax's wrappers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from mars_optax._src import estimator


class State(NamedTuple):
    """State of a rule, or of an optimizer that has one for matrices and one for vectors.

    Each tree has the structure of the parameters, in an optimizer with :class:`optax.MaskedNode`
    for those whose rule does not keep it. What no rule keeps is None.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates | None = None  # first moment, dtype=mu_dtype or the parameter's
    nu: optax.Updates | None = None  # second moment, real, dtype=nu_dtype or at least float32
    prev_grad: optax.Updates | None = None  # dtype=prev_grad_dtype or the parameter's
    prev_grad_scale: optax.Updates | None = None  # of an 8-bit prev_grad: float32, one for each row
    prev_params: optax.Params | None = None  # where grad_fn is evaluated, dtype=the parameter's
    nu_max: optax.Updates | None = None  # largest nu so far, as nu
    prev_corrected: optax.Updates | None = None  # c at prev_params, or the anchor, as prev_grad
    gamma_state: Any = None  # an AdaptiveGammaState
    inner_state: Any = None  # of the preconditioner


class MomentumState(NamedTuple):
    """State of a rule whose moving averages are the momentum alone; see :class:`State`."""

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    prev_grad: optax.Updates | None = None
    prev_grad_scale: optax.Updates | None = None
    prev_params: optax.Params | None = None
    prev_corrected: optax.Updates | None = None
    gamma_state: Any = None
    inner_state: Any = None


class CorrectGradientsState(NamedTuple):
    """State of :func:`correct_gradients`, with fields of :class:`ScaleByMarsState`."""

    count: jax.Array  # type: ignore[assignment]
    prev_grad: optax.Updates | None
    prev_grad_scale: optax.Updates | None
    prev_params: optax.Params | None
    prev_corrected: optax.Updates | None
    gamma_state: Any = None


def with_previous_gradient(state: Any) -> list[Any]:
    """The states, at any depth, that keep a previous gradient."""
    return [node for node in jax.tree.leaves(state, is_leaf=_keeps) if _keeps(node)]


def map_previous_gradients(fn: Callable[[Any], Any], state: Any) -> Any:
    """Replaces each state that keeps a previous gradient by what `fn` makes of it."""
    return jax.tree.map(lambda node: fn(node) if _keeps(node) else node, state, is_leaf=_keeps)


def previous_gradients(node: Any) -> dict[tuple[Any, ...], Any]:
    """The previous gradients that a state keeps, by the path of their parameter."""
    return dict(jax.tree_util.tree_leaves_with_path(estimator.stored_gradients(node)))


# A user's own tuple of parameters may have a field of one of these names, but not all of them.
_FIELDS = frozenset({"count", "prev_grad", "prev_grad_scale", "prev_params"})


def _keeps(node: Any) -> bool:
    return _FIELDS.issubset(getattr(node, "_fields", ())) and node.prev_grad is not None
