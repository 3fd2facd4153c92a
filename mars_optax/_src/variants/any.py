"""The door for any preconditioner: an estimator and a clip in front, an optimizer around."""

from typing import Any

import jax
import optax

from mars_optax._src import assembly, checks, named, transformation, trees, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf import precision
from mars_optax._src.states import State
from mars_optax._src.variants import adamw


class VarianceReducedState(State):
    """State of :func:`variance_reduced`; `inner_state` is that of `inner`."""


def _widened(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` with its state and the parameters, where those have 16 bits, as wide as directions.

    Branches in it have to agree on dtypes.
    """
    inner = optax.with_extra_args_support(inner)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        dtypes = {str(getattr(x, "dtype", "")) for x in jax.tree.leaves(state)}
        if dtypes & {"bfloat16", "float16"}:
            state = trees.cast_like(state, jax.eval_shape(inner.init, updates))
            params = jax.tree.map(precision.upcast, params)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


@named.named
def variance_reduced(
    inner: optax.GradientTransformation,
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    weight_decay: types.ScalarOrSchedule = 0.0,
    mask: types.Mask | None = None,
    *,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    optimize_1d: bool = False,
    learning_rate_1d: types.ScalarOrSchedule | None = None,
    b1_1d: jax.typing.ArrayLike = 0.9,
    b2_1d: jax.typing.ArrayLike = 0.95,
    eps_1d: jax.typing.ArrayLike | None = None,
    weight_decay_1d: types.ScalarOrSchedule | None = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    eps_root_1d: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Any preconditioner on variance-reduced gradients: MARS as a framework.

    For matrices :math:`x_{t+1} = x_t - \eta_t (\mathrm{inner}(\tilde c_t) + \lambda x_t)` with the
    corrected and clipped gradient :math:`\tilde c_t` of :func:`scale_by_mars`, all other leaves by
    AdamW with the values `*_1d`. At equal values ``inner=optax.scale_by_adam(b1, b2)`` is `mars`.

    Args:
      inner: An Optax transformation that makes directions of gradients and does not change their
        sign, such as :func:`optax.scale_by_adam`: with state of any shape, without learning rate
        and decay. An optimizer such as ``optax.adam(0.1)`` in its place would climb, as its updates
        have the opposite sign; only those of this package are refused. It sees the matrices
        alone, in at least float32, and :class:`optax.MaskedNode` in place of other leaves. Its
        state keeps the dtypes of `init`.
      b1: Decay rate of the momentum in `inner`, in [0, 1), which the correction's coefficient
        :math:`\gamma \beta_1 / (1-\beta_1)` shares.
      optimize_1d: Whether `inner` gets all leaves. The values `*_1d` are not used then.
      weight_dimension_numbers: ... None: all leaves of rank >= 2, each as a whole.
      mu_dtype: Storage dtype of the other leaves' first moments; None for the parameter's.
      nu_dtype: Storage dtype of their second moments; None for the parameter's, at least float32.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
      >>> tx = mars_optax.variance_reduced(optax.scale_by_factored_rms(), 0.1, b1=0.9)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     updates, state = tx.update(params, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{params['kernel'][0, 0]:.2f}", end=" ")
      0.90 0.80 0.70

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, Algorithm 1, whose
      preconditioner is arbitrary.
    """
    settings = locals()
    checks.directions("inner", inner)

    def rule(weight_dimension_numbers: Any, correction: Any) -> named.Transformation:
        own = {"weight_dimension_numbers": weight_dimension_numbers, "correction": correction}
        all_settings = {**settings, **own}
        return transformation.rule("variance_reduced", State, all_settings, inner=_widened(inner))

    vectors = adamw.for_vectors(settings)
    return assembly.optimizer("variance_reduced", rule, settings, VarianceReducedState, vectors)
