"""MARS-AdamW: Adam's direction computed from the corrected gradient."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import assembly, checks, named, partition, transformation, trees, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf import precision
from mars_optax._src.leaf.momentum import bias_correction
from mars_optax._src.leaf.root import root
from mars_optax._src.states import State


class ScaleByMarsState(State):
    """State of :func:`scale_by_mars`."""


def adamw_step(
    c: jax.Array,
    grad: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    nu_max: jax.Array | None,
    *,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_correction: Any,
    nu_correction: Any,
    nu_of_gradient: bool = False,
    next_mu_correction: Any = None,
) -> tuple[Any, ...]:
    """Lines 6 to 9 of the paper's Algorithm 2; with `next_mu_correction` by Nesterov's momentum."""
    mu = optax.tree.update_moment(c, mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(grad if nu_of_gradient else c, nu, b2, 2)
    if nu_max is not None:
        nu_max = jnp.maximum(nu_max, nu)
    nu_hat = (nu if nu_max is None else nu_max) / nu_correction
    if next_mu_correction is None:
        momentum = mu / mu_correction
    else:
        momentum = b1 * (mu / next_mu_correction) + (1 - b1) * (c / mu_correction)
    return momentum / (root(nu_hat + eps_root) + eps), mu, nu, nu_max


def rule(name: str, settings: Mapping[str, Any], *, nesterov: bool = False) -> Any:
    """The rule of Adam on an estimator of the gradient."""
    amsgrad = settings.get("amsgrad", False)
    second_moment = settings.get("second_moment", "corrected")
    checks.decay_rate("b2", settings["b2"])
    checks.non_negative("eps", settings["eps"])
    checks.non_negative("eps_root", settings["eps_root"])
    checks.flag("amsgrad", amsgrad)
    checks.choice("second_moment", second_moment, ("corrected", "gradient"))
    if second_moment != "gradient":
        keep, instead = settings.get("keep_prev_grad", True), "'gradient', and `max_norm=None`,"
        checks.keeps_prev_grad(keep, f"`second_moment`={second_moment!r}", instead)
    mu_dtype = checks.recursive_dtype("mu_dtype", settings["mu_dtype"])
    nu_dtype = checks.recursive_dtype("nu_dtype", settings.get("nu_dtype"))
    first = functools.partial(trees.zeros, dtype=mu_dtype)
    second = functools.partial(trees.zeros, dtype=nu_dtype, averages_squares=True)

    def scalars(count: jax.Array) -> dict[str, Any]:
        own = {key: settings[key] for key in ("b1", "b2", "eps", "eps_root")}
        beta1, beta2 = (precision.upcast_scalar(own[key]) for key in ("b1", "b2"))
        own["mu_correction"] = bias_correction(beta1, count)
        own["nu_correction"] = bias_correction(beta2, count)
        if nesterov:
            own["next_mu_correction"] = bias_correction(beta1, optax.safe_increment(count))
        return own

    step = functools.partial(adamw_step, nu_of_gradient=second_moment == "gradient")
    moments = {"mu": first, "nu": second, "nu_max": second if amsgrad else lambda params: None}
    return transformation.rule(
        name, ScaleByMarsState, settings, step=step, moments=moments, scalars=scalars
    )


@named.named
def scale_by_mars(
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    gamma: Gamma = 0.025,
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
    alpha: types.ScalarOrSchedule = 1.0,
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
    direction :math:`u_t` has the sign of the gradient and its dtype; with ``gamma=0,
    max_norm=None`` it is, to rounding, that of :func:`optax.scale_by_adam`. Arithmetic is in at
    least float32. At the defaults :math:`c_1` is 1.475 :math:`g_1`, see `first_step`.

    Args:
      weight_dimension_numbers: ... None: each leaf is clipped as a whole.

    Returns:
      A transformation with state :class:`ScaleByMarsState`. Complex leaves follow Optax: :math:`v`
      averages :math:`|c|^2`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> tx = optax.chain(mars_optax.scale_by_mars(), optax.scale_by_learning_rate(0.1))
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([1.0, 2.0]), jnp.array([1.0, -2.0])):
      ...     updates, state = tx.update(grads, state)
      ...     print(updates.round(3))
      [-0.1 -0.1]
      [-0.096  0.007]

    References:
      Yuan et al., `MARS: Unleashing the Power of Variance Reduction for Training Large Models
      <https://arxiv.org/abs/2411.10438>`_, 2025: (3.5), (3.10) to (3.12), Algorithm 2, Remark 3.3.
      Code: ``MARS/optimizers/mars.py`` of https://github.com/AGI-Arena/MARS, type "mars-adamw".
    """
    return rule("scale_by_mars", locals())


def for_vectors(settings: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Makes Optax's Adam, but with state of fixed dtypes, for vectors; None with `optimize_1d`."""
    optimize_1d = settings.get("optimize_1d", False)
    checks.flag("optimize_1d", optimize_1d)
    checks.decay_rate("b1_1d", settings["b1_1d"])
    checks.decay_rate("b2_1d", settings["b2_1d"])
    shared = {"eps", "eps_root", "amsgrad", "mu_dtype", "nu_dtype", "implementation"}
    own = {key: settings[key] for key in shared.intersection(settings)}
    for key in ("eps", "eps_root"):
        if (value := settings[f"{key}_1d"]) is not None:
            checks.non_negative(f"{key}_1d", value)
            own[key] = value
    own |= {"max_norm": None, "weight_dimension_numbers": partition.no_matrices}
    make = functools.partial(scale_by_mars, settings["b1_1d"], settings["b2_1d"], **own)
    make(correction="none")  # wrong arguments fail here
    if optimize_1d:
        return None
    return lambda correction: make(correction="none")


class MarsState(State):
    """State of :func:`mars`."""


@named.named
def mars(
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    gamma: Gamma = 0.025,
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
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-AdamW: AdamW on variance-reduced gradients.

    Matrices are updated by :math:`x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)` with the direction
    :math:`u_t` of :func:`scale_by_mars`, and all other leaves by AdamW with the values `*_1d`. With
    ``correction="none", max_norm=None, optimize_1d=True`` and the same rates and decay it is
    :func:`optax.adamw`, but for dtypes in low precision: of state, arithmetic and updates.

    Differences from the reference code: leaves of rank >= 3 are matrices, clipped as a whole, not
    AdamW's (which ``weight_dimension_numbers=dimension_numbers_by_path([])`` restores);
    `learning_rate_1d` is a rate or schedule, where there `lr_1d / lr` is frozen at construction;
    `mask` applies to all leaves, where there `weight_decay_1d` is that of every vector.

    Args:
      learning_rate_1d: ... The paper's GPT-2 runs use half of it.
      weight_dimension_numbers: ... None: all leaves of rank >= 2, each as a whole.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> def loss(params):
      ...     return jnp.mean(jnp.square(jnp.ones(3) @ params["kernel"] + params["bias"] - 2.0))
      >>> params = {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
      >>> tx = mars_optax.mars(learning_rate=0.1, learning_rate_1d=0.05)
      >>> state = tx.init(params)
      >>> for step in range(6):
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{value:.3f}", end=" ")
      4.000 2.723 1.692 0.907 0.367 0.068
    """
    settings = locals()
    return assembly.optimizer("mars", scale_by_mars, settings, MarsState, for_vectors(settings))
