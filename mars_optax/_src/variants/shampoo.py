"""MARS-Shampoo: the orthogonalized momentum of the corrected gradient."""

import functools

import jax
import optax

from mars_optax._src import assembly, checks, named, orthogonalize, partition, transformation, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf import newton_schulz, precision
from mars_optax._src.states import MomentumState, State
from mars_optax._src.variants import adamw


class ScaleByMarsShampooState(MomentumState):
    """State of :func:`scale_by_mars_shampoo`."""


@named.named
def scale_by_mars_shampoo(
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    *,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    implementation: types.Implementation | None = None,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: types.NewtonSchulzCoefficients = "quintic",
    ns_dtype: types.DType = "bfloat16",
    ns_precision: types.Precision = None,
    newton_schulz_fn: types.NewtonSchulzFn | None = None,
    eps: jax.typing.ArrayLike = 1e-8,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates of matrices by the rule of MARS-Shampoo.

    .. math::

      c_t &= g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \mathrm{max\_norm} / \lVert c_t \rVert_F) \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      u_t = \sqrt{\max(1, n_\mathrm{out} / n_\mathrm{in})} \;
      \mathrm{NewtonSchulz}\!\left(\frac{m_t}{1-\beta_1}\right)

    for each matrix (in, out): a leaf of rank 2, or each slice of a leaf whose axes are declared. A
    kernel and the transposed PyTorch weight get transposed updates. The direction :math:`u_t` has
    the sign of the gradient and its dtype. :func:`orthogonalize` describes the iteration. At the
    first step both values of `first_step` give nearly the same direction, but not the same average.

    Differences: the clip is in the reference code, but not in the paper's Algorithm 4; a step of
    the iteration is (a I + b A + c A A) X with :math:`A = X X^T`, in the reference code
    (a X + b A X) + c A (A X), which rounds otherwise; no second moment is allocated.

    Args:
      weight_dimension_numbers: ... None: every leaf is a matrix (in, out) of rank 2.
      eps: Added to the Frobenius norm, >= 0.

    Returns:
      A transformation with state :class:`ScaleByMarsShampooState`.

    Raises:
      ValueError: ... Also at ``init``, if a leaf is no matrix; at ``update``, if `newton_schulz_fn`
        returns another shape or dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.scale_by_mars_shampoo(ns_coeffs="polar_express", ns_steps=8)
      >>> params = jnp.zeros((2, 2))
      >>> state = tx.init(params)
      >>> direction, state = tx.update(jnp.array([[0.3, 0.0], [0.0, -2.0]]), state)
      >>> print(direction.round().astype(int))
      [[ 1  0]
       [ 0 -1]]

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, Algorithm 4. Reference code:
      ``MARS/optimizers/mars.py``, ``mars_type="mars-shampoo"``, of
      https://github.com/AGI-Arena/MARS.
    """
    settings = locals()
    how = ns_steps, ns_coeffs, ns_dtype, ns_precision
    iteration = orthogonalize.Orthogonalization(
        *how, eps, newton_schulz_fn, implementation=implementation
    )
    checks.decay_rate("b1", b1)
    factor, divisor = newton_schulz.spectral_factor, 1 - precision.upcast_scalar(b1)
    inner = orthogonalize.transformation(iteration, factor, weight_dimension_numbers, divisor)
    name, state_type = "scale_by_mars_shampoo", ScaleByMarsShampooState
    return transformation.momentum_rule(name, state_type, settings, inner=inner)


class MarsShampooState(State):
    """State of :func:`mars_shampoo`."""


@named.named
def mars_shampoo(
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    weight_decay: types.ScalarOrSchedule = 0.0,
    mask: types.Mask | None = None,
    *,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: types.NewtonSchulzCoefficients = "quintic",
    ns_dtype: types.DType = "bfloat16",
    ns_precision: types.Precision = None,
    newton_schulz_fn: types.NewtonSchulzFn | None = None,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    optimize_1d: bool = False,
    learning_rate_1d: types.ScalarOrSchedule | None = None,
    b1_1d: jax.typing.ArrayLike = 0.9,
    b2_1d: jax.typing.ArrayLike = 0.95,
    eps_1d: jax.typing.ArrayLike | None = None,
    weight_decay_1d: types.ScalarOrSchedule | None = 0.1,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    implementation: types.Implementation | None = None,
    amsgrad: bool = False,
    nu_dtype: types.DType = None,
    eps_root_1d: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-Shampoo: orthogonalized momentum of variance-reduced gradients.

    Matrices are updated by :math:`x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)` with the direction
    :math:`u_t` of :func:`scale_by_mars_shampoo`, whose docstring has the equations, the first step,
    the references and the differences from their code. All other leaves are updated by AdamW with
    the values `*_1d`; with `optimize_1d` by :func:`mars` with the main ones.

    Args:
      b2: Decay rate, in [0, 1), of the second moment of the other leaves under `optimize_1d`.
      eps: Epsilon >= 0 of the orthogonalization, and of the other leaves.
      optimize_1d: Whether the other leaves, too, get a variance-reduced rule, that of :func:`mars`.
        The values `*_1d` but `eps_root_1d` are not used then.
      weight_dimension_numbers: ... None: leaves of rank 2, embeddings too: name what to leave out.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "bias": jnp.array([1.0, -1.0])}
      >>> tx = mars_optax.mars_shampoo(learning_rate=0.1, ns_dtype="float32")
      >>> updates, state = tx.update(params, tx.init(params), params)  # of half the sum of squares
      >>> print(f"{updates['kernel'][0, 0]:.2f} {updates['bias'][0]:.2f}")
      -0.03 -0.11
    """
    settings = locals()
    checks.flag("optimize_1d", optimize_1d)
    checks.non_negative("eps", eps)
    checks.decay_rate("b2", b2)
    vector_rule = adamw.for_vectors({**settings, "optimize_1d": False})
    if optimize_1d:
        # The vectors' rule averages the squares of corrected gradients.
        checks.keeps_prev_grad(keep_prev_grad, "`optimize_1d`=True", "False")
        eps_root = 0.0 if eps_root_1d is None else eps_root_1d
        own = {"eps_root": eps_root, "weight_dimension_numbers": partition.no_matrices}
        vectors = assembly.accepted(adamw.scale_by_mars, {**settings, **own})
        vector_rule = functools.partial(adamw.scale_by_mars, **vectors)
        unused = dict.fromkeys(("learning_rate_1d", "weight_decay_1d"))
        checks.rates({key: settings[key] for key in unused if settings[key] is not None})
        settings = {**settings, **unused}
    return assembly.optimizer(
        "mars_shampoo", scale_by_mars_shampoo, settings, MarsShampooState, vector_rule
    )
