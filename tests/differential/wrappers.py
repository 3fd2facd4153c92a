"""Wrappers and neighbours in Optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.differential import subjects
from tests.differential.situation import Results, situation
from tests.differential.subjects import EVALUATING, LEARNING_RATE, Subject, gradient, train

_NO_EXTRA_ARGUMENTS = dict.fromkeys(
    EVALUATING, "the wrapper passes no extra arguments, and this one needs `grad_fn`"
)


@situation()
def chain(subject: Subject):
    """`optax.chain` behind `clip_by_global_norm`, in front of `scale`."""
    return train(
        subject, tx=optax.chain(optax.clip_by_global_norm(1e3), subject.tx, optax.scale(1.0))
    )


@situation()
def named_chain(subject: Subject):
    """`optax.named_chain`."""
    links = [("clip", optax.clip(1e3)), ("optimizer", subject.tx)]
    return train(subject, tx=optax.named_chain(*links))


@situation()
def masked(subject: Subject):
    """`optax.masked` by a tree: the other leaf's updates are its gradients."""
    trained = train(subject, tx=optax.masked(subject.tx, {"b": True, "w": True}))
    start = subjects.params()
    half = optax.masked(subject.tx, {"b": False, "w": True})
    updates, _ = half.update(gradient(start), half.init(start), start, **subject.extra)
    assert jnp.array_equal(updates["b"], gradient(start)["b"])
    return trained


@situation(slow=True)
def masked_by_a_function(subject: Subject):
    """`optax.masked` by a function of the parameters, one leaf left out."""
    tx = optax.masked(subject.tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    actual = train(
        subject, tx=optax.chain(tx, optax.masked(optax.set_to_zero(), {"b": True, "w": False}))
    )
    start = {"w": subjects.params()["w"]}
    return Results(actual, {**train(subject, start), "b": subjects.params()["b"]})


@situation()
def partition(subject: Subject):
    """`optax.partition` with the optimizer for all leaves."""
    tx = optax.partition(
        {"trained": subject.tx, "frozen": optax.set_to_zero()},
        lambda p: jax.tree.map(lambda _: "trained", p),
    )
    return train(subject, tx=tx)


@situation()
def partition_with_a_frozen_leaf(subject: Subject):
    """`optax.partition` with `set_to_zero` for a leaf."""
    tx = optax.partition(
        {"trained": subject.tx, "frozen": optax.set_to_zero()}, {"b": "frozen", "w": "trained"}
    )
    start = {"w": subjects.params()["w"]}
    return Results(train(subject, tx=tx), {**train(subject, start), "b": subjects.params()["b"]})


@situation(slow=True)
def partition_of_two(subject: Subject):
    """`optax.partition` with an optimizer for each leaf."""
    tx = optax.partition(
        {"b": subject.tx, "w": subject.make(LEARNING_RATE / 2)}, {"b": "b", "w": "w"}
    )
    start = subjects.params()
    halves = {
        "b": train(subject, {"b": start["b"]})["b"],
        "w": train(subject, {"w": start["w"]}, tx=subject.make(LEARNING_RATE / 2))["w"],
    }
    return Results(train(subject, tx=tx), halves)


@situation(slow=True, needs=("optax.freeze",))
def freeze(subject: Subject):
    """`optax.freeze` of a leaf behind the optimizer."""
    tx = optax.chain(subject.tx, optax.freeze({"b": True, "w": False}))
    expected = {**subjects.plain(subject), "b": subjects.params()["b"]}
    return Results(train(subject, tx=tx), expected)


@situation(slow=True, needs=("optax.selective_transform",))
def selective_transform(subject: Subject):
    """`optax.selective_transform`: the optimizer for a leaf, the other frozen."""
    tx = optax.selective_transform(subject.tx, freeze_mask={"b": True, "w": False})
    start = {"w": subjects.params()["w"]}
    return Results(train(subject, tx=tx), {**train(subject, start), "b": subjects.params()["b"]})


@situation()
def multi_steps(subject: Subject):
    """`optax.MultiSteps`: two calls with one gradient are one step."""
    return train(subject, tx=optax.MultiSteps(subject.tx, 2), steps=2 * subjects.STEPS)


@situation(slow=True)
def multi_steps_by_a_schedule(subject: Subject):
    """`optax.MultiSteps` with a schedule of their number."""
    tx = optax.MultiSteps(subject.tx, lambda step: jnp.where(step < 1, 1, 2))
    return train(subject, tx=tx.gradient_transformation(), steps=2 * subjects.STEPS - 1)


@situation(slow=True)
def skip_not_finite(subject: Subject):
    """`optax.MultiSteps` that skips a gradient that is not finite."""
    tx = optax.MultiSteps(subject.tx, 1, should_skip_update_fn=optax.skip_not_finite)
    return _with_a_nan(subject, tx)


@situation(slow=True)
def skip_large_updates(subject: Subject):
    """`optax.MultiSteps` that skips large gradients, of which there are none."""
    skip = functools.partial(optax.skip_large_updates, max_squared_norm=1e3)
    return train(subject, tx=optax.MultiSteps(subject.tx, 1, should_skip_update_fn=skip))


@situation()
def apply_if_finite(subject: Subject):
    """`optax.apply_if_finite`: a step with a NaN leaves no trace."""
    return _with_a_nan(subject, optax.apply_if_finite(subject.tx, 3))


def _with_a_nan(subject: Subject, tx: Any) -> Any:
    """Two steps, and one whose gradient is NaN between them."""
    now, update = subjects.params(), jax.jit(functools.partial(tx.update, **subject.extra))
    state = tx.init(now)
    for factor in (1.0, jnp.nan, 1.0):
        grads = jax.tree.map(lambda g, f=factor: g * f, gradient(now))
        updates, state = update(grads, state, now)
        now = optax.apply_updates(now, updates)
    return now


@situation()
def inject_hyperparams(subject: Subject):
    """`optax.inject_hyperparams`, the rate changed in the state and back."""
    tx = _injected(subject, learning_rate=LEARNING_RATE)
    state = tx.init(subjects.params())
    assert state.hyperparams["learning_rate"] == jnp.float32(LEARNING_RATE)
    step = jax.jit(subjects.step_of(subject, tx))
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    still, _ = step(subjects.params(), state)
    assert all(map(jnp.array_equal, jax.tree.leaves(still), jax.tree.leaves(subjects.params())))
    return train(subject, tx=tx)


@situation()
def inject_a_schedule(subject: Subject):
    """`optax.inject_hyperparams` of a schedule of the rate."""
    tx = _injected(subject, optax.constant_schedule(LEARNING_RATE))
    return train(subject, tx=tx)


@situation(slow=True)
def inject_a_stateful_schedule(subject: Subject):
    """`optax.inject_hyperparams` of a schedule that keeps a state of its own."""
    rate = optax.WrappedSchedule(optax.constant_schedule(LEARNING_RATE))
    return train(subject, tx=_injected(subject, learning_rate=rate))


def _injected(subject: Subject, learning_rate: Any) -> Any:
    inject = optax.inject_hyperparams(subject.factory, static_args=tuple(subject.kwargs))
    return inject(learning_rate=learning_rate, **subject.kwargs)


@situation()
def a_schedule(subject: Subject):
    """A schedule of the rate, made for the optimizer itself."""
    return train(subject, tx=subject.make(optax.constant_schedule(LEARNING_RATE)))


@situation(slow=True)
def an_array_as_the_rate(subject: Subject):
    """A rate that is an array."""
    return train(subject, tx=subject.make(jnp.asarray(LEARNING_RATE)))


@situation(reasons=_NO_EXTRA_ARGUMENTS)
def lookahead(subject: Subject):
    """`optax.lookahead` that never synchronizes: the fast parameters are the plain ones."""
    tx = optax.lookahead(subject.tx, sync_period=100, slow_step_size=0.5)
    start = subjects.params()
    state = tx.init(optax.LookaheadParams.init_synced(start))
    now = optax.LookaheadParams.init_synced(start)
    update = jax.jit(tx.update)
    for _ in range(subjects.STEPS):
        updates, state = update(gradient(now.fast), state, now)
        now = optax.apply_updates(now, updates)
    return now.fast


@situation(slow=True, reasons=_NO_EXTRA_ARGUMENTS)
def lookahead_synchronizes(subject: Subject):
    """`optax.lookahead` at every step, which resets the state: twice a first step."""
    tx = optax.lookahead(subject.tx, sync_period=1, slow_step_size=1.0, reset_state=True)
    now = optax.LookaheadParams.init_synced(subjects.params())
    state = tx.init(now)
    for _ in range(subjects.STEPS):
        updates, state = tx.update(gradient(now.fast), state, now)
        now = optax.apply_updates(now, updates)
    once = train(subject, steps=1)
    return Results(now.slow, train(subject, once, steps=1))


@situation(slow=True)
def schedule_free(subject: Subject):
    """`optax.contrib.schedule_free`, whose first averages are the optimizer's own steps."""
    tx = optax.contrib.schedule_free(subject.tx, learning_rate=LEARNING_RATE, b1=0.9)
    now, state = subjects.params(), tx.init(subjects.params())
    step = jax.jit(subjects.step_of(subject, tx))
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
    once, _ = step(subjects.params(), tx.init(subjects.params()))
    averaged = optax.contrib.schedule_free_eval_params(state, now)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((now, averaged)))
    return Results(once, train(subject, steps=1))


@situation(reasons=_NO_EXTRA_ARGUMENTS)
def sam(subject: Subject):
    """`optax.contrib.sam` around the optimizer, its adversary a step of length zero."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.0))
    tx = optax.contrib.sam(subject.tx, adversary, sync_period=2)
    return train(subject, tx=tx, steps=2 * subjects.STEPS)


@situation(reasons=_NO_EXTRA_ARGUMENTS)
def opaque_sam(subject: Subject):
    """`optax.contrib.sam` in its opaque mode, which takes a `grad_fn` of its own."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.0))
    tx = optax.contrib.sam(
        subject.tx, adversary, sync_period=2, opaque_mode=True, reset_state=False
    )
    now, state = subjects.params(), tx.init(subjects.params())
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, grad_fn=lambda p, _: gradient(p)))
    for _ in range(subjects.STEPS):
        updates, state = update(gradient(now), state, now)
        now = optax.apply_updates(now, updates)
    return now


@situation()
def reduce_on_plateau(subject: Subject):
    """`optax.contrib.reduce_on_plateau` behind the optimizer, given the loss."""
    tx = optax.chain(subject.tx, optax.contrib.reduce_on_plateau(patience=5))
    return train(subject, tx=tx, value=jnp.asarray(1.0))


@situation()
def split_real_and_imaginary(subject: Subject):
    """`optax.contrib.split_real_and_imaginary` around complex parameters."""
    start = jax.tree.map(lambda x: x + 1j * x[..., ::-1], subjects.params())
    tx = _with_arguments(optax.contrib.split_real_and_imaginary, subject, _scaled)
    updates, _ = tx.update(_scaled(start), tx.init(start), start)
    real = jax.tree.map(jnp.real, start)
    tx = _with_arguments(lambda tx: tx, subject, _scaled)
    expected, _ = tx.update(_scaled(real), tx.init(real), real)
    return Results(jax.tree.map(jnp.real, updates), expected)


def _scaled(params: Any) -> Any:
    """A gradient of which the real part is that of the real part."""
    return jax.tree.map(lambda p: p * 0.2, params)


@situation(slow=True)
def differentially_private_aggregate(subject: Subject):
    """`optax.contrib.differentially_private_aggregate` without noise, on a batch of one."""
    private = optax.contrib.differentially_private_aggregate(1e3, 0.0, key=jax.random.key(0))
    tx = optax.chain(private, subject.tx)
    now, state = subjects.params(), tx.init(subjects.params())
    update = jax.jit(functools.partial(tx.update, **subject.extra))
    for _ in range(subjects.STEPS):
        examples = jax.tree.map(lambda g: g[None], gradient(now))
        updates, state = update(examples, state, now)
        now = optax.apply_updates(now, updates)
    return now


@situation()
def conditionally_mask(subject: Subject):
    """`optax.conditionally_mask`: nothing moves at every second step."""
    tx = optax.conditionally_mask(subject.tx, lambda step: step % 2 == 0)
    return train(subject, tx=tx, steps=2 * subjects.STEPS)


@situation()
def conditionally_transform(subject: Subject):
    """`optax.conditionally_transform`, always."""
    return train(subject, tx=optax.conditionally_transform(subject.tx, lambda step: step >= 0))


@situation()
def flatten(subject: Subject):
    """`optax.flatten`: all parameters are one vector."""
    actual = train(subject, tx=_with_arguments(optax.flatten, subject, gradient))
    flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(subjects.params())])
    expected = train(subject, {"flat": flat})["flat"]
    return Results(jnp.concatenate([x.ravel() for x in jax.tree.leaves(actual)]), expected)


def _with_arguments(wrapper: Any, subject: Subject, grad_fn: Any) -> Any:
    """`wrapper` around an optimizer that, if it wants one, has `grad_fn` at hand."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if subject.evaluates:
            extra["grad_fn"] = grad_fn
        return subject.tx.update(updates, state, params, **extra)

    wrapped = wrapper(optax.GradientTransformationExtraArgs(subject.tx.init, update))
    # The `grad_fn` of `train` is for all parameters.
    return optax.GradientTransformationExtraArgs(
        wrapped.init,
        lambda updates, state, params=None, **_: wrapped.update(updates, state, params),
    )


_ONE_OF_A_NAME = {
    "links": "two links count: `optax.tree.get_all_with_path` finds all",
    "mars_soap": "two rules have a `mu`, as in `optax.contrib.muon`",
    "variance_reduced": "`mu` is that of the vectors: `inner` has none",
}


@situation(reasons=_ONE_OF_A_NAME)
def tree_get_and_set(subject: Subject):
    """`optax.tree.get` and `set` of the state's fields, `count` set to what it is."""
    state = subject.tx.init(subjects.params())
    mu = optax.tree.get(state, "mu")
    assert jax.tree.structure(mu) == jax.tree.structure(subjects.params())
    count = optax.tree.get(state, "count")
    state = optax.tree.set(state, count=count)
    return train(subject, tx=subject.tx._replace(init=lambda _: state))


@situation()
def tree_set_everywhere(subject: Subject):
    """`optax.tree.get_all_with_path` finds a count, and `set` sets all."""
    state = subject.tx.init(subjects.params())
    counts = optax.tree.get_all_with_path(state, "count")
    assert counts
    state = optax.tree.set(state, count=jnp.asarray(7, "int32"))
    assert all(int(c) == 7 for _, c in optax.tree.get_all_with_path(state, "count"))
    state = optax.tree.set(state, count=jnp.asarray(0, "int32"))
    return train(subject, tx=subject.tx._replace(init=lambda _: state))


@situation()
def tree_map_params(subject: Subject):
    """`optax.tree.map_params` of the state by the optimizer, to bfloat16 and back."""
    tx = subject.tx
    state = tx.init(subjects.params())
    seen = []

    def there_and_back(leaf: Any) -> Any:
        seen.append(leaf.shape)
        return leaf

    state = optax.tree.map_params(tx, there_and_back, state)
    # Scales of 8-bit buffers have one number for each row, and SOAP keeps stacks of matrices.
    assert {1, 2} <= {len(shape) for shape in seen} <= {1, 2, 3}
    return train(subject, tx=tx._replace(init=lambda _: state))


@situation(slow=True)
def zoom_linesearch(subject: Subject):
    """`optax.scale_by_zoom_linesearch` behind the optimizer: the loss falls."""
    return _by_linesearch(subject, optax.scale_by_zoom_linesearch(max_linesearch_steps=5))


@situation(slow=True)
def backtracking_linesearch(subject: Subject):
    """`optax.scale_by_backtracking_linesearch` behind the optimizer: the loss falls."""
    return _by_linesearch(
        subject, optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True)
    )


def _by_linesearch(subject: Subject, search: Any) -> Any:
    tx, loss = optax.chain(subject.tx, search), subjects.loss

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grad = optax.value_and_grad_from_state(loss)(params, state=state)

        def value_fn(params: Any, grad_fn: Any = None) -> Any:
            return loss(params)

        updates, state = tx.update(
            grad, state, params, value=value, grad=grad, value_fn=value_fn, **subject.extra
        )
        return optax.apply_updates(params, updates), state

    now, state = subjects.params(), tx.init(subjects.params())
    losses = [loss(now)]
    for _ in range(subjects.STEPS):
        now, state = step(now, state)
        losses.append(loss(now))
    return Results(jnp.asarray(sorted(losses, reverse=True)), jnp.asarray(losses))


@situation(slow=True)
def apply_every(subject: Subject):
    """`optax.apply_every` behind the optimizer, every step."""
    return train(subject, tx=optax.chain(subject.tx, optax.apply_every(1)))


@situation(needs=("optax.monitor",))
def monitor(subject: Subject):
    """`optax.monitor` behind the optimizer."""
    measure = optax.monitor({"largest": lambda updates, *_: jnp.max(updates["w"])})
    return train(subject, tx=optax.chain(subject.tx, measure), wrap=lambda step: step)


@situation(needs=("optax.snapshot",))
def snapshot(subject: Subject):
    """`optax.snapshot` in front of the optimizer."""
    return train(
        subject,
        tx=optax.chain(
            optax.snapshot("largest", lambda updates, *_: jnp.max(updates["w"])), subject.tx
        ),
    )


@situation(slow=True)
def keep_params_nonnegative(subject: Subject):
    """`optax.keep_params_nonnegative` behind the optimizer; nothing becomes negative."""
    return train(subject, tx=optax.chain(subject.tx, optax.keep_params_nonnegative()))


@situation(slow=True)
def ema_of_the_updates(subject: Subject):
    """`optax.ema` behind the optimizer, with a decay of zero."""
    return train(subject, tx=optax.chain(subject.tx, optax.ema(0.0)))


@situation(slow=True)
def ema_of_the_parameters(subject: Subject):
    """`optax.incremental_update` of averaged parameters inside the compiled step."""
    tx = subject.tx
    step = subjects.step_of(subject)

    @jax.jit
    def averaged(carry: Any) -> Any:
        now, state, slow = carry
        now, state = step(now, state)
        return now, state, optax.incremental_update(now, slow, 1.0)

    carry = subjects.params(), tx.init(subjects.params()), subjects.params()
    for _ in range(subjects.STEPS):
        carry = averaged(carry)
    return carry[2]


@situation(slow=True)
def other_links_in_front(subject: Subject):
    """`zero_nans`, `add_noise`, `adaptive_grad_clip` and `trace` in front, none of which acts."""
    links = (
        optax.zero_nans(),
        optax.add_noise(0.0, 0.0, 0),
        optax.adaptive_grad_clip(1e3),
        optax.trace(0.0),
    )
    return train(subject, tx=optax.chain(*links, subject.tx))


@situation(slow=True)
def trust_ratio_behind(subject: Subject):
    """`optax.scale_by_trust_ratio` behind the optimizer (LAMB): finite, of the parameter's norm."""
    tx = optax.chain(subject.tx, optax.scale_by_trust_ratio())
    start = subjects.params()
    state = tx.init(start)
    for _ in range(subjects.STEPS):  # the first direction of SOAP is 0
        updates, state = tx.update(gradient(start), state, start, **subject.extra)
    norms = jax.tree.map(jnp.linalg.norm, (updates, start))
    return Results(norms[0], norms[1], 1e-4)  # the order of the norm's sum


@situation(slow=True, needs=("optax.contrib.mechanize",))
def mechanize(subject: Subject):
    """`optax.contrib.mechanize` around the optimizer: the steps are finite and move something."""
    tx = optax.contrib.mechanize(subject.make(1.0))
    now, state = subjects.params(), tx.init(subjects.params())
    step = jax.jit(subjects.step_of(subject, tx))
    for _ in range(subjects.STEPS + 2):
        now, state = step(now, state)
    pairs = zip(jax.tree.leaves(now), jax.tree.leaves(subjects.params()), strict=True)
    moved = [jnp.any(a != b) for a, b in pairs]
    return Results((moved, now), ([jnp.asarray(True)] * len(moved), now))


@situation()
def a_transformation_without_extra_arguments(subject: Subject):
    """`optax.GradientTransformation(tx.init, tx.update)` in a chain, as old code makes it."""
    tx = subject.tx if subject.evaluates else optax.GradientTransformation(*subject.tx)
    return train(subject, tx=optax.chain(optax.GradientTransformation(*optax.identity()), tx))


@situation()
def unknown_extra_arguments(subject: Subject):
    """Extra arguments of other links reach the optimizer, too."""
    tx = optax.with_extra_args_support(subject.tx)
    return train(subject, tx=tx, value=jnp.asarray(1.0), unknown="text")
