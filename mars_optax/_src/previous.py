"""Where the previous gradient of the correction comes from: a buffer in the state, or nowhere."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, types
from mars_optax._src.leaf import correction, precision


@dataclasses.dataclass(frozen=True)
class PreviousGradient:
    """The approximate correction, Remark 3.3 of the paper: the gradient of the previous step.

    Attributes:
      gamma: The scale of the correction, a number or a schedule.
      b1: The decay rate of the momentum, which the coefficient shares.
      mode: "approx", or "none" for no correction and no buffer.
      first_step: What the previous gradient of the first step is: "zeros", or "no_correction".
      dtype: The dtype of the buffer; None is each parameter's own.
    """

    gamma: types.ScalarOrSchedule
    b1: jax.typing.ArrayLike
    mode: str = "approx"
    first_step: types.FirstStep = "zeros"
    dtype: Any = None

    def __post_init__(self) -> None:
        checks.scalar_or_schedule("gamma", self.gamma)
        checks.decay_rate("b1", self.b1)
        checks.choice("first_step", self.first_step, ("zeros", "no_correction"))
        object.__setattr__(self, "dtype", checks.float_dtype("prev_grad_dtype", self.dtype))

    def init(self, params: optax.Params) -> Any:
        """The buffer before the first step."""
        return None if self.mode == "none" else zeros(params, self.dtype)

    def coefficient(self, count: jax.Array) -> Any:
        """The factor of g - g_prev at this step, gamma b1 / (1 - b1)."""
        gamma = self.gamma(count) if callable(self.gamma) else self.gamma
        k = correction.correction_coefficient(gamma, self.b1)
        return jnp.where(count == 0, 0.0, k) if self.first_step == "no_correction" else k

    def advance(self, updates: optax.Updates, prev_grad: Any) -> Any:
        """The buffer after this step, in the dtype it has."""
        if prev_grad is None:
            return None
        # A copy: kept by reference, an eager gradient and the state would be one buffer, and
        # donating both, or overwriting the gradient in place, would fail. Under jit it costs
        # nothing.
        return jax.tree.map(
            lambda g, prev: jnp.array(g, dtype=prev.dtype, copy=True), updates, prev_grad
        )


def zeros(params: optax.Params, dtype: Any = None, *, averages_squares: bool = False) -> Any:
    """A buffer of zeros for each parameter, in its storage dtype."""
    return jax.tree.map(
        lambda p: jnp.zeros_like(
            p, dtype=precision.storage_dtype(p, dtype, averages_squares=averages_squares)
        ),
        params,
    )
