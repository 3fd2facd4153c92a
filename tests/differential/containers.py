"""Trees of parameters: their containers, and their leaves."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.differential import subjects
from tests.differential.situation import Results, situation
from tests.differential.subjects import Subject, eagerly, gradient, train


class _Pair(NamedTuple):
    b: Any
    w: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Record:
    b: Any
    w: Any


def _as_dict(b: Any, w: Any) -> dict[str, Any]:
    return {"b": b, "w": w}


@situation()
def none_leaves(subject: Subject):
    """`None` beside the leaves, in parameters and gradients."""
    trained = train(subject, {**subjects.params(), "frozen": None, "more": {"none": None}})
    assert trained.pop("frozen") is None
    assert trained.pop("more") == {"none": None}
    return trained


@situation()
def no_leaves(subject: Subject):
    """Trees without leaves: an empty dict, an empty tuple, a `None` in a dict."""
    for empty in ({}, (), {"none": None}):
        assert jax.tree.leaves(eagerly(subject, empty)) == []
    return Results(jnp.zeros(1), jnp.zeros(1))


@situation()
def a_bare_matrix(subject: Subject):
    """The parameters are one array, a matrix."""
    start = subjects.params()["w"]
    return Results({"w": train(subject, start)}, {"w": train(subject, {"w": start})["w"]})


@situation(slow=True)
def a_bare_vector(subject: Subject):
    """The parameters are one array, a vector."""
    start = subjects.params()["b"]
    return Results({"b": train(subject, start)}, {"b": train(subject, {"b": start})["b"]})


@situation()
def leaves_of_size_zero(subject: Subject):
    """Leaves of shapes (0,), (0, 4) and (4, 0) beside the others."""
    empty = {name: jnp.zeros(shape) for name, shape in _EMPTY.items()}
    trained = train(subject, {**subjects.params(), **empty})
    for name, shape in _EMPTY.items():
        assert trained.pop(name).shape == shape
    return trained


_EMPTY = {"none": (0,), "no_columns": (4, 0), "no_rows": (0, 4)}


@situation(slow=True)
def leaves_of_rank_zero(subject: Subject):
    """A leaf of rank 0 beside the others, and moved as a vector of one entry."""
    start = subjects.params()
    trained = train(subject, {**start, "scale": start["b"][0]})
    scale = trained.pop("scale")
    return Results((trained, scale), (subjects.plain(subject), trained["b"][0]))


@situation()
def leaves_of_rank_three(subject: Subject):
    """Leaves of rank 3 and 4 beside the others, finite and moved."""
    start = {**subjects.params(), "conv": jnp.ones((2, 2, 3, 4)), "stack": jnp.ones((2, 3, 4))}
    trained = train(subject, start)
    for name in ("conv", "stack"):
        leaf = trained.pop(name)
        assert np.all(np.isfinite(leaf))
        assert np.all(leaf != 1)
    return trained


@situation(slow=True)
def tuples(subject: Subject):
    """A tuple of parameters."""
    return _as_dict(*train(subject, tuple(subjects.params().values())))


@situation(slow=True)
def lists(subject: Subject):
    """A list of parameters, in a list."""
    return _as_dict(*train(subject, [list(subjects.params().values())])[0])


@situation()
def named_tuples(subject: Subject):
    """A `NamedTuple` of parameters."""
    return train(subject, _Pair(**subjects.params()))._asdict()


@situation()
def dataclasses_of_parameters(subject: Subject):
    """A registered dataclass of parameters."""
    return vars(train(subject, _Record(**subjects.params())))


@situation(needs=("flax.core",))
def frozen_dicts(subject: Subject):
    """Flax's `FrozenDict`."""
    from flax.core import FrozenDict

    return dict(train(subject, FrozenDict(subjects.params())))


@situation(slow=True, needs=("flax.nnx",))
def nnx_states(subject: Subject):
    """Flax's `nnx.State`."""
    from flax import nnx

    start = nnx.State({k: nnx.Param(x) for k, x in subjects.params().items()})
    trained = train(subject, start)
    return {k: v[...] for k, v in trained.items()}


@situation(needs=("equinox",))
def equinox_modules(subject: Subject):
    """An Equinox module that can be called."""
    import equinox as eqx

    class Dense(eqx.Module):
        b: Any
        w: Any

        def __call__(self, x: Any) -> Any:
            return x @ self.w + self.b

    trained = train(subject, Dense(**subjects.params()))
    return {"b": trained.b, "w": trained.w}


@situation()
def integer_keys(subject: Subject):
    """A dict with integers for keys."""
    trained = train(subject, dict(enumerate(subjects.params().values())))
    return _as_dict(trained[0], trained[1])


@situation(slow=True)
def tuple_keys(subject: Subject):
    """A dict with tuples for keys, as `flax.traverse_util.flatten_dict` makes it."""
    trained = train(subject, {("layer", k): x for k, x in subjects.params().items()})
    return {k[1]: x for k, x in trained.items()}


@situation()
def names_of_fields(subject: Subject):
    """Parameters named as fields of states are: `mu`, `count`, `prev_grad`."""
    start = subjects.params()
    trained = train(subject, {"count": start["b"], "mu": {"prev_grad": start["w"]}})
    return _as_dict(trained["count"], trained["mu"]["prev_grad"])


@situation()
def deep_trees(subject: Subject):
    """Parameters below 200 dicts."""
    tree: Any = subjects.params()
    for _ in range(200):
        tree = {"inner": tree}
    trained = eagerly(subject, tree)
    for _ in range(200):
        trained = trained["inner"]
    return trained


@situation(slow=True)
def many_leaves(subject: Subject):
    """Twenty copies of the parameters, each moved as the one."""
    start = {str(i): subjects.params() for i in range(20)}
    trained = train(subject, start)
    return Results(trained, {k: subjects.plain(subject) for k in start})


@situation(slow=True)
def shared_leaves(subject: Subject):
    """One array as two leaves (tied weights that are not tied)."""
    start = subjects.params()
    trained = train(subject, {"one": start, "two": start})
    return Results(trained, {k: subjects.plain(subject) for k in ("one", "two")})


@situation()
def complex_leaves(subject: Subject):
    """Complex parameters without an imaginary part move as the real ones."""
    trained = train(subject, subjects.params("complex64"))
    assert {x.dtype.name for x in jax.tree.leaves(trained)} == {"complex64"}
    imaginary = jax.tree.map(jnp.imag, trained)
    real = jax.tree.map(jnp.real, trained)
    zeros = jax.tree.map(jnp.zeros_like, imaginary)
    return Results((real, imaginary), (subjects.plain(subject), zeros))


@situation()
def bfloat16_leaves(subject: Subject):
    """Parameters in bfloat16 keep their dtype and follow those in float32."""
    trained = train(subject, subjects.params("bfloat16"))
    assert {x.dtype.name for x in jax.tree.leaves(trained)} == {"bfloat16"}
    # Two updates of 0.1 to numbers near 1, of 8 bits each.
    return Results(trained, subjects.plain(subject), 3e-2)


@situation(slow=True)
def mixed_dtypes(subject: Subject):
    """Leaves in bfloat16, float16 and float32 beside each other."""
    dtypes = ("bfloat16", "float32", "float16")
    # In float16 a gradient's square has to be a number.
    start = {dtype: jax.tree.map(lambda p: p + 1, subjects.params(dtype)) for dtype in dtypes}
    trained = train(subject, start)
    for dtype in dtypes:
        assert {x.dtype.name for x in jax.tree.leaves(trained[dtype])} == {dtype}
    expected = train(subject, start["float32"])
    return Results(trained, dict.fromkeys(dtypes, expected), 3e-2)  # as above


@situation()
def gradients_of_another_dtype(subject: Subject):
    """Parameters in float32, gradients in bfloat16: the state keeps its types."""
    start = subjects.params()
    half = lambda p: jax.tree.map(lambda x: x.astype("bfloat16"), gradient(p))  # noqa: E731
    extra = {"grad_fn": half} if subject.evaluates else {}
    now, state = start, subject.tx.init(start)
    update = jax.jit(lambda g, s, p: subject.tx.update(g, s, p, **extra))
    for _ in range(subjects.STEPS):
        updates, state = update(half(now), state, now)
        now = jax.tree.map(lambda p, u: p + u, now, updates)
    # Rounded gradients of which one near zero may change the sign that Lion takes.
    return Results(now, subjects.plain(subject), 2e-2)


@situation()
def numpy_parameters(subject: Subject):
    """Parameters and gradients that are arrays of NumPy, eagerly."""
    return eagerly(subject, jax.device_get(subjects.params()))


@situation()
def numpy_gradients(subject: Subject):
    """Gradients that are arrays of NumPy, parameters of JAX, under jit and eagerly."""
    start = subjects.params()
    state = subject.tx.init(start)
    grads = jax.device_get(gradient(start))
    update = functools.partial(subject.tx.update, **subject.extra)
    eager, compiled = (fn(grads, state, start)[0] for fn in (update, jax.jit(update)))
    expected, _ = jax.jit(update)(gradient(start), state, start)
    return Results([eager, compiled], [expected] * 2)


@situation()
def python_numbers(subject: Subject):
    """A Python float as a parameter and as a gradient, eagerly."""
    start = 1.25
    now, state = start, subject.tx.init(start)
    for _ in range(subjects.STEPS):
        updates, state = subject.tx.update(gradient(now), state, now, **subject.extra)
        now = now + updates
    return Results(now, train(subject, jnp.float32(start)))


@situation(slow=True)
def weak_types(subject: Subject):
    """Parameters of a weak type: two steps are one program, or two."""
    start = {"b": jnp.asarray(1.25), "w": jnp.ones((3, 4)) * 1.25}
    assert start["b"].weak_type
    return Results(train(subject, start), train(subject, jax.tree.map(_strong, start)))


def _strong(x: Any) -> Any:
    return jnp.asarray(x, "float32")


@situation()
def masked_integers(subject: Subject):
    """Leaves of integers and booleans that `optax.masked` leaves out."""
    start = {**subjects.params(), "step": jnp.asarray([3]), "flag": jnp.asarray([True])}
    is_float = lambda p: jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), p)  # noqa: E731
    tx = optax.masked(subject.tx, is_float)
    now, state = start, tx.init(start)
    for _ in range(subjects.STEPS):
        grads = {**jax.tree.map(jnp.zeros_like, now), **gradient(_floats(now))}
        updates, state = tx.update(grads, state, now, **subject.extra)
        now = {**now, **optax.apply_updates(_floats(now), _floats(updates))}
    return _floats(now)


def _floats(tree: Any) -> Any:
    return {k: tree[k] for k in ("b", "w")}


@situation()
def shapes_for_init(subject: Subject):
    """`init` inside `eval_shape` of `jax.ShapeDtypeStruct`, then zeros for the state."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), subjects.params())
    abstract = jax.eval_shape(subject.tx.init, shapes)
    real = subject.tx.init(subjects.params())
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    lowered = jax.jit(subjects.step_of(subject)).lower(shapes, abstract).compile()
    now, state = subjects.params(), real
    for _ in range(subjects.STEPS):
        now, state = lowered(now, state)
    return now


@situation()
def huge_and_tiny_gradients(subject: Subject):
    """Gradients of 1e15 and 1e-15: what comes of them is finite."""
    now, state = subjects.params(), subject.tx.init(subjects.params())
    for factor in (1e15, 1e-15):
        big = lambda p, f=factor: jax.tree.map(lambda g: g * f, gradient(p))  # noqa: E731
        extra = {"grad_fn": big} if subject.evaluates else {}
        updates, state = subject.tx.update(big(now), state, now, **extra)
        now = jax.tree.map(lambda p, u: p + u, now, updates)
    return Results(now, now)
