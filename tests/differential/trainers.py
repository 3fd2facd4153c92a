"""Training loops: those of libraries, and those of `jax.lax`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.differential import subjects
from tests.differential.situation import Results, situation
from tests.differential.subjects import EVALUATING, Subject, gradient

_NO_EXTRA_ARGUMENTS = dict.fromkeys(
    EVALUATING, "the trainer passes no extra arguments, and this one needs `grad_fn`"
)


@situation(needs=("flax.training.train_state",), reasons=_NO_EXTRA_ARGUMENTS)
def flax_train_state(subject: Subject):
    """Flax's `TrainState`, under jit."""
    from flax.training.train_state import TrainState

    state = TrainState.create(apply_fn=None, params=subjects.params(), tx=subject.tx)
    step = jax.jit(lambda state: state.apply_gradients(grads=gradient(state.params)))
    for _ in range(subjects.STEPS):
        state = step(state)
    return state.params


def _nnx_model() -> Any:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            start = subjects.params()
            self.b, self.w = nnx.Param(start["b"]), nnx.Param(start["w"])

    return Model()


def _nnx_train(subject: Subject, optimizer: Any, model: Any, update: Any) -> Any:
    from flax import nnx

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda m: subjects.loss({"b": m.b[...], "w": m.w[...]}))(model)
        update(optimizer, model, grads, **subject.extra)

    for _ in range(subjects.STEPS):
        step(model, optimizer)
    return {"b": model.b[...], "w": model.w[...]}


@situation(needs=("flax.nnx",))
def nnx_optimizer(subject: Subject):
    """Flax's `nnx.Optimizer`, under `nnx.jit`."""
    from flax import nnx

    model = _nnx_model()
    optimizer = nnx.Optimizer(model, subject.tx, wrt=nnx.Param)
    return _nnx_train(subject, optimizer, model, lambda o, m, g, **extra: o.update(m, g, **extra))


@situation(slow=True, needs=("flax.nnx.ModelAndOptimizer",))
def nnx_model_and_optimizer(subject: Subject):
    """Flax's `nnx.ModelAndOptimizer`, under `nnx.jit`."""
    from flax import nnx

    optimizer = nnx.ModelAndOptimizer(_nnx_model(), subject.tx, wrt=nnx.Param)

    @nnx.jit
    def step(optimizer: Any) -> None:
        grads = nnx.grad(lambda m: subjects.loss({"b": m.b[...], "w": m.w[...]}))(optimizer.model)
        optimizer.update(grads, **subject.extra)

    for _ in range(subjects.STEPS):
        step(optimizer)
    return {"b": optimizer.model.b[...], "w": optimizer.model.w[...]}


@situation(needs=("equinox",))
def equinox_filter_jit(subject: Subject):
    """Equinox's `filter_jit` of a module with a function among its leaves."""
    import equinox as eqx

    class Model(eqx.Module):
        b: jax.Array
        w: jax.Array
        activation: Any

        def __call__(self, x: Any) -> Any:
            return self.activation(x @ self.w + self.b)

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        grads = eqx.filter_grad(lambda m: subjects.loss({"b": m.b, "w": m.w}))(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = subject.tx.update(grads, state, params, **subject.extra)
        return eqx.apply_updates(model, updates), state

    model = Model(**subjects.params(), activation=jax.nn.relu)
    state = subject.tx.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(subjects.STEPS):
        model, state = step(model, state)
    return {"b": model.b, "w": model.w}


@situation(slow=True, needs=("equinox",))
def equinox_carries_the_optimizer(subject: Subject):
    """The optimizer as a leaf of an Equinox module that `filter_jit` gets."""
    import equinox as eqx

    class Trainer(eqx.Module):
        params: Any
        state: Any
        tx: Any

    @eqx.filter_jit
    def step(trainer: Any) -> Any:
        params, state = subjects.step_of(subject, trainer.tx)(trainer.params, trainer.state)
        return Trainer(params, state, trainer.tx)

    start = subjects.params()
    trainer = Trainer(start, subject.tx.init(start), subject.tx)
    for _ in range(subjects.STEPS):
        trainer = step(trainer)
    return trainer.params


@situation(needs=("equinox",))
def equinox_closure_to_callable_tree(subject: Subject):
    """Equinox's `filter_closure_convert`: the step and what it captures as a callable tree."""
    import equinox as eqx

    start = subjects.params()
    converted = eqx.filter_closure_convert(subjects.step_of(subject), start, subject.tx.init(start))
    now, state = start, subject.tx.init(start)
    for _ in range(subjects.STEPS):
        now, state = eqx.filter_jit(converted)(now, state)
    return now


@situation(needs=("haiku",))
def haiku_parameters(subject: Subject):
    """Haiku's nested parameters, of `transform`."""
    import haiku as hk

    def forward() -> Any:
        start = subjects.params()
        return {k: hk.get_parameter(k, x.shape, init=lambda *_, x=x: x) for k, x in start.items()}

    model = hk.transform(forward)
    now = model.init(jax.random.key(0))

    @jax.jit
    def step(now: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: subjects.loss(model.apply(p, None)))(now)
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        return optax.apply_updates(now, updates), state

    state = subject.tx.init(now)
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    return now["~"]


@situation(needs=("optimistix",), reasons=_NO_EXTRA_ARGUMENTS)
def optimistix_minimiser(subject: Subject):
    """Optimistix's `OptaxMinimiser`, which turns captured functions into callable trees."""
    import optimistix

    solver = optimistix.OptaxMinimiser(subject.tx, rtol=1e-9, atol=1e-9)
    solution = optimistix.minimise(
        lambda p, _: subjects.loss(p),
        solver,
        subjects.params(),
        max_steps=subjects.STEPS,
        throw=False,
    )
    return solution.value


class _SolverState(NamedTuple):
    iteration: jax.Array
    internal: Any


@situation()
def solver_of_fixed_arguments(subject: Subject):
    """A solver as JAXopt's: a carry of parameters and state in a `while_loop` until they stop."""

    def update(now: Any, state: _SolverState) -> Any:
        now, internal = subjects.step_of(subject)(now, state.internal)
        return now, _SolverState(state.iteration + 1, internal)

    @functools.partial(jax.jit, static_argnums=1)
    def run(now: Any, steps: int) -> Any:
        state = _SolverState(jnp.asarray(0), subject.tx.init(now))
        return jax.lax.while_loop(
            lambda carry: carry[1].iteration < steps, lambda carry: update(*carry), (now, state)
        )[0]

    return run(subjects.params(), subjects.STEPS)


@situation()
def scan(subject: Subject):
    """`jax.lax.scan` over the steps, `init` inside."""

    @jax.jit
    def run(now: Any) -> Any:
        step = subjects.step_of(subject)
        carry = now, subject.tx.init(now)
        return jax.lax.scan(lambda c, _: (step(*c), None), carry, None, subjects.STEPS)[0][0]

    return run(subjects.params())


@situation(slow=True)
def fori_loop(subject: Subject):
    """`jax.lax.fori_loop` over the steps, eagerly."""
    step, now = subjects.step_of(subject), subjects.params()
    carry = now, subject.tx.init(now)
    return jax.lax.fori_loop(0, subjects.STEPS, lambda _, c: step(*c), carry)[0]


@situation()
def cond_around_update(subject: Subject):
    """`jax.lax.cond` that takes a step or leaves all as it is."""
    step = subjects.step_of(subject)

    @jax.jit
    def maybe(take: Any, now: Any, state: Any) -> Any:
        return jax.lax.cond(take, step, lambda *same: same, now, state)

    now, state = subjects.params(), subject.tx.init(subjects.params())
    for take in (True, False, True):
        now, state = maybe(take, now, state)
    return now


@situation(slow=True)
def switch_between_rates(subject: Subject):
    """`jax.lax.switch` between optimizers of two rates with one state."""
    branches = [
        subjects.step_of(subject, subject.make(rate)) for rate in (0.5, subjects.LEARNING_RATE)
    ]
    step = jax.jit(lambda i, now, state: jax.lax.switch(i, branches, now, state))
    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        now, state = step(1, now, state)
    return now


@situation(slow=True)
def accumulated_micro_batches(subject: Subject):
    """The mean of micro-batches' gradients by a scan, one `update` behind it."""

    def step(now: Any, state: Any) -> Any:
        def add(total: Any, weight: Any) -> Any:
            return jax.tree.map(lambda t, g: t + weight * g, total, gradient(now)), None

        zeros = jax.tree.map(jnp.zeros_like, now)
        grads, _ = jax.lax.scan(add, zeros, jnp.asarray([0.25, 0.75]))
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        return optax.apply_updates(now, updates), state

    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        now, state = jax.jit(step)(now, state)
    return now


@situation()
def loss_scale(subject: Subject):
    """Parameters in bfloat16 for the loss, in float32 for the optimizer, and a loss scale."""

    def step(now: Any, state: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype("bfloat16"), now)
        grads = jax.tree.map(lambda g: g.astype("float32") * 128 / 128, gradient(half))
        updates, state = subject.tx.update(grads, state, now, **subject.extra)
        return optax.apply_updates(now, updates), state

    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        now, state = jax.jit(step)(now, state)
    # Entries of a gradient round to 8 bits; one near zero may change the sign that Lion takes.
    return Results(now, subjects.plain(subject), 2e-2)


@situation(needs=("chex",))
def chex_dataclass(subject: Subject):
    """A training state that is a `chex.dataclass`, traced once."""
    import chex

    @chex.dataclass
    class State:
        params: Any
        opt_state: Any

    chex.clear_trace_counter()  # it counts by name

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state: Any) -> Any:
        now, opt_state = subjects.step_of(subject)(state.params, state.opt_state)
        return State(params=now, opt_state=opt_state)

    state = State(params=subjects.params(), opt_state=subject.tx.init(subjects.params()))
    for _ in range(subjects.STEPS):
        state = step(state)
    return state.params


@situation(needs=("jax.new_ref",))
def references(subject: Subject):
    """Parameters and state in mutable references, which the step writes (`jax.new_ref`)."""
    start = subjects.params()
    refs = jax.tree.map(jax.new_ref, (start, subject.tx.init(start)))

    @jax.jit
    def step(refs: Any) -> None:
        now, state = jax.tree.map(lambda r: r[...], refs)
        new = subjects.step_of(subject)(now, state)

        def write(ref: Any, x: Any) -> None:
            ref[...] = x

        jax.tree.map(write, refs, new)

    for _ in range(subjects.STEPS):
        step(refs)
    return jax.tree.map(lambda r: r[...], refs[0])


@situation(slow=True)
def train_of_others(subject: Subject):
    """`jax.value_and_grad` with an auxiliary output, and `apply_updates` in another program."""
    update = jax.jit(functools.partial(subject.tx.update, **subject.extra))
    now, state = subjects.params(), subject.tx.init(subjects.params())
    for _ in range(subjects.STEPS):
        (_, _), grads = jax.value_and_grad(lambda p: (subjects.loss(p), p), has_aux=True)(now)
        updates, state = update(grads, state, now)
        now = jax.jit(optax.apply_updates)(now, updates)
    return now
