"""STORM-AdamW: AdamW on the recursive gradient estimator of STORM."""

import functools
from typing import Any

import jax
import optax

from mars_optax._src import (
    assembly,
    checks,
    links,
    named,
    partition,
    previous,
    transformation,
    types,
)
from mars_optax._src.leaf import precision
from mars_optax._src.leaf.momentum import bias_correction
from mars_optax._src.leaf.root import root
from mars_optax._src.variants import adamw


def nadam_step(
    grad: jax.Array,
    prev_grad: None,
    clip: None,
    mu: jax.Array,
    nu: jax.Array,
    nu_max: None,
    *,
    coefficient: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_correction: Any,
    next_mu_correction: Any,
    nu_correction: Any,
) -> tuple[Any, ...]:
    """Adam with Nesterov momentum, as :func:`optax.scale_by_adam` has it."""
    del prev_grad, clip, coefficient
    mu = optax.tree.update_moment(grad, mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(grad, nu, b2, 2)
    momentum = b1 * (mu / next_mu_correction) + (1 - b1) * (grad / mu_correction)
    return momentum / (root(nu / nu_correction + eps_root) + eps), mu, nu, nu_max


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
    :math:`c_t - g_t = (1-\gamma_t)(c_{t-1} - g_{t-1}) = \dots = 0`, and nothing is estimated.

    With ``gamma=1`` it is :func:`optax.adamw`. Each step evaluates two gradients; the state keeps
    the previous parameters and :math:`c_{t-1}`, two buffers more than AdamW's, and its dtypes never
    change. At the first step :math:`c_1 = g_1`.

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
      An optimizer, whose `update` takes the keyword `grad_fn`: a function from parameters to the
      gradients of this step's batch.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> def loss(params, batch):
      ...     return jnp.mean(jnp.square(params - batch))
      >>> params = jnp.zeros(2)
      >>> tx = mars_optax.storm_adamw(0.1, gamma=0.2)
      >>> state = tx.init(params)
      >>> for batch in (jnp.array([1.0, 2.0]), jnp.array([3.0, 2.0]), jnp.array([2.0, 2.0])):
      ...     grad_fn = lambda p: jax.grad(loss)(p, batch)
      ...     updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{params[0]:.3f}", end=" ")
      0.100 0.200 0.300

    References:
      Cutkosky and Orabona, `Momentum-Based Variance Reduction in Non-Convex SGD
      <https://arxiv.org/abs/1905.10018>`_, 2019: the estimator is that of Algorithm 1 (STORM), with
      :math:`\gamma` for its :math:`a`.
    """
    checks.flag("nesterov", nesterov)
    first = functools.partial(previous.zeros, dtype=checks.recursive_dtype("mu_dtype", mu_dtype))
    adam = adamw.scale_by_mars(
        b1,
        b2,
        eps,
        correction="none",
        max_norm=None,
        mu_dtype=mu_dtype,
        eps_root=eps_root,
        weight_dimension_numbers=partition.no_matrices,
    )

    def scalars(count: jax.Array) -> dict[str, Any]:
        return {
            "b1": b1,
            "b2": b2,
            "eps": eps,
            "eps_root": eps_root,
            "mu_correction": bias_correction(precision.widen_scalar(b1), count),
            "next_mu_correction": bias_correction(
                precision.widen_scalar(b1), optax.safe_increment(count)
            ),
            "nu_correction": bias_correction(precision.widen_scalar(b2), count),
        }

    nadam = transformation.variance_reduced(
        "storm_adamw",
        adamw.ScaleByMarsState,
        nadam_step,
        moments={
            "mu": first,
            "nu": functools.partial(previous.zeros, averages_squares=True),
            "nu_max": lambda params: None,
        },
        scalars=scalars,
        gamma=0.0,
        b1=b1,
        max_norm=None,
        correction="none",
        first_step="zeros",
        prev_grad_dtype=None,
        keep_prev_grad=True,
        weight_dimension_numbers=partition.no_matrices,
        implementation=None,
    )
    estimator = links.correct_gradients(gamma, correction="storm", correction_clip=correction_clip)
    rule = optax.chain(estimator, nadam if nesterov else adam)
    return assembly.optimizer(
        "storm_adamw",
        lambda weight_dimension_numbers, correction: rule,
        None,
        correction="exact",
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        learning_rate_1d=None,
        weight_decay_1d=None,
        mask=mask,
        weight_dimension_numbers=None,
        default=partition.matrix_from_rank_2,
    )
