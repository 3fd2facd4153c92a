"""Wrappers around an optimizer: cautious updates, and gradients that are absent on some steps."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, in_shard_map, named, states, trees
from mars_optax._src.leaf import precision


@named.named
def cautious(
    inner: optax.GradientTransformation, *, rescale: Literal["mean", "count", "none"] = "mean"
) -> optax.GradientTransformationExtraArgs:
    r"""Drops the entries of a direction whose sign is not that of the gradient.

    .. math::

      u_i \leftarrow u_i \frac{[u_i g_i > 0]}{s}

    for each leaf on its own, with :math:`s` by `rescale`. For AdamW's direction, whose sign is the
    momentum's, this is timm's `caution` and pytorch_optimizer's `cautious`; for MARS-Lion timm
    takes the sign after the mask, which is ``rescale="none"``. The first step is like any other.

    Args:
      inner: A transformation that returns the ascent-signed direction, without learning rate and
        decay, such as :func:`scale_by_mars`; the learning rate comes after, as in
        ``optax.chain(cautious(...), optax.scale_by_learning_rate(0.1))``. An optimizer such as
        ``optax.adam(0.1)`` has updates of the opposite sign, of which nearly all are dropped; only
        those of this package are refused.
      rescale: ``"mean"``: :math:`s = \max(\mathrm{mean}[u g > 0], 10^{-3})`, as in timm;
        ``"count"``: :math:`s = (n_{ug > 0} + 1) / n`, as in pytorch_optimizer; ``"none"``:
        :math:`s = 1`.

    Returns:
      A transformation with the state of `inner`.

    Raises:
      TypeError: If `inner` is no transformation.
      ValueError: If `rescale` is none of these, or `inner` an optimizer of this package.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> tx = mars_optax.cautious(optax.ema(0.9, debias=False), rescale="none")
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([1.0, 1.0]), jnp.array([0.5, -0.5])):
      ...     direction, state = tx.update(grads, state)
      ...     print(direction)
      [0.1 0.1]
      [0.14 0.  ]

    References:
      Liang et al., `Cautious Optimizers: Improving Training with One Line of Code
      <https://arxiv.org/abs/2411.16085>`_, 2024.
    """
    checks.choice("rescale", rescale, ("mean", "count", "none"))
    checks.directions("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def masked(direction: Any, grad: Any) -> jax.Array:
        u, g = precision.upcast(direction), precision.upcast(grad)
        agrees = (jnp.real(u * jnp.conj(g)) > 0).astype(precision.compute_dtype(u))
        if rescale == "mean":
            agrees /= jnp.maximum(jnp.mean(agrees), 1e-3) if agrees.size else 1
        elif rescale == "count":
            agrees *= agrees.size / (jnp.sum(agrees) + 1)
        return u * agrees

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if rescale != "none":
            in_shard_map.require_whole(updates, extra_args, f"`cautious` with {rescale=}")
        direction, state = inner.update(updates, state, params, **extra_args)
        return trees.cast_like(jax.tree.map(masked, direction, updates), direction), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


@named.named
def ignore_absent_gradients(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Treats a gradient of zeros as none at all, in the correction of an optimizer.

    Where a parameter takes no part in a step, as an expert that no token is routed to or an adapter
    that is dropped, its gradient is 0. The formula of the approximate mode, also in the reference
    code, then is :math:`c_t = -k g_{t-1}`: a step back along the last gradient, and a correction by
    the whole gradient when the parameter returns. In this wrapper a leaf whose gradient is 0
    everywhere has :math:`c_t = 0` instead, and keeps :math:`g_{t-1}` and the averages of an
    :class:`AdaptiveGamma`; its momentum decays as AdamW's does, and steps are counted, the first as
    any other. So a leaf that comes later than the first step has a previous gradient of 0 then, and
    :math:`c_t = (1 + k) g_t`, also with ``first_step="no_correction"``. Of a stack of experts in
    one leaf, all have to be absent. What changes gradients, as :class:`optax.MultiSteps`, goes
    around this.

    Args:
      inner: What keeps a previous gradient, of this package, also in a chain or partition.

    Returns:
      A transformation with the state of `inner`.

    Raises:
      TypeError: If `inner` is no transformation.
      ValueError: At ``init``, if no leaf keeps a previous gradient (``keep_prev_grad=False``, or
        another correction than ``"approx"``), or :class:`optax.MultiSteps` is in `inner`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.correct_gradients(gamma=0.1, b1=0.9)  # a coefficient of 0.9
      >>> for tx in (tx, mars_optax.ignore_absent_gradients(tx)):
      ...     state = tx.init(jnp.zeros(2))
      ...     for grads in (jnp.array([1.0, 2.0]), jnp.zeros(2), jnp.array([1.0, 2.0])):
      ...         corrected, state = tx.update(grads, state)
      ...         print(corrected, end=" ")
      [1.9 3.8] [-0.9 -1.8] [1.9 3.8] [1.9 3.8] [0. 0.] [1. 2.]
    """
    checks.transformation("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        state = inner.init(params)
        if trees.contains(state, optax.MultiStepsState):
            raise ValueError(
                "`inner`: expected a transformation that gets every gradient, got one inside "
                "`optax.MultiSteps`. Pass its optimizer, and put `MultiSteps` around this."
            )
        paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
        nodes = states.with_previous_gradient(state)
        kept = [path for node in nodes for path in states.previous_gradients(node)]
        if paths and not paths.intersection(kept):
            which, one = "none", "one with `correction='approx'` and `keep_prev_grad=True`"
            if kept:
                which, one = "it at other paths", "one that keeps paths, unlike `optax.flatten`"
            raise ValueError(
                "`inner`: expected a transformation that keeps a previous gradient, got one that "
                f"keeps {which}. Pass {one}, or use it without this wrapper."
            )
        return state

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        in_shard_map.require_whole(updates, extra_args, "`ignore_absent_gradients`")
        flat = jax.tree_util.tree_leaves_with_path(updates)
        absent = {path: jnp.all(grad == 0) for path, grad in flat}

        def on_leaf(path: Any, new: Any, old: Any) -> Any:
            if path not in absent:
                return new
            return jnp.where(absent[path], precision.beside(old, new), new)

        def kept(node: Any, old: Any, *names: str) -> Any:
            mapped = functools.partial(jax.tree_util.tree_map_with_path, on_leaf)
            return node._replace(**{x: mapped(getattr(node, x), getattr(old, x)) for x in names})

        def choose(node: Any, old: Any) -> Any:
            """What is made of gradients: that of `old` where there is none now, else of `node`."""
            if node.gamma_state is not None:
                gamma_state = kept(node.gamma_state, old.gamma_state, "cross", "square")
                node = node._replace(gamma_state=gamma_state)
            return kept(node, old, "prev_grad", "prev_grad_scale")

        # With a previous gradient of 0 the correction of a gradient of 0 is 0.
        def without(node: Any) -> Any:
            return choose(node, node._replace(prev_grad=optax.tree.zeros_like(node.prev_grad)))

        old_nodes = iter(states.with_previous_gradient(state))
        state = states.map_previous_gradients(without, state)
        updates, state = inner.update(updates, state, params, **extra_args)
        state = states.map_previous_gradients(lambda node: choose(node, next(old_nodes)), state)
        return updates, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
