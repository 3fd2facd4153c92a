"""Newton-Schulz on leaves: matrices of any layout, and what the matrix variants ask of it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_optax._src import checks, execute, in_shard_map, mesh, partition, reshard, stacks, types
from mars_optax._src.leaf import newton_schulz, precision


@dataclasses.dataclass(frozen=True)
class Orthogonalization:
    """The options of :func:`orthogonalize`, checked and ready for a stack of matrices."""

    steps: Any = 5
    coeffs: Any = "quintic"  # once built, a table of triples
    dtype: Any = "bfloat16"
    precision: types.Precision = None
    eps: Any = 1e-7
    fn: types.NewtonSchulzFn | None = None  # the user's function in its place
    prefix: str = "ns_"  # what the options' names begin with where the user gave them, for errors
    implementation: types.Implementation | None = None

    def __post_init__(self) -> None:
        checks.steps(f"{self.prefix}steps", self.steps)
        checks.non_negative("eps", self.eps)
        checks.optional_callable("newton_schulz_fn", self.fn)
        table = checks.coefficients(self.coeffs, self.steps, newton_schulz.PRESETS, self.prefix)
        object.__setattr__(self, "coeffs", table)
        name = f"{self.prefix}dtype"
        if self.dtype is None:
            raise TypeError(f"`{name}`: expected a dtype, got None. Pass for example 'bfloat16'.")
        object.__setattr__(self, "dtype", checks.float_dtype(name, self.dtype))

    def __call__(
        self, leaves: Sequence[jax.Array], axes: Sequence[partition.Axes]
    ) -> list[jax.Array]:
        """Orthogonalizes each matrix of some leaves."""
        rows = list(zip(leaves, axes, strict=True))
        if self.fn is not None:
            return [self._by_user(self.fn, *row) for row in rows]
        # Steps that are an array are one more operand; a number is part of the program.
        is_known = isinstance(self.steps, int | np.integer)
        constants = [jnp.asarray(self.coeffs)] + ([] if is_known else [jnp.asarray(self.steps)])

        def fn(
            stack: jax.Array, coeffs: jax.Array, steps: Any = self.steps, is_local: bool = False
        ) -> jax.Array:
            run = functools.partial(
                newton_schulz.iterated, steps=steps, matmul_precision=self.precision
            )
            # Kernels have one precision.
            by = self.implementation if is_known and self.precision is None else "xla"
            return execute.newton_schulz(run, stack, coeffs, by, is_local)

        divisors = [newton_schulz.divisor(x, a.norm_axes, self.eps) for x, a in rows]
        pairs = list(zip(leaves, divisors, strict=True))
        normalized = [newton_schulz.divided(*pair, self.dtype) for pair in pairs]
        is_wanted = self.implementation != "xla" and execute.kernels_are_faster(leaves)
        sources = pairs if is_wanted else None
        iterates = stacks.map_stacks(fn, normalized, axes, constants, sources)
        return [y.astype(x.dtype) for x, y in zip(leaves, iterates, strict=True)]

    @staticmethod
    def _by_user(fn: types.NewtonSchulzFn, x: jax.Array, axes: partition.Axes) -> jax.Array:
        """The user's function gets the stack of each leaf, in the orientation declared."""
        stack = axes.to_stack(mesh.whole(x))
        result: jax.Array = fn(stack)
        checks.newton_schulz_result(stack, result)
        return mesh.laid_out(axes.from_stack(result, x.shape), x)


def transformation(
    orthogonalization: Orthogonalization,
    factor: Callable[[int, int], float],
    weight_dimension_numbers: types.WeightDimensionNumbers,
    divisor: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The directions of matrices: momenta / `divisor`, orthogonalized, times `factor(in, out)`."""

    def divided(x: jax.Array) -> jax.Array:
        if divisor is None:
            return x
        return x / precision.upcast_scalar(divisor, precision.compute_dtype(x))

    def update_fn(momenta: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        axes = partition.resolve_axes(weight_dimension_numbers, momenta)
        what = "the orthogonalization of a matrix"
        layouts = in_shard_map.layouts(momenta, axes, extra_args, what)
        leaves, treedef = jax.tree.flatten(momenta)
        whole = [divided(layout.whole(x)) for layout, x in zip(layouts, leaves, strict=True)]
        run = reshard.by_specs(orthogonalization, [layout.spec for layout in layouts])
        pairs = zip(layouts, run(whole, [layout.axes for layout in layouts]), strict=True)
        directions = [its.part(y * factor(*its.axes.fans(y.shape))) for its, y in pairs]
        return jax.tree.unflatten(treedef, directions), optax.EmptyState()

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def orthogonalize(
    x: jax.typing.ArrayLike,
    *,
    steps: jax.typing.ArrayLike = 5,
    coeffs: types.NewtonSchulzCoefficients = "quintic",
    dtype: types.DType = "bfloat16",
    eps: jax.typing.ArrayLike = 1e-7,
    precision: types.Precision = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    implementation: types.Implementation | None = None,
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
    NaN stays in its own matrix. The norm is taken in at least float32 before the cast to `dtype`;
    the reference's ``mars_m.py`` takes that of the cast matrix, and one for a whole stack.

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
      weight_dimension_numbers: :class:`optax.contrib.MuonDimensionNumbers`; other axes are batch.
      implementation: ``"xla"``; ``"pallas"``, kernels on Hopper GPUs for `dtype` of 16 bits, a
        shorter side of 32 or more, known `steps` and no `precision` (XLA for all else, under
        ``jax.vmap``, and on TPUs); or None, which takes kernels where they were measured to be
        faster.

    Returns:
      An array with the shape and dtype of `x`.

    Raises:
      TypeError: If an argument is of the wrong kind.
      ValueError: If an argument is out of its range, or `x` has no axes that fit, nor rank 2.
      NotImplementedError: If kernels were asked for and cannot run.

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
    checks.choice("implementation", implementation, (None, "xla", "pallas"))
    how: Any = {"prefix": "", "implementation": implementation}
    options = Orthogonalization(steps, coeffs, dtype, precision, eps, **how)
    x = jnp.asarray(x)
    if weight_dimension_numbers is None and x.ndim != 2:
        raise ValueError(
            f"`x`: expected rank 2, got {x.shape=}. Declare its axes by `weight_dimension_numbers`."
        )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"`x`: expected a real or complex floating-point array, got dtype {x.dtype}. Pass for "
            "example `x.astype('float32')`."
        )
    axes = partition.resolve_axes(weight_dimension_numbers, x)
    partition.require_matrices(axes, x, "orthogonalize")
    return options([x], [axes])[0]
