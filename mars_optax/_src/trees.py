"""Mapping over several trees at once, where some are absent and several results come out."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mars_optax._src.leaf import precision


def rows(inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each leaf of the first tree a tuple with those of all; the leaves of None are None."""
    leaves = jax.tree.leaves(inputs[0])
    treedef: Any = jax.tree.structure(inputs[0])
    absent = [None] * len(leaves)
    columns = [absent if tree is None else treedef.flatten_up_to(tree) for tree in inputs[1:]]
    return list(zip(leaves, *columns, strict=True))


def unzip(results: Sequence[tuple[Any, ...]], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """From the results of each leaf to trees of the structures of `outputs`, None where one is."""
    columns = list(zip(*results, strict=True)) or [()] * len(outputs)
    # The output's own structure, not that of the first input: metadata in its nodes may differ.
    return tuple(
        None if tree is None else jax.tree.unflatten(jax.tree.structure(tree), column)
        for tree, column in zip(outputs, columns, strict=True)
    )


def zeros(params: Any, dtype: Any = None, *, averages_squares: bool = False) -> Any:
    """A buffer of zeros for each parameter, in its storage dtype."""
    how: Any = {"dtype": dtype, "averages_squares": averages_squares}
    return jax.tree.map(lambda p: zeros_like(p, precision.storage_dtype(p, **how)), params)


def zeros_like(p: Any, dtype: Any) -> jax.Array:
    """Zeros that lie on the devices as `p` does, but in their memory where `p` is in the host's."""
    zero = jnp.zeros_like(p, dtype=dtype)
    if not isinstance(p, jax.core.Tracer) or precision.host_memory_of(p) is not None:
        return zero
    # Under jit on a mesh of automatic axes a constant would be whole on every device: the operand
    # that is never chosen tells the compiler where to put it.
    like = p if jnp.iscomplexobj(zero) else jnp.real(p)
    return jnp.where(jnp.zeros_like(p, dtype=bool), like.astype(zero.dtype), zero)


def copies(tree: Any, like: Any) -> Any:
    """Copies of the leaves of `tree`, in the dtypes of `like`; None where `like` is None.

    Kept by reference, an eager gradient and the state would be one buffer, and donating both, or
    overwriting the gradient in place, would fail. Under jit a copy costs nothing, but where it has
    to lie in a donated buffer.
    """
    if like is None:
        return None
    return jax.tree.map(lambda x, y: precision.copied(x, jnp.result_type(y)), tree, like)


def contains(tree: Any, kind: type) -> bool:
    """Whether a node of this class is in a tree."""
    is_one = lambda x: isinstance(x, kind)  # noqa: E731
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def choose(predicate: Any, tree: Any, other: Any) -> Any:
    """The leaves of one of two trees, in at least float32."""

    def on_leaf(x: Any, y: Any) -> jax.Array:
        dtype = precision.compute_dtype(x, y)
        return jnp.where(predicate, precision.upcast(x, dtype), precision.upcast(y, dtype))

    return jax.tree.map(on_leaf, tree, other)


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` in the dtypes of `like`; leaves may be Python numbers, or keys, which stay."""

    def on_leaf(x: Any, y: Any) -> jax.Array:
        is_key = jnp.issubdtype(getattr(y, "dtype", float), jax.dtypes.extended)
        return x if is_key else jnp.asarray(x).astype(jnp.result_type(y))

    return jax.tree.map(on_leaf, tree, like)
