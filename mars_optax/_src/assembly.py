"""From a rule for matrices and one for vectors to an optimizer: partition, decay, learning rate."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import optax

from mars_optax._src import checks, fused, manual, named, partition, trees, types
from mars_optax._src.adaptive import AdaptiveGammaState
from mars_optax._src.estimator import OF_ANY_SHAPE, PER_ROW, HandedOver
from mars_optax._src.kernels import execute
from mars_optax._src.leaf import precision
from mars_optax._src.states import State

Rule = Callable[..., optax.GradientTransformationExtraArgs]

_TREES: Final = tuple(x for x in State._fields if x not in ("count", "inner_state"))


def accepted(factory: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some settings that a function takes."""
    return {key: settings[key] for key in inspect.signature(factory).parameters if key in settings}


def optimizer(
    name: str,
    matrix_rule: Rule,
    settings: Mapping[str, Any],
    *,
    vector_rule: Rule | None = None,
    state_type: type = State,
    default: partition.DefaultRule = partition.matrix_from_rank_2,
    implementation: types.Implementation | None = "xla",
) -> named.Transformation:
    """Gives matrices and vectors their rule, their decay and their learning rate.

    Args:
      name: The public name, for errors.
      matrix_rule: Makes the transformation of the matrices from those of `settings` that it takes.
      settings: The arguments that the user gave, by the names of the public functions.
      vector_rule: Makes that of the vectors from `correction`, or None where the matrix rule takes
        all leaves.
      state_type: The optimizer's own subclass of it.
      default: Which leaves are matrices, where `weight_dimension_numbers` is None.
      implementation: What executes the rules, see :func:`execute.elementwise`.
    """
    rates = {key: settings[key] for key in ("weight_decay", "learning_rate")}
    if vector_rule is not None:
        rates |= {f"{key}_1d": settings.get(f"{key}_1d", rates[key]) for key in list(rates)}
        rates |= {key: rates[key[:-3]] for key, value in rates.items() if value is None}
    for key, value in rates.items():
        check = checks.learning_rate if "rate" in key else checks.scalar_or_schedule
        check(key, value)
    mask, numbers = settings["mask"], settings["weight_dimension_numbers"]
    partition.check_spec(numbers)
    correction = settings["correction"]
    make = functools.partial(matrix_rule, **accepted(matrix_rule, settings))
    # Wrong arguments of the rules fail here, not at `init`.
    sample = make(weight_dimension_numbers=None)
    source: Any = getattr(sample, "estimator", None)
    # `grad_fn` wants all parameters: where no single rule sees them, the optimizer keeps them.
    hands_over = vector_rule is not None and source.evaluates
    inner_correction = HandedOver(correction) if hands_over else correction
    # The extra arguments of the rules that are trees of the parameters.
    tree_arguments = (manual.ARGUMENT, *(("prev_grad", "anchor_grad") if hands_over else ()))
    vector = None if vector_rule is None else vector_rule(correction=inner_correction)
    # On its own: where captured functions are made anew, as by Equinox, attributes are lost.
    vector_kept = getattr(vector, "kept", None)
    has_momentum = getattr(sample.kept, "mu", False)

    def chains_for(tree: Any) -> tuple[dict[str, fused.Chain], Any]:
        """The rules for a tree of these shapes, and which leaf has which."""

        def chain(rule: Any, kept: Any, end: str = "") -> fused.Chain:
            return fused.Chain(
                rule, rates["learning_rate" + end], rates["weight_decay" + end], kept
            )

        def matrix(numbers: Any) -> fused.Chain:
            rule = make(weight_dimension_numbers=numbers, correction=inner_correction)
            return chain(rule, getattr(rule, "kept", None))

        if vector is None:
            return {"matrix": matrix(numbers)}, None
        axes = partition.resolve_axes(numbers, tree, default)
        labels = jax.tree.map(lambda a: "matrix" if a.is_matrix else "vector", axes)
        matrix_numbers = jax.tree.map(
            lambda a: a.dimension_numbers if a.is_matrix else optax.MaskedNode(), axes
        )
        return {
            "matrix": matrix(matrix_numbers),
            "vector": chain(vector, vector_kept, "_1d"),
        }, labels

    def decay_mask_for(tree: Any) -> Any:
        # The placeholder of `optax.tree.map_params` has no leaves, and is its own mask.
        if checks.is_tree_function(mask, tree):
            return mask(tree) if jax.tree.leaves(tree) else tree
        return mask

    def checked(updates: Any, state: Any) -> tuple[dict[str, fused.Chain], Any]:
        """The rules for these gradients, if `init` makes states of this kind for them."""
        if vector is None:
            checks.chain_state(state, rates, mask is not None, name)
            return chains_for(updates)
        checks.state_type(state, state_type, name)
        if has_momentum:
            checks.gradients(updates, state.mu, "`state.mu`")
        chains, labels = chains_for(updates)
        wanted = {
            field: _whole(
                labels,
                [
                    _part(labels, label, updates)
                    for label, chain in chains.items()
                    if getattr(chain.kept, field, False)
                ],
            )
            for field in _TREES
        }
        wanted["prev_params"] = updates if hands_over else None
        checks.state_fields(state, wanted, name, PER_ROW, OF_ANY_SHAPE)
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
        prev_params = trees.copies(params, params) if hands_over else None
        return _joined(state_type, labels, states, prev_params)

    def advance(
        step: Callable[..., tuple[Any, Any]],
        chains: dict[str, fused.Chain],
        labels: Any,
        arguments: tuple[Any, ...],
        state: Any,
        extra_args: dict[str, Any],
    ) -> tuple[Any, Any]:
        """The results of `step` with each chain, its state, parts of trees and of arguments."""
        if vector is None:
            return step(chains["matrix"], state, *arguments, extra_args)
        results, states = [], {}
        for label, chain in chains.items():
            part = functools.partial(_part, labels, label)
            own = {k: part(x) if k in tree_arguments else x for k, x in extra_args.items()}
            kept = chain.kept._asdict()
            mine = {field: part(getattr(state, field)) for field in kept if field in _TREES}
            mine = {field: mine[field] if kept[field] else None for field in mine}
            if kept.get("inner_state"):
                mine["inner_state"] = state.inner_state
            rule_state = type(chain.kept)(state.count, **mine)
            result, states[label] = step(
                chain,
                (rule_state, *chain.link_states(state.count, mask)),
                *map(part, arguments),
                own,
            )
            results.append(result)
        return _whole(labels, results), _joined(state_type, labels, states, None)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.needs_params(params, name, {k: x for k, x in rates.items() if "decay" in k})
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
        prev_params = None
        if hands_over:
            extra_args["prev_grad"] = source.evaluate(updates, state, params, extra_args)
            prev_params = source.next_params(state, params, extra_args)
        extra_args[manual.ARGUMENT] = manual.specs_of(extra_args, updates)
        decay_mask = decay_mask_for(updates)

        def step(chain: fused.Chain, state: Any, g: Any, p: Any, extra_args: Any) -> Any:
            return chain.link(decay_mask).update(g, state, p, **extra_args)

        arguments = (wide_updates, wide_params)
        direction, new_state = advance(step, chains, labels, arguments, state, extra_args)
        if hands_over:
            new_state = new_state._replace(prev_params=prev_params)
        return trees.narrow(direction, like), new_state

    def step_fn(
        updates: optax.Updates, state: Any, params: optax.Params, extra_args: Any
    ) -> tuple[optax.Params, optax.OptState]:
        pays = implementation is None and execute.kernels_pay(jax.tree.leaves(updates))
        if implementation != "pallas" and not pays:
            updates, state = update_fn(updates, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        checks.gradients(updates, params, "`params`")
        chains, labels = checked(updates, state)
        extra_args = {**extra_args, manual.ARGUMENT: manual.specs_of(extra_args, updates)}
        decays = fused.decays_of(decay_mask_for(updates), params)

        def step(chain: fused.Chain, state: Any, g: Any, p: Any, decays: Any, args: Any) -> Any:
            return chain.step(g, state, p, decays, args)

        return advance(step, chains, labels, (updates, params, decays), state, extra_args)

    result = named.Transformation(init_fn, update_fn)
    if not hands_over and hasattr(sample, "step"):
        result.fused_step = step_fn
    return result


def _part(labels: Any, label: str, tree: Any) -> Any:
    """The leaves with one label, and placeholders for the others; all without labels."""
    if tree is None or labels is None:
        return tree
    if isinstance(tree, AdaptiveGammaState):
        return AdaptiveGammaState(*(_part(labels, label, x) for x in tree))
    return jax.tree.map(lambda its, x: x if its == label else optax.MaskedNode(), labels, tree)


def _whole(labels: Any, parts: Sequence[Any]) -> Any:
    """The tree of which these are parts; None where all are."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if isinstance(parts[0], AdaptiveGammaState):
        return AdaptiveGammaState(*(_whole(labels, x) for x in zip(*parts, strict=True)))

    def own(_: str, *leaves: Any) -> Any:
        present = (x for x in leaves if not isinstance(x, optax.MaskedNode))
        return next(present, optax.MaskedNode())

    return jax.tree.map(own, labels, *parts)


def _joined(state_type: type, labels: Any, states: Mapping[str, Any], prev_params: Any) -> Any:
    """The state of an optimizer from those of its chains."""
    rules = [rule for rule, *_ in states.values()]
    fields = {
        field: _whole(labels, [getattr(rule, field, None) for rule in rules]) for field in _TREES
    }
    fields["prev_params"] = prev_params
    fields["inner_state"] = getattr(rules[0], "inner_state", None)
    return state_type(count=rules[0].count, **fields)
