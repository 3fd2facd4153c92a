"""The links of the chain, for any optimizer: correct the gradients, clip them leaf by leaf."""

import functools
from typing import Any

import jax
import optax

from mars_optax._src import checks, in_shard_map, named, partition, transformation, trees, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.estimator import Estimate
from mars_optax._src.run import run_step
from mars_optax._src.states import CorrectGradientsState


@named.named
def correct_gradients(
    gamma: Gamma = 0.025,
    b1: jax.typing.ArrayLike = 0.95,
    *,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    prev_grad_dtype: types.DType = None,
    correction_clip: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds the scaled gradient correction of MARS to the gradients, in front of any optimizer.

    .. math::

      c_t = g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1})

    ``optax.chain(correct_gradients(gamma, b1), clip_by_leaf_norm(1.0), optax.scale_by_adam(b1,
    b2))`` computes what :func:`scale_by_mars` does; :func:`optax.contrib.muon` may follow as well.
    The result has the gradients' dtypes; arithmetic is in at least float32.

    Args:
      b1: Decay rate :math:`\beta_1` of the momentum that follows, in [0, 1). 0 turns the
        correction off. Like `first_step`, only ``"approx"`` and ``"exact"`` use it.
      correction_clip: Bound > 0 on the L2 norm, over all leaves together, of what is added to
        :math:`g_t`; None for no bound.
      weight_dimension_numbers: ... An :class:`AdaptiveGamma` has a gamma for each; nothing else
        depends on it. None: each leaf as a whole.

    Returns:
      A transformation with state :class:`CorrectGradientsState`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.correct_gradients(gamma=0.1, b1=0.9)  # a coefficient of 0.9
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([1.0, 2.0]), jnp.array([2.0, 2.0])):
      ...     corrected, state = tx.update(grads, state)
      ...     print(corrected)
      [1.9 3.8]
      [2.9 2. ]

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, equation (3.10) and Remark 3.3.
      Cutkosky and Orabona, `Momentum-Based Variance Reduction in Non-Convex SGD
      <https://arxiv.org/abs/1905.10018>`_, 2019, Algorithm 1, for STORM.
    """
    settings = {**locals(), "max_norm": None}
    return transformation.rule("correct_gradients", CorrectGradientsState, settings)


@named.named
def clip_by_leaf_norm(
    max_norm: jax.typing.ArrayLike | None = 1.0,
    *,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Bounds the L2 norm of every leaf, or of every matrix of a stack, on its own.

    .. math::

      \tilde c = c \min(1, \mathrm{max\_norm} / \lVert c \rVert_2)

    Unlike :func:`optax.clip_by_global_norm` no leaf influences another: neither a frozen one nor
    one that is not finite. The finite entries of a leaf whose norm overflows become 0; a NaN stays
    where it is. The first step is like any other. Norms are taken in at least float32.

    Args:
      max_norm: Bound > 0; None turns the clipping off.
      weight_dimension_numbers: ... None: each leaf is clipped as a whole.

    Returns:
      A transformation without state.

    Raises:
      TypeError: If `max_norm` is no number or, at ``init``, a parameter is not inexact.
      ValueError: If `max_norm` is out of its range or, at ``init``, axes do not fit a leaf.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.clip_by_leaf_norm(1.0)
      >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.3, 0.4])}
      >>> clipped, _ = tx.update(grads, tx.init(grads))
      >>> print(clipped["a"], clipped["b"])
      [0.6 0.8] [0.3 0.4]

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, equation (3.5).
    """
    checks.max_norm(max_norm)
    partition.check_spec(weight_dimension_numbers)
    default, numbers = partition.matrix_from_rank_2, weight_dimension_numbers
    axes_of = functools.partial(partition.resolve_axes, numbers, default=default)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        checks.inexact_leaves(params)
        partition.record_axes(axes_of(params))
        return optax.EmptyState()

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        checks.inexact_leaves(updates, "Gradient")
        if max_norm is None:
            return updates, state
        step, nothing = transformation.identity_step, Estimate(None, 0.0)
        how = {"max_norm": max_norm, "axes": axes_of(updates), "implementation": "xla"}
        specs = in_shard_map.specs_of(extra_args, updates)
        clipped, _ = run_step(step, updates, nothing, (), **how, specs=specs)
        return trees.cast_like(clipped, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
