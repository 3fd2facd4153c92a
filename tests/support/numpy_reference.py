"""The update rules of the MARS family in float64 NumPy, one leaf at a time.

An oracle for the tests, written from the rules and sharing no code with the package. It favours
the reading order of the algorithms over speed: a whole trajectory of one leaf is computed in one
Python loop.

Matrices are in PyTorch's orientation, (out, in); a JAX kernel is transposed before and after. A
hyperparameter documented as "number or one per step" is a schedule written out as a sequence.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
PerStep = float | Sequence[float] | np.ndarray

QUINTIC = (3.4445, -4.7750, 2.0315)


class Trajectory(NamedTuple):
    """What one leaf goes through: parameters after every step, state after the last."""

    params: Array  # (steps, *shape)
    mu: Array  # (*shape)
    nu: Array | None = None  # (*shape)
    nu_max: Array | None = None  # (*shape)
    prev_grad: Array | None = None  # (*shape)


def _per_step(value: PerStep, steps: int) -> Array:
    return np.broadcast_to(np.asarray(value, np.float64), (steps,))


def _rounding(dtype: str):
    """Rounds a float64 array to `dtype` and back, as an operation of that precision would."""
    if dtype == "float64":
        return lambda x: x
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    # By way of float32, in which products of bfloat16 matrices are accumulated.
    return lambda x: np.asarray(x, np.float32).astype(target).astype(np.float64)


def newton_schulz(
    x: Array,
    *,
    steps: int = 5,
    coeffs: Sequence[Any] = QUINTIC,
    eps: float = 1e-7,
    order: Literal["mars", "mars_m"] = "mars_m",
    dtype: str = "float64",
) -> Array:
    """Orthogonalizes a matrix, or a stack of matrices normalised by one common norm.

    Args:
      x: Array of rank 2 or more; the last two axes are the matrix.
      steps: Number of iterations.
      coeffs: (a, b, c), or one such triple per step.
      eps: Added to the Frobenius norm.
      order: "mars" takes the norm in the precision of the input and computes (aX + bB) + (cA)B
        with B = AX; "mars_m" takes it after the cast and computes aX + BX with B = bA + (cA)A. In
        exact arithmetic the two agree.
      dtype: Every operation is rounded to this precision.

    Returns:
      The orthogonalized array, as float64.
    """
    rounded = _rounding(dtype)
    x = np.asarray(x, np.float64)
    norm = np.sqrt(np.sum(x * x))
    if order == "mars":
        x = rounded(rounded(x) / (norm + eps))
    else:
        x = rounded(x)
        norm = rounded(np.sqrt(np.sum(x * x)))
        x = rounded(x / rounded(norm + rounded(eps)))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = np.swapaxes(x, -1, -2)
    triples = np.broadcast_to(np.asarray(coeffs, np.float64), (steps, 3))
    for a, b, c in triples:
        gram = rounded(x @ np.swapaxes(x, -1, -2))
        if order == "mars":
            product = rounded(gram @ x)
            linear = rounded(rounded(a * x) + rounded(b * product))
            x = rounded(linear + rounded(rounded(c * gram) @ product))
        else:
            poly = rounded(rounded(b * gram) + rounded(rounded(c * gram) @ gram))
            x = rounded(rounded(a * x) + rounded(poly @ x))
    return np.swapaxes(x, -1, -2) if tall else x


def shape_factor(rule: Literal["shampoo", "mars_m"], shape: Sequence[int]) -> float:
    """What multiplies the orthogonalized momentum of a weight of shape (out, in, ...)."""
    if rule == "shampoo":
        return float(np.sqrt(max(1.0, shape[0] / shape[1])))
    return float(0.2 * np.sqrt(max(shape[0], shape[1])))


def normalize_rows(x: Array, nu: Array, *, b2: float, eps: float = 1e-8) -> tuple[Array, Array]:
    """One step of NorMuon's row normalization.

    Args:
      x: The orthogonalized matrix, (out, in).
      nu: The average of each row's mean square before this step, (out,).
      b2: Decay of that average.
      eps: Added to its root.

    Returns:
      The matrix with the Frobenius norm of `x`, and the new average.
    """
    nu = b2 * nu + (1.0 - b2) * np.array([np.mean(np.abs(row) ** 2) for row in x])
    rows = x / (np.sqrt(nu) + eps)[:, None]
    return rows * np.linalg.norm(x) / np.linalg.norm(rows), nu


def adam_direction(
    mu: Array,
    nu: Array,
    step: int,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    eps_before_correction: bool = False,
) -> Array:
    """Bias-corrected mu over the root of bias-corrected nu.

    `eps_before_correction` divides (sqrt(nu) + eps) as a whole by sqrt(1 - b2^t), as MARS-M does
    with its vector leaves.
    """
    mu_hat = mu / (1.0 - b1**step)
    root = np.sqrt(nu + eps_root)
    correction = np.sqrt(1.0 - b2**step)
    if eps_before_correction:
        return mu_hat / ((root + eps) / correction)
    return mu_hat / (root / correction + eps)


def mars_leaf(
    param: Array,
    grads: Array,
    *,
    rule: Literal["adamw", "lion", "shampoo", "mars_m"],
    lr: PerStep,
    b1: float = 0.95,
    b2: float = 0.99,
    eps: float = 1e-8,
    gamma: PerStep = 0.025,
    weight_decay: float = 0.0,
    max_norm: float | None = 1.0,
    first_step: Literal["zeros", "no_correction"] = "zeros",
    amsgrad: bool = False,
    second_moment: Literal["corrected", "gradient"] = "corrected",
    eps_root: float = 0.0,
    eps_before_correction: bool = False,
    ns_steps: int = 5,
    ns_coeffs: Sequence[Any] = QUINTIC,
    ns_dtype: str = "float64",
    row_b2: float | None = None,
    prev_grads: Array | None = None,
) -> Trajectory:
    """A leaf under the variance-reduced rule.

    Args:
      param: Initial parameter.
      grads: Gradients, (steps, *param.shape).
      rule: What becomes of the momentum: Adam's direction, its sign, or its orthogonalization
        with MARS-Shampoo's or MARS-M's factor.
      lr: Learning rate, a number or one per step.
      b1: Decay of the momentum; also in the correction's coefficient.
      b2: Decay of the second moment.
      eps: In Adam's denominator; under "shampoo" added to the norm in Newton-Schulz.
      gamma: Strength of the correction, a number or one per step.
      weight_decay: Decoupled, multiplied by the learning rate.
      max_norm: Bound on the L2 norm of the corrected gradient, or None.
      first_step: "zeros": the gradient before the first is zero; "no_correction": it equals the
        first.
      amsgrad: Divide by the running maximum of the uncorrected second moment.
      second_moment: Average the square of the clipped corrected gradient, or of the gradient.
      eps_root: See `adam_direction`.
      eps_before_correction: See `adam_direction`.
      ns_steps: Newton-Schulz iterations.
      ns_coeffs: Newton-Schulz coefficients.
      ns_dtype: Newton-Schulz precision.
      row_b2: Decay of the mean squares of rows under "mars_m", or None for no row normalization.
      prev_grads: What stands for the previous gradient at each step, for the exact variant. None
        takes the gradient of the step before.

    Returns:
      The leaf's trajectory.
    """
    param = np.asarray(param, np.float64)
    grads = np.asarray(grads, np.float64)
    steps = len(grads)
    lr, gamma = _per_step(lr, steps), _per_step(gamma, steps)
    if prev_grads is None:
        before_first = grads[0] if first_step == "no_correction" else np.zeros_like(grads[0])
        prev_grads = np.concatenate([before_first[None], grads[:-1]])
    prev_grads = np.asarray(prev_grads, np.float64)
    mu, nu, nu_max = (np.zeros_like(param) for _ in range(3))
    rows = np.zeros(param.shape[:1])
    params = []
    for t in range(steps):
        g, last = grads[t], prev_grads[t]
        c = g + gamma[t] * b1 / (1.0 - b1) * (g - last)
        if max_norm is not None:
            norm = np.sqrt(np.sum(c * c))
            if norm > max_norm:
                c = c * (max_norm / norm)
        mu = b1 * mu + (1.0 - b1) * c
        squared = c if second_moment == "corrected" else g
        nu = b2 * nu + (1.0 - b2) * squared * squared
        nu_max = np.maximum(nu_max, nu)
        if rule == "adamw":
            direction = adam_direction(
                mu,
                nu_max if amsgrad else nu,
                t + 1,
                b1=b1,
                b2=b2,
                eps=eps,
                eps_root=eps_root,
                eps_before_correction=eps_before_correction,
            )
        elif rule == "lion":
            direction = np.sign(mu)
        else:
            if rule == "shampoo":
                unit = newton_schulz(
                    mu / (1.0 - b1),
                    steps=ns_steps,
                    coeffs=ns_coeffs,
                    eps=eps,
                    order="mars",
                    dtype=ns_dtype,
                )
            else:
                unit = newton_schulz(
                    mu, steps=ns_steps, coeffs=ns_coeffs, eps=1e-7, order="mars_m", dtype=ns_dtype
                )
            direction = shape_factor(rule, param.shape) * unit
            if row_b2 is not None:
                direction, rows = normalize_rows(direction, rows, b2=row_b2)
        param = param - lr[t] * (direction + weight_decay * param)
        params.append(param)
    has_nu = rule == "adamw"
    return Trajectory(
        params=np.stack(params),
        mu=mu,
        nu=nu if has_nu else None,
        nu_max=nu_max if has_nu and amsgrad else None,
        prev_grad=grads[-1],
    )


def adamw_leaf(
    param: Array,
    grads: Array,
    *,
    lr: PerStep,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    eps_root: float = 0.0,
    eps_before_correction: bool = False,
) -> Trajectory:
    """A leaf under AdamW on the raw gradient; arguments as in `mars_leaf`."""
    trajectory = mars_leaf(
        param,
        grads,
        rule="adamw",
        lr=lr,
        b1=b1,
        b2=b2,
        eps=eps,
        gamma=0.0,
        weight_decay=weight_decay,
        max_norm=None,
        amsgrad=amsgrad,
        eps_root=eps_root,
        eps_before_correction=eps_before_correction,
    )
    return trajectory._replace(prev_grad=None)


def mars_m_efficient_leaf(
    param: Array,
    grads: Array,
    *,
    lr: PerStep,
    b1: float = 0.95,
    gamma: float = 0.025,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    ns_dtype: str = "float64",
) -> Trajectory:
    """MARS-M without clipping and without the previous gradient, in the form published for it.

    `mu` of the result is that form's buffer, not the momentum.
    """
    param = np.asarray(param, np.float64)
    grads = np.asarray(grads, np.float64)
    buffer = np.zeros_like(param)
    params = []
    for g, rate in zip(grads, _per_step(lr, len(grads)), strict=True):
        buffer = b1 * buffer + (1.0 - gamma) * (1.0 - b1) / b1 * g
        unit = newton_schulz(gamma * g + b1 * buffer, steps=ns_steps, dtype=ns_dtype)
        factor = shape_factor("mars_m", param.shape)
        param = param - rate * (factor * unit + weight_decay * param)
        params.append(param)
    return Trajectory(params=np.stack(params), mu=buffer)
