"""Transformations of JAX: of the optimizer's functions, of steps, and through whole trainings."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun

from tests.differential import subjects
from tests.differential.situation import Results, situation
from tests.differential.subjects import LEARNING_RATE, Subject, eagerly, gradient, train
from tests.support import trees


def _stacked(count: int = 2) -> Any:
    """Members whose parameters are multiples of the plain ones."""
    factors = [1.0, 0.8, 0.6][:count]
    return jax.tree.map(lambda p: jnp.stack([p * f for f in factors]), subjects.params())


def _member(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


@situation()
def vmap_over_members(subject: Subject):
    """`jax.vmap` of `init` and of the step over members."""
    now = _stacked()
    state = jax.vmap(subject.tx.init)(now)
    step = jax.jit(jax.vmap(subjects.step_of(subject)))
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    expected = [train(subject, _member(_stacked(), i)) for i in range(2)]
    return Results([_member(now, i) for i in range(2)], expected)


@situation(slow=True)
def vmap_over_rates(subject: Subject):
    """`jax.vmap` of whole trainings over the learning rate."""
    rates = jnp.asarray([LEARNING_RATE, LEARNING_RATE / 2])

    @jax.jit
    @jax.vmap
    def run(rate: Any) -> Any:
        return eagerly(subject, tx=subject.make(rate))

    expected = [train(subject, tx=subject.make(rate)) for rate in map(float, rates)]
    return Results([_member(run(rates), i) for i in range(2)], expected)


@situation()
def vmap_of_gradients_only(subject: Subject):
    """`jax.vmap` of `update` over gradients, with one state and one set of parameters."""
    start = subjects.params()
    state = subject.tx.init(start)
    grads = jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), gradient(start))
    update = functools.partial(subject.tx.update, **subject.extra)
    updates, _ = jax.jit(jax.vmap(update, in_axes=(0, None, None)))(grads, state, start)
    expected = [jax.jit(update)(_member(grads, i), state, start)[0] for i in range(2)]
    return Results([_member(updates, i) for i in range(2)], expected)


@situation(slow=True)
def vmap_of_vmap(subject: Subject):
    """Two `jax.vmap` around the step."""
    now = jax.tree.map(lambda x: x[None], _stacked())
    state = jax.vmap(jax.vmap(subject.tx.init))(now)
    step = jax.jit(jax.vmap(jax.vmap(subjects.step_of(subject))))
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return Results(_member(_member(now, 0), 0), subjects.plain(subject))


@situation(slow=True)
def lax_map_over_members(subject: Subject):
    """`jax.lax.map` of whole trainings, two members at a time."""
    run = jax.jit(lambda p: jax.lax.map(lambda q: eagerly(subject, q), p, batch_size=2))
    now = run(_stacked(3))
    return Results(_member(now, 0), subjects.plain(subject))


def _outer_loss(subject: Subject, rate: Any, start: Any = None, **kwargs: Any) -> Any:
    trained = eagerly(subject, start, tx=subject.make(rate, **kwargs))
    return sum(jnp.sum((x - 0.3) ** 2) for x in jax.tree.leaves(trained))


def _by_differences(fn: Any, rate: float) -> Any:
    h = 1e-3
    return (fn(rate + h) - fn(rate - h)) / (2 * h)


@situation(slow=True)
def gradient_through_training(subject: Subject):
    """`jax.grad` of a training's result with respect to the learning rate."""
    outer = jax.jit(functools.partial(_outer_loss, subject))
    actual = jax.grad(outer)(LEARNING_RATE)
    expected = _by_differences(outer, LEARNING_RATE)
    # Differences of values in float32, with Newton-Schulz in bfloat16 among them.
    tolerance = 10.0 if subject.tolerance > 1e-5 else 0.05
    return Results(actual, expected, tolerance)


def _rooted(subject: Subject) -> dict[str, float]:
    """The argument of Adam's square root that is to make its derivative finite at zero."""
    given = inspect.signature(subject.factory).parameters
    return {name: 1e-8 for name in ("eps_root", "adam_eps_root") if name in given}


@situation()
def gradient_through_training_where_gradients_are_zero(subject: Subject):
    """The derivative by the learning rate, an entry's gradient zero at every step."""

    def outer(rate: Any) -> Any:
        tx = subject.make(rate, **_rooted(subject))
        start = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(0.0), subjects.params())
        fn = lambda p: jax.tree.map(lambda x: 0.2 * x, p)  # noqa: E731
        extra = {"grad_fn": fn} if subject.evaluates else {}
        now, state = start, tx.init(start)
        for _ in range(subjects.STEPS):
            updates, state = tx.update(fn(now), state, now, **extra)
            now = optax.apply_updates(now, updates)
        return sum(jnp.sum((x - 0.3) ** 2) for x in jax.tree.leaves(now))

    outer = jax.jit(outer)
    actual = jax.grad(outer)(LEARNING_RATE)
    tolerance = 10.0 if subject.tolerance > 1e-5 else 0.05  # as above
    return Results(actual, _by_differences(outer, LEARNING_RATE), tolerance)


@situation(slow=True)
def forward_mode_through_training(subject: Subject):
    """`jax.jacfwd` and `jax.jvp` by the rate equal `jax.grad`."""
    outer = functools.partial(_outer_loss, subject)
    forward = jax.jit(jax.jacfwd(outer))(LEARNING_RATE)
    _, tangent = jax.jvp(outer, (LEARNING_RATE,), (1.0,))
    reverse = jax.jit(jax.grad(outer))(LEARNING_RATE)
    # Sums in another order, of numbers around 1; through bfloat16, rounded to it.
    tolerance = 5.0 if subject.tolerance > 1e-5 else 2e-3
    return Results([forward, tangent], [reverse, reverse], tolerance)


@situation(slow=True)
def rematerialized_step(subject: Subject):
    """`jax.checkpoint` of the step, differentiated by the start."""

    def outer(start: Any, wrap: Any) -> Any:
        trained = train(subject, start, wrap=wrap)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(trained))

    start = subjects.params()
    grad = jax.jit(jax.grad(outer), static_argnums=1)
    tolerance = 1.0 if subject.tolerance > 1e-5 else 1e-3  # as above
    return Results(grad(start, jax.checkpoint), grad(start, lambda step: step), tolerance)


@situation(slow=True)
def linearized(subject: Subject):
    """`jax.linearize` and `jax.vjp` of a step by the parameters."""
    start = subjects.params()
    step = subjects.step_of(subject)
    state = jax.jit(step)(start, subject.tx.init(start))[1]
    fn = lambda p: step(p, state)[0]  # noqa: E731
    now, pushed = jax.linearize(fn, start)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(pushed(start)))
    other, pulled = jax.vjp(fn, start)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(pulled(start)))
    return Results([now, other], [fn(start)] * 2)


@situation(slow=True)
def custom_vjp_around(subject: Subject):
    """A `jax.custom_vjp` whose forward pass is a training."""

    @jax.custom_vjp
    def trained(start: Any) -> Any:
        return eagerly(subject, start)

    trained.defvjp(lambda start: (trained(start), None), lambda _, g: (g,))
    value, pulled = jax.vjp(jax.jit(trained), subjects.params())
    (back,) = pulled(subjects.params())
    return Results((value, back), (subjects.plain(subject), subjects.params()))


@situation()
def stacked_layers(subject: Subject):
    """`jax.lax.scan` of a step over the layers of stacked parameters, as models are scanned."""
    now = _stacked()
    states = jax.vmap(subject.tx.init)(now)

    @jax.jit
    def step(now: Any, states: Any) -> Any:
        body = lambda _, layer: (None, subjects.step_of(subject)(*layer))  # noqa: E731
        return jax.lax.scan(body, None, (now, states))[1]

    for _ in range(subjects.STEPS):
        now, states = step(now, states)
    return Results(_member(now, 0), subjects.plain(subject))


@situation()
def eval_shape(subject: Subject):
    """`jax.eval_shape` of `init` and of the step: types as those of the arrays."""
    start = subjects.params()
    shapes = jax.eval_shape(subject.tx.init, start)
    state = subject.tx.init(start)
    trees.assert_same_types(shapes, state)
    after = jax.eval_shape(subjects.step_of(subject), start, state)
    trees.assert_same_types(after, (start, state))
    return train(subject)


@situation()
def jaxprs_are_equal(subject: Subject):
    """`jax.make_jaxpr` twice gives one text, and it evaluates."""
    start = subjects.params()
    carry = start, subject.tx.init(start)
    step = subjects.step_of(subject)
    first, second = jax.make_jaxpr(step)(*carry), jax.make_jaxpr(subjects.step_of(subject))(*carry)
    assert _without_addresses(first) == _without_addresses(second)
    run = jaxpr_as_fun(first)
    structure = jax.tree.structure(carry)
    for _ in range(subjects.STEPS):
        carry = structure.unflatten(run(*jax.tree.leaves(carry)))
    return carry[0]


def _without_addresses(jaxpr: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


@situation(slow=True)
def compile_time_evaluation(subject: Subject):
    """`jax.ensure_compile_time_eval` around a training of constants inside jit."""

    @jax.jit
    def run() -> Any:
        with jax.ensure_compile_time_eval():
            return eagerly(subject)

    return run()


@situation()
def optimizer_as_a_static_argument(subject: Subject):
    """The optimizer as a static argument of `jax.jit`: hashable, equal to itself."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(tx: Any, now: Any, state: Any) -> Any:
        return subjects.step_of(subject, tx)(now, state)

    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        now, state = step(subject.tx, now, state)
    assert step._cache_size() == 1
    return now


@situation()
def made_inside_used_outside(subject: Subject):
    """An optimizer made while a function is traced, used in another."""
    made = []

    @jax.jit
    def trace(x: Any) -> Any:
        made.append(subject.make(LEARNING_RATE))
        made[0].init(subjects.params())
        return x

    trace(1.0)
    return train(subject, tx=made[0])


@situation()
def compiled_once(subject: Subject):
    """Ten steps of a compiled step are one program, the state of `init` included."""
    step = jax.jit(subjects.step_of(subject))
    now, state = subjects.params(), subject.tx.init(subjects.params())
    results = []
    for _ in range(10):
        now, state = step(now, state)
        results.append(now)
    assert step._cache_size() == 1
    return results[subjects.STEPS - 1]


@situation(slow=True)
def checkified(subject: Subject):
    """`checkify.checkify` with every check of floats, divisions and indices."""
    from jax.experimental import checkify

    errors = checkify.float_checks | checkify.div_checks | checkify.index_checks
    step = jax.jit(checkify.checkify(subjects.step_of(subject), errors=errors))
    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        error, (now, state) = step(now, state)
        error.throw()
    return now


@situation(slow=True)
def inside_a_callback(subject: Subject):
    """A training inside `jax.pure_callback`."""
    run = jax.jit(
        lambda p: jax.pure_callback(
            lambda p: jax.device_get(eagerly(subject, jax.tree.map(jnp.asarray, p))),
            jax.eval_shape(lambda: p),
            p,
        )
    )
    return run(subjects.params())


@situation(slow=True)
def named_scope(subject: Subject):
    """`jax.named_scope` and `jax.named_call` around the step."""
    with jax.named_scope("outer"):
        return train(subject, wrap=lambda step: jax.jit(jax.named_call(step, name="step")))


@situation(slow=True)
def optimization_barrier(subject: Subject):
    """`jax.lax.optimization_barrier` around gradients, state and updates."""

    def step(now: Any, state: Any) -> Any:
        grads, state = jax.lax.optimization_barrier((gradient(now), state))
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        return optax.apply_updates(now, jax.lax.optimization_barrier(updates)), state

    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        now, state = jax.jit(step)(now, state)
    return now


@situation(slow=True)
def gradients_by_the_state(subject: Subject):
    """`jax.grad` of an update by the optimizer's state, as truncated unrolls have it."""
    start = subjects.params()
    state = jax.jit(subjects.step_of(subject))(start, subject.tx.init(start))[1]

    def outer(state: Any) -> Any:
        now, _ = subjects.step_of(subject)(start, state)
        return sum(jnp.sum(x) for x in jax.tree.leaves(now))

    grads = jax.grad(outer, allow_int=True)(state)
    inexact = [
        x.astype("float32") for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    assert inexact
    return Results(inexact, inexact)
