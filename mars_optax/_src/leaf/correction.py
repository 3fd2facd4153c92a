"""The corrected gradient c = g + k (a - b), in the one place that computes it."""

from typing import Any

import jax

from mars_optax._src.leaf import precision


def correction_coefficient(gamma: Any, b1: Any) -> Any:
    """Gamma b1 / (1 - b1), in double precision for Python numbers, else in at least float32."""
    gamma, b1 = precision.upcast_scalar(gamma), precision.upcast_scalar(b1)
    return gamma * b1 / (1 - b1)


def corrected_gradient(
    grad: jax.Array, prev_grad: jax.Array | None, coefficient: Any, estimate: Any = None
) -> jax.Array:
    """Equation (3.10) of the paper, whose difference is that of the gradient to the previous one.

    Recursive estimators and those with an anchor have an estimate of the gradient where the
    previous gradient is taken, and add its difference to that. Without a previous gradient, c = g.
    """
    if prev_grad is None:
        return grad
    return grad + coefficient * ((grad if estimate is None else estimate) - prev_grad)
