"""MARS-Lion: the sign of the momentum of the corrected gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import assembly, checks, named, transformation, trees, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf.momentum import momentum_step
from mars_optax._src.states import MomentumState, State
from mars_optax._src.variants import adamw


class ScaleByMarsLionState(MomentumState):
    """State of :func:`scale_by_mars_lion`."""

    __slots__ = ()


def lion_step(*arrays: Any, **scalars: Any) -> tuple[jax.Array, jax.Array]:
    """Lines 4 to 7 of Algorithm 3 of the paper, without learning rate and decay."""
    momentum, mu = momentum_step(*arrays, **scalars)
    return jnp.sign(momentum), mu


@named.named
def scale_by_mars_lion(
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    *,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    implementation: types.Implementation | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by the rule of MARS-Lion, for every leaf alike.

    .. math::

      c_t &= g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \mathrm{max\_norm} / \lVert c_t \rVert_2) \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      u_t = \mathrm{sign}(m_t)

    with sign(0) = 0, and z / abs(z) for complex numbers. There is one moving average and no bias
    correction, which a sign would not show; unlike :func:`optax.scale_by_lion` there is no second
    decay rate, whose interpolation the correction contains (Lemma 3.4 of the paper). The direction
    :math:`u_t` has the sign of the gradient and the gradient's dtype.

    At the first step :math:`c_1 = (1 + k) g_1` with :math:`k = \gamma \beta_1 / (1-\beta_1)` under
    ``first_step="zeros"``, as in the reference code, and :math:`c_1 = g_1` under
    ``"no_correction"``; both have the same sign for :math:`k > -1`.

    Args:
      b1: Decay rate :math:`\beta_1` of the momentum, in [0, 1). 0 turns the correction off.
      gamma: Scale :math:`\gamma_t` of the correction, a number (may be negative) or a schedule of
        the step count, which starts at 0. The coefficient is computed in at least float32.
      max_norm: Bound > 0 on the norm of each corrected gradient; None turns the clipping off.
      correction: ``"approx"``, the gradient of the previous step; ``"exact"``, that of this step's
        batch at the previous parameters, which ``update(..., grad_fn=f)`` obtains as
        ``f(previous_params)`` (the state keeps these in place of the previous gradient, and
        `params` is required); or ``"none"``.
      first_step: ``"zeros"`` or ``"no_correction"``, see above.
      mu_dtype: Storage dtype of :math:`m`; None for each parameter's own.
      prev_grad_dtype: Storage dtype of :math:`g_{t-1}`; None for each parameter's own. An 8-bit
        float is stored with a float32 scale for each row along the last axis.
      keep_prev_grad: Whether the state keeps :math:`g_{t-1}`. False takes the same steps without,
        and excludes the clip, exact mode and `prev_grad_dtype`: see :func:`scale_by_mars`.
      weight_dimension_numbers: Axes of the matrices, as in :func:`scale_by_mars`.
      implementation: What executes norms and the elementwise part: None or ``"xla"`` for XLA,
        ``"pallas"`` for kernels on Hopper GPUs and (norms aside) TPUs.

    Returns:
      A transformation with state :class:`ScaleByMarsLionState`.

    Raises:
      TypeError: If an argument is of the wrong kind; at ``init``, if a parameter is not inexact; at
        ``update``, if a gradient is not, or the state is another transformation's.
      ValueError: As :func:`scale_by_mars`.
      NotImplementedError: At ``update``, if kernels were asked for and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.scale_by_mars_lion()
      >>> params = jnp.zeros((1, 3))
      >>> state = tx.init(params)
      >>> direction, state = tx.update(jnp.array([[0.3, 0.0, -2.0]]), state)
      >>> print(direction)
      [[ 1.  0. -1.]]

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, Algorithm 3. Reference code:
      ``MARS/optimizers/mars.py``, ``mars_type="mars-lion"``, of https://github.com/AGI-Arena/MARS.
    """
    settings = locals()
    first = functools.partial(trees.zeros, dtype=checks.recursive_dtype("mu_dtype", mu_dtype))
    return transformation.rule(
        "scale_by_mars_lion",
        ScaleByMarsLionState,
        settings,
        step=lion_step,
        moments={"mu": first},
        scalars=lambda count: {"b1": b1},
    )


class MarsLionState(State):
    """State of :func:`mars_lion` in which vectors have a rule of their own."""

    __slots__ = ()


@named.named
def mars_lion(
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
    weight_decay_1d: types.ScalarOrSchedule | None = 0.1,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    implementation: types.Implementation | None = None,
    eps_root_1d: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-Lion: sign descent on variance-reduced gradients.

    Matrices are updated by

    .. math::

      x_{t+1} = x_t - \eta_t (\mathrm{sign}(m_t) + \lambda x_t)

    with the momentum :math:`m_t` of :func:`scale_by_mars_lion`, whose docstring has the equations
    and the first step, and all other leaves by AdamW with the values `*_1d`.

    Differences from the reference code: as for :func:`mars`, and there is no second moment, which
    is allocated there and stays zero.

    Args:
      learning_rate: :math:`\eta_t`, a number or a schedule of the step count, which starts at 0.
        Every entry moves by it: choose it well below AdamW's.
      b1: Decay rate of the momentum, in [0, 1).
      gamma: Scale of the correction, a number or a schedule.
      weight_decay: :math:`\lambda` of the matrices, a number or a schedule.
      mask: Which leaves decay, as in :func:`mars`.
      max_norm: Bound > 0 on the norm of each matrix's corrected gradient; None for no clip.
      correction: ``"approx"``, ``"exact"`` (with ``update(..., grad_fn=f)``) or ``"none"``, see
        :func:`scale_by_mars_lion`.
      first_step: ``"zeros"`` or ``"no_correction"``.
      optimize_1d: Whether the other leaves, too, get the rule of MARS-Lion, with the main values.
        The values `*_1d` are not used then.
      learning_rate_1d: Learning rate of the other leaves, a number or a schedule; None for
        `learning_rate`. AdamW wants a larger one than a sign does.
      b1_1d: Decay rate of their first moment, in [0, 1).
      b2_1d: Decay rate of their second moment, in [0, 1).
      eps_1d: Their epsilon, >= 0; None for 1e-8.
      weight_decay_1d: Their weight decay; None for `weight_decay`.
      weight_dimension_numbers: Which leaves are matrices, as in :func:`mars`.
      mu_dtype: Storage dtype of the first moments; None for the parameter's.
      prev_grad_dtype: Storage dtype of the previous gradient; None for the parameter's.
      keep_prev_grad: Whether the state keeps the previous gradient, see :func:`scale_by_mars_lion`.
      implementation: What executes norms and the elementwise part: ``"xla"``; ``"pallas"``,
        kernels for Hopper GPUs and (norms aside) TPUs; or None, which takes kernels in
        :func:`fused_step` alone, where they were measured to be faster.
      eps_root_1d: Added to the second moment of the other leaves inside the root, >= 0; None for
        0.

    Returns:
      An optimizer, as :func:`mars` does.

    Raises:
      TypeError: As :func:`mars`.
      ValueError: As :func:`mars`.
      NotImplementedError: As :func:`mars`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> params = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
      >>> tx = mars_optax.mars_lion(learning_rate=0.1)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     grads = params  # of half the sum of squares
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{jnp.sum(params['kernel'] ** 2) / 2:.2f}", end=" ")
      6.50 5.91 5.36

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, Algorithm 3. Reference code:
      ``MARS/optimizers/mars.py``, ``mars_type="mars-lion"``, of https://github.com/AGI-Arena/MARS.
    """
    settings = locals()
    checks.flag("optimize_1d", optimize_1d)
    return assembly.optimizer(
        "mars_lion",
        scale_by_mars_lion,
        settings,
        vector_rule=None if optimize_1d else adamw.for_vectors(settings),
        state_type=MarsLionState,
        implementation=implementation,
    )
