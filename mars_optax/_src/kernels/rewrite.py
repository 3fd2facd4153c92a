"""Replaces operations that Mosaic does not have by ones that it has."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core

# What is replaced inside, too: functions that are called once. A loop is left as it is.
_CALLS: Final = frozenset({"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
# By the name of the primitive, what it is replaced by.
Rules = Mapping[str, Callable[..., jax.Array]]


def rewritten(fn: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """`fn` with some of its operations replaced."""

    def wrapped(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = _evaluate(closed, jax.tree.leaves(args), rules)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return wrapped


def _evaluate(closed: Any, args: Sequence[Any], rules: Rules) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
        if name in _CALLS:
            inside = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            outputs = _evaluate(inside, inputs, rules)
        else:
            outputs = rules.get(name, eqn.primitive.bind)(*inputs, **eqn.params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def integer_pow(x: jax.Array, *, y: int) -> jax.Array:
    """Powers from the first on as products."""
    return jax.lax.integer_pow(x, y) if y < 1 else functools.reduce(operator.mul, [x] * y)


def sqrt(x: jax.Array, **unused: Any) -> jax.Array:
    """A root by way of its inverse."""
    # Where x rsqrt(x) is 0 times infinity, the root is x itself.
    is_fixed = (x == 0) | (x == jnp.inf)
    return jnp.where(is_fixed, x, x * jax.lax.rsqrt(jnp.where(is_fixed, 1.0, x)))


def sign(x: jax.Array) -> jax.Array:
    """A sign by comparisons; that of 0 and of NaN is itself."""
    return jnp.where(x > 0, 1.0, jnp.where(x < 0, -1.0, x)).astype(x.dtype)


# Mosaic GPU has squares among the powers, and roots since JAX 0.11.
_OLD: Final[Rules] = {"sqrt": sqrt} if jax.__version_info__ < (0, 11) else {}
GPU: Final[Rules] = {"integer_pow": integer_pow, **_OLD}
# Mosaic TPU lowers a sign only where there is a TPU, which a program can be made without.
TPU: Final[Rules] = {"sign": sign}
