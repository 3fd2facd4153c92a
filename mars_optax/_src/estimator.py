"""The estimator of the gradient: what c_t is, and what the state keeps for it.

All are one formula, c = g + k (a - b), with the gradient b of another step or of other parameters:

| correction | k | a | b |
| --- | --- | --- | --- |
| approx | gamma b1 / (1 - b1) | g | the gradient of the previous step |
| exact | gamma b1 / (1 - b1) | g | this batch's at the previous parameters |
| storm | 1 - gamma | the previous c | this batch's at the previous parameters |
| sarah | 1 | the previous c, or the anchor | this batch's at the previous parameters |
| svrg | alpha | the anchor | this batch's at the anchor's parameters |
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, in_shard_map, mesh, trees, types
from mars_optax._src.adaptive import AdaptiveGamma
from mars_optax._src.leaf import clipping, correction, precision, quantization


class HandedOver(str):
    """A correction whose b comes as extra argument `prev_grad` from the optimizer around a rule."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the elementwise part of a step makes c of."""

    other: Any  # a tree beside the gradients: the previous gradients, or c itself; or None
    coefficient: Any  # that of the correction
    is_corrected: bool = False  # whether `other` is c
    next_gamma: Any = None  # memory-free: the part of the gradient that the kept momentum lacks

    def corrected(self, grad: jax.Array, other: jax.Array | None, coefficient: Any) -> jax.Array:
        """The corrected gradient before the clip, elementwise."""
        if other is not None and self.is_corrected:
            return other
        if self.next_gamma is not None:
            other = jnp.zeros_like(grad)
        return correction.corrected_gradient(grad, other, coefficient)

    def kept(self, momentum: jax.Array, grad: jax.Array, next_gamma: Any) -> jax.Array:
        r"""What the memory-free form keeps of the momentum.

        Unclipped, the correction is linear. So this form takes the part of the previous gradient in
        the next step off the momentum in this one: with :math:`n_t = m_t - \gamma_{t+1} g_t`,

        .. math::

          m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t + \gamma_t \beta_1 (g_t - g_{t-1})
              = \beta_1 n_{t-1} + (1-\beta_1)(1 + k_t) g_t.
        """
        return momentum + correction.corrected_gradient(jnp.zeros_like(grad), grad, next_gamma)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """The estimator, and the fields of a state that it keeps; see `arguments` for its settings."""

    gamma: Any
    b1: jax.typing.ArrayLike
    correction: types.Correction | HandedOver = "approx"
    first_step: types.FirstStep = "zeros"
    prev_grad_dtype: types.DType = None  # that of all gradients that are kept
    keep_prev_grad: bool = True
    alpha: types.ScalarOrSchedule = 1.0
    correction_clip: jax.typing.ArrayLike | None = None  # on the norm of k (a - b) of all leaves

    def __post_init__(self) -> None:
        if not self.is_adaptive:
            checks.scalar_or_schedule("gamma", self.gamma)
        checks.scalar_or_schedule("alpha", self.alpha)
        checks.decay_rate("b1", self.b1)
        checks.choice("first_step", self.first_step, ("zeros", "no_correction"))
        checks.choice("correction", self.correction, get_args(types.Correction))
        checks.flag("keep_prev_grad", self.keep_prev_grad)
        checks.max_norm(self.correction_clip, name="correction_clip")
        if self.is_adaptive and self.correction not in ("approx", "exact"):
            raise ValueError(
                "`gamma`: expected a number or a schedule with "
                f"`correction`={self.correction!r}, got {self.gamma!r}. Pass one of these, or "
                "'approx' or 'exact' for `correction`."
            )
        keep = self.keep_prev_grad
        if self.correction != "approx":
            checks.keeps_prev_grad(keep, f"`correction`={self.correction!r}", "'approx'")
        if (dtype := self.prev_grad_dtype) is not None:
            checks.keeps_prev_grad(keep, f"`prev_grad_dtype`={dtype!r}", "None")
        if not keep:
            checks.constant_or_schedule(self.gamma)
        check = checks.recursive_dtype if self._is_anchored else checks.float_dtype
        object.__setattr__(self, "prev_grad_dtype", check("prev_grad_dtype", dtype))

    @property
    def is_handed_over(self) -> bool:
        """Whether an optimizer around the rule evaluates gradients for it."""
        return isinstance(self.correction, HandedOver)

    @property
    def is_adaptive(self) -> bool:
        """Whether gamma is a rule."""
        return isinstance(self.gamma, AdaptiveGamma)

    @property
    def evaluates(self) -> bool:
        """Whether gradients of this batch are wanted at other parameters."""
        return self.correction not in ("approx", "none")

    @property
    def _is_anchored(self) -> bool:
        """Whether it starts from an estimate of the gradient where b is taken."""
        return self.correction in ("storm", "svrg", "sarah")

    @property
    def kept(self) -> dict[str, bool]:
        """The fields of the state that belong to the estimator, and if they are kept."""
        is_stored = self.correction == "approx" and self.keep_prev_grad
        return {
            "prev_grad": is_stored,
            "prev_grad_scale": is_stored and quantization.is_scaled(self.prev_grad_dtype),
            "prev_params": self.evaluates and not self.is_handed_over,
            "prev_corrected": self._is_anchored,
            "gamma_state": self.is_adaptive,
        }

    def init(self, params: optax.Params, axes: Any) -> dict[str, Any]:
        """The same fields before the first step."""
        made = {
            "prev_grad": lambda: trees.zeros(params, self.prev_grad_dtype),
            "prev_grad_scale": lambda: _scales(params, self.prev_grad_dtype),
            "prev_params": lambda: trees.copies(params, params),
            "prev_corrected": lambda: trees.zeros(params, self.prev_grad_dtype),
            "gamma_state": lambda: self.gamma.init(params, axes),
        }
        return {field: made[field]() if is_kept else None for field, is_kept in self.kept.items()}

    def coefficient(self, count: jax.Array) -> Any:
        """K at the step after `count` ones; not of an adaptive gamma."""
        if self.correction == "svrg":
            return checks.at("alpha", self.alpha, count)
        if self.correction == "sarah":
            return 1.0
        gamma = checks.at("gamma", self.gamma, count)
        if self.correction == "storm":
            return 1 - gamma
        k = correction.correction_coefficient(gamma, self.b1)
        return jnp.where(count == 0, 0.0, k) if self.first_step == "no_correction" else k

    def estimate(
        self,
        updates: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        axes: Any,
        in_pass: bool,
    ) -> tuple[Estimate, dict[str, Any]]:
        """What c of this step is made of, and the fields of the state after the step.

        `in_pass` says that XLA makes one pass that reads both gradients and has several outputs.
        """
        fields: dict[str, Any] = dict.fromkeys(self.kept)
        if self.correction == "none":
            return Estimate(None, 0.0), fields
        if not self.keep_prev_grad:
            next_k = self.coefficient(optax.safe_increment(state.count))
            next_gamma = next_k * (1 - precision.upcast_scalar(self.b1)) / _divisor(self.b1)
            return Estimate(None, self.coefficient(state.count), next_gamma=next_gamma), fields
        if self.correction == "approx":
            prev_grad = stored_gradients(state)
            fields |= _stored(updates, state, in_pass)
        else:
            prev_grad = self._evaluated(updates, state, params, extra_args)
            fields["prev_params"] = self.next_params(state, params, extra_args)
        if self.is_adaptive:
            adapted = self._adapted(updates, prev_grad, state, extra_args, axes)
            k, prev_grad, fields["gamma_state"] = adapted
            k = self._bounded(updates, prev_grad, updates, k, extra_args)
            corrected = jax.tree.map(_corrected, updates, prev_grad, updates, k)
            return Estimate(corrected, 0.0, is_corrected=True), fields
        k, a = self.coefficient(state.count), updates
        if self._is_anchored:
            is_given = self._is_given(extra_args)
            is_new, anchor = is_given | (state.count == 0), updates
            if is_given is not False:  # else it is the first step's gradient
                anchor = trees.choose(is_given, extra_args["anchor_grad"], updates)
            a = trees.choose(is_new, anchor, state.prev_corrected)
            prev_grad = trees.choose(is_new, updates, prev_grad)
        elif self.correction_clip is None:
            return Estimate(prev_grad, k), fields
        ks = jax.tree.map(lambda _: k, updates)
        ks = self._bounded(updates, prev_grad, a, ks, extra_args)
        corrected = jax.tree.map(_corrected, updates, prev_grad, a, ks)
        if self._is_anchored:
            new = a if self.correction == "svrg" else corrected
            fields["prev_corrected"] = trees.copies(new, like=state.prev_corrected)
        return Estimate(corrected, 0.0, is_corrected=True), fields

    def evaluate(
        self, updates: optax.Updates, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> Any:
        """The gradients of this batch at `state.prev_params`, of the structure of `updates`."""
        checks.exact_arguments(params, extra_args)
        prev_grad = extra_args["grad_fn"](state.prev_params)
        checks.gradients(prev_grad, updates, "the gradients", "grad_fn")
        checks.anchor(updates, extra_args)
        return prev_grad

    def next_params(self, state: Any, params: Any, extra_args: Mapping[str, Any]) -> Any:
        """The parameters at which the next step evaluates its batch's gradients."""
        if state.prev_params is not None and self.correction == "svrg":
            is_new = self._is_given(extra_args) | (state.count == 0)
            params = trees.choose(is_new, params, state.prev_params)
        return trees.copies(params, like=state.prev_params)

    def _evaluated(
        self, updates: optax.Updates, state: Any, params: Any, extra_args: Mapping[str, Any]
    ) -> Any:
        """The gradients of this batch at the previous parameters."""
        if self.is_handed_over:
            prev_grad = extra_args["prev_grad"]
        else:
            prev_grad = self.evaluate(updates, state, params, extra_args)
        if self.correction != "exact" or self.first_step != "zeros":
            return prev_grad
        # There are no previous parameters before the first step.
        is_first = state.count == 0
        return jax.tree.map(lambda g: jnp.where(is_first, precision.beside(0, g), g), prev_grad)

    def _is_given(self, extra_args: Mapping[str, Any]) -> Any:
        """Whether this step takes an anchor that `update` got, which may be traced."""
        if self.correction == "storm" or extra_args.get("anchor_grad") is None:
            return False
        return jnp.asarray(extra_args.get("refresh_anchor", True))

    def _bounded(
        self, updates: Any, prev_grad: Any, a: Any, k: Any, extra_args: Mapping[str, Any]
    ) -> Any:
        """Each leaf's coefficients, by which the whole correction keeps to its bound."""
        if self.correction_clip is None:
            return k
        in_shard_map.require_whole(updates, extra_args, "`correction_clip`")
        zeros = jax.tree.map(jnp.zeros_like, updates)
        added = jax.tree.map(_corrected, zeros, prev_grad, a, k)
        squares = jnp.asarray(optax.tree.norm(added, squared=True))
        factor = clipping.factor_of_squares(squares, self.correction_clip)
        return jax.tree.map(lambda x: x * factor, k)

    def _adapted(
        self, updates: Any, prev_grad: Any, state: Any, extra_args: Mapping[str, Any], axes: Any
    ) -> tuple[Any, Any, Any]:
        """Each matrix's coefficient, the previous gradients, and the state of gamma."""
        if self.first_step == "no_correction":
            prev_grad = trees.choose(state.count == 0, updates, prev_grad)
        unseen = updates if self.correction == "approx" else prev_grad
        old, specs = state.gamma_state, in_shard_map.specs_of(extra_args, updates)

        def inner(x: Any, y: Any) -> Any:
            rows = trees.rows((x, y, axes))
            parts = [clipping.inner(p, q, a.norm_axes) for p, q, a in rows]
            summed = in_shard_map.sum_parts(parts, updates, axes, specs)
            return jax.tree.unflatten(jax.tree.structure(x), summed)

        b1 = precision.upcast_scalar(self.b1)
        k = jax.tree.map(lambda x: correction.correction_coefficient(x, b1), self.gamma.gammas(old))
        return k, prev_grad, self.gamma.advance(old, updates, prev_grad, unseen, b1, inner)


def _corrected(grad: Any, prev_grad: Any, estimate: Any, k: Any) -> jax.Array:
    """The corrected gradient in at least float32."""
    dtype = precision.compute_dtype(grad, prev_grad, estimate)
    grad, prev_grad, estimate = (precision.upcast(x, dtype) for x in (grad, prev_grad, estimate))
    k = precision.upcast_scalar(k, dtype)
    return correction.corrected_gradient(grad, prev_grad, k, estimate)


def _divisor(b1: Any) -> Any:
    """B1, or 1 where it is 0, so that what is divided, which is 0 then, stays that."""
    if isinstance(b1, int | float):
        return b1 or 1
    b1 = precision.upcast_scalar(b1)
    return jnp.where(b1 == 0, 1, b1)


def stored_gradients(state: Any) -> Any:
    """The previous gradients that a state keeps, by their scales where it has such."""
    if state.prev_grad_scale is None:
        return state.prev_grad
    return jax.tree.map(quantization.dequantize, state.prev_grad, state.prev_grad_scale)


def _stored(updates: optax.Updates, state: Any, in_pass: bool) -> dict[str, Any]:
    """The fields of the previous gradient after a step, in the dtypes that they have.

    A gradient that is returned as it is XLA copies into the donated buffer of the one before, by a
    kernel for each leaf. One chosen out of both, by what the compiler does not know to be true, it
    writes in the pass that reads both: `in_pass`, where XLA makes one of several outputs.
    """
    if state.prev_grad_scale is None:
        prev_grad = trees.copies(updates, like=state.prev_grad)
        if in_pass:
            choose = functools.partial(_chosen, state.count)
            prev_grad = jax.tree.map(choose, prev_grad, state.prev_grad)
        return {"prev_grad": prev_grad}
    rows = trees.rows((updates, state.prev_grad))
    results = [quantization.quantize(jnp.asarray(g), prev.dtype) for g, prev in rows]
    outputs = state.prev_grad, state.prev_grad_scale
    prev_grad, prev_grad_scale = trees.unzip(results, outputs)
    return {"prev_grad": prev_grad, "prev_grad_scale": prev_grad_scale}


def _chosen(count: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new`; in a program as a choice, if that does not change where it lies and varies."""
    varies = mesh.varying(count) - mesh.varying(new)
    are_alike = new.ndim and jax.typeof(new) == jax.typeof(old) and not varies
    is_traced = isinstance(new, jax.core.Tracer)
    return jnp.where(count >= 0, new, old) if is_traced and are_alike else new


def _scales(params: optax.Params, dtype: Any) -> Any:
    """The scales of 8-bit buffers of zeros: made as in every later step, they lie as those do."""
    zeros = trees.zeros(params, dtype)
    return jax.tree.map(lambda x: quantization.quantize(x, x.dtype)[1], zeros)
