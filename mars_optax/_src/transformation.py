"""What all variants have in common: state, correction, clip, step, and their order."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, in_shard_map, named, partition, previous, run, types
from mars_optax._src.leaf import quantization


def variance_reduced(  # noqa: D417 (the others are told of where users read)
    name: str,
    state_type: type,
    step: run.Step,
    *,
    moments: Mapping[str, Callable[[optax.Params], Any]],
    scalars: Callable[[jax.Array], Mapping[str, Any]],
    gamma: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike,
    max_norm: jax.typing.ArrayLike | None,
    correction: types.Correction,
    first_step: types.FirstStep,
    prev_grad_dtype: types.DType,
    keep_prev_grad: bool,
    weight_dimension_numbers: types.WeightDimensionNumbers,
    implementation: types.Implementation | None,
    matrix_directions: Callable[[Any, Any, Any], Any] | None = None,
) -> named.Transformation:
    """Builds a variant's transformation.

    The arguments not told of here are those of the same name of the public functions.

    Args:
      name: The public name, for errors.
      state_type: The state, with the fields `count`, `prev_grad`, `prev_grad_scale`,
        `prev_params` and those of `moments`.
      step: The elementwise update of one leaf, see :data:`run.Step`.
      moments: The moving averages in the order in which `step` takes them, and how each begins.
      scalars: The hyperparameters of `step` at a count that starts at 1.
      matrix_directions: Makes the directions of all matrices from those of the step, in at least
        float32, the leaves' axes and their specs. With it, every leaf must be a matrix.
    """
    checks.max_norm(max_norm)
    if not isinstance(correction, previous.Mode):
        checks.choice("correction", correction, ("approx", "exact", "none"))
    checks.choice("implementation", implementation, (None, "xla", "pallas"))
    checks.flag("keep_prev_grad", keep_prev_grad)
    if max_norm is not None:
        checks.keeps_prev_grad(keep_prev_grad, f"`max_norm`={max_norm!r}", "None")
    if correction != "approx":
        checks.keeps_prev_grad(keep_prev_grad, f"`correction`={correction!r}", "'approx'")
    if prev_grad_dtype is not None:
        checks.keeps_prev_grad(keep_prev_grad, f"`prev_grad_dtype`={prev_grad_dtype!r}", "None")
    if not keep_prev_grad:
        checks.constant_or_schedule(gamma)
    partition.check_spec(weight_dimension_numbers)
    mode = correction if keep_prev_grad else "none"
    source = previous.PreviousGradient(gamma, b1, mode, first_step, prev_grad_dtype)
    is_matrix_rule = matrix_directions is not None
    default = partition.matrix_at_rank_2 if is_matrix_rule else partition.matrix_from_rank_2

    # A tree without leaves tells which moments these settings keep.
    kept = {moment: zeros(()) is not None for moment, zeros in moments.items()} | source.kept

    def axes_of(tree: Any) -> Any:
        return partition.resolve_axes(weight_dimension_numbers, tree, default)

    def init_fn(params: optax.Params) -> Any:
        checks.inexact_leaves(params)
        axes = axes_of(params)
        if is_matrix_rule:
            partition.require_matrices(axes, params, name)
        partition.record_axes(axes)
        return state_type(
            count=jnp.zeros([], jnp.int32),
            **source.init(params),
            **{moment: zeros(params) for moment, zeros in moments.items()},
        )

    def advance(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        extra_args: Mapping[str, Any],
        implementation: types.Implementation | None,
        finish: run.Finish | None = None,
    ) -> tuple[Any, Any]:
        """The directions, or with `finish` the new parameters, and the new state."""
        checks.state_type(state, state_type, name)
        first = next(iter(moments))
        checks.gradients(updates, getattr(state, first), f"`state.{first}`")
        wanted = {field: updates if is_kept else None for field, is_kept in kept.items()}
        checks.state_fields(state, wanted, name, previous.PER_ROW)
        axes = axes_of(updates)
        count = optax.safe_increment(state.count)
        form = {} if keep_prev_grad else {"next_gamma": source.gamma_at(count)}
        specs = in_shard_map.specs_of(extra_args, updates)
        if source.dtype is not None and quantization.is_scaled(source.dtype):
            in_shard_map.require_whole(updates, specs, "`prev_grad_dtype` of 8 bits")
        result, new_moments = run.run_step(
            step,
            updates,
            source.gradients(updates, state, params, extra_args),
            tuple(getattr(state, moment) for moment in moments),
            coefficient=source.coefficient(state.count),
            max_norm=max_norm,
            axes=axes,
            implementation=implementation,
            specs=specs,
            finish=None if is_matrix_rule else finish,
            **scalars(count),
            **form,
        )
        if matrix_directions is not None:
            result = matrix_directions(result, axes, specs)
            result = result if finish is None else finish.tree(result)
        new_state = state_type(
            count=count,
            **source.advance(updates, state, params),
            **dict(zip(moments, new_moments, strict=True)),
        )
        return result, new_state

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        # Fused with what follows in the user's program, XLA moves fewer bytes than a kernel.
        executed_by = implementation or "xla"
        direction, state = advance(updates, state, params, extra_args, executed_by)
        return run.narrow(direction, updates), state

    def step_fn(
        updates: optax.Updates, state: Any, finish: run.Finish, extra_args: Mapping[str, Any]
    ) -> tuple[optax.Params, Any]:
        return advance(updates, state, finish.params, extra_args, implementation, finish)

    rule = named.Transformation(init_fn, update_fn)
    rule.step = step_fn
    rule.kept = state_type(count=True, **kept)
    return rule
