"""Which leaf is a matrix, and which of its axes are reduction, output and batch axes."""

import contextlib
import contextvars
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from mars_optax._src import checks, trees, types


@dataclasses.dataclass(frozen=True)
class Axes:
    """The role of each axis of one leaf. A leaf without reduction axes is a vector."""

    reduction: tuple[int, ...]  # axes that a kernel contracts with its input, non-negative
    output: tuple[int, ...]  # those of its result
    batch: tuple[int, ...]  # all others: their slices are matrices of their own

    @property
    def is_matrix(self) -> bool:
        return bool(self.reduction)

    @property
    def norm_axes(self) -> tuple[int, ...]:
        """The axes over which a norm is taken: those of a matrix, or all those of a vector."""
        return self.reduction + self.output if self.is_matrix else self.batch

    @property
    def dimension_numbers(self) -> MuonDimensionNumbers:
        """The axes of a matrix in Optax's form."""
        axes = self.reduction, self.output
        return MuonDimensionNumbers(*(its[0] if len(its) == 1 else its for its in axes))

    def fans(self, shape: Sequence[int]) -> tuple[int, int]:
        """The sizes (in, out) of each matrix of a leaf of this shape."""
        fan_in, fan_out = (math.prod(shape[i] for i in x) for x in (self.reduction, self.output))
        return fan_in, fan_out

    def stack_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape (batch, in, out) of the stack of the matrices of a leaf of this shape."""
        return math.prod(shape[i] for i in self.batch), *self.fans(shape)

    def to_stack(self, x: jax.Array) -> jax.Array:
        """A leaf as a stack of its matrices."""
        order = self.batch + self.reduction + self.output
        return jnp.transpose(x, order).reshape(self.stack_shape(x.shape))

    def from_stack(self, stack: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The inverse of `to_stack`, for a leaf of this shape."""
        order = self.batch + self.reduction + self.output
        unflattened = stack.reshape([shape[i] for i in order])
        return jnp.transpose(unflattened, sorted(range(len(order)), key=order.__getitem__))

    def __str__(self) -> str:
        if not self.is_matrix:
            return "-"
        names = ("in", self.reduction), ("out", self.output), ("batch", self.batch)
        return " ".join(f"{name}={','.join(map(str, axes))}" for name, axes in names if axes)


def vector_axes(ndim: int) -> Axes:
    """A leaf that is no matrix, whatever its rank."""
    return Axes((), (), tuple(range(ndim)))


def matrix_from_rank_2(ndim: int) -> Axes:
    """Every leaf of rank >= 2 is one matrix, its last axis the output."""
    return vector_axes(ndim) if ndim < 2 else Axes(tuple(range(ndim - 1)), (ndim - 1,), ())


def matrix_at_rank_2(ndim: int) -> Axes:
    """Leaves of exactly rank 2 are matrices (in, out)."""
    return matrix_from_rank_2(ndim) if ndim == 2 else vector_axes(ndim)


def no_matrices(params: Any) -> None:
    """`weight_dimension_numbers` of a tree all of whose leaves are vectors."""


DefaultRule = Callable[[int], Axes]


def resolve_axes(
    spec: types.WeightDimensionNumbers, params: Any, default: DefaultRule = matrix_at_rank_2
) -> Any:
    """The axes of every leaf, as a tree with the structure of `params`, of which shapes matter.

    `spec` is the user's; where it is None, `default` is the rule for a leaf by its rank.
    """
    if spec is None:
        return jax.tree.map(lambda leaf: default(jnp.ndim(leaf)), params)
    # `optax.tree.map_params` calls `init` with a placeholder, which has no leaves.
    if not jax.tree.leaves(params):
        return params
    if checks.is_tree_function(spec, params):
        spec = spec(params)
    _check_leaves(spec)

    def of_subtree(path: tuple[Any, ...], spec: Any, subtree: Any) -> Any:
        def of_leaf(rest: tuple[Any, ...], leaf: Any) -> Axes:
            # At the root a spec names no leaf, even where the parameters are a single array.
            is_named = bool(path) and not rest
            return axes_of_leaf(spec, jnp.shape(leaf), path + rest, is_named=is_named)

        return jax.tree_util.tree_map_with_path(of_leaf, subtree)

    try:
        jax.tree.map(lambda *_: None, spec, params, is_leaf=_is_spec)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            "`weight_dimension_numbers`: expected a tree with the structure of the parameters, or "
            f"a prefix of it, got another one: {_first_difference(spec, params)}. Give every leaf "
            "a `MuonDimensionNumbers`, or None where it is no matrix."
        ) from error
    return jax.tree_util.tree_map_with_path(of_subtree, spec, params, is_leaf=_is_spec)


def check_spec(spec: types.WeightDimensionNumbers) -> None:
    """Raises where `weight_dimension_numbers` is neither a function nor a tree of specs."""
    if not callable(spec):
        _check_leaves(spec)


def _check_leaves(spec: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec, is_leaf=_is_spec):
        if not _is_spec(leaf):
            where = f" at '{checks.path_string(path)}'" if path else ""
            raise TypeError(
                "`weight_dimension_numbers`: expected a `MuonDimensionNumbers`, a tree of them "
                f"and None, or a function of the parameters, got {leaf!r}{where}. Pass "
                "`MuonDimensionNumbers(reduction_axis, output_axis)`; under "
                "`optax.inject_hyperparams`, name the argument in `static_args`."
            )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def axes_of_leaf(
    spec: Any, shape: tuple[int, ...], path: tuple[Any, ...] = (), *, is_named: bool = True
) -> Axes:
    """The axes of one leaf, whose specification names it or a tree that it is in."""
    ndim = len(shape)
    where = f"`weight_dimension_numbers` of leaf '{checks.path_string(path)}' of shape {shape}"
    if spec is None or (ndim < 2 and not is_named):
        return vector_axes(ndim)
    if ndim < 2:
        raise ValueError(
            f"{where}: expected None, as a leaf of rank {ndim} is no matrix, got {spec}. Pass None."
        )
    reduction = _normalized(spec.reduction_axis, ndim, f"{where}: `reduction_axis`")
    output = _normalized(spec.output_axis, ndim, f"{where}: `output_axis`")
    if set(reduction) & set(output):
        raise ValueError(
            f"{where}: expected disjoint reduction and output axes, got {spec}. Name each once."
        )
    batch = tuple(i for i in range(ndim) if i not in reduction + output)
    return Axes(reduction, output, batch)


def _normalized(axes: Any, ndim: int, where: str) -> tuple[int, ...]:
    """Axes as a tuple of distinct non-negative ints."""
    sequence = axes if isinstance(axes, Sequence) else (axes,)
    are_numbers = all(isinstance(i, int | np.integer) and type(i) is not bool for i in sequence)
    fits = are_numbers and all(-ndim <= i < ndim for i in sequence)
    if not fits or not sequence or len({i % ndim for i in sequence}) != len(sequence):
        raise ValueError(
            f"{where}: expected one axis or several distinct ones, each in [{-ndim}, {ndim}), got "
            f"{axes!r}. Name axes that the leaf has."
        )
    return tuple(int(i) % ndim for i in sequence)


def _first_difference(spec: Any, params: Any) -> str:
    """Names the first leaf of one tree that the other does not have."""
    specified = [p for p, _ in jax.tree_util.tree_leaves_with_path(spec, is_leaf=_is_spec)]
    leaves = [p for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    for path in leaves:
        if not any(path[: len(prefix)] == prefix for prefix in specified):
            return f"leaf '{checks.path_string(path)}' has no specification"
    for path in specified:
        if not any(leaf[: len(path)] == path for leaf in leaves):
            return f"there is no leaf '{checks.path_string(path)}'"
    return f"{jax.tree.structure(spec, is_leaf=_is_spec)} for {jax.tree.structure(params)}"


def require_matrices(axes: Any, params: Any, name: str) -> None:
    """Raises unless every leaf is a matrix."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), leaf_axes in zip(leaves, jax.tree.leaves(axes), strict=True):
        if not leaf_axes.is_matrix:
            raise ValueError(
                f"Leaf '{checks.path_string(path)}' of shape {jnp.shape(leaf)}: `{name}` expected "
                "a matrix, of rank 2 or with axes declared by `weight_dimension_numbers`, got a "
                "leaf that is none. Declare its axes, or give it to another transformation with "
                "`optax.partition`."
            )


_records: contextvars.ContextVar[Any] = contextvars.ContextVar("mars_optax_axes", default=None)


@contextlib.contextmanager
def recorded_axes() -> Iterator[dict[tuple[Any, ...], Axes]]:
    """Collects the axes, by path, that transformations resolve in their `init` meanwhile.

    Static, they cannot be part of a state, and wrappers such as `optax.chain` hide all but `init`.
    """
    records: dict[tuple[Any, ...], Axes] = {}
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def record_axes(axes: Any) -> None:
    """Notes the axes for whoever listens with `recorded_axes`."""
    if (records := _records.get()) is not None:
        records.update(jax.tree_util.tree_leaves_with_path(axes))


_DEFAULTS: Final[dict[str, DefaultRule]] = {"rank2": matrix_at_rank_2, "vector": vector_axes}


def dimension_numbers_by_path(
    rules: Sequence[tuple[str, MuonDimensionNumbers | None]],
    default: Literal["rank2", "vector"] = "rank2",
) -> Callable[[Any], Any]:
    r"""Chooses the matrices and their axes by the names of the parameters.

    Args:
      rules: Pairs of a regular expression and the dimension numbers of the leaves whose path it
        finds (:func:`re.search`), None for leaves that are no matrices; the first match wins. A
        path is a leaf's keys joined by `/`, without the closing `value` of a Flax NNX variable.
      default: What a leaf is that no rule matches: `"rank2"` takes a leaf of exactly rank 2 for a
        matrix (in, out) and any other for a vector, `"vector"` takes all for vectors.

    Returns:
      A function `params -> tree`, for the argument `weight_dimension_numbers` of the optimizers.

    Raises:
      TypeError: If a rule is no pair of a string and dimension numbers or None.
      ValueError: If a regular expression or `default` is malformed and, when the function is
        called, if a rule's expression finds no leaf at all; in a tree with
        :class:`optax.MaskedNode` for frozen parameters it may find none.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> from optax.contrib import MuonDimensionNumbers
      >>> params = {
      ...     "embed": jnp.zeros((100, 8)),
      ...     "blocks": {"kernel": jnp.zeros((3, 8, 8)), "bias": jnp.zeros((3, 8))},
      ... }
      >>> rules = mars_optax.dimension_numbers_by_path(
      ...     [("embed", None), ("blocks/kernel", MuonDimensionNumbers(1, 2)), ("bias$", None)]
      ... )
      >>> tx = mars_optax.mars_m(1e-2, weight_dimension_numbers=rules)
      >>> print([(leaf.path, leaf.rule) for leaf in mars_optax.describe(params, tx).leaves])
      [('blocks/bias', 'vector'), ('blocks/kernel', 'matrix'), ('embed', 'vector')]
    """
    checks.choice("default", default, tuple(_DEFAULTS))
    compiled = []
    for rule in rules if isinstance(rules, tuple | list) else (rules,):
        is_pair = isinstance(rule, tuple | list) and len(rule) == 2 and not _is_spec(rule)
        if not is_pair or not isinstance(rule[0], str) or not _is_spec(rule[1]):
            raise TypeError(
                "`rules`: expected a sequence of pairs of a regular expression and a "
                f"`MuonDimensionNumbers` or None, got {rule!r}. Pass for example [('embed', None)]."
            )
        try:
            compiled.append((re.compile(rule[0]), rule[1]))
        except re.error as error:
            raise ValueError(
                f"`rules`: expected a regular expression, got {rule[0]!r} ({error}). Correct it, "
                "or escape it with `re.escape`."
            ) from error

    def dimension_numbers(params: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = [checks.path_string(path) for path, _ in leaves]
        # A rule may be of a parameter that `optax.masked` or `optax.partition` leaves out here.
        is_part = trees.contains(params, optax.MaskedNode)
        for pattern, _ in compiled:
            if not is_part and not any(pattern.search(path) for path in paths):
                raise ValueError(
                    f"`rules`: expected every rule to match a leaf, got {pattern.pattern!r}, which "
                    f"matches none of {paths}. Correct it, or leave it out. Under "
                    "`optax.inject_hyperparams`, name `weight_dimension_numbers` in `static_args`."
                )

        def of_leaf(key: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
            path, axes = checks.path_string(key), _DEFAULTS[default](jnp.ndim(leaf))
            other = axes.dimension_numbers if axes.is_matrix else None
            return next((spec for rule, spec in compiled if rule.search(path)), other)

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    return dimension_numbers
