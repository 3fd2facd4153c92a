"""Newton-Schulz iteration on stacks of matrices, and the factors of a matrix's shape."""

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from mars_optax._src.leaf import precision

Triple = tuple[float, float, float]

# Amsel et al., The Polar Express (arXiv 2505.16932), Algorithm 1: the optimal degree-5 polynomials
# for singular values down to 1e-3. All but the last are evaluated at x / 1.01, as there.
_POLAR_EXPRESS: Final = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY: Final = 1.01

# Triples (a, b, c) of p(x) = a x + b x^3 + c x^5, one per step; the last serves all further steps.
PRESETS: Final[dict[str, tuple[Triple, ...]]] = {
    # Jordan et al., Muon (2024): steepest at 0; singular values end between about 0.68 and 1.13.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}

# Up to so many steps are written out, more are a loop: a step of a loop copies what it carries.
_UNROLLED: Final = 10


def divisor(x: jax.Array, axes: tuple[int, ...], eps: Any) -> jax.Array:
    """||X||_F + eps over `axes`, which are kept, in at least float32; 1 where that is 0."""
    real = precision.compute_dtype(x)
    wide = precision.upcast(x, real)
    squares = jnp.sum(jnp.real(wide * jnp.conj(wide)), axis=axes, keepdims=True)
    # A square root has no derivative at 0.
    zero, one = (precision.beside(number, squares) for number in (0, 1))
    norm = jnp.where(squares == 0, zero, jnp.sqrt(jnp.where(squares == 0, one, squares)))
    norm = norm + precision.upcast_scalar(eps, real)
    # With eps = 0 a matrix of zeros stays one.
    return jnp.where(norm > 0, norm, one)


def divided(x: jax.Array, by: jax.Array, dtype: Any) -> jax.Array:
    """X / `by` in `dtype`, divided in at least float32."""
    result = precision.upcast(x, by.dtype) / by
    # There is no complex number of lower precision than complex64.
    return result if jnp.iscomplexobj(x) else result.astype(precision.available(dtype))


def iterated(
    x: jax.Array,
    coeffs: Any,
    steps: Any,
    matmul_precision: jax.lax.PrecisionLike = None,
    polynomial: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """`steps` times X <- (a I + b A + c A A) X with A = X X^H, for matrices with m <= n.

    The polynomial is summed in at least float32 and rounded to the dtype of `x`. The references add
    a X to the product instead, `mars_m.py` in this order, `mars.py` as (a X + b A X) + c A (A X):
    in exact arithmetic all are the same. With a on the diagonal of the small matrix, a step is
    three products of matrices and nothing else of the full shape. `polynomial` makes the first
    factor of X and the coefficients where something other than XLA's products is to make it.
    """
    if isinstance(steps, np.integer):
        steps = int(steps)
    run = _known_steps if isinstance(steps, int) else _any_steps
    table = jnp.asarray(coeffs, precision.compute_dtype(x))
    how = {"matmul_precision": matmul_precision, "polynomial": polynomial}
    return run(x, table, steps=steps, **how)


def _steps(
    x: jax.Array, table: jax.Array, steps: Any, matmul_precision: Any, polynomial: Any
) -> jax.Array:
    factor = polynomial or functools.partial(_polynomial, matmul_precision=matmul_precision)

    def step(i: Any, x: jax.Array) -> jax.Array:
        row = table[jnp.minimum(i, len(table) - 1)]
        return jnp.matmul(factor(x, row), x, precision=matmul_precision)

    if isinstance(steps, int) and steps <= _UNROLLED:
        for i in range(steps):
            x = step(i, x)
        return x
    return jax.lax.fori_loop(0, steps, step, x)


def _polynomial(x: jax.Array, coefficients: jax.Array, matmul_precision: Any) -> jax.Array:
    """The factor a I + b A + c A A with A = X X^H."""
    identity = jnp.eye(x.shape[-2], dtype=precision.compute_dtype(x))
    # Without a rank to be promoted, which JAX can be set to refuse.
    identity = precision.beside(jnp.expand_dims(identity, tuple(range(x.ndim - 2))), x)
    gram = jnp.matmul(x, jnp.conj(jnp.swapaxes(x, -2, -1)), precision=matmul_precision)
    square = jnp.matmul(gram, gram, precision=matmul_precision)
    a, b, c = coefficients
    return (a * identity + b * precision.upcast(gram) + c * precision.upcast(square)).astype(
        x.dtype
    )


# Compiled here, an eager call finds its program in the cache, which knows functions by identity. A
# number of steps that is known makes one that can be differentiated in reverse.
_known_steps = jax.jit(_steps, static_argnames=("steps", "matmul_precision", "polynomial"))
_any_steps = jax.jit(_steps, static_argnames=("matmul_precision", "polynomial"))


def spectral_factor(fan_in: int, fan_out: int) -> float:
    """sqrt(max(1, fan_out / fan_in)), the scale of MARS-Shampoo (`mars.py` of the reference)."""
    return math.sqrt(max(1.0, fan_out / max(fan_in, 1)))


def rms_factor(fan_in: int, fan_out: int) -> float:
    """0.2 sqrt(max(fan_in, fan_out)), the scale of MARS-M, which gives AdamW's usual RMS of 0.2."""
    return 0.2 * math.sqrt(max(fan_in, fan_out))
