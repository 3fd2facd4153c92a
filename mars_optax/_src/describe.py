"""A table of what an optimizer does with each parameter, and what that costs."""

import collections
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from mars_optax._src import checks, named, partition


class LeafDescription(NamedTuple):
    """What an optimizer does with one parameter.

    Attributes:
      path: Its keys, joined by "/".
      shape: Its shape.
      dtype: Its dtype's name.
      rule: "matrix", "vector", or "frozen" where no transformation of this package sees it under
        its path (as behind :func:`optax.flatten`).
      axes: The reduction and output axes of a matrix; None for others.
      state_bytes: Bytes of the state's arrays that belong to it alone.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: Literal["matrix", "vector", "frozen"]
    axes: MuonDimensionNumbers | None
    state_bytes: int


@dataclasses.dataclass(frozen=True)
class Description:
    """What an optimizer does with each parameter; `str` of it is a table.

    Attributes:
      leaves: One description per parameter, in the order of the tree.
      counts: How many parameters each rule has.
      param_bytes: Bytes of all parameters.
      state_bytes: Bytes of the whole state, counters included.
      optimizer: What the optimizer shows of itself; empty where it is one of Optax's wrappers.
    """

    leaves: tuple[LeafDescription, ...]
    counts: dict[str, int]
    param_bytes: int
    state_bytes: int
    optimizer: str = ""

    def __str__(self) -> str:
        rows: list[Any] = [("leaf", "shape", "dtype", "rule", "axes", "state bytes")]
        for leaf in self.leaves:
            cells = *leaf[:4], partition.axes_of_leaf(leaf.axes, leaf.shape), leaf.state_bytes
            rows.append([*map(str, cells)])
        *widths, last = (max(map(len, column)) for column in zip(*rows, strict=True))
        form = " ".join([*(f"{{:{width}}}" for width in widths), f"{{:>{last}}}"])
        lines = [form.format(*row) for row in rows]
        counts = ", ".join(f"{count} {rule}" for rule, count in self.counts.items())
        total = f"parameters {self.param_bytes} bytes, state {self.state_bytes} bytes"
        return "\n".join([*filter(None, [self.optimizer]), *lines, f"total: {counts}; {total}"])


def describe(params: optax.Params, tx: optax.GradientTransformation) -> Description:
    """Tells which rule each parameter gets, with which axes, and how large the state is.

    Nothing is computed or allocated: the state's shapes are traced.

    Args:
      params: The parameters, or their shapes and dtypes as :func:`jax.eval_shape` gives them.
      tx: An optimizer or transformation of this package, also inside Optax's wrappers, such as
        :func:`optax.chain`, :func:`optax.masked`, :func:`optax.partition` or
        :class:`optax.MultiSteps`.

    Returns:
      A :class:`Description`: its `str` is a table, with reduction ("in"), output and batch axes.

    Raises:
      TypeError: If `tx` contains no transformation of this package that takes parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros(4)}
      >>> print(mars_optax.describe(params, mars_optax.mars(1e-3)))
      mars(learning_rate=0.001)
      leaf   shape  dtype   rule   axes       state bytes
      bias   (4,)   float32 vector -                   32
      kernel (8, 4) float32 matrix in=0 out=1         384
      total: 1 matrix, 1 vector, 0 frozen; parameters 144 bytes, state 420 bytes
    """
    checks.transformation("tx", tx)
    checks.arrays(params, "Parameter")
    with partition.recorded_axes() as axes:
        # A new function each time: from its cache, `eval_shape` would not call `init` again.
        state = jax.eval_shape(lambda p: tx.init(p), params)
    if not axes and jax.tree.leaves(params):
        raise TypeError(
            f"`tx`: expected a transformation of mars_optax, got a `{type(tx).__name__}` whose "
            "`init` calls none. Pass an optimizer of this package, alone or wrapped by Optax."
        )
    flat = jax.tree_util.tree_leaves_with_path(params)
    owned: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # A buffer has its parameter's path behind a field of a state, as a hyperparameter may.
        names = [getattr(key, "name", "hyperparams") for key in path]
        starts = [i for i, name in enumerate(names, 1) if "hyperparams" not in name]
        owners = [p for p, _ in flat if any(path[i : i + len(p)] == p for i in starts)]
        if owners and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            owned[max(owners, key=len)] += _nbytes(leaf)
    leaves = []
    for path, leaf in flat:
        rule, text = axes.get(path), checks.path_string(path)
        kind: Any = "frozen" if rule is None else "matrix" if rule.is_matrix else "vector"
        numbers = rule.dimension_numbers if rule is not None and rule.is_matrix else None
        shape, dtype = tuple(jnp.shape(leaf)), str(jnp.result_type(leaf))
        leaves.append(LeafDescription(text, shape, dtype, kind, numbers, owned[path]))
    kinds = [leaf.rule for leaf in leaves]
    counts = {kind: kinds.count(kind) for kind in ("matrix", "vector", "frozen")}
    param_bytes, state_bytes = (sum(map(_nbytes, jax.tree.leaves(x))) for x in (params, state))
    optimizer = repr(tx) if isinstance(tx, named.Transformation) else ""
    return Description(tuple(leaves), counts, param_bytes, state_bytes, optimizer)


def _nbytes(leaf: Any) -> int:
    return math.prod(jnp.shape(leaf)) * jnp.result_type(leaf).itemsize
