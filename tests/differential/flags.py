"""Flags of JAX, and of NumPy."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.differential import subjects
from tests.differential.situation import Results, situation
from tests.differential.subjects import Subject, eagerly, train
from tests.support import trees


@contextlib.contextmanager
def _flag(name: str, value: Any) -> Iterator[None]:
    """Sets a flag that has no context manager in JAX's public interface."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


_STRICT_ADAMW = {"links": "its `optax.adamw` promotes, and fails alone, too"}


@situation()
def rank_promotion_raises(subject: Subject):
    """`jax_numpy_rank_promotion="raise"`, eagerly and under jit."""
    with jax.numpy_rank_promotion("raise"):
        eagerly(subject, steps=1)
        return train(subject)


@situation(reasons=_STRICT_ADAMW)
def strict_dtype_promotion(subject: Subject):
    """`jax_numpy_dtype_promotion="strict"`."""
    with jax.numpy_dtype_promotion("strict"):
        return train(subject)


@situation(reasons=_STRICT_ADAMW)
def strict_dtype_promotion_of_bfloat16(subject: Subject):
    """`jax_numpy_dtype_promotion="strict"` with parameters in bfloat16."""
    expected = train(subject, subjects.params("bfloat16"))
    with jax.numpy_dtype_promotion("strict"):
        return Results(train(subject, subjects.params("bfloat16")), expected)


@situation()
def x64_enabled(subject: Subject):
    """`jax_enable_x64` with parameters in float32, which keep their types."""
    with trees.float64():
        state = subject.tx.init(subjects.params())
        after = jax.eval_shape(subjects.step_of(subject), subjects.params(), state)
        trees.assert_same_types(after, (subjects.params(), state))
        return train(subject)


@situation()
def x64_parameters(subject: Subject):
    """`jax_enable_x64` with parameters in float64."""
    with trees.float64():
        trained = train(subject, subjects.params("float64"))
        assert {x.dtype.name for x in jax.tree.leaves(trained)} == {"float64"}
        return trained


@situation(slow=True)
def x64_enabled_after_init(subject: Subject):
    """`jax_enable_x64` around the steps only: the state was made without it."""
    state, step = subject.tx.init(subjects.params()), subjects.step_of(subject)
    with trees.float64():
        trees.assert_same_types(
            jax.eval_shape(step, subjects.params(), state), (subjects.params(), state)
        )
        return train(subject, tx=subject.tx._replace(init=lambda _: state))


@situation()
def debug_nans(subject: Subject):
    """`jax_debug_nans`, eagerly and under jit."""
    with jax.debug_nans(True):
        eagerly(subject)
        return train(subject)


@situation()
def debug_nans_and_infs_without_gradients(subject: Subject):
    """`jax_debug_nans` and `jax_debug_infs` with gradients and parameters that are zero."""
    zeros = jax.tree.map(jnp.zeros_like, subjects.params())
    extra = {"grad_fn": lambda _: zeros} if subject.evaluates else {}
    with jax.debug_nans(True), jax.debug_infs(True):
        state = subject.tx.init(zeros)
        for _ in range(subjects.STEPS):
            updates, state = jax.jit(functools.partial(subject.tx.update, **extra))(
                zeros, state, zeros
            )
    return Results(updates, zeros)


@situation(slow=True)
def debug_infs(subject: Subject):
    """`jax_debug_infs`, eagerly and under jit."""
    with jax.debug_infs(True):
        eagerly(subject)
        return train(subject)


@situation()
def tracer_leaks_checked(subject: Subject):
    """`jax_check_tracer_leaks`, with the optimizer made inside the step."""

    def step(params: Any, state: Any) -> Any:
        tx = subject.make(subjects.LEARNING_RATE)
        return subjects.step_of(subject, tx)(params, state)

    with jax.checking_leaks():
        now = subjects.params()
        state = jax.jit(lambda p: subject.make(subjects.LEARNING_RATE).init(p))(now)
        for _ in range(subjects.STEPS):
            now, state = jax.jit(step)(now, state)
        return now


@situation(slow=True)
def jit_disabled(subject: Subject):
    """`jax_disable_jit`."""
    with jax.disable_jit():
        return train(subject)


@situation()
def matmul_precision_highest(subject: Subject):
    """`jax_default_matmul_precision="highest"`."""
    with jax.default_matmul_precision("highest"):
        return train(subject)


@situation(slow=True)
def matmul_precision_of_an_algorithm(subject: Subject):
    """`jax_default_matmul_precision="BF16_BF16_F32_X3"`, the name of an algorithm of dots."""
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        return Results(train(subject), subjects.plain(subject), 1e-3)  # the dots' precision


@situation()
def transfers_disallowed(subject: Subject):
    """`jax_transfer_guard="disallow"` once parameters and state are placed."""
    now = subjects.params()
    state = subject.tx.init(now)
    step = jax.jit(subjects.step_of(subject))
    step(now, state)  # what is constant is placed when it is compiled
    with jax.transfer_guard("disallow"):
        for _ in range(subjects.STEPS):
            now, state = step(now, state)
    return now


@situation(slow=True)
def transfers_disallowed_from_the_start(subject: Subject):
    """`jax_transfer_guard="disallow"` around compiled `init` and steps."""
    now = subjects.params()
    with jax.transfer_guard("disallow"):
        state = jax.jit(subject.tx.init)(now)
        for _ in range(subjects.STEPS):
            now, state = jax.jit(subjects.step_of(subject))(now, state)
    return now


@situation(slow=True)
def threefry_not_partitionable(subject: Subject):
    """`jax_threefry_partitionable=False`."""
    with jax.threefry_partitionable(False):
        return train(subject)


@situation(slow=True)
def random_numbers_of_another_kind(subject: Subject):
    """`jax_default_prng_impl="rbg"` and `jax_enable_custom_prng`."""
    with jax.default_prng_impl("rbg"), _flag("jax_enable_custom_prng", True):
        return train(subject)


@situation(slow=True)
def another_default_device(subject: Subject):
    """`jax_default_device` is another than that of the parameters."""
    first, second = jax.devices()[:2]
    start = jax.device_put(subjects.params(), first)
    with jax.default_device(second):
        return train(subject, start)


@situation(slow=True)
def parameters_on_the_second_device(subject: Subject):
    """Parameters on a device that is not the default, eagerly and under jit; they stay there."""
    second = jax.devices()[1]
    start = jax.device_put(subjects.params(), second)
    eager, compiled = eagerly(subject, start), train(subject, start)
    for leaf in jax.tree.leaves((eager, compiled)):
        assert leaf.devices() == {second}
    return Results((eager, compiled), (subjects.plain(subject),) * 2)


@situation(slow=True, needs=("jax.config.jax_explicit_x64_dtypes",))
def explicit_x64_dtypes(subject: Subject):
    """`jax_explicit_x64_dtypes="error"`: nothing asks for 64 bits."""
    with _flag("jax_explicit_x64_dtypes", "error"):
        return train(subject)


@situation(slow=True)
def internal_checks(subject: Subject):
    """`jax_enable_checks`."""
    with _flag("jax_enable_checks", True):
        return train(subject)


@situation(
    needs=("jax.config.jax_allow_f16_reductions",),
    reasons={"links": "its `optax.adamw` divides by 1e-8, 0 in float16, and fails alone, too"},
)
def no_reductions_in_half_precision(subject: Subject):
    """`jax_allow_f16_reductions=False` with parameters in float16."""
    expected = train(subject, subjects.params("float16"))
    with _flag("jax_allow_f16_reductions", False):
        return Results(train(subject, subjects.params("float16")), expected)


@situation(needs=("jax.config.jax_no_tracing",))
def no_tracing_after_the_first_step(subject: Subject):
    """`jax_no_tracing` once a step is compiled: no step traces anew."""
    now = subjects.params()
    state = subject.tx.init(now)
    step = jax.jit(subjects.step_of(subject))
    now, state = step(now, state)
    with _flag("jax_no_tracing", True):
        for _ in range(subjects.STEPS - 1):
            now, state = step(now, state)
    return now


@situation(needs=("jax.config.jax_captured_constants_warn_bytes",))
def large_constants_warned_of(subject: Subject):
    """`jax_captured_constants_warn_bytes=1`: nothing of an array's size is a constant."""
    with _flag("jax_captured_constants_warn_bytes", 65):
        return train(subject)


@situation(slow=True, needs=("jax.config.eager_constant_folding",))
def constants_folded_eagerly(subject: Subject):
    """`eager_constant_folding`."""
    with _flag("eager_constant_folding", True):
        return train(subject)


@situation(slow=True, needs=("jax.config.jax_debug_key_reuse",))
def reused_keys_noticed(subject: Subject):
    """`jax_debug_key_reuse`, which looks into every compiled program."""
    with jax.debug_key_reuse(True):
        return train(subject)


@situation(slow=True, needs=("jax.config.jax_thread_guard",))
def one_thread_alone(subject: Subject):
    """`jax_thread_guard`: no other thread creates arrays."""
    with jax.thread_guard(True):
        return train(subject)


@situation()
def numpy_raises(subject: Subject):
    """`np.errstate(all="raise")`, with the optimizer made inside."""
    with np.errstate(all="raise"):
        return eagerly(subject, tx=subject.make(np.float32(subjects.LEARNING_RATE)))
