"""A gamma for each matrix that follows from the gradients themselves."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from mars_optax._src import checks, trees, types
from mars_optax._src.leaf import clipping, precision


class AdaptiveGammaState(NamedTuple):
    """What :class:`AdaptiveGamma` keeps: trees of the parameters' structure."""

    cross: Any  # average of <w, f - a>, one for each matrix
    square: Any  # average of |w|^2, one for each matrix
    plain: Any  # a, the momentum without the correction
    effect: Any  # w, the derivative of the momentum by gamma


@dataclasses.dataclass(frozen=True)
class AdaptiveGamma:
    r"""A gamma for each matrix, by which the momentum predicts the next gradient best.

    With a constant :math:`\gamma` the momentum of MARS is linear in it,

    .. math::

      m_t = a_t + \gamma w_t, \qquad
      a_t = \beta_1 a_{t-1} + (1-\beta_1) g_t, \qquad
      w_t = \beta_1 (w_{t-1} + g_t - g'_t),

    with the previous gradient :math:`g'_t` of the correction. A gradient :math:`f_{t+1}` of a batch
    that :math:`m_t` has not seen is the true gradient and noise of its own, so that the gamma that
    predicts it best is that of the least variance and bias together:

    .. math::

      \gamma^\star = \arg\min_\gamma E \lVert f_{t+1} - a_t - \gamma w_t \rVert^2
      = \frac{E \langle w_t, f_{t+1} - a_t \rangle}{E \lVert w_t \rVert^2}.

    In exact mode :math:`f_{t+1} = g'_{t+1}`, the next batch's gradient at the parameters of
    :math:`m_t`; in approximate mode, which takes gradients of neighbouring steps for those of one
    point, it is :math:`g_{t+1}`. Both expectations are running averages, taken before the step's
    own gradients enter, so that :math:`\gamma_t` does not depend on their noise. Clips are left
    out of account. In the first two steps, before which there is no :math:`w`, gamma is `initial`;
    with ``first_step="no_correction"``, where :math:`w_1 = 0`, in the first three. It costs two
    buffers of the parameters' size and dtype and two reductions a step, by XLA, and serves
    ``correction="approx"`` and ``"exact"``.

    Attributes:
      decay: Decay rate of the running averages, in [0, 1); default 0.99.
      initial: Gamma until there is an average; default 0.025.
      low: The least gamma; default 0. Where noise rules, the best one is a little below 0.
      high: The largest gamma; default 1, with which noiseless gradients are followed exactly.

    Raises:
      TypeError: If an attribute is no number, or `decay` an array of integers.
      ValueError: If `decay` is not in [0, 1), or `low` above `high`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> gamma = mars_optax.AdaptiveGamma(decay=0.9)
      >>> tx = mars_optax.scale_by_mars(gamma=gamma, max_norm=None)
      >>> params = jnp.zeros((2, 2))
      >>> state = tx.init(params)
      >>> for step in range(1, 4):  # gradients that grow, without noise
      ...     grads = jnp.full((2, 2), float(step))
      ...     print(f"{mars_optax.diagnose(grads, state, gamma=gamma)['gamma']:.3f}", end=" ")
      ...     _, state = tx.update(grads, state)
      0.025 0.025 1.000

    References:
      The objective is that of Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025,
      section 3, for its optimal scale; that rule by least squares is this package's own.
    """

    decay: float = 0.99
    initial: float = 0.025
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        decay: Any = self.decay
        checks.decay_rate("decay", decay)
        if isinstance(decay, jax.Array) and jnp.issubdtype(decay.dtype, jnp.integer):
            raise TypeError(
                f"`decay`: expected a floating-point number in [0, 1), got {decay!r}, as "
                "where `optax.inject_hyperparams` calls a class with the step count. Pass an "
                "instance, `gamma=AdaptiveGamma()`."
            )
        for name in ("initial", "low", "high"):
            checks.number(name, getattr(self, name))
        numbers = all(isinstance(x, int | float) for x in (self.low, self.high))
        if numbers and not self.low <= self.high:
            raise ValueError(
                f"`low`: expected a number up to `high`={self.high}, got {self.low}. Pass less."
            )

    def init(self, params: Any, axes: Any) -> AdaptiveGammaState:
        """The state before the first step."""
        # Each its own buffer, so that the state can be donated.
        plain, effect = trees.zeros(params), trees.zeros(params)
        # Made as in every later step, they lie on a mesh as those do.
        cross, square = (
            jax.tree.map(lambda x, a: clipping.squares(precision.upcast(x), a.norm_axes), x, axes)
            for x in (plain, effect)
        )
        return AdaptiveGammaState(cross, square, plain, effect)

    def gammas(self, state: AdaptiveGammaState) -> Any:
        """Those of the coming step, one for each matrix."""

        def on_leaf(cross: jax.Array, square: jax.Array) -> jax.Array:
            is_known = square > 0
            ratio = cross / jnp.where(is_known, square, 1)
            return jnp.where(is_known, jnp.clip(ratio, self.low, self.high), self.initial)

        return jax.tree.map(on_leaf, state.cross, state.square)

    def advance(
        self, state: Any, grads: Any, prev_grads: Any, unseen: Any, b1: Any, inner: Any
    ) -> Any:
        """The state after a step; `inner` takes inner products over each matrix of two trees."""
        given = (state.plain, state.effect, grads, prev_grads, unseen)
        a, w, grads, prev_grads, unseen = (jax.tree.map(precision.upcast, x) for x in given)
        products = inner(w, jax.tree.map(jnp.subtract, unseen, a)), inner(w, w)

        def finite(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(jnp.isfinite(new), new, old)

        def average(old: jax.Array, x: jax.Array, *both: jax.Array) -> jax.Array:
            # Where a norm overflows the step does not count: an average would not forget it.
            new = self.decay * old + (1 - self.decay) * x
            return jnp.where(jnp.isfinite(sum(both)), new, old)

        new = AdaptiveGammaState(
            jax.tree.map(average, state.cross, products[0], *products),
            jax.tree.map(average, state.square, products[1], *products),
            jax.tree.map(lambda a, g: finite(b1 * a + (1 - b1) * g, a), a, grads),
            jax.tree.map(lambda w, g, p: finite(b1 * (w + g - p), w), w, grads, prev_grads),
        )
        return trees.copies(new, like=state)


Gamma: TypeAlias = types.ScalarOrSchedule | AdaptiveGamma
