"""MARS-M: variance reduction for Muon as Moonlight has it."""

import functools

import jax
import optax

from mars_optax._src import (
    assembly,
    checks,
    named,
    orthogonalize,
    partition,
    transformation,
    trees,
    types,
)
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf import newton_schulz
from mars_optax._src.leaf.momentum import momentum_step
from mars_optax._src.states import MomentumState, State
from mars_optax._src.variants import adamw


class ScaleByMarsMState(MomentumState):
    """State of :func:`scale_by_mars_m`."""

    __slots__ = ()


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
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates of matrices by the rule of MARS-M.

    .. math::

      c_t &= g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \mathrm{max\_norm} / \lVert c_t \rVert_F) \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      u_t = 0.2 \sqrt{\max(n_\mathrm{in}, n_\mathrm{out})} \; \mathrm{NewtonSchulz}(m_t)

    for each matrix (in, out): a leaf of rank 2, or each slice of a leaf whose axes are declared.
    The factor gives the update the root mean square that AdamW's has, near 0.2, so that AdamW's
    learning rates and decays are a start. The direction :math:`u_t` has the sign of the gradient
    and the gradient's dtype; :func:`orthogonalize` tells what the iteration does.

    At the first step :math:`c_1 = (1 + k) g_1` with :math:`k = \gamma \beta_1 / (1-\beta_1)` under
    ``first_step="zeros"``, as in the reference code, and :math:`c_1 = g_1` under
    ``"no_correction"``; the direction is nearly the same, but the moving average is not.

    Differences from the reference code: each slice of a stack has its own norm, its own clip and
    the factor of its own shape, where there one norm serves the whole stack and the factor comes
    from its first two axes; the norm is taken before the cast to `ns_dtype`; a step of the
    iteration is (a I + b A + c A A) X with :math:`A = X X^T`, there a X + (b A + c A A) X, which is
    the same in exact arithmetic and rounds otherwise; b1 and `gamma` are read at every step, where
    there their product is frozen at construction.

    Args:
      b1: Decay rate :math:`\beta_1` of the momentum, in [0, 1). 0 turns the correction off.
      gamma: Scale :math:`\gamma_t` of the correction, a number (may be negative) or a schedule of
        the step count, which starts at 0. The coefficient is computed in at least float32.
      max_norm: Bound > 0 on the norm of each corrected gradient; None turns the clipping off.
      correction: ``"approx"``, the gradient of the previous step; ``"exact"``, that of this step's
        batch at the previous parameters, which ``update(..., grad_fn=f)`` obtains as
        ``f(previous_params)`` (the state keeps these in place of the previous gradient, and
        `params` is required); or ``"none"``.
      first_step: ``"zeros"`` or ``"no_correction"``, see above.
      mu_dtype: Storage dtype of :math:`m`; None for each parameter's own.
      prev_grad_dtype: Storage dtype of :math:`g_{t-1}`; None for each parameter's own. An 8-bit
        float is stored with a float32 scale for each row along the last axis.
      keep_prev_grad: Whether the state keeps :math:`g_{t-1}`. False takes the same steps without,
        and excludes the clip, exact mode and `prev_grad_dtype`: see :func:`scale_by_mars`.
      weight_dimension_numbers: Axes of the matrices, as in :func:`scale_by_mars_shampoo`. None:
        every leaf is a matrix (in, out) of rank 2.
      implementation: What executes norms and the elementwise part: None or ``"xla"`` for XLA,
        ``"pallas"`` for kernels on Hopper GPUs and (norms aside) TPUs.
      ns_steps: Number of iterations, an integer >= 0. 0 leaves the matrix over its Frobenius norm.
      ns_coeffs: ``"quintic"``, ``"polar_express"``, one triple, or one triple per step.
      ns_dtype: The dtype of the iteration.
      ns_precision: Of its matrix products, as in :func:`jax.numpy.matmul`.
      newton_schulz_fn: A function in place of the iteration: it gets the momentum as a stack
        (batch, in, out) of at least float32, and returns the same shape and dtype. The shape factor
        comes after.

    Returns:
      A transformation with state :class:`ScaleByMarsMState`.

    Raises:
      TypeError: If an argument is of the wrong kind; at ``init``, if a parameter is not inexact; at
        ``update``, if a gradient is not, or the state is another transformation's.
      ValueError: As :func:`scale_by_mars`; at ``init``, if a leaf is no matrix; at ``update``, if
        `newton_schulz_fn` returns another shape or dtype.
      NotImplementedError: At ``update``, if kernels were asked for and cannot run.

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
    settings = locals()
    iteration = orthogonalize.Orthogonalization(
        ns_steps, ns_coeffs, ns_dtype, ns_precision, fn=newton_schulz_fn
    )
    first = functools.partial(trees.zeros, dtype=checks.recursive_dtype("mu_dtype", mu_dtype))
    inner = orthogonalize.transformation(
        iteration,
        newton_schulz.rms_factor,
        weight_dimension_numbers,
    )
    return transformation.rule(
        "scale_by_mars_m",
        ScaleByMarsMState,
        settings,
        step=momentum_step,
        moments={"mu": first},
        scalars=lambda count: {"b1": b1},
        inner=inner,
        default=partition.matrix_at_rank_2,
    )


class MarsMState(State):
    """State of :func:`mars_m` in which vectors have a rule of their own."""

    __slots__ = ()


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
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-M: Muon on variance-reduced gradients, at AdamW's scale of updates.

    Matrices are updated by

    .. math::

      x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)

    with the direction :math:`u_t` of :func:`scale_by_mars_m`, whose docstring has the equations,
    the first step and the differences from the reference code. All other leaves are updated by
    AdamW with the values `*_1d`.

    A further difference: AdamW's epsilon is added after the bias correction, as in Optax and in
    :func:`mars`; the reference's ``mars_m.py`` adds it before, which is an epsilon of
    :math:`\varepsilon / \sqrt{1 - \beta_2^t}` here.

    Args:
      learning_rate: :math:`\eta_t`, a number or a schedule of the step count, which starts at 0.
      b1: Decay rate of the momentum, in [0, 1).
      gamma: Scale of the correction, a number or a schedule.
      weight_decay: :math:`\lambda` of the matrices, a number or a schedule. It is multiplied by the
        learning rate alone, not by the factor of the matrix's shape.
      mask: Which leaves decay, as in :func:`mars`.
      ns_steps: Number of Newton-Schulz iterations, an integer >= 0; 0 leaves the normalized matrix.
      ns_coeffs: ``"quintic"``, ``"polar_express"``, one triple, or one triple per step.
      ns_dtype: The dtype of the iteration.
      ns_precision: Of its matrix products, as in :func:`jax.numpy.matmul`.
      newton_schulz_fn: A function in place of the iteration, as in :func:`scale_by_mars_m`.
      max_norm: Bound > 0 on the norm of each matrix's corrected gradient; None for no clip.
      correction: ``"approx"``, ``"exact"`` (with ``update(..., grad_fn=f)``) or ``"none"``, see
        :func:`scale_by_mars_m`.
      first_step: ``"zeros"`` or ``"no_correction"``.
      learning_rate_1d: Learning rate of the other leaves, a number or a schedule; None for
        `learning_rate`.
      b1_1d: Decay rate of their first moment, in [0, 1).
      b2_1d: Decay rate of their second moment, in [0, 1).
      eps_1d: Their epsilon, >= 0; None for 1e-8.
      weight_decay_1d: Their weight decay; None for `weight_decay`.
      weight_dimension_numbers: Which leaves are matrices, as in :func:`mars_shampoo`. None: leaves
        of exactly rank 2. Embeddings and output layers are among these; the reference gives them to
        AdamW: ``dimension_numbers_by_path([("embed|head", None)])``.
      mu_dtype: Storage dtype of the first moments; None for the parameter's.
      prev_grad_dtype: Storage dtype of the previous gradient; None for the parameter's.
      keep_prev_grad: Whether the state keeps the previous gradient, see :func:`scale_by_mars_m`.
      implementation: What executes norms and the elementwise part: None or ``"xla"`` for XLA,
        ``"pallas"`` for kernels on Hopper GPUs and (norms aside) TPUs, with which steps of
        :func:`mars_m` were measured to be slower.
      eps_root_1d: Added to the second moment of the other leaves inside the root, >= 0; None for
        0.

    Returns:
      An optimizer, as :func:`mars` does.

    Raises:
      TypeError: As :func:`mars`.
      ValueError: As :func:`mars`.
      NotImplementedError: As :func:`mars`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> params = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "bias": jnp.array([1.0, -1.0])}
      >>> tx = mars_optax.mars_m(learning_rate=0.1, ns_dtype="float32")
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     grads = params  # of half the sum of squares
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{jnp.sum(params['kernel'] ** 2) / 2:.2f}", end=" ")
      6.85 6.58 6.32

    References:
      Liu et al., `MARS-M: When Variance Reduction Meets Matrices
      <https://arxiv.org/abs/2510.21800>`_, 2025. Reference code: ``MARS_M/optimizers/mars_m.py`` of
      https://github.com/AGI-Arena/MARS.
    """
    settings = locals()
    return assembly.optimizer(
        "mars_m",
        scale_by_mars_m,
        settings,
        vector_rule=adamw.for_vectors(settings),
        state_type=MarsMState,
        default=partition.matrix_at_rank_2,
        # With kernels steps are 4 percent slower (GPT-2 small, one H200).
        implementation=implementation or "xla",
    )
