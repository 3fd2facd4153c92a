"""Checks of arguments and the wording of their errors: expected, got, what to do.

The range of a number is checked. An array may be traced, without a value yet: its dtype is checked.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from mars_optax._src.leaf import precision, quantization

_ARRAYS = jax.Array | np.ndarray | np.generic

# The fields of a state that are no tree of the parameters' shapes.
OF_ANY_SHAPE: Final = ("gamma_state", "inner_state")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and type(value) is not bool


def _is_real(value: Any) -> bool:
    """Whether it is a real number, or an array of such."""
    is_array = isinstance(value, _ARRAYS) and not jnp.iscomplexobj(value)
    return _is_number(value) or (is_array and jnp.issubdtype(value.dtype, jnp.number))


def is_zero(value: Any) -> bool:
    """Whether it is the number 0."""
    return _is_number(value) and bool(value == 0)


def number(name: str, value: Any, *, or_schedule: bool = False) -> None:
    """A real number, also as an array of rank 0, or, where allowed, a schedule, of any value."""
    is_schedule = or_schedule and callable(value) and not isinstance(value, type)
    if not (is_schedule or (_is_real(value) and jnp.ndim(value) == 0)):
        kinds = "a real number or a real array of rank 0" + ", or a schedule of these" * or_schedule
        call = f", or call the class: `{value.__name__}()`" if isinstance(value, type) else ""
        raise TypeError(f"`{name}`: expected {kinds}, got {value!r}. Pass {kinds}{call}.")


scalar_or_schedule = functools.partial(number, or_schedule=True)


def at(name: str, value: Any, count: jax.Array) -> Any:
    """A hyperparameter at a step, counted from 0, in at least float32."""
    value = value(count) if callable(value) else value
    scalar_or_schedule(name, value)
    return precision.upcast_scalar(value)


def rates(values: Mapping[str, Any]) -> None:
    """Learning rates, of which negative numbers would climb and let decay grow, and decays."""
    for name, value in values.items():
        scalar_or_schedule(name, value)
        if "learning_rate" in name and _is_number(value) and not value >= 0:
            raise ValueError(
                f"`{name}`: expected a number >= 0, got {value!r}. Pass a positive one: updates "
                "have their sign already. To maximize, pass the gradients of minus the objective."
            )


def decay_rate(name: str, value: Any) -> None:
    """The decay rate of a moving average, in [0, 1)."""
    number(name, value)
    if _is_number(value) and not 0 <= value < 1:
        raise ValueError(
            f"`{name}`: expected a decay rate in [0, 1), got {value!r}. Pass a number such as 0.95."
        )


def non_negative(name: str, value: Any) -> None:
    """An epsilon, at least 0."""
    number(name, value)
    if _is_number(value) and not value >= 0:
        raise ValueError(f"`{name}`: expected a number >= 0, got {value!r}. Pass one such as 1e-8.")


def max_norm(value: Any, name: str = "max_norm") -> None:
    """The bound of a clip: positive, or None for no clip."""
    if value is not None:
        number(name, value)
    if _is_number(value) and not value > 0:
        raise ValueError(
            f"`{name}`: expected a number > 0 or None, got {value!r}. Pass None for no clip."
        )


def steps(name: str, value: Any) -> None:
    """A number of iterations: an integer >= 0."""
    number(name, value)
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer) or (_is_number(value) and value < 0):
        raise ValueError(
            f"`{name}`: expected an integer >= 0, got {value!r}. Pass a number of steps such as 5."
        )


def static_integer(name: str, value: Any, least: int) -> None:
    """An integer that decides what is compiled, or how long it takes: no array."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"`{name}`: expected an integer >= {least}, got {value!r}. Pass one; name it in "
            "`static_args` of `optax.inject_hyperparams`."
        )


def choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """One of a few values."""
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        raise ValueError(
            f"`{name}`: expected one of {', '.join(map(repr, allowed))}, got {value!r}. Pass one "
            "of these."
        )


def flag(name: str, value: Any) -> None:
    """True or False; a flag decides what is compiled, so it cannot be an array."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}`: expected True or False, got {value!r}. Pass one of these.")


def optional_callable(name: str, value: Any) -> None:
    """A function, or None."""
    if value is not None and not callable(value):
        raise TypeError(
            f"`{name}`: expected a function or None, got {value!r}. Pass a function of one array."
        )


def transformation(name: str, value: Any) -> None:
    """An optimizer, or another gradient transformation."""
    if not all(callable(getattr(value, part, None)) for part in ("init", "update")):
        raise TypeError(
            f"`{name}`: expected a gradient transformation, got {value!r:.99}. Pass what a factory "
            "returns, such as `optax.scale_by_adam()`."
        )


def float_dtype(name: str, value: Any) -> jnp.dtype | None:
    """The floating-point dtype that `value` names, or None for None."""
    if value is None:
        return None
    # `optax.inject_hyperparams` takes the callable `jnp.bfloat16` for a schedule and passes the
    # array `jnp.bfloat16(count)` in its place: the dtype of an array is what was meant.
    advice = "Pass a floating-point dtype, best as a string such as 'bfloat16'."
    try:
        dtype = jnp.dtype(value.dtype if isinstance(value, _ARRAYS) else value)
    except TypeError as error:
        raise TypeError(f"`{name}`: expected a dtype, got {value!r}. {advice}") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}`: expected a floating-point dtype, got {value!r}. {advice}")
    if np.zeros((), np.float32).astype(dtype).astype(np.float32) != 0:
        raise ValueError(f"`{name}`: expected a dtype that has a 0, got {dtype}. {advice}")
    return dtype


def recursive_dtype(name: str, value: Any) -> jnp.dtype | None:
    """The dtype of a quantity that is fed back: in 8 bits its error would grow."""
    dtype = float_dtype(name, value)
    if dtype is not None and dtype.itemsize == 1:
        raise ValueError(
            f"`{name}`: expected at least 16 bits for a recursive estimate, got {dtype}. Pass "
            "'bfloat16', or None for the parameters' dtype."
        )
    return dtype


def keeps_prev_grad(keep_prev_grad: bool, conflict: str, instead: str) -> None:
    """Raises where a setting needs the previous gradient, and there is to be none."""
    if not keep_prev_grad:
        raise ValueError(
            f"`keep_prev_grad`: expected True with {conflict}, got False: its correction needs the "
            f"previous gradient. Pass {instead} there, or `keep_prev_grad=True`."
        )


def constant_or_schedule(gamma: Any) -> None:
    """Without the previous gradient, gamma of the next step has to be known in this one."""
    if not (_is_number(gamma) or callable(gamma)):
        raise ValueError(
            "`keep_prev_grad`: expected True with a `gamma` that is an array or a rule, which may "
            "change from step to step, got False. Pass a Python number or a schedule (under "
            "`optax.inject_hyperparams` with `static_args='gamma'`), or `keep_prev_grad=True`."
        )


def exact_arguments(params: Any, extra_args: Mapping[str, Any]) -> None:
    """What `update` needs where gradients are taken at the previous parameters."""
    advice = (
        "Call `update(grads, state, params, grad_fn=grad_fn)` with a function that maps parameters "
        "to gradients of this step's batch."
    )
    if not callable(grad_fn := extra_args.get("grad_fn")):
        raise ValueError(f"`grad_fn`: expected a function, got {grad_fn!r}. {advice}")
    if params is None:
        raise ValueError(f"`params`: expected the parameters, got None. {advice}")


def anchor(updates: Any, extra_args: Mapping[str, Any]) -> None:
    """The gradients of a new anchor, where `update` gets one, are those of the parameters."""
    given, flag = extra_args.get("anchor_grad"), extra_args.get("refresh_anchor", True)
    if given is not None:
        gradients(given, updates, "the gradients", "anchor_grad")
    elif "refresh_anchor" in extra_args:
        raise ValueError(
            "`anchor_grad`: expected gradients for the anchor beside `refresh_anchor`, got None. "
            "Call `update(..., anchor_grad=grads, refresh_anchor=flag)`, or pass neither."
        )
    kind = getattr(flag, "dtype", type(flag))
    if getattr(flag, "shape", ()) or kind not in (bool, jnp.dtype(bool)):
        raise TypeError(
            f"`refresh_anchor`: expected a bool, which may be traced, got {flag!r}. Pass one."
        )


def same_shapes(name: str, got: Any, like: Any, where: str, advice: str) -> list[Any]:
    """A tree has the structure and shapes of `like`, named `where`; paths and both leaves."""
    arrays(got, f"`{name}`: leaf")
    rows = _same_leaves(name, got, like, where, advice)
    for path, leaf, other in rows:
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"`{name}`: expected shape {jnp.shape(other)} for leaf '{path_string(path)}', as "
                f"in {where}, got {jnp.shape(leaf)}. {advice}"
            )
    return rows


def inexact_leaves(params: Any, what: str = "Parameter") -> None:
    """Parameters are real or complex floating-point numbers; anything else has no gradient."""
    arrays(params, what)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"{what} '{path_string(path)}': expected a real or complex floating-point array, "
                f"got dtype {jnp.result_type(leaf)}. {_LEAF_ADVICE}"
            )


def arrays(tree: Any, what: str) -> None:
    """The leaves of a tree are arrays, or have a shape and a dtype that JAX knows."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_array(leaf):
            raise TypeError(
                f"{what} '{path_string(path)}': expected an array, got {leaf!r}. {_LEAF_ADVICE}"
            )


def _is_array(leaf: Any) -> bool:
    """Whether it is one: strings and types name a dtype, too."""
    try:
        jnp.result_type(leaf)
        return isinstance(leaf, int | float | complex) or jnp.shape(leaf) == tuple(leaf.shape)
    except (TypeError, AttributeError):
        return False


_LEAF_ADVICE = (
    "Leave it out of the parameters, for example with `equinox.filter(model, "
    "equinox.is_inexact_array)` or `flax.nnx.state(model, flax.nnx.Param)`, or mask it out with "
    "`optax.masked` or `optax.partition`."
)


def gradients(updates: Any, like: Any, where: str, name: str = "updates") -> None:
    """Gradients are those of the parameters: what broadcasts or is cast would change the state."""
    verb = "Return" if name == "grad_fn" else "Pass"
    advice = f"{verb} what `jax.grad` of a real loss gives for the parameters that `init` got."
    for path, leaf, other in same_shapes(name, updates, like, where, advice):
        is_real = not jnp.issubdtype(jnp.result_type(other), jnp.complexfloating)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating if is_real else jnp.inexact):
            kind = "real" if is_real else "real or complex"
            raise TypeError(
                f"`{name}`: expected a {kind} floating-point array for leaf '{path_string(path)}', "
                f"as in {where}, got dtype {jnp.result_type(leaf)}. {advice}"
            )


def state_type(state: Any, kind: type, name: str) -> None:
    """The state of a transformation is the one that its `init` makes."""
    if not isinstance(state, kind):
        raise TypeError(
            f"`state`: expected a `{kind.__name__}`, as `init` of `{name}` makes it, got "
            f"`{type(state).__name__}`. {_STATE_ADVICE}"
        )


def state(state: Any, kind: type, name: str, wanted: Mapping[str, Any]) -> None:
    """A state is of type `kind`, gradients are like its first field that is kept, others fit."""
    state_type(state, kind, name)
    for field, updates in wanted.items():
        if updates is not None and field not in OF_ANY_SHAPE and getattr(state, field) is not None:
            gradients(updates, getattr(state, field), f"`state.{field}`")
            break
    state_fields(state, wanted, name)


def state_fields(state: Any, wanted: Mapping[str, Any], name: str) -> None:
    """The trees of a state are those that the settings ask for, with a leaf for each gradient.

    `wanted` has the gradients that have a leaf in a field, or None where it is not kept.
    """
    for field, updates in wanted.items():
        tree = getattr(state, field)
        if (updates is None) != (tree is None) and field != "inner_state":
            expected, got = ("None", "a tree") if updates is None else ("a tree", "None")
            raise ValueError(
                f"`state.{field}`: expected {expected} with these settings of `{name}`, got {got}. "
                f"{_STATE_ADVICE}"
            )
        if field not in OF_ANY_SHAPE:
            like = jax.tree.map(_of_rows, updates) if field == "prev_grad_scale" else updates
            same_shapes(f"state.{field}", tree, like, "the gradients", _STATE_ADVICE)


def _of_rows(x: Any) -> Any:
    """One number for each row of a leaf."""
    return np.broadcast_to(0.0, quantization.scale_shape(jnp.shape(x)))


def inner_state(new: Any, old: Any, name: str) -> None:
    """A preconditioner got a state of its own."""
    got, expected = ([jnp.shape(x) for x in jax.tree.leaves(state)] for state in (old, new))
    if got != expected:
        raise ValueError(
            f"`state.inner_state`: expected the {len(expected)} arrays that the preconditioner of "
            f"`{name}` makes of these gradients, got {len(got)}, or other shapes. {_STATE_ADVICE}"
        )


_STATE_ADVICE = (
    "Pass the state that `init` made with these settings, or begin with a new one: that of another "
    "optimizer or other settings cannot be continued."
)


def _same_leaves(name: str, got: Any, wanted: Any, where: str, advice: str) -> list[Any]:
    """Two trees have leaves at the same places, though metadata in the nodes may differ."""
    flat = jax.tree_util.tree_leaves_with_path(got)
    try:
        treedef: Any = jax.tree.structure(wanted)
        if jax.tree_util.all_leaves(treedef.flatten_up_to(got)):
            return [(*x, y) for x, y in zip(flat, jax.tree.leaves(wanted), strict=True)]
    except (ValueError, TypeError, KeyError):
        pass
    mine = [path_string(path) for path, _ in flat]
    others = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    missing = [f"no leaf '{path}'" for path in others if path not in mine]
    spare = [f"a further leaf '{path}'" for path in mine if path not in others]
    # Modules and states of Flax NNX, which need not be there.
    kinds = (*type(got).__mro__, *type(wanted).__mro__)
    if not missing + spare and any(x.__module__.startswith("flax.nnx") for x in kinds):
        raise ValueError(
            f"`{name}`: expected a tree of the structure of {where}, got a `{type(got).__name__}` "
            f"for a `{type(wanted).__name__}`. Use `nnx.Optimizer(model, tx, wrt=nnx.Param)`, or "
            "give `tx.init` and `tx.update` the `nnx.state(model, nnx.Param)` whose gradients "
            "`nnx.grad` returns."
        )
    nodes = f"{jax.tree.structure(got)} and not {jax.tree.structure(wanted)}"
    difference = next(iter(missing + spare), nodes)
    raise ValueError(
        f"`{name}`: expected a tree of the structure of {where}, got {difference}. {advice}"
    )


def needs_params(params: Any, name: str, decays: dict[str, Any]) -> None:
    """`update` cannot do without the parameters where some of them decay."""
    for argument, value in decays.items() if params is None else ():
        if not is_zero(value):
            raise ValueError(
                f"`params`: expected the parameters, which `{argument}`={value!r} of `{name}` may "
                f"decay, got None. Call `update(grads, state, params)`, or set `{argument}=0.0`."
            )


def path_string(path: tuple[Any, ...]) -> str:
    """A leaf's path, its keys joined by '/'; Flax NNX's closing 'value' of a variable left out."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_tree_function(value: Any, tree: Any) -> TypeGuard[Callable[[Any], Any]]:
    """Whether `value` is a function of `tree`, rather than a tree like it that can be called."""
    # Equinox modules are trees and may be callable; so are `jax.tree_util.Partial` and what Equinox
    # makes of a closure, but these are not of the type of the parameters.
    return callable(value) and type(value) is not type(tree)


def coefficients(value: Any, steps: Any, presets: dict[str, Any], prefix: str) -> Any:
    """The Newton-Schulz coefficients as a table with a triple (a, b, c) in each row."""
    name = f"`{prefix}coeffs`"
    if isinstance(value, str):
        if value not in presets:
            raise ValueError(
                f"{name}: expected one of the presets {', '.join(map(repr, presets))}, got "
                f"{value!r}. Pass one of these, one triple (a, b, c), or one triple per step."
            )
        return presets[value]
    shape = _shape_of_numbers(value)
    if shape == (3,):
        return jnp.asarray(value)[None] if isinstance(value, jax.Array) else (tuple(value),)
    wants = "one triple (a, b, c) of real numbers, or one triple per step"
    if len(shape) != 2 or shape[1] != 3 or shape[0] == 0:
        raise ValueError(
            f"{name}: expected {wants}, that is shape (3,) or (n, 3), got "
            f"{f'shape {shape} from ' * bool(shape)}{value!r}. Pass a preset's name, {wants}."
        )
    if _is_number(steps) and steps != shape[0]:
        raise ValueError(
            f"{name}: expected one triple for each of `{prefix}steps`={steps} steps, got "
            f"{shape[0]}. Set `{prefix}steps={shape[0]}`, or pass {steps} triples."
        )
    return value


def _shape_of_numbers(value: Any) -> tuple[int, ...]:
    """The shape of an array or nested sequence of real numbers; () where it is none."""
    if isinstance(value, jax.Array):
        return value.shape if _is_real(value) else ()
    try:
        shape, flat = np.shape(value), np.asarray(value, dtype=object).ravel()
    except ValueError:
        return ()
    are_numbers = (_is_real(x) and (isinstance(x, jax.Array) or x == x) for x in flat)
    return shape if all(are_numbers) else ()


def newton_schulz_result(x: jax.Array, y: Any) -> None:
    """What a user's `newton_schulz_fn` gives back has the shape and dtype of what it got."""
    is_array = isinstance(y, jax.Array | np.ndarray)
    if not is_array or (y.shape, y.dtype) != (x.shape, x.dtype):
        got = f"shape {y.shape} and dtype {y.dtype}" if is_array else repr(y)
        raise ValueError(
            f"`newton_schulz_fn`: expected an array of shape {x.shape} and dtype {x.dtype}, as its "
            f"argument has, got {got}. Return the same shape and dtype."
        )


def directions(name: str, value: Any) -> None:
    """A transformation whose directions have the gradient's sign: no optimizer of this package."""
    transformation(name, value)
    maker, settings = getattr(value, "made_by", None) or ("", {})
    if "learning_rate" in settings:
        raise ValueError(
            f"`{name}`: expected directions with the sign of the gradient, got the optimizer "
            f"`{maker}`, whose updates have the opposite one. Pass a `scale_by_*`."
        )
