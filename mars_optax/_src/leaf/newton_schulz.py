"""Newton-Schulz iteration on stacks of matrices, and the factors of a matrix's shape."""

import math
from collections.abc import Sequence
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


def newton_schulz(
    x: jax.Array,
    coeffs: Sequence[Triple] | jax.Array,
    *,
    steps: Any = 5,
    dtype: Any = "bfloat16",
    eps: Any = 1e-7,
    matmul_precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Pushes the singular values of each matrix of the stack `x` (..., m, n) towards 1.

    X_0 = X / (||X||_F + eps), then `steps` times X <- a X + (b A + c A A) X with A = X X^T, in
    `dtype`; on the transpose where m > n, so that A is the smaller of the two Gram matrices. The
    Frobenius norm is taken in at least float32, and the polynomial's sums too.

    The order of the products is that of the reference's `mars_m.py`; `mars.py` groups them as
    (a X + b A X) + c A (A X), which is the same in exact arithmetic and costs another product of
    the full shape.
    """
    real = precision.compute_dtype(x)
    wide = precision.widen(x, real)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        wide = jnp.swapaxes(wide, -2, -1)
    squares = jnp.sum(jnp.real(wide * jnp.conj(wide)), axis=(-2, -1), keepdims=True)
    # A square root has no derivative at 0.
    norm = jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))
    norm = norm + precision.widen_scalar(eps, real)
    # With eps = 0 a matrix of zeros stays one.
    iterate = wide / jnp.where(norm > 0, norm, 1)
    # There is no complex number of lower precision than complex64.
    if not jnp.iscomplexobj(x):
        iterate = iterate.astype(precision.available(dtype))
    table = jnp.asarray(coeffs, precision.compute_dtype(iterate))
    iterate = _run_steps(iterate, table, steps, matmul_precision)
    if is_tall:
        iterate = jnp.swapaxes(iterate, -2, -1)
    return iterate.astype(x.dtype)


def _steps(
    x: jax.Array, table: jax.Array, steps: Any, matmul_precision: jax.lax.PrecisionLike
) -> jax.Array:
    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        a, b, c = table[jnp.minimum(i, len(table) - 1)]
        gram = jnp.matmul(x, jnp.conj(jnp.swapaxes(x, -2, -1)), precision=matmul_precision)
        gram_squared = jnp.matmul(gram, gram, precision=matmul_precision)
        polynomial = (b * precision.widen(gram) + c * precision.widen(gram_squared)).astype(x.dtype)
        product = jnp.matmul(polynomial, x, precision=matmul_precision)
        total: jax.Array = a * precision.widen(x) + precision.widen(product)
        return total.astype(x.dtype)

    # A rolled loop: unrolled, XLA keeps the intermediates of all steps at once.
    result: jax.Array = jax.lax.fori_loop(0, steps, body, x)
    return result


# Compiled here, an eager call finds its loop in the cache, which knows functions by identity. A
# number of steps that is known makes a loop that can be differentiated in reverse.
_known_steps = jax.jit(_steps, static_argnames=("steps", "matmul_precision"))
_any_steps = jax.jit(_steps, static_argnames=("matmul_precision",))


def _run_steps(
    x: jax.Array, table: jax.Array, steps: Any, matmul_precision: jax.lax.PrecisionLike
) -> jax.Array:
    if isinstance(steps, np.integer):
        steps = int(steps)
    run = _known_steps if isinstance(steps, int) else _any_steps
    result: jax.Array = run(x, table, steps=steps, matmul_precision=matmul_precision)
    return result


def spectral_factor(fan_in: int, fan_out: int) -> float:
    """sqrt(max(1, fan_out / fan_in)), the scale of MARS-Shampoo (`mars.py` of the reference)."""
    return math.sqrt(max(1.0, fan_out / max(fan_in, 1)))


def rms_factor(fan_in: int, fan_out: int) -> float:
    """0.2 sqrt(max(fan_in, fan_out)), the scale of MARS-M, which gives AdamW's usual RMS of 0.2."""
    return 0.2 * math.sqrt(max(fan_in, fan_out))
