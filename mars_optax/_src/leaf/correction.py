"""The corrected gradient c = g + k (g - g_prev), k = gamma b1 / (1 - b1)."""

from typing import Any

import jax

from mars_optax._src.leaf import precision


def correction_coefficient(gamma: Any, b1: Any) -> Any:
    """Gamma b1 / (1 - b1), in double precision for Python numbers, else in at least float32."""
    gamma, b1 = precision.widen_scalar(gamma), precision.widen_scalar(b1)
    return gamma * b1 / (1 - b1)


def corrected_gradient(
    grad: jax.Array, prev_grad: jax.Array | None, coefficient: Any, clip: jax.Array | None = None
) -> jax.Array:
    """Equation (3.10) of the paper, and (3.5) where the factor of the clip is known already.

    Without a previous gradient there is no correction, without a factor no clip.
    """
    c = grad if prev_grad is None else grad + coefficient * (grad - prev_grad)
    return c if clip is None else c * clip
