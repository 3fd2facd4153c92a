"""STORM-AdamW: AdamW on the recursive gradient estimator of STORM."""

from typing import Any

import jax
import optax

from mars_optax._src import assembly, checks, named, partition, types
from mars_optax._src.states import State
from mars_optax._src.variants import adamw


class StormAdamwState(State):
    """State of :func:`storm_adamw`."""


@named.named
def storm_adamw(
    learning_rate: types.ScalarOrSchedule,
    gamma: types.ScalarOrSchedule = 0.025,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: types.ScalarOrSchedule = 1e-4,
    mask: types.Mask | None = None,
    *,
    correction_clip: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
    mu_dtype: types.DType = None,
    eps_root: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW on STORM's recursive gradient estimator.

    .. math::

      c_t = g_t + (1-\gamma_t)(c_{t-1} - g'_t), \qquad c_1 = g_1,

    with :math:`g_t` the gradient of this batch at the parameters and :math:`g'_t` that of *the same
    batch at the previous parameters*, takes the place of the gradient in AdamW, for every leaf. The
    second evaluation is the point: with the stored gradient of the previous step in its place,
    :math:`c_t - g_t = (1-\gamma_t)(c_{t-1} - g_{t-1}) = \dots = 0`, and nothing is estimated. Each
    step evaluates two gradients; the state keeps the previous parameters and :math:`c_{t-1}`, two
    buffers more than AdamW's. With ``gamma=1`` it is :func:`optax.adamw`, but for dtypes in
    low precision: of state, arithmetic and updates.

    Args:
      gamma: Weight :math:`\gamma_t` of the fresh gradient, usually in (0, 1]; a number or a
        schedule. Small values average over many steps.
      b1: Decay rate :math:`\beta_1` of the first moment, in [0, 1).
      weight_decay: A number or a schedule, multiplied by the learning rate.
      correction_clip: Bound > 0 on the L2 norm, over all leaves together, of
        :math:`(1-\gamma_t)(c_{t-1} - g'_t)`; None for no bound. It limits what an outlier leaves
        behind, since the recursion has no decay of its own but :math:`1-\gamma_t`.
      nesterov: Whether to use Nesterov momentum, as in :func:`optax.adamw`.
      eps_root: Added to the second moment inside the root, after the bias correction, >= 0, as in
        :func:`optax.adamw`.

    Returns:
      An optimizer. `update` takes the keyword `grad_fn`: from parameters to this batch's gradients.
      Updates have the parameters' dtypes; decay and learning rate are applied in at least float32.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> params = jnp.zeros(2)
      >>> tx = mars_optax.storm_adamw(0.1, gamma=0.2)
      >>> state = tx.init(params)
      >>> for batch in (1.0, 3.0, 2.0):
      ...     grad_fn = lambda p: p - batch  # of half the sum of squares
      ...     updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{params[0]:.3f}", end=" ")
      0.100 0.200 0.300

    References:
      Cutkosky and Orabona, `Momentum-Based Variance Reduction in Non-Convex SGD
      <https://arxiv.org/abs/1905.10018>`_, 2019, Algorithm 1, whose :math:`a` is :math:`\gamma`.
    """
    settings = {**locals(), "correction": "storm", "max_norm": None}
    settings["weight_dimension_numbers"] = partition.no_matrices
    checks.flag("nesterov", nesterov)

    def rule(weight_dimension_numbers: Any = None, correction: Any = None) -> Any:
        return adamw.rule("storm_adamw", settings, nesterov=nesterov)

    return assembly.optimizer("storm_adamw", rule, settings, StormAdamwState)
