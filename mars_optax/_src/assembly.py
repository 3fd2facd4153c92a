"""From a rule for matrices and one for vectors to an optimizer: partition, decay, learning rate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from mars_optax._src import checks, fused, manual, named, partition, previous, run, types
from mars_optax._src.kernels import execute
from mars_optax._src.leaf import precision

# Untyped in Optax.
_PARTITION_STATE: Any = optax.transforms.PartitionState


class PreviousParamsState(NamedTuple):
    """State of an optimizer in exact mode that treats matrices and vectors differently."""

    prev_params: optax.Params  # dtype=the parameter's
    inner_state: optax.OptState


def optimizer(
    name: str,
    matrix_rule: Callable[..., optax.GradientTransformationExtraArgs],
    vector_rule: Callable[..., optax.GradientTransformationExtraArgs] | None,
    *,
    correction: types.Correction,
    learning_rate: types.ScalarOrSchedule,
    weight_decay: types.ScalarOrSchedule,
    learning_rate_1d: types.ScalarOrSchedule | None,
    weight_decay_1d: types.ScalarOrSchedule | None,
    mask: types.Mask | None,
    weight_dimension_numbers: types.WeightDimensionNumbers,
    default: partition.DefaultRule,
    implementation: types.Implementation | None = "xla",
) -> named.Transformation:
    """Gives matrices and vectors their rule, their decay and their learning rate.

    Args:
      name: The public name, for errors.
      matrix_rule: Makes the transformation of the matrices from `weight_dimension_numbers` and
        `correction`.
      vector_rule: Makes that of the vectors from `correction`, or None where the matrix rule takes
        all leaves.
      correction: The correction that the user asked for.
      learning_rate: Of the matrices.
      weight_decay: Of the matrices.
      learning_rate_1d: Of the vectors; None for `learning_rate`.
      weight_decay_1d: Of the vectors; None for `weight_decay`.
      mask: Which leaves decay, as in :func:`optax.adamw`.
      weight_dimension_numbers: Which leaves are matrices, and their axes.
      default: That rule by a leaf's rank, where `weight_dimension_numbers` is None.
      implementation: What executes the rules, see :func:`execute.elementwise`.
    """
    checks.learning_rate("learning_rate", learning_rate)
    checks.scalar_or_schedule("weight_decay", weight_decay)
    if learning_rate_1d is None:
        learning_rate_1d = learning_rate
    if weight_decay_1d is None:
        weight_decay_1d = weight_decay
    checks.learning_rate("learning_rate_1d", learning_rate_1d)
    partition.check_spec(weight_dimension_numbers)
    checks.scalar_or_schedule("weight_decay_1d", weight_decay_1d)
    scalars = {
        "matrix": {"weight_decay": weight_decay, "learning_rate": learning_rate},
        "vector": {"weight_decay_1d": weight_decay_1d, "learning_rate_1d": learning_rate_1d},
    }
    decays = {"weight_decay": weight_decay}
    if vector_rule is not None:
        decays["weight_decay_1d"] = weight_decay_1d
    # Wrong arguments of the rules fail here, not at `init`.
    matrix_rule(weight_dimension_numbers=None, correction=correction)
    # `grad_fn` wants all parameters: where no single rule sees them, the optimizer keeps them.
    hands_over = correction == "exact" and vector_rule is not None
    inner_correction = previous.Mode.HANDED_OVER if hands_over else correction
    vector = None if vector_rule is None else vector_rule(correction=inner_correction)

    def chains_for(tree: Any) -> tuple[dict[str, fused.Chain], Any]:
        """The rules for a tree of these shapes, and which leaf has which."""

        def matrix(numbers: Any) -> fused.Chain:
            rule = matrix_rule(weight_dimension_numbers=numbers, correction=inner_correction)
            return fused.Chain(rule, learning_rate, weight_decay)

        if vector is None:
            return {"matrix": matrix(weight_dimension_numbers)}, None
        axes = partition.resolve_axes(weight_dimension_numbers, tree, default)
        labels = jax.tree.map(lambda a: "matrix" if a.is_matrix else "vector", axes)
        matrix_numbers = jax.tree.map(
            lambda a: a.dimension_numbers if a.is_matrix else optax.MaskedNode(), axes
        )
        vectors = fused.Chain(vector, learning_rate_1d, weight_decay_1d)
        return {"matrix": matrix(matrix_numbers), "vector": vectors}, labels

    def decay_mask_for(tree: Any) -> Any:
        # The placeholder of `optax.tree.map_params` has no leaves, and is its own mask.
        if checks.is_tree_function(mask, tree):
            return mask(tree) if jax.tree.leaves(tree) else tree
        return mask

    def chain_for(tree: Any, has_trees: bool = False) -> optax.GradientTransformationExtraArgs:
        """The optimizer of a tree of these shapes: rules by name and masks see it as a whole."""
        chains, labels = chains_for(tree)
        links = {label: chain.link(decay_mask_for(tree)) for label, chain in chains.items()}
        if labels is None:
            return links["matrix"]
        # A tree of labels that can be called (Equinox) would be taken for a function. Each group
        # gets its part of extra arguments that are trees of the parameters.
        return optax.partition(links, lambda _: labels, mask_compatible_extra_args=has_trees)

    def require_own(state: Any) -> None:
        """Raises unless `init` makes states of this kind."""
        if hands_over:
            checks.state_type(state, PreviousParamsState, name)
            state = state.inner_state
        if vector is None:
            chain_states = [("matrix", state)]
        else:
            checks.state_type(state, _PARTITION_STATE, name)
            chain_states = [
                (label, getattr(state.inner_states.get(label), "inner_state", None))
                for label in ("matrix", "vector")
            ]
        for label, chain_state in chain_states:
            checks.chain_state(chain_state, scalars[label], mask is not None, name)

    def init_fn(params: optax.Params) -> optax.OptState:
        checks.inexact_leaves(params)
        state = chain_for(params).init(params)
        return PreviousParamsState(previous.copies(params, params), state) if hands_over else state

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.needs_params(params, name, decays)
        if params is None:
            checks.arrays(updates, "Gradient")
        else:
            checks.arrays(params, "Parameter")
            checks.gradients(updates, params, "`params`")
        # Without decay nothing reads the parameters but the dtypes of the result.
        like = updates if params is None else params
        # Decay and learning rate, too, are applied in at least float32, and rounded once.
        wide_updates = jax.tree.map(precision.widen, updates)
        wide_params = jax.tree.map(precision.widen, like)
        require_own(state)
        inner_state = state
        if hands_over:
            checks.exact_arguments(params, extra_args)
            checks.state_fields(state, updates, {"prev_params": True}, name)
            prev_grad = previous.evaluate(extra_args["grad_fn"], state.prev_params, updates)
            extra_args = {**extra_args, "prev_grad": prev_grad}
            del extra_args["grad_fn"]
            inner_state = state.inner_state
        specs = manual.specs_of(extra_args, updates)
        if specs is not None:
            extra_args = {**extra_args, manual.ARGUMENT: specs}
        direction, new_state = chain_for(updates, hands_over or specs is not None).update(
            wide_updates, inner_state, wide_params, **extra_args
        )
        if hands_over:
            prev_params = previous.copies(params, like=state.prev_params)
            new_state = PreviousParamsState(prev_params, new_state)
        return run.narrow(direction, like), new_state

    def step_fn(
        updates: optax.Updates, state: Any, params: optax.Params, extra_args: Any
    ) -> tuple[optax.Params, optax.OptState]:
        pays = implementation is None and execute.kernels_pay(jax.tree.leaves(updates))
        if implementation != "pallas" and not pays:
            updates, state = update_fn(updates, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        checks.gradients(updates, params, "`params`")
        require_own(state)
        extra_args = {**extra_args, manual.ARGUMENT: manual.specs_of(extra_args, updates)}
        chains, labels = chains_for(updates)
        decays = fused.decays_of(decay_mask_for(updates), params)
        arguments = (updates, state, params, decays, extra_args)
        if labels is None:
            return chains["matrix"].step(*arguments)
        return fused.step_partition(chains, labels, *arguments)

    result = named.Transformation(init_fn, update_fn)
    if not hands_over:
        result.fused_step = step_fn
    return result
