"""Where the previous gradient of the correction comes from, and what the state keeps for it."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, trees, types
from mars_optax._src.leaf import correction, precision, quantization


class Mode(enum.Enum):
    """A correction that users cannot ask for. A member survives pickling, as an object does not."""

    # An optimizer around the transformation hands the previous gradients over, as the extra
    # argument `prev_grad`: it evaluates `grad_fn` for all parameters, matrices and vectors.
    HANDED_OVER = enum.auto()


# The fields that have one number for each row of a leaf.
PER_ROW: Final = ("prev_grad_scale",)


@dataclasses.dataclass(frozen=True)
class PreviousGradient:
    """The previous gradient of the correction, and its coefficient.

    Attributes:
      gamma: The scale of the correction, a number or a schedule.
      b1: The decay rate of the momentum, which the coefficient shares.
      mode: "approx", the gradient of the previous step (Remark 3.3 of the paper); "exact", that of
        this batch at the previous parameters; "none", no correction; or
        `Mode.HANDED_OVER`.
      first_step: What the previous gradient of the first step is: "zeros", or "no_correction".
      dtype: The dtype of the buffer of "approx"; None is each parameter's own.
    """

    gamma: types.ScalarOrSchedule
    b1: jax.typing.ArrayLike
    mode: Any = "approx"
    first_step: types.FirstStep = "zeros"
    dtype: Any = None

    def __post_init__(self) -> None:
        checks.scalar_or_schedule("gamma", self.gamma)
        checks.decay_rate("b1", self.b1)
        checks.choice("first_step", self.first_step, ("zeros", "no_correction"))
        object.__setattr__(self, "dtype", checks.float_dtype("prev_grad_dtype", self.dtype))

    @property
    def kept(self) -> dict[str, bool]:
        """The fields of the state that belong to the previous gradient, and if they are kept."""
        is_stored = self.mode == "approx"
        return {
            "prev_grad": is_stored,
            "prev_grad_scale": is_stored and quantization.is_scaled(self.dtype),
            "prev_params": self.mode == "exact",
        }

    def init(self, params: optax.Params) -> dict[str, Any]:
        """The same fields before the first step."""
        kept = self.kept
        return {
            "prev_grad": zeros(params, self.dtype) if kept["prev_grad"] else None,
            "prev_grad_scale": scales(params, self.dtype) if kept["prev_grad_scale"] else None,
            "prev_params": copies(params, params) if kept["prev_params"] else None,
        }

    def coefficient(self, count: jax.Array) -> Any:
        """The factor of g - g_prev at this step, gamma b1 / (1 - b1)."""
        k = correction.correction_coefficient(self.gamma_at(count), self.b1)
        return jnp.where(count == 0, 0.0, k) if self.first_step == "no_correction" else k

    def gamma_at(self, count: jax.Array) -> Any:
        """Gamma at a step, counted from 0, in at least float32."""
        return precision.widen_scalar(self.gamma(count) if callable(self.gamma) else self.gamma)

    def gradients(
        self, updates: optax.Updates, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> Any:
        """The previous gradients of this step, or None for no correction."""
        if self.mode == "approx":
            return stored_gradients(state)
        if self.mode == "none":
            return None
        if self.mode == "exact":
            checks.exact_arguments(params, extra_args)
            prev_grad = evaluate(extra_args["grad_fn"], state.prev_params, updates)
        else:
            prev_grad = extra_args["prev_grad"]
        if self.first_step == "zeros":
            # There are no previous parameters before the first step.
            prev_grad = jax.tree.map(
                lambda g: jnp.where(state.count == 0, precision.beside(0, g), g), prev_grad
            )
        return prev_grad

    def advance(self, updates: optax.Updates, state: Any, params: Any) -> dict[str, Any]:
        """The same fields after this step, in the dtypes that they have."""
        if state.prev_grad_scale is None:
            prev_grad, prev_grad_scale = copies(updates, like=state.prev_grad), None
        else:
            prev_grad, prev_grad_scale = trees.map_unzip(
                lambda g, prev: quantization.quantize(jnp.asarray(g), prev.dtype),
                (updates, state.prev_grad),
                (state.prev_grad, state.prev_grad_scale),
            )
        return {
            "prev_grad": prev_grad,
            "prev_grad_scale": prev_grad_scale,
            "prev_params": copies(params, like=state.prev_params),
        }


def evaluate(grad_fn: Any, prev_params: Any, updates: optax.Updates) -> Any:
    """The gradients of this batch at the previous parameters, of the structure of `updates`."""
    prev_grad = grad_fn(prev_params)
    advice = "Return gradients as `jax.grad` does: one for each parameter, of its shape."
    checks.same_shapes("grad_fn", prev_grad, updates, "the gradients", advice)
    return prev_grad


def stored_gradients(state: Any) -> Any:
    """The previous gradients that a state keeps, by their scales where it has such."""
    if state.prev_grad_scale is None:
        return state.prev_grad
    return jax.tree.map(quantization.dequantize, state.prev_grad, state.prev_grad_scale)


def scales(params: optax.Params, dtype: Any) -> Any:
    """The scales of 8-bit buffers of zeros."""

    def on_leaf(p: Any) -> jax.Array:
        # Made as in every later step, they lie on a mesh as those do.
        return quantization.quantize(_zeros_like(p), precision.storage_dtype(p, dtype))[1]

    return jax.tree.map(on_leaf, params)


def zeros(params: optax.Params, dtype: Any = None, *, averages_squares: bool = False) -> Any:
    """A buffer of zeros for each parameter, in its storage dtype."""
    return jax.tree.map(
        lambda p: _zeros_like(
            p, precision.storage_dtype(p, dtype, averages_squares=averages_squares)
        ),
        params,
    )


def _zeros_like(p: Any, dtype: Any = None) -> jax.Array:
    """Zeros that lie on the devices as `p` does, but in their memory where `p` is in the host's."""
    zero = jnp.zeros_like(p, dtype=dtype)
    if not isinstance(p, jax.core.Tracer) or precision.host_memory_of(p) is not None:
        return zero
    # Under jit on a mesh of automatic axes a constant would be whole on every device: the operand
    # that is never chosen tells the compiler where to put it.
    like = p if jnp.iscomplexobj(zero) else jnp.real(p)
    return jnp.where(jnp.zeros_like(p, dtype=bool), like.astype(zero.dtype), zero)


def copies(tree: Any, like: Any) -> Any:
    """Copies of the leaves of `tree`, in the dtypes of `like`; None where `like` is None.

    Kept by reference, an eager gradient and the state would be one buffer, and donating both, or
    overwriting the gradient in place, would fail. Under jit a copy costs nothing.
    """
    if like is None:
        return None
    return jax.tree.map(lambda x, y: precision.copied(x, jnp.result_type(y)), tree, like)
