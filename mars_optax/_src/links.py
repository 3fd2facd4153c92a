"""The links of the chain, for any optimizer: correct the gradients, clip them leaf by leaf."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, in_shard_map, named, partition, previous, run, trees, types
from mars_optax._src.leaf import clipping, precision


class CorrectGradientsState(NamedTuple):
    """State of :func:`correct_gradients`; trees are of the parameters' structure, or None."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32
    prev_grad: optax.Updates | None  # in approximate mode, dtype=prev_grad_dtype or the parameter's
    prev_grad_scale: optax.Updates | None  # of an 8-bit prev_grad: float32, one for each row
    prev_params: optax.Params | None  # in exact mode and STORM, dtype=the parameter's
    prev_corrected: optax.Updates | None  # c of STORM, dtype=prev_grad_dtype or the parameter's


@named.named
def correct_gradients(
    gamma: types.ScalarOrSchedule = 0.025,
    b1: jax.typing.ArrayLike = 0.95,
    *,
    correction: Literal["approx", "exact", "storm"] = "approx",
    first_step: types.FirstStep = "zeros",
    prev_grad_dtype: types.DType = None,
    correction_clip: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds the scaled gradient correction of MARS to the gradients, in front of any optimizer.

    .. math::

      c_t = g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1})

    ``optax.chain(correct_gradients(gamma, b1), clip_by_leaf_norm(1.0), optax.scale_by_adam(b1,
    b2))`` computes what :func:`scale_by_mars` does. The result has the gradients' dtypes;
    arithmetic is in at least float32.

    At the first step :math:`c_1 = (1 + k) g_1` with :math:`k = \gamma \beta_1 / (1-\beta_1)` under
    ``first_step="zeros"``, as in the reference code, and :math:`c_1 = g_1` under
    ``"no_correction"``, the paper's :math:`x_0 = x_1`.

    Args:
      gamma: Scale :math:`\gamma_t` of the correction, a number (may be negative) or a schedule of
        the step count, which starts at 0. The coefficient is computed in at least float32.
      b1: Decay rate :math:`\beta_1` of the momentum that follows, in [0, 1). 0 turns the
        correction off.
      correction: ``"approx"``: the gradient of the previous step. ``"exact"``: that of this step's
        batch at the previous parameters, which ``update(..., grad_fn=f)`` obtains as
        ``f(previous_params)``. ``"storm"``: with the same :math:`g'_t = f(x_{t-1})`, the recursion
        :math:`c_t = g_t + (1-\gamma_t)(c_{t-1} - g'_t)`, :math:`c_1 = g_1`; `b1` and `first_step`
        are not used.
      first_step: ``"zeros"`` or ``"no_correction"``, see above.
      prev_grad_dtype: Storage dtype of :math:`g_{t-1}`, or of :math:`c_{t-1}` under ``"storm"``;
        None for each parameter's own. An 8-bit float (not under ``"storm"``) is stored with a
        float32 scale for each row along the last axis.
      correction_clip: Bound > 0 on the L2 norm, over all leaves together, of what is added to
        :math:`g_t`; None for no bound.

    Returns:
      A transformation with state :class:`CorrectGradientsState`.

    Raises:
      TypeError: If an argument is of the wrong kind; at ``init``, if a parameter is not inexact; at
        ``update``, if a gradient is not, or the state is another transformation's.
      ValueError: If an argument is out of its range; at ``update``, if gradients have other shapes,
        the state was made with other settings, or ``"exact"`` and ``"storm"`` lack `grad_fn` or
        `params`.

    Examples:
      The correction in front of Muon:

      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> tx = optax.chain(
      ...     mars_optax.correct_gradients(),
      ...     mars_optax.clip_by_leaf_norm(1.0),
      ...     optax.contrib.muon(learning_rate=0.02),
      ... )
      >>> params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
      >>> updates, state = tx.update(params, tx.init(params), params)

      On its own:

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
    checks.choice("correction", correction, ("approx", "exact", "storm"))
    checks.max_norm(correction_clip, name="correction_clip")
    is_storm = correction == "storm"
    if is_storm:
        checks.recursive_dtype("prev_grad_dtype", prev_grad_dtype)
    source = previous.PreviousGradient(
        gamma,
        b1,
        "exact" if is_storm else correction,
        "no_correction" if is_storm else first_step,
        prev_grad_dtype,
    )

    kept = {**source.kept, "prev_corrected": is_storm}

    def init_fn(params: optax.Params) -> CorrectGradientsState:
        checks.inexact_leaves(params)
        partition.record_axes(
            partition.resolve_axes(None, params, default=partition.matrix_from_rank_2)
        )
        return CorrectGradientsState(
            count=jnp.zeros([], jnp.int32),
            prev_corrected=previous.zeros(params, source.dtype) if is_storm else None,
            **source.init(params),
        )

    def update_fn(
        updates: optax.Updates,
        state: CorrectGradientsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CorrectGradientsState]:
        checks.state_type(state, CorrectGradientsState, "correct_gradients")
        field = "prev_grad" if kept["prev_grad"] else "prev_params"
        if getattr(state, field) is not None:
            checks.gradients(updates, getattr(state, field), f"`state.{field}`")
        wanted = {field: updates if is_kept else None for field, is_kept in kept.items()}
        checks.state_fields(state, wanted, "correct_gradients", previous.PER_ROW)
        wide = jax.tree.map(precision.widen, updates)
        prev_grad = source.gradients(updates, state, params, extra_args)
        if is_storm:
            # c = g + (1 - gamma) (c_prev - g_prev), and c = g at the first step.
            coefficient = jnp.where(state.count == 0, 0.0, 1 - source.gamma_at(state.count))
            minuend = state.prev_corrected
        else:
            coefficient = source.coefficient(state.count)
            minuend = wide

        def added(x: jax.Array, prev_grad: jax.Array, grad: jax.Array) -> jax.Array:
            dtype = precision.compute_dtype(x, prev_grad, grad)
            difference = precision.widen(x, dtype) - precision.widen(prev_grad, dtype)
            return jnp.multiply(precision.widen_scalar(coefficient, dtype), difference)

        corrections = jax.tree.map(added, minuend, prev_grad, wide)
        if correction_clip is not None:
            specs = in_shard_map.specs_of(extra_args, updates)
            in_shard_map.require_whole(updates, specs, "`correction_clip`")
            squares = jnp.asarray(optax.tree.norm(corrections, squared=True))
            factor = clipping.factor_of_squares(squares, correction_clip)
            corrections = jax.tree.map(
                lambda x: x * precision.widen_scalar(factor, precision.compute_dtype(x)),
                corrections,
            )
        corrected = jax.tree.map(jnp.add, wide, corrections)
        new_state = CorrectGradientsState(
            count=optax.safe_increment(state.count),
            prev_corrected=previous.copies(corrected, like=state.prev_corrected),
            **source.advance(updates, state, params),
        )
        return run.narrow(corrected, updates), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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
    one that is not finite. The finite entries of a leaf whose norm overflows become 0; a NaN
    stays where it is. It has
    no state: the first step is like any other. Norms are taken in at least float32.

    Args:
      max_norm: Bound > 0; None turns the clipping off.
      weight_dimension_numbers: Axes of the matrices, as in :func:`scale_by_mars`: slices along
        batch axes are clipped on their own. None: each leaf is clipped as a whole.

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

    def axes_of(tree: Any) -> Any:
        return partition.resolve_axes(weight_dimension_numbers, tree, partition.matrix_from_rank_2)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        checks.inexact_leaves(params)
        partition.record_axes(axes_of(params))
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        checks.inexact_leaves(updates, "Gradient")
        if max_norm is None:
            return updates, state
        axes = axes_of(updates)
        wide = jax.tree.map(precision.widen, updates)
        squares = [clipping.squares(x, a.of_one_norm) for x, a in trees.rows((wide, axes))]
        specs = in_shard_map.specs_of(extra_args, updates)
        squares = run.sum_shards(squares, updates, axes, specs)
        factors = [
            clipping.factor_of_squares(x, precision.widen_scalar(max_norm, x.dtype))
            for x in squares
        ]
        clipped = [x * factor for x, factor in zip(jax.tree.leaves(wide), factors, strict=True)]
        return run.narrow(jax.tree.unflatten(jax.tree.structure(updates), clipped), updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
