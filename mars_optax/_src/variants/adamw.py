"""MARS-AdamW: Adam's direction computed from the corrected gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import assembly, checks, named, partition, previous, transformation, types
from mars_optax._src.leaf import precision
from mars_optax._src.leaf.correction import corrected_gradient
from mars_optax._src.leaf.momentum import bias_correction, momentum_step
from mars_optax._src.leaf.root import root


class ScaleByMarsState(NamedTuple):
    """State of :func:`scale_by_mars`; each tree has the structure of the parameters, or is None."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates  # average of c, dtype=mu_dtype or the parameter's
    nu: optax.Updates  # average of |c|^2, real, dtype=nu_dtype or at least float32
    prev_grad: optax.Updates | None  # dtype=prev_grad_dtype or the parameter's
    prev_grad_scale: optax.Updates | None  # of an 8-bit prev_grad: float32, one for each row
    prev_params: optax.Params | None  # in exact mode, dtype=the parameter's
    nu_max: optax.Updates | None  # largest nu so far, as nu


def adamw_step(
    grad: jax.Array,
    prev_grad: jax.Array | None,
    clip: jax.Array | None,
    mu: jax.Array,
    nu: jax.Array,
    nu_max: jax.Array | None,
    *,
    coefficient: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    mu_correction: Any,
    nu_correction: Any,
    nu_of_gradient: bool,
    eps_root: Any = 0.0,
    next_gamma: Any = None,
) -> tuple[Any, ...]:
    """Lines 4 to 9 of Algorithm 2 of the paper, without learning rate and decay."""
    momentum, mu = momentum_step(
        grad, prev_grad, clip, mu, coefficient=coefficient, b1=b1, next_gamma=next_gamma
    )
    squared = grad if nu_of_gradient else corrected_gradient(grad, prev_grad, coefficient, clip)
    nu = optax.tree.update_moment_per_elem_norm(squared, nu, b2, 2)
    if nu_max is not None:
        nu_max = jnp.maximum(nu_max, nu)
    nu_hat = (nu if nu_max is None else nu_max) / nu_correction
    return momentum / mu_correction / (root(nu_hat + eps_root) + eps), mu, nu, nu_max


@named.named
def scale_by_mars(
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    gamma: types.ScalarOrSchedule = 0.025,
    *,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    amsgrad: bool = False,
    second_moment: types.SecondMoment = "corrected",
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    implementation: types.Implementation | None = None,
    eps_root: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by the rule of MARS-AdamW, for every leaf alike.

    .. math::

      c_t &= g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \mathrm{max\_norm} / \lVert c_t \rVert_2) \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      v_t = \beta_2 v_{t-1} + (1-\beta_2) |\tilde c_t|^2 \\
      u_t &= \frac{m_t / (1-\beta_1^t)}
        {\sqrt{v_t / (1-\beta_2^t) + \varepsilon_\mathrm{root}} + \varepsilon}

    The norm is each matrix's own: that of a leaf, or of each slice along declared batch axes. The
    direction :math:`u_t` has the sign of the gradient and the gradient's dtype, as that of
    :func:`optax.scale_by_adam`; with ``gamma=0, max_norm=None`` it is, to rounding, that of
    :func:`optax.scale_by_adam`. Arithmetic is in at least float32 whatever the dtypes.

    At the first step :math:`c_1` is 1.475 :math:`g_1` at the defaults, see `first_step`.

    Args:
      weight_dimension_numbers: ... None: each leaf is clipped as a whole.

    Returns:
      A transformation with state :class:`ScaleByMarsState`. Complex leaves follow Optax: :math:`v`
      averages :math:`|c|^2`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> params = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
      >>> tx = optax.chain(mars_optax.scale_by_mars(), optax.scale_by_learning_rate(0.1))
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     grads = params  # of half the sum of squares
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{jnp.sum(params['kernel'] ** 2) / 2:.2f}", end=" ")
      6.50 5.91 5.36

    References:
      Yuan et al., `MARS: Unleashing the Power of Variance Reduction for Training Large Models
      <https://arxiv.org/abs/2411.10438>`_, 2025: equations (3.5) and (3.10) to (3.12), Algorithm 2,
      Remark 3.3. Reference code: ``MARS/optimizers/mars.py``, ``mars_type="mars-adamw"``, of
      https://github.com/AGI-Arena/MARS.
    """
    checks.decay_rate("b2", b2)
    checks.non_negative("eps", eps)
    checks.non_negative("eps_root", eps_root)
    checks.flag("amsgrad", amsgrad)
    checks.choice("second_moment", second_moment, ("corrected", "gradient"))
    if second_moment != "gradient":
        checks.keeps_prev_grad(keep_prev_grad, f"`second_moment`={second_moment!r}", "'gradient'")
    first = functools.partial(previous.zeros, dtype=checks.recursive_dtype("mu_dtype", mu_dtype))
    second = functools.partial(
        previous.zeros, dtype=checks.recursive_dtype("nu_dtype", nu_dtype), averages_squares=True
    )

    def scalars(count: jax.Array) -> dict[str, Any]:
        return {
            "b1": b1,
            "b2": b2,
            "eps": eps,
            "eps_root": eps_root,
            "mu_correction": bias_correction(precision.widen_scalar(b1), count),
            "nu_correction": bias_correction(precision.widen_scalar(b2), count),
        }

    return transformation.variance_reduced(
        "scale_by_mars",
        ScaleByMarsState,
        functools.partial(adamw_step, nu_of_gradient=second_moment == "gradient"),
        moments={"mu": first, "nu": second, "nu_max": second if amsgrad else lambda params: None},
        scalars=scalars,
        gamma=gamma,
        b1=b1,
        max_norm=max_norm,
        correction=correction,
        first_step=first_step,
        prev_grad_dtype=prev_grad_dtype,
        keep_prev_grad=keep_prev_grad,
        weight_dimension_numbers=weight_dimension_numbers,
        implementation=implementation,
    )


def vector_adamw(
    b1_1d: jax.typing.ArrayLike,
    b2_1d: jax.typing.ArrayLike,
    eps_1d: jax.typing.ArrayLike,
    *,
    amsgrad: bool = False,
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    implementation: types.Implementation | None = None,
    eps_root_1d: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Plain Adam for the leaves that are no matrices, without a previous gradient.

    It is :func:`optax.scale_by_adam`, but for state that keeps its dtypes whatever the gradients'.
    """
    checks.decay_rate("b1_1d", b1_1d)
    checks.decay_rate("b2_1d", b2_1d)
    checks.non_negative("eps_1d", eps_1d)
    checks.non_negative("eps_root_1d", eps_root_1d)
    return scale_by_mars(
        b1_1d,
        b2_1d,
        eps_1d,
        max_norm=None,
        correction="none",
        amsgrad=amsgrad,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        weight_dimension_numbers=partition.no_matrices,
        implementation=implementation,
        eps_root=eps_root_1d,
    )


class MarsState(assembly.OptimizerState):
    """State of :func:`mars` in which vectors have a rule of their own."""

    __slots__ = ()


@named.named
def mars(
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    gamma: types.ScalarOrSchedule = 0.025,
    weight_decay: types.ScalarOrSchedule = 0.0,
    mask: types.Mask | None = None,
    *,
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
    amsgrad: bool = False,
    second_moment: types.SecondMoment = "corrected",
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    implementation: types.Implementation | None = None,
    eps_root: jax.typing.ArrayLike = 0.0,
    eps_root_1d: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-AdamW: AdamW on variance-reduced gradients.

    Matrices are updated by

    .. math::

      x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)

    with the direction :math:`u_t` of :func:`scale_by_mars`, whose docstring has the equations, and
    all other leaves by AdamW with the values `*_1d`. With ``correction="none", max_norm=None,
    optimize_1d=True`` and the same rates and decay it is :func:`optax.adamw`, but for the dtypes of
    state and arithmetic in low precision.

    Differences from the reference code: leaves of rank >= 3 are matrices, clipped as a whole, where
    there they go to AdamW (``weight_dimension_numbers=dimension_numbers_by_path([])`` restores
    that); `learning_rate_1d` is a learning rate or schedule of its own, where there `lr_1d / lr` is
    frozen at construction; `mask` applies to all leaves, where there `weight_decay_1d` cannot be
    turned off for single ones. Weight decay of the vectors is 0.1 unless told otherwise, as there.

    Args:
      learning_rate_1d: ... The paper's GPT-2 runs use half of it.
      weight_dimension_numbers: ... None: all leaves of rank >= 2, each as a whole.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> def loss(params):
      ...     outputs = jnp.ones((4, 3)) @ params["kernel"] + params["bias"]
      ...     return jnp.mean(jnp.square(outputs - 2.0))
      >>> params = {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
      >>> tx = mars_optax.mars(learning_rate=0.1, learning_rate_1d=0.05)
      >>> state = tx.init(params)
      >>> for step in range(6):
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{value:.3f}", end=" ")
      4.000 2.723 1.692 0.907 0.367 0.068

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, Algorithm 2. Reference code:
      ``MARS/optimizers/mars.py``, ``mars_type="mars-adamw"``, of https://github.com/AGI-Arena/MARS.
    """
    checks.flag("optimize_1d", optimize_1d)
    checks.non_negative("eps", eps)
    checks.non_negative("eps_root", eps_root)
    rule = functools.partial(
        scale_by_mars,
        b1,
        b2,
        eps,
        gamma,
        max_norm=max_norm,
        first_step=first_step,
        amsgrad=amsgrad,
        second_moment=second_moment,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        prev_grad_dtype=prev_grad_dtype,
        keep_prev_grad=keep_prev_grad,
        implementation=implementation,
        eps_root=eps_root,
    )
    vector_rule = vector_adamw(
        b1_1d,
        b2_1d,
        eps if eps_1d is None else eps_1d,
        amsgrad=amsgrad,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        implementation=implementation,
        eps_root_1d=eps_root if eps_root_1d is None else eps_root_1d,
    )
    return assembly.optimizer(
        "mars",
        rule,
        None if optimize_1d else lambda correction: vector_rule,
        correction=correction,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        learning_rate_1d=learning_rate_1d,
        weight_decay_1d=weight_decay_1d,
        mask=mask,
        weight_dimension_numbers=weight_dimension_numbers,
        state_type=MarsState,
        default=partition.matrix_from_rank_2,
        implementation=implementation,
    )
