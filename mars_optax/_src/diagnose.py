"""Measures of the correction, read from the gradients and the state between two updates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, states
from mars_optax._src.adaptive import AdaptiveGamma, Gamma
from mars_optax._src.leaf import clipping, correction, precision
from mars_optax._src.leaf.root import root


def diagnose(
    grads: optax.Updates,
    state: optax.OptState,
    *,
    gamma: Gamma = 0.025,
    b1: jax.typing.ArrayLike = 0.95,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction_clip: jax.typing.ArrayLike | None = None,
) -> dict[str, jax.Array]:
    r"""Measures what the correction and the clip are about to do with these gradients.

    Called before `update`, with the state that `update` will get, it changes nothing; under
    :func:`jax.jit` together with the step, or on its own every hundredth step. With
    :math:`k = \gamma \beta_1 / (1-\beta_1)`, which `correction_clip` may make smaller, the sums
    running over all leaves that keep a previous gradient:

    - ``gradient_norm``: :math:`\lVert g_t \rVert`; over all leaves where none keeps one;
    - ``corrected_norm``: :math:`\lVert c_t \rVert` with :math:`c_t = g_t + k (g_t - g_{t-1})`,
      before the clip;
    - ``clip_fraction``: the share of leaves with :math:`\lVert c_t \rVert` above `max_norm`;
    - ``cosine``: of :math:`g_t` with :math:`g_{t-1}`; 0 where one of them is 0, as before the first
      step;
    - ``correction_share``: :math:`\lVert k (g_t - g_{t-1}) \rVert / \lVert c_t \rVert`; 0 where
      :math:`c_t` is;
    - ``gamma``, of an :class:`AdaptiveGamma`: the mean over all matrices.

    What cannot be known is left out: all but the first where no leaf keeps a previous gradient
    (exact mode, ``keep_prev_grad=False``, no correction), ``clip_fraction`` where `max_norm` is
    None. A leaf of which slices are clipped on their own counts as one leaf. At the first step the
    numbers are those of ``first_step="zeros"``.

    Args:
      grads: The gradients, as `update` will get them.
      state: A state of this package, however nested in those of Optax's wrappers.
      gamma: As the optimizer was given it: a number, a schedule of the state's count, or a rule.
      b1: As the optimizer was given it, in [0, 1).
      max_norm: As the optimizer was given it, > 0 or None.
      correction_clip: As :func:`correct_gradients` was given it, > 0 or None.

    Returns:
      A dictionary of float32 scalars.

    Raises:
      TypeError: If an argument or a gradient is of the wrong kind.
      ValueError: If one of them is out of its range, or `gamma` is not the state's kind, or a
        gradient has another shape than the one before.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
      >>> tx = mars_optax.mars(1e-3)
      >>> state = tx.init(params)
      >>> for scale in (0.1, 0.3):
      ...     grads = {"kernel": jnp.full((2, 2), scale), "bias": jnp.zeros(2)}
      ...     measures = mars_optax.diagnose(grads, state)
      ...     _, state = tx.update(grads, state, params)
      >>> for name, value in sorted(measures.items()):
      ...     print(f"{name}: {value:.3f}")
      clip_fraction: 0.000
      corrected_norm: 0.790
      correction_share: 0.241
      cosine: 1.000
      gradient_norm: 0.600
    """
    rule = gamma if isinstance(gamma, AdaptiveGamma) else None
    if rule is None:
        checks.scalar_or_schedule("gamma", gamma)
    checks.decay_rate("b1", b1)
    checks.max_norm(max_norm)
    checks.max_norm(correction_clip, name="correction_clip")
    checks.inexact_leaves(grads, "Gradient")
    flat = jax.tree_util.tree_leaves_with_path(grads)
    by_path = {path: precision.upcast(x, jnp.float32) for path, x in flat}
    g_g = p_p = g_p = d_d = c_c = clipped = gammas = zero = jnp.zeros([], jnp.float32)
    leaves = matrices = 0
    for node in states.with_previous_gradient(state):
        if rule is None and node.gamma_state is not None:
            raise ValueError(f"`gamma`: expected the optimizer's rule, got {gamma!r}. Pass that.")
        value: Any = rule or checks.at("gamma", gamma, node.count)
        if rule is not None:
            checks.state_fields(node, {"gamma_state": grads}, "diagnose")
            values = dict(jax.tree_util.tree_leaves_with_path(rule.gammas(node.gamma_state)))
        rows = []
        for path, stored in states.previous_gradients(node).items():
            if path not in by_path:
                continue
            if (got := by_path[path].shape) != (its := jnp.shape(stored)):
                raise ValueError(
                    f"Gradient {checks.path_string(path)!r}: expected the shape {its} of the "
                    f"previous one in the state, got {got}. Pass what `update` gets."
                )
            g, p = by_path[path], precision.upcast(stored, jnp.float32)
            if rule is not None:
                value = values[path].astype(jnp.float32)
                gammas, matrices = gammas + jnp.sum(value), matrices + value.size
            k = precision.upcast_scalar(correction.correction_coefficient(value, b1), jnp.float32)
            rows.append((g, p, k))
        factor: Any = 1
        if correction_clip is not None:
            added = [correction.corrected_gradient(jnp.zeros_like(g), p, k, g) for g, p, k in rows]
            total = sum((_inner(d, d) for d in added), start=zero)
            factor = clipping.factor_of_squares(total, correction_clip)
        leaves += len(rows)
        for g, p, k in rows:
            c = correction.corrected_gradient(g, p, k * factor)
            squares = _inner(c, c)
            g_g, p_p, g_p = g_g + _inner(g, g), p_p + _inner(p, p), g_p + _inner(g, p)
            d_d, c_c = d_d + _inner(c - g, c - g), c_c + squares
            if max_norm is not None:
                clipped += (root(squares) > max_norm).astype(jnp.float32)
    if not leaves:
        return {"gradient_norm": root(sum((_inner(g, g) for g in by_path.values()), start=zero))}
    measures = {
        "gradient_norm": root(g_g),
        "corrected_norm": root(c_c),
        "cosine": _ratio(g_p, root(g_g) * root(p_p)),
        "correction_share": _ratio(root(d_d), root(c_c)),
    }
    if max_norm is not None:
        measures["clip_fraction"] = clipped / leaves
    if rule is not None:
        measures["gamma"] = gammas / matrices
    return measures


def _inner(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.real(x * jnp.conj(y)))


def _ratio(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)
