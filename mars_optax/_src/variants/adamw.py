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

    __slots__ = ()


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
    """Lines 6 to 9 of Algorithm 2 of the paper, without learning rate and decay.

    With `next_mu_correction` it has Nesterov momentum, as :func:`optax.scale_by_adam`.
    """
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
    b1, b2 = settings["b1"], settings["b2"]
    checks.decay_rate("b2", b2)
    checks.non_negative("eps", settings["eps"])
    checks.non_negative("eps_root", settings["eps_root"])
    amsgrad, second_moment = (
        settings.get("amsgrad", False),
        settings.get("second_moment", "corrected"),
    )
    checks.flag("amsgrad", amsgrad)
    checks.choice("second_moment", second_moment, ("corrected", "gradient"))
    if second_moment != "gradient":
        keep = settings.get("keep_prev_grad", True)
        checks.keeps_prev_grad(keep, f"`second_moment`={second_moment!r}", "'gradient'")
    first = functools.partial(
        trees.zeros, dtype=checks.recursive_dtype("mu_dtype", settings["mu_dtype"])
    )
    second = functools.partial(
        trees.zeros,
        dtype=checks.recursive_dtype("nu_dtype", settings.get("nu_dtype")),
        averages_squares=True,
    )

    def scalars(count: jax.Array) -> dict[str, Any]:
        own = {key: settings[key] for key in ("b1", "b2", "eps", "eps_root")}
        own["mu_correction"] = bias_correction(precision.widen_scalar(b1), count)
        own["nu_correction"] = bias_correction(precision.widen_scalar(b2), count)
        if nesterov:
            following = optax.safe_increment(count)
            own["next_mu_correction"] = bias_correction(precision.widen_scalar(b1), following)
        return own

    return transformation.rule(
        name,
        ScaleByMarsState,
        settings,
        step=functools.partial(adamw_step, nu_of_gradient=second_moment == "gradient"),
        moments={"mu": first, "nu": second, "nu_max": second if amsgrad else lambda params: None},
        scalars=scalars,
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
    direction :math:`u_t` has the sign of the gradient and the gradient's dtype, as that of
    :func:`optax.scale_by_adam`; with ``gamma=0, max_norm=None`` it is, to rounding, that of
    :func:`optax.scale_by_adam`. Arithmetic is in at least float32 whatever the dtypes.

    At the first step the previous gradient is 0 under ``first_step="zeros"``, as in the reference
    code, so that :math:`c_1 = (1 + k) g_1` with :math:`k = \gamma \beta_1/(1-\beta_1)`, which is
    1.475 :math:`g_1` at the defaults. Under ``"no_correction"`` :math:`c_1 = g_1`, which is the
    paper's :math:`x_0 = x_1` and what timm does.

    Args:
      b1: Decay rate :math:`\beta_1` of the first moment, in [0, 1). 0 turns the correction off.
      b2: Decay rate :math:`\beta_2` of the second moment, in [0, 1).
      eps: :math:`\varepsilon` >= 0, outside the root and after the bias correction. With 0 an entry
        whose gradients have all been 0 becomes NaN, as in :func:`optax.scale_by_adam`.
      gamma: Scale :math:`\gamma_t` of the correction, a number (may be negative) or a schedule of
        the step count, which starts at 0. The coefficient is computed in at least float32 from what
        arrives; :func:`optax.inject_hyperparams` rounds it to the parameters' dtype before, unless
        its ``hyperparam_dtype`` says otherwise.
      max_norm: Bound > 0 on the norm of each corrected gradient; None turns the clipping off.
      correction: ``"approx"``, the gradient of the previous step; ``"exact"``, that of this step's
        batch at the previous parameters, which ``update(..., grad_fn=f)`` obtains as
        ``f(previous_params)`` (the state keeps these in place of the previous gradient, and
        `params` is required); or ``"none"``. As in every chain of Optax, extra arguments that a
        transformation does not use are left to others: the other modes do not call `grad_fn`.
      first_step: ``"zeros"`` or ``"no_correction"``, see above.
      amsgrad: Whether the largest :math:`v` so far takes the place of :math:`v_t`: the raw one, as
        in the reference code, where :func:`optax.amsgrad` takes that after bias correction.
      second_moment: ``"corrected"``: :math:`v` from :math:`\tilde c_t`, as the paper and the
        reference code; ``"gradient"``: from :math:`g_t`, as the formula in the reference's README.
      mu_dtype: Storage dtype of :math:`m`; None for each parameter's own.
      nu_dtype: Storage dtype of :math:`v`; None for the parameter's own, but at least float32. (The
        reference stores it in the parameter's dtype, where in bfloat16 it stalls.)
      prev_grad_dtype: Storage dtype of :math:`g_{t-1}`; None for each parameter's own. An 8-bit
        float is stored with a float32 scale for each row along the last axis; in float16 a gradient
        beyond its range is kept as 65504.
      keep_prev_grad: Whether the state keeps :math:`g_{t-1}`. Without, it is the same trajectory to
        rounding: an unclipped correction is linear, so that
        :math:`m_t = \beta_1 n_{t-1} + (1-\beta_1)(1+k_t) g_t` with
        :math:`n_t = m_t - \gamma_{t+1} g_t`, which `mu` then holds. Requires ``max_norm=None``,
        ``correction="approx"``, ``prev_grad_dtype=None``, ``second_moment="gradient"`` and a gamma
        that is a Python number or a schedule (under :func:`optax.inject_hyperparams` with
        ``static_args="gamma"``: of an array, the next step's value is not known).
      weight_dimension_numbers: Axes of the matrices, which set the slices of the clip: a
        :class:`optax.contrib.MuonDimensionNumbers`, a tree of them with None for vectors, or a
        callable ``params -> tree``. None: each leaf is clipped as a whole.
      implementation: What executes norms and the elementwise part: None or ``"xla"`` for XLA,
        ``"pallas"`` for kernels on Hopper GPUs and (norms aside) TPUs.
      eps_root: :math:`\varepsilon_\mathrm{root}` >= 0, inside the root. Derivatives through steps
        are finite without it, too, if `prev_grad_dtype` has at least 16 bits: where :math:`v_t` is
        0, that of its root is taken for 0.

    Returns:
      A transformation with state :class:`ScaleByMarsState`. Complex leaves follow Optax: :math:`v`
      averages :math:`|c|^2`.

    Raises:
      TypeError: If an argument is of the wrong kind; at ``init``, if a parameter is not inexact; at
        ``update``, if a gradient is not, or the state is another transformation's.
      ValueError: If an argument is out of its range, or does not go with ``keep_prev_grad=False``;
        at ``init``, if axes do not fit a leaf; at ``update``, if gradients have other shapes, the
        state was made with other settings, or exact mode lacks `grad_fn` or `params`.
      NotImplementedError: At ``update``, if kernels were asked for and cannot run.

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
    return rule("scale_by_mars", locals())


def for_vectors(settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Makes plain Adam for the leaves that are no matrices, by the settings of an optimizer.

    It is :func:`optax.scale_by_adam`, but for state that keeps its dtypes whatever the gradients'.
    """
    own = {key: settings[f"{key}_1d"] for key in ("b1", "b2", "eps", "eps_root")}
    for key, default in (("eps", 1e-8), ("eps_root", 0.0)):
        own[key] = settings.get(key, default) if own[key] is None else own[key]
    checks.decay_rate("b1_1d", own["b1"])
    checks.decay_rate("b2_1d", own["b2"])
    checks.non_negative("eps_1d", own["eps"])
    checks.non_negative("eps_root_1d", own["eps_root"])
    shared = {
        key: settings[key]
        for key in ("amsgrad", "mu_dtype", "nu_dtype", "implementation")
        if key in settings
    }
    made = scale_by_mars(
        **own,
        **shared,
        max_norm=None,
        correction="none",
        weight_dimension_numbers=partition.no_matrices,
    )
    return lambda correction: made


class MarsState(State):
    """State of :func:`mars` in which vectors have a rule of their own."""

    __slots__ = ()


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

    Matrices are updated by

    .. math::

      x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)

    with the direction :math:`u_t` of :func:`scale_by_mars`, whose docstring has the equations, and
    all other leaves by AdamW with the values `*_1d`. With ``correction="none", max_norm=None,
    optimize_1d=True`` and the same rates and decay it is :func:`optax.adamw`, but for the dtypes of
    state and arithmetic in low precision. What happens at the first step is told there, too.

    Differences from the reference code: leaves of rank >= 3 are matrices, clipped as a whole, where
    there they go to AdamW (``weight_dimension_numbers=dimension_numbers_by_path([])`` restores
    that); `learning_rate_1d` is a learning rate or schedule of its own, where there `lr_1d / lr` is
    frozen at construction; `mask` applies to all leaves, where there `weight_decay_1d` cannot be
    turned off for single ones. Weight decay of the vectors is 0.1 unless told otherwise, as there.

    Args:
      learning_rate: :math:`\eta_t`, a number or a schedule of the step count, which starts at 0.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Added to the root of the second moment, >= 0.
      gamma: Scale of the correction, a number or a schedule.
      weight_decay: :math:`\lambda` of the matrices, a number or a schedule.
      mask: Which leaves decay: a tree of bools, a prefix of the parameters, or a callable that
        makes one from them, as in :func:`optax.adamw`. None: all.
      max_norm: Bound > 0 on the norm of each matrix's corrected gradient; None for no clip.
      correction: ``"approx"``, ``"exact"`` (with ``update(..., grad_fn=f)``) or ``"none"``, see
        :func:`scale_by_mars`.
      first_step: ``"zeros"`` or ``"no_correction"``.
      optimize_1d: Whether the other leaves, too, get the variance-reduced rule, with the main
        values. The values `*_1d` are not used then.
      learning_rate_1d: Learning rate of the other leaves, a number or a schedule; None for
        `learning_rate`. The paper's GPT-2 runs use half of it.
      b1_1d: Decay rate of their first moment, in [0, 1).
      b2_1d: Decay rate of their second moment, in [0, 1).
      eps_1d: Their epsilon, >= 0; None for `eps`.
      weight_decay_1d: Their weight decay; None for `weight_decay`.
      weight_dimension_numbers: Which leaves are matrices and which of their axes are reduction and
        output axes; slices along other axes are clipped on their own. A
        :class:`optax.contrib.MuonDimensionNumbers` (for all leaves of rank >= 2), a tree of them
        with None for vectors, or a callable ``params -> tree``, such as
        :func:`dimension_numbers_by_path` makes. None: all leaves of rank >= 2, each as a whole.
      amsgrad: Whether the largest second moment so far is used, for the other leaves, too.
      second_moment: ``"corrected"`` or ``"gradient"``, see :func:`scale_by_mars`.
      mu_dtype: Storage dtype of the first moments; None for the parameter's.
      nu_dtype: Storage dtype of the second moments; None for the parameter's, at least float32.
      prev_grad_dtype: Storage dtype of the previous gradient; None for the parameter's.
      keep_prev_grad: Whether the state keeps the previous gradient, see :func:`scale_by_mars`.
      implementation: What executes norms and the elementwise part: ``"xla"``; ``"pallas"``,
        kernels for Hopper GPUs and (norms aside) TPUs; or None, which takes kernels in
        :func:`fused_step` alone, where they were measured to be faster.
      eps_root: Added to the second moment inside the root, after the bias correction, >= 0, as in
        :func:`optax.adamw`.
      eps_root_1d: Added to the second moment of the other leaves inside the root, >= 0; None for
        `eps_root`.

    Returns:
      An optimizer. Updates have the dtypes of the parameters; decay and learning rate are applied
      in at least float32. Without parameters, `update` works only if `weight_decay` and,
      without `optimize_1d`, `weight_decay_1d` are the number 0.

    Raises:
      TypeError: If an argument is of the wrong kind; at ``init``, if a parameter is not inexact; at
        ``update``, if a gradient is not, or the state is another transformation's.
      ValueError: If an argument is out of its range; at ``init``, if axes do not fit a leaf; at
        ``update``, if ``params`` is None though one of the decays is not 0; and as
        :func:`scale_by_mars`.
      NotImplementedError: At ``update``, if kernels were asked for and cannot run.

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
    settings = locals()
    checks.flag("optimize_1d", optimize_1d)
    return assembly.optimizer(
        "mars",
        scale_by_mars,
        settings,
        vector_rule=None if optimize_1d else for_vectors(settings),
        state_type=MarsState,
        implementation=implementation,
    )
