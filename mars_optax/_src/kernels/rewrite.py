"""Replaces operations that Mosaic GPU does not have by ones that it has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core


def rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with integer powers as products, and roots by :func:`jax.lax.rsqrt` where needed."""

    def wrapped(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return wrapped


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None:
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        elif eqn.primitive.name in _RULES:
            outputs = [_RULES[eqn.primitive.name](*inputs, **eqn.params)]
        else:
            outputs = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _integer_pow(x: jax.Array, *, y: int) -> jax.Array:
    if y < 1:
        return jax.lax.integer_pow(x, y)
    result = x
    for _ in range(y - 1):
        result = result * x
    return result


def _sqrt(x: jax.Array, **unused: Any) -> jax.Array:
    # Where x rsqrt(x) is 0 times infinity, the root is x itself.
    is_fixed = (x == 0) | (x == jnp.inf)
    return jnp.where(is_fixed, x, x * jax.lax.rsqrt(jnp.where(is_fixed, 1.0, x)))


_RULES: dict[str, Callable[..., jax.Array]] = {"integer_pow": _integer_pow}
if jax.__version_info__ < (0, 11):
    _RULES["sqrt"] = _sqrt
