"""MARS-M: variance reduction for Muon as Moonlight has it."""

import jax
import optax

from mars_optax._src import assembly, checks, named, orthogonalize, transformation, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf import newton_schulz
from mars_optax._src.row_normalization import normalize_rows
from mars_optax._src.states import MomentumState, State
from mars_optax._src.variants import adamw


class ScaleByMarsMState(MomentumState):
    """State of :func:`scale_by_mars_m`."""


@named.named
def scale_by_mars_m(
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
    alpha: types.ScalarOrSchedule = 1.0,
    row_b2: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates of matrices by the rule of MARS-M.

    .. math::

      c_t &= g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \mathrm{max\_norm} / \lVert c_t \rVert_F) \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      u_t = 0.2 \sqrt{\max(n_\mathrm{in}, n_\mathrm{out})} \; \mathrm{NewtonSchulz}(m_t)

    for each matrix (in, out): a leaf of rank 2, or each slice of a leaf whose axes are declared.
    The factor gives the update AdamW's root mean square, near 0.2, so that AdamW's learning rates
    and decays are a start. The direction :math:`u_t` has the sign of the gradient and its dtype.
    :func:`orthogonalize` describes the iteration. At the first step both values of `first_step`
    give nearly the same direction, but not the same moving average.

    Differences from the reference code: each slice of a stack has its own norm, clip and factor,
    where there one norm serves the whole stack and the factor comes from its first two axes; the
    norm is taken before the cast to `ns_dtype`; a step of the iteration is (a I + b A + c A A) X
    with :math:`A = X X^T`, there a X + (b A + c A A) X, which rounds otherwise; b1 and `gamma` are
    read at every step, where there their product is frozen at construction.

    Args:
      weight_dimension_numbers: ... None: every leaf is a matrix (in, out) of rank 2.

    Returns:
      A transformation with state :class:`ScaleByMarsMState`.

    Raises:
      ValueError: ... Also at ``init``, if a leaf is no matrix; at ``update``, if `newton_schulz_fn`
        returns another shape or dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.scale_by_mars_m(ns_coeffs="polar_express", ns_steps=8, ns_dtype="float32")
      >>> params = jnp.zeros((4, 4))
      >>> state = tx.init(params)
      >>> direction, state = tx.update(jnp.diag(jnp.array([0.3, -2.0, 0.1, 5.0])), state)
      >>> print(f"{direction[0, 0]:.2f} {direction[0, 1]:.2f} {direction[1, 1]:.2f}")
      0.40 0.00 -0.40

    References:
      Liu et al., `MARS-M: When Variance Reduction Meets Matrices
      <https://arxiv.org/abs/2510.21800>`_, 2025. Liu et al., `Muon is Scalable for LLM Training
      <https://arxiv.org/abs/2502.16982>`_, 2025, for the factor. Reference code:
      ``MARS_M/optimizers/mars_m.py`` of https://github.com/AGI-Arena/MARS.
    """
    settings, numbers = locals(), weight_dimension_numbers
    how = ns_steps, ns_coeffs, ns_dtype, ns_precision
    iteration = orthogonalize.Orthogonalization(
        *how, fn=newton_schulz_fn, implementation=implementation
    )
    inner = orthogonalize.transformation(iteration, newton_schulz.rms_factor, numbers)
    if row_b2 is not None:
        checks.decay_rate("row_b2", row_b2)
        inner = optax.chain(inner, normalize_rows(row_b2, weight_dimension_numbers=numbers))
    return transformation.momentum_rule("scale_by_mars_m", ScaleByMarsMState, settings, inner=inner)


class MarsMState(State):
    """State of :func:`mars_m`."""


@named.named
def mars_m(
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    weight_decay: types.ScalarOrSchedule = 0.1,
    mask: types.Mask | None = None,
    *,
    ns_steps: jax.typing.ArrayLike = 5,
    ns_coeffs: types.NewtonSchulzCoefficients = "quintic",
    ns_dtype: types.DType = "bfloat16",
    ns_precision: types.Precision = None,
    newton_schulz_fn: types.NewtonSchulzFn | None = None,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    learning_rate_1d: types.ScalarOrSchedule | None = None,
    b1_1d: jax.typing.ArrayLike = 0.9,
    b2_1d: jax.typing.ArrayLike = 0.95,
    eps_1d: jax.typing.ArrayLike | None = None,
    weight_decay_1d: types.ScalarOrSchedule | None = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    implementation: types.Implementation | None = None,
    eps_root_1d: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
    row_b2: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-M: Muon on variance-reduced gradients, at AdamW's scale of updates.

    Matrices are updated by :math:`x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)` with the direction
    :math:`u_t` of :func:`scale_by_mars_m`, whose docstring has the equations, the first step, the
    references and the differences from their code. Other leaves get AdamW with the values `*_1d`.

    A further difference: AdamW's epsilon is added after the bias correction, as in Optax; in
    ``mars_m.py`` before, which is one of :math:`\varepsilon / \sqrt{1 - \beta_2^t}` here.

    Args:
      weight_decay: ... It is multiplied by the learning rate, not by the factor of the shape.
      weight_dimension_numbers: ... None: leaves of exactly rank 2. Embeddings and output layers are
        among these; the reference gives them to AdamW:
        ``dimension_numbers_by_path([("embed|head", None)])``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "bias": jnp.array([1.0, -1.0])}
      >>> tx = mars_optax.mars_m(learning_rate=0.1, ns_dtype="float32")
      >>> updates, state = tx.update(params, tx.init(params), params)  # of half the sum of squares
      >>> print(f"{updates['kernel'][0, 0]:.2f} {updates['bias'][0]:.2f}")
      -0.02 -0.11
    """
    settings = locals()
    vectors = adamw.for_vectors(settings)
    return assembly.optimizer("mars_m", scale_by_mars_m, settings, MarsMState, vectors)
