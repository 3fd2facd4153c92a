"""Helpers on trees: types, fields of states, and comparisons that name the leaf that differs."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Turns 64-bit types on for a while."""
    if hasattr(jax, "enable_x64"):
        with jax.enable_x64(True):
            yield
    else:
        from jax import experimental

        with experimental.enable_x64():
            yield


def path_of(path: Any) -> str:
    """The leaf's path as the package prints it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def assert_equal(actual: Any, expected: Any) -> None:
    """Structure and values are the same to the last bit; NaN equals NaN."""
    _compare(actual, expected, np.testing.assert_array_equal)


def assert_close(actual: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Structure is the same and values agree within the tolerances."""

    def compare(x: Any, y: Any, err_msg: str) -> None:
        np.testing.assert_allclose(_wide(x), _wide(y), rtol=rtol, atol=atol, err_msg=err_msg)

    _compare(actual, expected, compare)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _compare(actual: Any, expected: Any, compare: Callable[..., None]) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        compare(np.asarray(x), np.asarray(y), err_msg=f"leaf {path_of(path)}")


def types(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Shape, dtype and weak type of every leaf, arrays or abstract values, by path."""

    def of(leaf: Any) -> tuple[Any, ...]:
        weak = leaf.weak_type if hasattr(leaf, "weak_type") else jax.typeof(leaf).weak_type
        return (tuple(leaf.shape), str(leaf.dtype), bool(weak))

    return {path_of(path): of(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_types(actual: Any, expected: Any) -> None:
    """Structure, shapes, dtypes and weak types are the same."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert types(actual) == types(expected)


def weak_leaves(tree: Any) -> list[str]:
    """Paths of the leaves whose type is weak."""
    return [path for path, (_, _, weak) in types(tree).items() if weak]


def fields(state: Any, name: str) -> list[Any]:
    """All values that fields of this name have anywhere in a state, `None` left out."""
    found = optax.tree.get_all_with_path(state, name)
    return [value for _, value in found if value is not None]


def shapes(trees: Sequence[Any]) -> list[tuple[int, ...]]:
    """The sorted shapes of all leaves of some trees."""
    return sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(list(trees)))


def all_finite(tree: Any) -> bool:
    """Whether no leaf holds a NaN or an infinity."""
    return all(bool(np.all(np.isfinite(_wide(np.asarray(x))))) for x in jax.tree.leaves(tree))


def copy(tree: Any) -> Any:
    """A copy on the host, for comparisons after donation or failure."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


@functools.cache
def jitted_update(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """`tx.update` under jit, compiled once for a transformation that several tests share."""
    return jax.jit(tx.update)


def run(tx: Any, params: Any, grads: Sequence[Any], *, apply: bool = True) -> tuple[Any, Any, Any]:
    """Runs some jitted steps; returns the last updates, the parameters and the state.

    Args:
      tx: The transformation, or a `MultiSteps`.
      params: The parameters.
      grads: A gradient per step.
      apply: Whether the parameters move.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    update, state, updates = jitted_update(tx), tx.init(params), None
    for gradient in grads:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates) if apply else params
    return updates, params, state
