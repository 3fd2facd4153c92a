"""From a rule for matrices and one for vectors to an optimizer: partition, decay, learning rate."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import optax

from mars_optax._src import checks, execute, in_shard_map, named, partition, run, trees
from mars_optax._src.adaptive import AdaptiveGammaState
from mars_optax._src.estimator import HandedOver
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
    state_type: type = State,
    vector_rule: Rule | None = None,
) -> named.Transformation:
    """Gives matrices and vectors their rule, their decay and their learning rate.

    `matrix_rule` makes the transformation of the matrices from those of `settings` that it takes,
    the arguments that the user gave; `vector_rule` that of the vectors from `correction`. Without,
    the matrix rule takes all leaves. Kernels run only if `settings` have `implementation`.
    """
    rates = {key: settings[key] for key in ("weight_decay", "learning_rate")}
    rates |= {f"{key}_1d": settings.get(f"{key}_1d") for key in rates}
    rates |= {x: rates[x[:-3]] for x in rates if x.endswith("_1d") and rates[x] is None}
    checks.rates(rates)
    weight_decays = {key: rates[key] for key in rates if "decay" in key}
    if vector_rule is None:
        del weight_decays["weight_decay_1d"]
    mask, numbers = settings["mask"], settings["weight_dimension_numbers"]
    partition.check_spec(numbers)
    correction = settings["correction"]
    make = functools.partial(matrix_rule, **accepted(matrix_rule, settings))
    # Wrong arguments of the rules fail here, not at `init`.
    sample = make(weight_dimension_numbers=None)
    # Where captured functions are made anew, as by Equinox, attributes are lost.
    source, default = sample.estimator, sample.default
    has_momentum, has_inner = (getattr(sample.kept, x, False) for x in ("mu", "inner_state"))
    # Averages that vectors alone have come last.
    tree_fields = sorted(_TREES, key=lambda field: not has_momentum and field in ("mu", "nu"))
    # `grad_fn` wants all parameters: where no single rule sees them, the optimizer keeps them.
    hands_over = vector_rule is not None and source.evaluates
    inner_correction = HandedOver(correction) if hands_over else correction
    # The extra arguments of the rules that are trees of the parameters.
    tree_arguments = (in_shard_map.ARGUMENT, *(("prev_grad", "anchor_grad") if hands_over else ()))

    def rules_for(tree: Any) -> tuple[dict[str, Any], Any]:
        """The rules for a tree like the parameters, and which leaf has which."""
        # By the parameters themselves: rules see them, or their gradients, in at least float32.
        is_function = jax.tree.leaves(tree) and checks.is_tree_function(numbers, tree)
        specs = numbers(tree) if is_function else numbers
        axes = partition.resolve_axes(specs, tree, default)
        if vector_rule is None:
            rule = make(weight_dimension_numbers=specs, correction=inner_correction)
            return {"matrix": rule}, jax.tree.map(lambda a: "matrix", axes)
        labels = jax.tree.map(lambda a: "matrix" if a.is_matrix else "vector", axes)
        own = _part(labels, "matrix", jax.tree.map(lambda a: a.dimension_numbers, axes))
        rule = make(weight_dimension_numbers=own, correction=inner_correction)
        return {"matrix": rule, "vector": vector_rule(correction=inner_correction)}, labels

    def finish_of(label: str, count: jax.Array, params: Any, decays: Any) -> run.Finish:
        """What follows the directions of a rule at the step after `count` ones."""
        suffix = "" if label == "matrix" else "_1d"
        keys = f"learning_rate{suffix}", f"weight_decay{suffix}"
        if checks.is_zero(rates[keys[1]]):
            decays = jax.tree.map(lambda _: False, decays)
        rate, decay = (checks.at(key, rates[key], count) for key in keys)
        return run.Finish(params, -rate, decay, decays)

    def decays_of(tree: Any) -> Any:
        """A bool for each leaf, from a mask as :func:`optax.masked` takes it."""
        its = mask(tree) if checks.is_tree_function(mask, tree) else True if mask is None else mask
        try:
            return jax.tree.map(lambda m, below: jax.tree.map(lambda _: bool(m), below), its, tree)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "`mask`: expected a tree with the structure of the parameters, or a prefix of it, "
                f"with a bool at each leaf, got {its!r} for {jax.tree.structure(tree)}. Give every "
                "leaf its own, for example by a function of the parameters."
            ) from error

    def init_fn(params: optax.Params) -> optax.OptState:
        checks.inexact_leaves(params)
        decays_of(params)  # so that a wrong mask fails here
        rules, labels = rules_for(params)
        states = {k: rule.init(_part(labels, k, params)) for k, rule in rules.items()}
        prev_params = trees.copies(params, params) if hands_over else None
        return _joined(state_type, labels, states, prev_params)

    def advance(
        step: Any, updates: Any, state: Any, params: Any, like: Any, extra_args: Any
    ) -> Any:
        """The results of `step` with each rule, its state, and its part of the trees."""
        rules, labels = rules_for(like)
        parts = {label: _part(labels, label, updates) for label in rules}
        wanted = {}
        for field in tree_fields:
            kept = [parts[k] for k, rule in rules.items() if getattr(rule.kept, field, False)]
            wanted[field] = _whole(labels, kept)
        if hands_over:
            wanted["prev_params"] = updates
        checks.state(state, state_type, name, wanted)
        prev_params = None
        if hands_over:
            extra_args["prev_grad"] = source.evaluate(updates, state, params, extra_args)
            prev_params = source.next_params(state, params, extra_args)
        extra_args[in_shard_map.ARGUMENT] = in_shard_map.specs_of(extra_args, updates)
        decays = decays_of(like)
        results, states = [], {}
        for label, rule in rules.items():
            part = functools.partial(_part, labels, label)
            own = {k: part(x) if k in tree_arguments else x for k, x in extra_args.items()}
            fields = {k: getattr(state, k) for k, is_kept in rule.kept._asdict().items() if is_kept}
            fields = {k: part(x) if k in _TREES else x for k, x in fields.items()}
            inner = type(rule.kept)(**fields)
            finish = finish_of(label, state.count, part(params), part(decays))
            result, states[label] = step(rule, parts[label], inner, finish, own)
            results.append(result)
        return _whole(labels, results), _joined(state_type, labels, states, prev_params)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        checks.needs_params(params, name, weight_decays)
        if params is None:
            checks.arrays(updates, "Gradient")
        else:
            checks.arrays(params, "Parameter")
            checks.gradients(updates, params, "`params`")
        # Without decay nothing reads the parameters but the dtypes of the result.
        like = updates if params is None else params

        def step(rule: Any, g: Any, state: Any, finish: run.Finish, extra_args: Any) -> Any:
            directions, state = rule.update(g, state, finish.params, **extra_args)
            return finish.updates(directions), state

        # Decay and learning rate, too, are applied in at least float32, and rounded once.
        wide = jax.tree.map(precision.upcast, updates)
        result, new_state = advance(step, wide, state, params, like, extra_args)
        return trees.cast_like(result, like), new_state

    def step_fn(updates: Any, state: Any, params: Any, extra_args: Any) -> Any:
        by = settings.get("implementation", "xla")
        # Beside a preconditioner it is what `update` does, unless kernels are asked for.
        pays = by is None and not has_inner and execute.kernels_are_faster(jax.tree.leaves(updates))
        if by != "pallas" and not pays:
            updates, state = update_fn(updates, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        checks.gradients(updates, params, "`params`")
        step = lambda rule, *args: rule.step(*args)  # noqa: E731
        return advance(step, updates, state, params, params, {**extra_args})

    result = named.Transformation(init_fn, update_fn)
    if not hands_over:
        result.fused_step = step_fn
    return result


def _part(labels: Any, label: str, tree: Any) -> Any:
    """The leaves with one label, and placeholders for the others."""
    if tree is None:
        return None
    if isinstance(tree, AdaptiveGammaState):
        return AdaptiveGammaState(*(_part(labels, label, x) for x in tree))
    return jax.tree.map(lambda its, x: x if its == label else optax.MaskedNode(), labels, tree)


def _whole(labels: Any, parts: Sequence[Any]) -> Any:
    """The tree of which these are parts; None where all are."""
    parts = [part for part in parts if part is not None]
    if parts and isinstance(parts[0], AdaptiveGammaState):
        return AdaptiveGammaState(*(_whole(labels, x) for x in zip(*parts, strict=True)))
    nothing = optax.MaskedNode()

    def own(_: str, *leaves: Any) -> Any:
        return next((x for x in leaves if not isinstance(x, optax.MaskedNode)), nothing)

    return jax.tree.map(own, labels, *parts) if parts else None


def _joined(state_type: type, labels: Any, states: Mapping[str, Any], prev_params: Any) -> Any:
    """The state of an optimizer from those of its chains."""
    parts = list(states.values())
    fields = {k: _whole(labels, [getattr(part, k, None) for part in parts]) for k in _TREES}
    if prev_params is not None:
        fields["prev_params"] = prev_params
    inner_state = getattr(parts[0], "inner_state", None)
    return state_type(count=parts[0].count, inner_state=inner_state, **fields)
