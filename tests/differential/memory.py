"""Memory: host memory, donation, state that is moved away and back."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.differential import subjects
from tests.differential.situation import situation
from tests.differential.subjects import Subject, gradient


def _in(kind: str) -> NamedSharding:
    """One device, and a kind of its memory."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return NamedSharding(mesh, P(), memory_kind=kind)


def _kinds(tree: Any) -> set[Any]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def _from_host(subject: Subject, state: Any, place: Any) -> Any:
    """Trains in the device's memory, parameters and state in between in the host's."""
    host, device = _in("pinned_host"), _in("device")

    @jax.jit
    def step(now: Any, state: Any) -> Any:
        now, state = jax.device_put((now, state), device)
        return subjects.step_of(subject)(now, state)

    now = jax.device_put(subjects.params(), host)
    for _ in range(subjects.STEPS):
        now, state = place(step(now, state))
    return now


# Before that JAX moves nothing to the host's memory inside a compiled program on CPUs.
_HOST = (0, 10)


@situation()
def pinned_host(subject: Subject):
    """`jit(init)` of parameters in pinned host memory, then steps on the device."""
    now = jax.device_put(subjects.params(), _in("pinned_host"))
    state = jax.jit(subject.tx.init)(now)
    return _from_host(subject, state, lambda carry: jax.device_put(carry, _in("pinned_host")))


@situation(jax=_HOST)
def pinned_host_by_out_shardings(subject: Subject):
    """`jit(init, out_shardings=...)` to pinned host memory, of parameters there."""
    host = _in("pinned_host")
    now = jax.device_put(subjects.params(), host)
    state = jax.jit(subject.tx.init, out_shardings=host)(now)
    assert _kinds(state) == {"pinned_host"}
    return _from_host(subject, state, lambda carry: jax.device_put(carry, host))


@situation(jax=_HOST)
def state_to_pinned_host(subject: Subject):
    """`jit(init, out_shardings=...)` to pinned host memory, of parameters on the device."""
    now = jax.device_put(subjects.params(), _in("device"))
    state = jax.jit(subject.tx.init, out_shardings=_in("pinned_host"))(now)
    assert _kinds(state) == {"pinned_host"}
    return _from_host(subject, state, lambda carry: jax.device_put(carry, _in("pinned_host")))


@situation()
def state_offloaded_and_back(subject: Subject):
    """The state moved to pinned host memory between steps, and back for each."""
    host, device = _in("pinned_host"), _in("device")
    now = jax.device_put(subjects.params(), device)
    state, step = subject.tx.init(now), jax.jit(subjects.step_of(subject))
    for _ in range(subjects.STEPS):
        state = jax.device_put(state, host)
        assert _kinds(state) == {"pinned_host"}
        now, state = step(now, jax.device_put(state, device))
    return now


@situation(slow=True, needs=("jax.experimental.compute_on.compute_on",))
def update_on_the_host(subject: Subject):
    """`update` under `compute_on("device_host")`, inside a compiled step."""
    from jax.experimental.compute_on import compute_on

    @jax.jit
    def step(now: Any, state: Any) -> Any:
        # Compiled on its own, as `compute_on` wants it.
        return compute_on("device_host")(jax.jit(subjects.step_of(subject)))(now, state)

    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now


@situation()
def donated_parameters_and_state(subject: Subject):
    """Parameters and state donated to the compiled step."""
    step = jax.jit(subjects.step_of(subject), donate_argnums=(0, 1))
    now = subjects.params()
    state = subject.tx.init(now)
    for _ in range(subjects.STEPS):
        before = jax.tree.leaves((now, state))
        now, state = step(now, state)
        # What is handed on as it is, as the parameters of exact mode, JAX does not take.
        assert any(x.is_deleted() for x in before)
    return now


@situation()
def donated_gradients_too(subject: Subject):
    """Gradients, state and parameters donated to a compiled `update` and `apply_updates`."""

    def step(grads: Any, state: Any, now: Any) -> Any:
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        return optax.apply_updates(now, updates), state

    donating = jax.jit(step, donate_argnums=(1, 2))
    now = subjects.params()
    state = subject.tx.init(now)
    for _ in range(subjects.STEPS):
        grads = gradient(now)
        now, state = donating(grads, state, now)
        jax.tree.map(lambda g: g.delete(), grads)  # the state keeps none of them
    return now


@situation(slow=True)
def donation_after_an_eager_step(subject: Subject):
    """Gradients and state of an eager step donated together: no buffer is in both."""
    start = subjects.params()
    grads = gradient(start)
    updates, state = subject.tx.update(grads, subject.tx.init(start), start, **subject.extra)
    now = optax.apply_updates(start, updates)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((grads, start, state, now))]
    assert len(set(buffers)) == len(buffers)
    step = jax.jit(subjects.step_of(subject), donate_argnums=(0, 1))
    for _ in range(subjects.STEPS - 1):
        now, state = step(now, state)
    return now


@situation(slow=True)
def parameters_deleted_after_init(subject: Subject):
    """The parameters that `init` got are deleted: the state keeps none of their buffers."""
    start = subjects.params()
    state = subject.tx.init(start)
    jax.tree.map(lambda p: p.delete(), start)
    now, step = subjects.params(), jax.jit(subjects.step_of(subject))
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now


@situation()
def gradients_overwritten(subject: Subject):
    """Gradients of NumPy that are overwritten after each eager step."""
    now = subjects.params()
    state = subject.tx.init(now)
    for _ in range(subjects.STEPS):
        grads = jax.tree.map(lambda g: jax.device_get(g).copy(), gradient(now))
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        now = jax.block_until_ready(optax.apply_updates(now, updates))
        jax.block_until_ready(state)
        for g in jax.tree.leaves(grads):
            g[...] = jnp.nan
    return now
