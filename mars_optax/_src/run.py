"""How a variant's step is executed: leaf by leaf, widened on entry and narrowed on exit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import trees
from mars_optax._src.leaf import clipping, correction, precision

# (grad, prev_grad, clip, *moments, **scalars) -> (direction, *moments), all elementwise. What a
# setting leaves out is None: the previous gradient, the clip's factor, a moment.
Step = Callable[..., tuple[Any, ...]]


def run_step(
    step: Step,
    updates: optax.Updates,
    prev_grad: Any,
    moments: tuple[Any, ...],
    *,
    coefficient: Any,
    max_norm: Any,
    axes: Any,
    **scalars: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """Runs `step` on every leaf.

    Args:
      step: The elementwise update of one leaf. It gets arrays of at least float32, the factor of
        the clip broadcast along the axes of its norm, and the scalars; it never reduces or
        reshapes.
      updates: The gradients.
      prev_grad: The previous gradients, or None.
      moments: The moving averages, each a tree or None.
      coefficient: That of the correction.
      max_norm: The bound on each matrix's corrected gradient, or None.
      axes: Each leaf's `Axes`, over which its norm is taken.
      **scalars: Hyperparameters that the step takes besides `coefficient`.

    Returns:
      The directions in at least float32, which :func:`narrow` gives the dtype of the gradients, and
      the new moments in the dtypes of the old ones.
    """

    def on_leaf(grad: Any, prev: Any, leaf_axes: Any, *leaf_moments: Any) -> tuple[Any, ...]:
        present = [x for x in (grad, prev, *leaf_moments) if x is not None]
        dtype = precision.compute_dtype(*present)

        def wide(x: Any) -> Any:
            return None if x is None else precision.widen(x, dtype)

        grad, prev, k = wide(grad), wide(prev), precision.widen_scalar(coefficient, dtype)
        clip = None
        if max_norm is not None:
            c = correction.corrected_gradient(grad, prev, k)
            bound = precision.widen_scalar(max_norm, dtype)
            clip = clipping.clip_factor(c, bound, leaf_axes.of_one_norm)
        direction, *new_moments = step(
            grad,
            prev,
            clip,
            *map(wide, leaf_moments),
            coefficient=k,
            **{name: precision.widen_scalar(value, dtype) for name, value in scalars.items()},
        )
        stored = (
            None if old is None else new.astype(old.dtype)
            for old, new in zip(leaf_moments, new_moments, strict=True)
        )
        return direction, *stored

    direction, *new_moments = trees.map_unzip(
        on_leaf, (updates, prev_grad, axes, *moments), (updates, *moments)
    )
    return direction, tuple(new_moments)


def narrow(tree: Any, like: Any) -> Any:
    """`tree` in the dtypes of `like`, leaf by leaf."""
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)
