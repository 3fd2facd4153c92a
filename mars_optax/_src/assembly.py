"""From a rule for matrices and one for vectors to an optimizer: partition, decay, learning rate."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import optax

from mars_optax._src import (
    checks,
    execute,
    fused,
    in_shard_map,
    named,
    partition,
    previous,
    run,
    types,
)
from mars_optax._src.leaf import precision


class OptimizerState(NamedTuple):
    """State of an optimizer that has one rule for matrices and one for vectors.

    Each tree has the structure of the parameters, with :class:`optax.MaskedNode` for those whose
    rule does not keep it. It is None where neither rule does.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates  # first moment, dtype=mu_dtype or the parameter's
    nu: optax.Updates | None  # second moment, real, dtype=nu_dtype or at least float32
    nu_max: optax.Updates | None  # largest nu so far, as nu
    prev_grad: optax.Updates | None  # dtype=prev_grad_dtype or the parameter's
    prev_grad_scale: optax.Updates | None  # of an 8-bit prev_grad: float32, one for each row
    prev_params: optax.Params | None  # in exact mode, dtype=the parameter's


_TREES: Final = OptimizerState._fields[1:]


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
    state_type: type = OptimizerState,
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
      state_type: The optimizer's own subclass of it.
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
    scalars = {"weight_decay": weight_decay, "learning_rate": learning_rate}
    decays = {"weight_decay": weight_decay}
    if vector_rule is not None:
        decays["weight_decay_1d"] = weight_decay_1d
    # Wrong arguments of the rules fail here, not at `init`.
    matrix_rule(weight_dimension_numbers=None, correction=correction)
    # `grad_fn` wants all parameters: where no single rule sees them, the optimizer keeps them.
    hands_over = correction == "exact" and vector_rule is not None
    inner_correction = previous.Mode.HANDED_OVER if hands_over else correction
    # The extra arguments of the rules that are trees of the parameters.
    tree_arguments = (
        (in_shard_map.ARGUMENT, "prev_grad") if hands_over else (in_shard_map.ARGUMENT,)
    )
    vector = None if vector_rule is None else vector_rule(correction=inner_correction)
    # On its own: where captured functions are made anew, as by Equinox, attributes are lost.
    vector_kept = getattr(vector, "kept", None)

    def chains_for(tree: Any) -> tuple[dict[str, fused.Chain], Any]:
        """The rules for a tree of these shapes, and which leaf has which."""

        def matrix(numbers: Any) -> fused.Chain:
            rule = matrix_rule(weight_dimension_numbers=numbers, correction=inner_correction)
            return fused.Chain(rule, learning_rate, weight_decay, getattr(rule, "kept", None))

        if vector is None:
            return {"matrix": matrix(weight_dimension_numbers)}, None
        axes = partition.resolve_axes(weight_dimension_numbers, tree, default)
        labels = jax.tree.map(lambda a: "matrix" if a.is_matrix else "vector", axes)
        matrix_numbers = jax.tree.map(
            lambda a: a.dimension_numbers if a.is_matrix else optax.MaskedNode(), axes
        )
        vectors = fused.Chain(vector, learning_rate_1d, weight_decay_1d, vector_kept)
        return {"matrix": matrix(matrix_numbers), "vector": vectors}, labels

    def decay_mask_for(tree: Any) -> Any:
        # The placeholder of `optax.tree.map_params` has no leaves, and is its own mask.
        if checks.is_tree_function(mask, tree):
            return mask(tree) if jax.tree.leaves(tree) else tree
        return mask

    def checked(updates: Any, state: Any) -> tuple[dict[str, fused.Chain], Any]:
        """The rules for these gradients, if `init` makes states of this kind for them."""
        if vector is None:
            checks.chain_state(state, scalars, mask is not None, name)
            return chains_for(updates)
        checks.state_type(state, state_type, name)
        checks.gradients(updates, state.mu, "`state.mu`")
        chains, labels = chains_for(updates)
        wanted = {
            field: _whole(
                [
                    _part(labels, label, updates)
                    for label, chain in chains.items()
                    if getattr(chain.kept, field, False)
                ]
            )
            for field in _TREES
        }
        wanted["prev_params"] = updates if hands_over else None
        checks.state_fields(state, wanted, name, previous.PER_ROW)
        return chains, labels

    def init_fn(params: optax.Params) -> optax.OptState:
        checks.inexact_leaves(params)
        chains, labels = chains_for(params)
        states = {
            label: chain.link(decay_mask_for(params)).init(_part(labels, label, params))
            for label, chain in chains.items()
        }
        if vector is None:
            return states["matrix"]
        prev_params = previous.copies(params, params) if hands_over else None
        return _joined(state_type, states, prev_params)

    def advance(
        step: Callable[..., tuple[Any, Any]],
        chains: dict[str, fused.Chain],
        labels: Any,
        trees: tuple[Any, ...],
        state: Any,
        extra_args: dict[str, Any],
    ) -> tuple[Any, Any]:
        """The results of `step` with each chain, its state, parts of `trees` and of arguments."""
        if vector is None:
            return step(chains["matrix"], state, *trees, extra_args)
        results, states = [], {}
        for label, chain in chains.items():
            part = functools.partial(_part, labels, label)
            own = {k: part(x) if k in tree_arguments else x for k, x in extra_args.items()}
            rule_state = type(chain.kept)(
                state.count,
                *(
                    part(getattr(state, field)) if is_kept else None
                    for field, is_kept in zip(chain.kept._fields[1:], chain.kept[1:], strict=True)
                ),
            )
            result, states[label] = step(
                chain, (rule_state, *chain.link_states(state.count, mask)), *map(part, trees), own
            )
            results.append(result)
        return _whole(results), _joined(state_type, states, None)

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
        chains, labels = checked(updates, state)
        if hands_over:
            checks.exact_arguments(params, extra_args)
            prev_grad = previous.evaluate(extra_args.pop("grad_fn"), state.prev_params, updates)
            extra_args["prev_grad"] = prev_grad
        extra_args[in_shard_map.ARGUMENT] = in_shard_map.specs_of(extra_args, updates)
        decay_mask = decay_mask_for(updates)

        def step(chain: fused.Chain, state: Any, g: Any, p: Any, extra_args: Any) -> Any:
            return chain.link(decay_mask).update(g, state, p, **extra_args)

        trees = (wide_updates, wide_params)
        direction, new_state = advance(step, chains, labels, trees, state, extra_args)
        if hands_over:
            prev_params = previous.copies(params, like=state.prev_params)
            new_state = new_state._replace(prev_params=prev_params)
        return run.narrow(direction, like), new_state

    def step_fn(
        updates: optax.Updates, state: Any, params: optax.Params, extra_args: Any
    ) -> tuple[optax.Params, optax.OptState]:
        pays = implementation is None and execute.kernels_pay(jax.tree.leaves(updates))
        if implementation != "pallas" and not pays:
            updates, state = update_fn(updates, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        checks.gradients(updates, params, "`params`")
        chains, labels = checked(updates, state)
        extra_args = {
            **extra_args,
            in_shard_map.ARGUMENT: in_shard_map.specs_of(extra_args, updates),
        }
        decays = fused.decays_of(decay_mask_for(updates), params)

        def step(chain: fused.Chain, state: Any, g: Any, p: Any, decays: Any, args: Any) -> Any:
            return chain.step(g, state, p, decays, args)

        return advance(step, chains, labels, (updates, params, decays), state, extra_args)

    result = named.Transformation(init_fn, update_fn)
    if not hands_over:
        result.fused_step = step_fn
    return result


def _part(labels: Any, label: str, tree: Any) -> Any:
    """The leaves with one label, and placeholders for the others; all without labels."""
    if tree is None or labels is None:
        return tree
    return jax.tree.map(lambda its, x: x if its == label else optax.MaskedNode(), labels, tree)


def _whole(parts: Sequence[Any]) -> Any:
    """The tree of which these are parts; None where all are."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None

    def own(*leaves: Any) -> Any:
        return next((x for x in leaves if not _is_absent(x)), optax.MaskedNode())

    return jax.tree.map(own, *parts, is_leaf=_is_absent)


def _is_absent(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _joined(state_type: Any, states: Mapping[str, Any], prev_params: Any) -> Any:
    """The state of an optimizer from those of its chains."""
    rules = [rule for rule, *_ in states.values()]
    trees = {field: _whole([getattr(rule, field, None) for rule in rules]) for field in _TREES}
    trees["prev_params"] = prev_params
    return state_type(count=rules[0].count, **trees)
