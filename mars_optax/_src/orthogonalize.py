"""Newton-Schulz on leaves: matrices of any layout, and what the matrix variants ask of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_optax._src import checks, manual, partition, spread, stacks, trees, types
from mars_optax._src.leaf import newton_schulz, precision


@dataclasses.dataclass(frozen=True)
class Orthogonalization:
    """The options of the iteration, checked and ready for a stack of matrices.

    Attributes:
      steps: Number of iterations.
      coeffs: A preset's name, a triple, or one per step; a table of triples once built.
      dtype: That of the iteration; as a string, an array that has it, or a dtype.
      precision: Of its matrix products, as in :func:`jax.numpy.matmul`.
      eps: Added to the Frobenius norm.
      fn: The user's function in its place, or None.
      prefix: What the options' names begin with where the user gave them, for errors.
    """

    steps: Any = 5
    coeffs: Any = "quintic"
    dtype: Any = "bfloat16"
    precision: types.Precision = None
    eps: Any = 1e-7
    fn: types.NewtonSchulzFn | None = None
    prefix: str = "ns_"

    def __post_init__(self) -> None:
        checks.steps(f"{self.prefix}steps", self.steps)
        checks.non_negative("eps", self.eps)
        checks.optional_callable("newton_schulz_fn", self.fn)
        table = checks.coefficients(self.coeffs, self.steps, newton_schulz.PRESETS, self.prefix)
        object.__setattr__(self, "coeffs", table)
        if self.dtype is None:
            raise TypeError(
                f"`{self.prefix}dtype`: expected a dtype, got None. Pass for example 'bfloat16'."
            )
        object.__setattr__(self, "dtype", checks.float_dtype(f"{self.prefix}dtype", self.dtype))

    def __call__(
        self, leaves: Sequence[jax.Array], axes: Sequence[partition.Axes]
    ) -> list[jax.Array]:
        """Orthogonalizes each matrix of some leaves."""
        if self.fn is not None:
            return [self._by_user(self.fn, x, a) for x, a in zip(leaves, axes, strict=True)]
        # Steps that are an array are one more operand; a number is part of the program.
        is_known = isinstance(self.steps, int | np.integer)
        constants = [jnp.asarray(self.coeffs)] + ([] if is_known else [jnp.asarray(self.steps)])

        def fn(stack: jax.Array, coeffs: jax.Array, steps: Any = self.steps) -> jax.Array:
            return newton_schulz.iterated(
                stack, coeffs, steps=steps, matmul_precision=self.precision
            )

        normalized = [self._normalized(x, a) for x, a in zip(leaves, axes, strict=True)]
        iterates = stacks.map_stacks(fn, normalized, axes, constants)
        return [y.astype(x.dtype) for x, y in zip(leaves, iterates, strict=True)]

    def _normalized(self, x: jax.Array, axes: partition.Axes) -> jax.Array:
        return newton_schulz.normalized(x, axes.of_one_norm, eps=self.eps, dtype=self.dtype)

    @staticmethod
    def _by_user(fn: types.NewtonSchulzFn, x: jax.Array, axes: partition.Axes) -> jax.Array:
        """The user's function gets the stack of each leaf, in the orientation declared."""
        stack = axes.to_stack(spread.whole(x))
        result: jax.Array = fn(stack)
        checks.newton_schulz_result(stack, result)
        return spread.laid_out(axes.from_stack(result, x.shape), x)


def matrix_directions(
    orthogonalization: Orthogonalization, factor: Callable[[int, int], float], divisor: Any = None
) -> Callable[[Any, Any, Any], Any]:
    """The directions of matrices from their momenta: orthogonalized, then scaled by their shapes.

    Args:
      orthogonalization: The iteration.
      factor: The scale, from the sizes (in, out) of a matrix.
      divisor: What the momenta are divided by before, if anything.
    """

    def divided(momentum: jax.Array) -> jax.Array:
        if divisor is not None:
            momentum /= precision.widen_scalar(divisor, precision.compute_dtype(momentum))
        return momentum

    def directions(momenta: Any, axes: Any, specs: Any) -> Any:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(momenta)]
        rows = trees.rows((momenta, axes, specs))
        all_axes = [a for _, a, _ in rows]
        dims = [a.reduction + a.output for a in all_axes]
        # Inside a shard_map a device may hold a part of a matrix, and its shape is not that.
        names = [
            manual.sharded(x, spec, d, path, "the orthogonalization of a matrix")
            for path, d, (x, _, spec) in zip(paths, dims, rows, strict=True)
        ]
        whole = [
            manual.gathered(x, d, n) for (x, _, _), d, n in zip(rows, dims, names, strict=True)
        ]
        run = spread.by_specs(orthogonalization, [spec for _, _, spec in rows])
        results = run([divided(x) for x in whole], all_axes)
        scaled = [y * factor(*a.fans(y.shape)) for y, a in zip(results, all_axes, strict=True)]
        parts = [
            manual.part(y, x, d, n)
            for y, (x, _, _), d, n in zip(scaled, rows, dims, names, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(momenta), parts)

    return directions


def transformation(
    name: str,
    orthogonalization: Orthogonalization,
    factor: Callable[[int, int], float],
    divisor: Any = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    """:func:`matrix_directions` as a transformation without state, under the public `name`."""
    partition.check_spec(weight_dimension_numbers)
    directions = matrix_directions(orthogonalization, factor, divisor)

    def axes_of(tree: Any) -> Any:
        return partition.resolve_axes(weight_dimension_numbers, tree, partition.matrix_at_rank_2)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        partition.require_matrices(axes_of(params), params, name)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        specs = manual.specs_of(extra_args, updates)
        return directions(updates, axes_of(updates), specs), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def orthogonalize(
    x: jax.typing.ArrayLike,
    *,
    steps: jax.typing.ArrayLike = 5,
    coeffs: types.NewtonSchulzCoefficients = "quintic",
    dtype: types.DType = "bfloat16",
    eps: jax.typing.ArrayLike = 1e-7,
    precision: types.Precision = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
) -> jax.Array:
    r"""Brings all singular values of a matrix near 1 by Newton-Schulz iteration.

    .. math::

      X_0 = \frac{X}{\lVert X \rVert_F + \varepsilon}, \qquad A_k = X_k X_k^H, \qquad
      X_{k+1} = a X_k + (b A_k + c A_k^2) X_k

    on the transpose of a tall matrix, so that :math:`A` is small. With the coefficients
    ``"quintic"`` and 5 steps the singular values end between about 0.68 and 1.13, unless they start
    near 0: this approximates the factor :math:`U V^H` of the singular value decomposition without
    converging to it. A matrix of zeros gives zeros, and so does one whose norm overflows, from
    1.8e19 on in float32; one whose norm is not far above :math:`\varepsilon` comes out smaller. A
    NaN stays in its own matrix.

    The Frobenius norm is taken in at least float32 before the cast to `dtype`; the reference's
    ``mars_m.py`` takes that of the cast matrix, and one norm for a whole stack.

    Args:
      x: A real or complex matrix (in, out) of rank 2, or an array of any rank with
        `weight_dimension_numbers`. The transpose of `x` gives the transposed result.
      steps: Number of iterations, >= 0; with 0 the result is :math:`X_0`.
      coeffs: ``"quintic"``, that is (3.4445, -4.7750, 2.0315); ``"polar_express"``, whose steps
        differ and whose last one converges; one triple (a, b, c); or one triple per step.
      dtype: The dtype of the iteration; complex matrices are iterated in at least complex64.
      eps: :math:`\varepsilon` >= 0.
      precision: Of the matrix products, as in :func:`jax.numpy.matmul`: the default computes
        float32 products in TF32 on some GPUs and in bfloat16 on TPUs.
      weight_dimension_numbers: The axes of the matrices, an
        :class:`optax.contrib.MuonDimensionNumbers`; all other axes are batch axes.

    Returns:
      An array with the shape and dtype of `x`.

    Raises:
      TypeError: If an argument is of the wrong kind.
      ValueError: If an argument is out of its range, if `x` has not rank 2 and no axes are given,
        or if they do not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> x = jnp.array([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
      >>> y = mars_optax.orthogonalize(x, coeffs="polar_express", steps=8, dtype="float32")
      >>> print(y.round(3))
      [[1. 0. 0.]
       [0. 1. 0.]]

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024. Amsel et al., `The
      Polar Express <https://arxiv.org/abs/2505.16932>`_, 2025. Reference code:
      ``zeropower_via_newtonschulz5`` of https://github.com/AGI-Arena/MARS.
    """
    options = Orthogonalization(steps, coeffs, dtype, precision, eps, prefix="")
    x = jnp.asarray(x)
    if weight_dimension_numbers is None and x.ndim != 2:
        raise ValueError(
            f"`x`: expected a matrix of rank 2, got {x.shape=}. Declare its axes by "
            "`weight_dimension_numbers`."
        )
    checks.inexact_leaves(x)
    axes = partition.resolve_axes(weight_dimension_numbers, x, partition.matrix_at_rank_2)
    partition.require_matrices(axes, x, "orthogonalize")
    return options([x], [axes])[0]
