"""A gamma for each matrix that follows from the gradients themselves."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from mars_optax._src import checks, trees, types
from mars_optax._src.leaf import clipping, precision


class AdaptiveGammaState(NamedTuple):
    """What :class:`AdaptiveGamma` keeps of one leaf."""

    cross: jax.Array  # average of <w, f - a>, one for each matrix
    square: jax.Array  # average of |w|^2, one for each matrix
    plain: jax.Array  # a, the momentum without the correction
    effect: jax.Array  # w, the derivative of the momentum by gamma


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
    own gradients enter, so that :math:`\gamma_t` does not depend on their noise. The clip is left
    out of account. At the first step gamma is `initial`.

    It costs two buffers of the parameters' size and dtype, three reductions a step, and is computed
    by XLA. It serves ``correction="approx"`` and ``"exact"``.

    Attributes:
      decay: Decay rate of the running averages, in [0, 1); default 0.99.
      initial: Gamma until there is an average; default 0.025.
      low: The least gamma; default 0. Where noise rules, the best one is a little below 0.
      high: The largest gamma; default 1, with which noiseless gradients are followed exactly.

    Raises:
      TypeError: If an attribute is no number.
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
        checks.decay_rate("decay", self.decay)
        for name in ("initial", "low", "high"):
            checks.number(name, getattr(self, name))
        if self.low > self.high:
            raise ValueError(
                f"`low`: expected a number up to `high`={self.high}, got {self.low}. Exchange them."
            )

    def init(self, p: Any, norm_axes: tuple[int, ...]) -> AdaptiveGammaState:
        """The state of one leaf."""
        buffer = trees.zeros_like(p, precision.storage_dtype(p))
        # Made as in every later step, they lie on a mesh as those do.
        zero = precision.upcast(buffer)
        averages = clipping.inner(zero, zero, norm_axes)
        return AdaptiveGammaState(averages, averages, buffer, buffer)

    def gamma(self, state: AdaptiveGammaState) -> jax.Array:
        """Gamma of the coming step, for each matrix of a leaf."""
        is_known = state.square > 0
        ratio = state.cross / jnp.where(is_known, state.square, 1)
        return jnp.where(is_known, jnp.clip(ratio, self.low, self.high), self.initial)

    def products(
        self, state: AdaptiveGammaState, unseen: jax.Array, norm_axes: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """<w, f - a> and |w|^2 of a step, of what this device has of each matrix."""
        w, a = precision.upcast(state.effect), precision.upcast(state.plain)
        return clipping.inner(w, unseen - a, norm_axes), clipping.inner(w, w, norm_axes)

    def advance(
        self,
        state: AdaptiveGammaState,
        products: tuple[jax.Array, jax.Array],
        grad: jax.Array,
        prev_grad: jax.Array,
        b1: Any,
    ) -> AdaptiveGammaState:
        """The state after a step with these products and gradients."""
        w, a = precision.upcast(state.effect), precision.upcast(state.plain)
        cross, square = (
            self.decay * old + (1 - self.decay) * x
            for old, x in zip(state[:2], products, strict=True)
        )
        new = cross, square, b1 * a + (1 - b1) * grad, b1 * (w + grad - prev_grad)
        return AdaptiveGammaState(*(x.astype(y.dtype) for x, y in zip(new, state, strict=True)))


Gamma: TypeAlias = types.ScalarOrSchedule | AdaptiveGamma
