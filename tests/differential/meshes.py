"""Meshes of four CPU devices: automatic and explicit axes, `shard_map`, `pmap`, `jax.export`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.differential import subjects
from tests.differential.situation import Results, situation
from tests.differential.subjects import Subject, eagerly, gradient, train

_LAYOUTS = {
    "rows": {"b": P(), "w": P("data", None)},
    "columns": {"b": P("model"), "w": P(None, "model")},
    "both": {"b": P("model"), "w": P("data", "model")},
}


def _mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4]
    )


def _line() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def _assert_placed(tree: Any, like: Any) -> None:
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), f"{x.sharding}, not {y.sharding}"


def _on_mesh(subject: Subject, axis_type: AxisType, layout: str, wrap: Any = jax.jit) -> Any:
    """Trains on a mesh; the updates lie as the parameters."""
    mesh = _mesh(axis_type)
    with jax.set_mesh(mesh):
        place = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS[layout].items()}
        start = now = jax.device_put(subjects.params(), place)
        state = wrap(subject.tx.init)(now)
        update = wrap(functools.partial(subject.tx.update, **subject.extra))
        for _ in range(subjects.STEPS):
            updates, state = update(gradient(now), state, now)
            _assert_placed(updates, start)
            now = optax.apply_updates(now, updates)
        return now


@situation()
def automatic_mesh_by_rows(subject: Subject):
    """A tall matrix by rows on a mesh of automatic axes; updates lie as it does."""
    return _on_mesh(subject, AxisType.Auto, "rows")


@situation(slow=True)
def automatic_mesh_by_columns(subject: Subject):
    """The matrix by columns on a mesh of automatic axes; updates lie as it does."""
    return _on_mesh(subject, AxisType.Auto, "columns")


@situation(slow=True)
def automatic_mesh_by_both(subject: Subject):
    """The matrix by both axes of a mesh of automatic axes; updates lie as it does."""
    return _on_mesh(subject, AxisType.Auto, "both")


@situation(slow=True)
def explicit_mesh_by_rows(subject: Subject):
    """A tall matrix by rows on a mesh of explicit axes; updates lie as it does."""
    return _on_mesh(subject, AxisType.Explicit, "rows")


@situation()
def explicit_mesh_by_both(subject: Subject):
    """The matrix by both axes of a mesh of explicit axes; updates lie as it does."""
    return _on_mesh(subject, AxisType.Explicit, "both")


@situation(slow=True)
def eager_on_a_mesh(subject: Subject):
    """Eager steps on parameters that lie on a mesh of automatic axes."""
    mesh = _mesh(AxisType.Auto)
    place = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS["both"].items()}
    return eagerly(subject, jax.device_put(subjects.params(), place))


def _in_shard_map(subject: Subject, check_vma: bool, **extra: Any) -> Any:
    """Parameters whole on every device, gradients averaged over the devices."""

    def step(now: Any, state: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda g: jax.lax.pmean(g * weight[0], "x"), gradient(now))
        updates, state = subject.tx.update(grads, state, now, **subject.extra, **extra)
        return optax.apply_updates(now, updates), state

    mapped = jax.shard_map(
        step, mesh=_line(), in_specs=(P(), P(), P("x")), out_specs=P(), check_vma=check_vma
    )
    now, state = subjects.params(), subject.tx.init(subjects.params())
    weights = jnp.asarray([0.5, 1.5, 0.75, 1.25])
    for _ in range(subjects.STEPS):
        now, state = jax.jit(mapped)(now, state, weights)
    return now


@situation()
def shard_map_with_check_vma(subject: Subject):
    """Data-parallel steps inside `jax.shard_map`."""
    return _in_shard_map(subject, check_vma=True)


# Nothing says whether a leaf is whole, and a clip, Newton-Schulz and rows of 8 bits have to know.
_MAY_BE_A_PART = dict.fromkeys(
    (s.name for s in subjects.OURS if s.name not in ("storm_adamw", "mars_without_prev_grad")),
    "a leaf may be a part of a matrix: `update` wants `param_specs`, see the row with them",
)
_WHOLE = {"b": P(), "w": P()}


@situation(reasons=_MAY_BE_A_PART)
def shard_map_without_check_vma(subject: Subject):
    """Data-parallel steps inside `jax.shard_map(check_vma=False)`."""
    return _in_shard_map(subject, check_vma=False)


@situation()
def shard_map_without_check_vma_with_param_specs(subject: Subject):
    """The same with `update(..., param_specs=...)`, which Optax's ignore."""
    return _in_shard_map(subject, check_vma=False, param_specs=_WHOLE)


@situation(
    slow=True,
    reasons={"mars_soap": "`init`, which sees the sizes of matrices, gets no `param_specs`"},
)
def shard_map_over_members(subject: Subject):
    """Another member on each device, inside `jax.shard_map`, with `param_specs` of whole leaves."""

    def run(stack: Any) -> Any:
        member = jax.tree.map(lambda x: x[0], stack)
        trained = eagerly(subject, member, param_specs=_WHOLE)
        return jax.tree.map(lambda x: x[None], trained)

    stack = jax.tree.map(lambda p: jnp.stack([p] * 4), subjects.params())
    mapped = jax.shard_map(run, mesh=_line(), in_specs=P("x"), out_specs=P("x"))
    trained = jax.jit(mapped)(stack)
    return Results(trained, jax.tree.map(lambda p: jnp.stack([p] * 4), subjects.plain(subject)))


def _by_pmap(subject: Subject, **extra: Any) -> Any:
    def step(now: Any, state: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda g: jax.lax.pmean(g * weight, "x"), gradient(now))
        updates, state = subject.tx.update(grads, state, now, **subject.extra, **extra)
        return optax.apply_updates(now, updates), state

    mapped = jax.pmap(step, "x", in_axes=(0, 0, None), devices=jax.devices()[:2])
    start = subjects.params()
    now, state = jax.tree.map(lambda x: jnp.stack([x] * 2), (start, subject.tx.init(start)))
    for _ in range(subjects.STEPS):
        now, state = mapped(now, state, jnp.float32(1.0))
    return jax.tree.map(lambda x: np.asarray(x)[1], now)


# Before that it is no `shard_map`, and all pass.
@situation(reasons=_MAY_BE_A_PART, jax=(0, 10))
def pmap(subject: Subject):
    """`jax.pmap` over replicated parameters and state, with a fixed argument."""
    return _by_pmap(subject)


@situation()
def pmap_with_param_specs(subject: Subject):
    """The same with `update(..., param_specs=...)`, which Optax's ignore."""
    return _by_pmap(subject, param_specs=_WHOLE)


@situation(needs=("jax.export", "flatbuffers"))
def exported_on_a_mesh(subject: Subject):
    """`jax.export` of a step on a mesh of automatic axes, serialized and called."""
    mesh = _mesh(AxisType.Auto)
    place = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS["rows"].items()}
    now = jax.device_put(subjects.params(), place)
    leaves, structure = jax.tree.flatten((now, jax.jit(subject.tx.init)(now)))
    # JAX leaves what depends on no parameter, as counts, on one device.
    specs = [getattr(x.sharding, "spec", P()) for x in leaves]
    leaves = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)
    ]

    def step(*leaves: Any) -> Any:
        return jax.tree.leaves(subjects.step_of(subject)(*structure.unflatten(leaves)))

    stored = jax.export.export(jax.jit(step))(*leaves).serialize()
    call = jax.jit(jax.export.deserialize(stored).call)
    for _ in range(subjects.STEPS):
        leaves = call(*leaves)
    return structure.unflatten(leaves)[0]


def _without_pointers(subject: Subject, **extra: Any) -> Any:
    mesh = _mesh(AxisType.Auto)
    place = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS["rows"].items()}
    now = jax.device_put(subjects.params(), place)
    carry = now, jax.jit(subject.tx.init)(now)
    texts = set()
    for _ in range(2):
        tx = subject.make(subjects.LEARNING_RATE)
        texts.add(jax.jit(subjects.step_of(subject, tx, **extra)).lower(*carry).as_text())
    assert len(texts) == 1
    assert "CustomSPMDPartitioning" not in texts.pop()
    return train(subject, now, **extra)


CALLS_BACK = dict.fromkeys(
    ("mars_m", "mars_shampoo", "mars_m_8_bits"),
    "the partitioner calls back into this process: `update` wants `param_specs`, see the row "
    "no_pointers_in_the_program_with_param_specs",
)


@situation(reasons=CALLS_BACK)
def no_pointers_in_the_program_on_a_mesh(subject: Subject):
    """The lowered step on a mesh has no pointer of this process, for a compilation cache."""
    return _without_pointers(subject)


@situation(jax=(0, 8))
def no_pointers_in_the_program_with_param_specs(subject: Subject):
    """The same with `update(..., param_specs=...)`, which Optax's ignore."""
    return _without_pointers(subject, param_specs=_LAYOUTS["rows"])


@situation()
def sharding_constraints(subject: Subject):
    """`with_sharding_constraint` of gradients and updates inside the compiled step."""
    mesh = _mesh(AxisType.Auto)
    place = {k: NamedSharding(mesh, spec) for k, spec in _LAYOUTS["both"].items()}

    @jax.jit
    def step(now: Any, state: Any) -> Any:
        grads = jax.lax.with_sharding_constraint(gradient(now), place)
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        updates = jax.lax.with_sharding_constraint(updates, place)
        return optax.apply_updates(now, updates), state

    now = jax.device_put(subjects.params(), place)
    state = jax.jit(subject.tx.init)(now)
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now


@situation(slow=True)
def out_shardings(subject: Subject):
    """`jax.jit(step, in_shardings=..., out_shardings=...)` with a sharding for all leaves."""
    whole = NamedSharding(_mesh(AxisType.Auto), P())
    step = jax.jit(subjects.step_of(subject), in_shardings=whole, out_shardings=whole)
    now = jax.device_put(subjects.params(), whole)
    state = jax.jit(subject.tx.init, out_shardings=whole)(now)
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now


@situation(slow=True)
def vmap_over_a_mesh_axis(subject: Subject):
    """`jax.vmap(spmd_axis_name=...)` of the step over members that lie on a mesh axis."""
    mesh = _mesh(AxisType.Auto)
    stack = jax.tree.map(lambda p: jnp.stack([p] * 2), subjects.params())
    now = jax.device_put(stack, NamedSharding(mesh, P("data")))
    state = jax.jit(jax.vmap(subject.tx.init))(now)
    step = jax.jit(jax.vmap(subjects.step_of(subject), spmd_axis_name="data"))
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return Results(now, jax.tree.map(lambda p: jnp.stack([p] * 2), subjects.plain(subject)))
