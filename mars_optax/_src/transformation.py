"""What all variants have in common: estimator, clip, step, preconditioner, and their order."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, in_shard_map, mesh, named, partition, run, trees, types
from mars_optax._src.estimator import Estimator
from mars_optax._src.leaf import quantization
from mars_optax._src.leaf.momentum import momentum_step


def identity_step(c: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    """The corrected and clipped gradient itself."""
    return (c,)


def rule(
    name: str,
    state_type: type,
    settings: Mapping[str, Any],
    *,
    step: run.Step = identity_step,
    moments: Mapping[str, Callable[[optax.Params], Any]] | None = None,
    scalars: Callable[[jax.Array], Mapping[str, Any]] = lambda count: {},
    inner: optax.GradientTransformation | None = None,
    default: partition.DefaultRule = partition.matrix_from_rank_2,
) -> named.Transformation:
    """Builds a variant's transformation from `settings`, the arguments that the user gave, by name.

    `moments` are the moving averages in the order in which `step` takes them, and how each begins;
    `scalars` the hyperparameters of `step` at a count that starts at 1. `inner` makes directions of
    those of the step, in at least float32, with any state. The state has the fields `count`,
    `inner_state` where there is an `inner`, those of `moments`, and those that :class:`Estimator`
    keeps. `default` says which leaves are matrices, if none are declared; with `matrix_at_rank_2`
    all must be. `name` is the public one, for errors.
    """
    moments = moments or {}
    max_norm, numbers = settings["max_norm"], settings["weight_dimension_numbers"]
    # Optimizers without this argument take no kernels, which nothing could turn off.
    implementation: types.Implementation | None = settings.get("implementation", "xla")
    checks.max_norm(max_norm)
    checks.choice("implementation", implementation, (None, "xla", "pallas"))
    partition.check_spec(numbers)
    names = [x.name for x in dataclasses.fields(Estimator)]
    source = Estimator(**{key: settings[key] for key in names if key in settings})
    if max_norm is not None:
        checks.keeps_prev_grad(source.keep_prev_grad, f"`max_norm`={max_norm!r}", "None")
    # A tree without leaves shows which moments these settings keep.
    kept = {moment: zeros(()) is not None for moment, zeros in moments.items()} | source.kept
    if inner is not None:
        inner = optax.with_extra_args_support(inner)
        kept["inner_state"] = True
    axes_of = functools.partial(partition.resolve_axes, numbers, default=default)

    def init_fn(params: optax.Params) -> Any:
        checks.inexact_leaves(params)
        axes = axes_of(params)
        if default is partition.matrix_at_rank_2:
            partition.require_matrices(axes, params, name)
        made = {moment: zeros(params) for moment, zeros in moments.items()}
        if inner is not None:
            made["inner_state"] = trees.cast_like(own := inner.init(params), own)  # no weak types
        partition.record_axes(axes)  # after those of a rule inside
        return state_type(count=jnp.zeros([], jnp.int32), **source.init(params, axes), **made)

    def advance(
        updates: Any, state: Any, params: Any, extra_args: Any, by: Any, finish: Any = None
    ) -> tuple[Any, Any]:
        """The directions, or with `finish` the new parameters, and the new state."""
        wanted = {field: updates if is_kept else None for field, is_kept in kept.items()}
        if updates is None:  # a tree without leaves, of which only a field of any shape keeps more
            wanted = {field: None for field in wanted if field not in checks.OF_ANY_SHAPE}
        checks.state(state, state_type, name, wanted)
        axes = axes_of(updates)
        count = optax.safe_increment(state.count)
        specs = in_shard_map.specs_of(extra_args, updates)
        if quantization.is_scaled(source.prev_grad_dtype):
            in_shard_map.require_whole(updates, extra_args, "`prev_grad_dtype` of 8 bits")
        in_pass = mesh.is_for_gpus() and by != "pallas"
        estimate, fields = source.estimate(updates, state, params, extra_args, axes, in_pass)
        old = tuple(getattr(state, moment) for moment in moments)
        how = {"max_norm": max_norm, "axes": axes, "implementation": by, "specs": specs}
        how |= {"norms": implementation, "apart": inner is not None}
        how["finish"] = finish if inner is None else None
        result, new_moments = run.run_step(step, updates, estimate, old, **how, **scalars(count))
        if inner is not None:
            # Those that are ours alone could be refused inside.
            its = {k: x for k, x in extra_args.items() if k != "prev_grad" and x is not None}
            try:
                result, new = inner.update(result, state.inner_state, params, **its)
            except (TypeError, ValueError):  # maybe as the gradients are not those of the state
                checks.inner_state(jax.eval_shape(inner.init, result), state.inner_state, name)
                raise
            checks.inner_state(new, state.inner_state, name)
            # Of the old one's structure: metadata in the nodes of gradients may differ.
            new = jax.tree.unflatten(jax.tree.structure(state.inner_state), jax.tree.leaves(new))
            fields["inner_state"] = trees.cast_like(new, state.inner_state)
            result = result if finish is None else finish.tree(result)
        moved = dict(zip(moments, new_moments, strict=True))
        return result, state_type(count=count, **fields, **moved)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        # Fused with what follows in the user's program, XLA moves fewer bytes than a kernel.
        direction, state = advance(updates, state, params, extra_args, implementation or "xla")
        return trees.cast_like(direction, updates), state

    def step_fn(updates: Any, state: Any, finish: run.Finish, extra_args: Any) -> tuple[Any, Any]:
        return advance(updates, state, finish.params, extra_args, implementation, finish)

    result = named.Transformation(init_fn, update_fn)
    result.step, result.default, result.estimator = step_fn, default, source
    result.kept = state_type(count=True, **kept)
    return result


def momentum_rule(
    name: str,
    state_type: type,
    settings: Mapping[str, Any],
    *,
    step: run.Step = momentum_step,
    inner: optax.GradientTransformation | None = None,
) -> named.Transformation:
    """A rule with the momentum alone, for all leaves or, with an `inner`, for matrices."""
    dtype = checks.recursive_dtype("mu_dtype", settings["mu_dtype"])
    return rule(
        name,
        state_type,
        settings,
        step=step,
        moments={"mu": functools.partial(trees.zeros, dtype=dtype)},
        scalars=lambda count: {"b1": settings["b1"]},
        inner=inner,
        default=partition.matrix_from_rank_2 if inner is None else partition.matrix_at_rank_2,
    )
