"""From gradients to new parameters in one go: a rule, its decay, its learning rate, the update."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, run, types
from mars_optax._src.leaf import precision


@dataclasses.dataclass(frozen=True)
class Chain:
    """A rule with what follows it; its state is a tuple of theirs, as :func:`optax.chain` keeps it.

    Attributes:
      rule: The transformation, with its `step`.
      learning_rate: A number or a schedule.
      weight_decay: A number or a schedule.
      kept: The rule's `kept`.
    """

    rule: Any
    learning_rate: types.ScalarOrSchedule
    weight_decay: types.ScalarOrSchedule
    kept: Any

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            if not callable(getattr(self, name)):
                object.__setattr__(self, name, precision.widen_scalar(getattr(self, name)))

    def link(self, decay_mask: Any) -> optax.GradientTransformationExtraArgs:
        """The same as links of Optax."""
        return optax.chain(
            self.rule,
            optax.add_decayed_weights(self.weight_decay, decay_mask),
            optax.scale_by_learning_rate(self.learning_rate),
        )

    def link_states(self, count: jax.Array, mask: Any) -> tuple[Any, Any]:
        """The states of decay and learning rate: schedules count as the rule does."""
        decay = optax.add_decayed_weights(self.weight_decay).init(())
        rate = optax.scale_by_learning_rate(self.learning_rate).init(())
        states = (decay if mask is None else optax.MaskedState(decay), rate)
        counted: tuple[Any, Any] = jax.tree.map(lambda _: count, states)
        return counted

    def step(
        self, updates: Any, state: Any, params: Any, decays: Any, extra_args: Any
    ) -> tuple[Any, Any]:
        """The new parameters and the new state; `decays` says of each parameter if it decays."""
        rule_state, decay_state, rate_state = state
        one, zero = jnp.ones(()), jnp.zeros(())
        # Of an update 0 and a parameter 1 the link of the decay makes its value.
        is_masked = isinstance(decay_state, optax.MaskedState)
        inner_state = decay_state.inner_state if is_masked else decay_state
        decay, inner_state = optax.add_decayed_weights(self.weight_decay).update(
            zero, inner_state, one
        )
        decay_state = optax.MaskedState(inner_state) if is_masked else inner_state
        scale, rate_state = optax.scale_by_learning_rate(self.learning_rate).update(one, rate_state)
        if isinstance(self.weight_decay, int | float) and self.weight_decay == 0:
            decays = jax.tree.map(lambda _: False, decays)
        finish = run.Finish(params, scale, decay, decays)
        params, rule_state = self.rule.step(updates, rule_state, finish, extra_args)
        return params, (rule_state, decay_state, rate_state)


def decays_of(mask: Any, params: Any) -> Any:
    """A bool for each parameter, from a mask as :func:`optax.masked` takes it."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return jax.tree.map(lambda m, below: jax.tree.map(lambda _: bool(m), below), mask, params)


def fused_step(
    optimizer: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    r"""Updates the parameters: `optimizer.update` and :func:`optax.apply_updates` in one call.

    The result is the same, to the rounding of compiled sums. What is gained: in a compiled program
    for one Hopper GPU, with JAX 0.11, the many leaves of a model whose layers are not stacked share
    kernels, where XLA launches one for each: small leaves (biases, scales of norms), and the norms
    of matrices. That is so in :func:`mars` and :func:`mars_lion`; the other two have Newton-Schulz,
    beside which kernels were measured to cost time. With ``implementation="pallas"`` kernels update
    every leaf of fewer than 2^31 elements, parameters and state in place. Elsewhere, and for any
    other optimizer, this is those two calls, which XLA fuses under :func:`jax.jit`.

    Args:
      optimizer: Any optimizer. One of this package by itself is fused; a rule alone (`scale_by_*`),
        or an optimizer inside a chain or another wrapper, is not, nor is one in exact mode whose
        vectors have a rule of their own.
      grads: The gradients.
      state: The optimizer's state.
      params: The parameters.
      **extra_args: What `update` takes besides, such as `grad_fn`.

    Returns:
      The new parameters, in their dtypes, and the new state. Under ``jax.jit(...,
      donate_argnames=("state", "params"))`` they take the place of the old ones.

    Raises:
      TypeError: If `optimizer` is none.
      ValueError: If `params` is None, and as `update`, whose `updates` are `grads`.
      NotImplementedError: If kernels were asked for and cannot run.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
      >>> tx = mars_optax.mars(learning_rate=0.1)
      >>> @jax.jit
      ... def train_step(params, state):
      ...     grads = jax.grad(lambda p: jnp.sum(p["kernel"] ** 2) + jnp.sum(p["bias"]))(params)
      ...     return mars_optax.fused_step(tx, grads, state, params)
      >>> params, state = train_step(params, tx.init(params))
      >>> print(f"{params['kernel'][0, 0]:.2f} {params['bias'][0]:.2f}")
      0.90 -0.10
    """
    checks.transformation("optimizer", optimizer)
    if params is None:
        raise ValueError(
            "`params`: expected the parameters, got None. Call `fused_step(optimizer, grads, "
            "state, params)`: it makes the new ones of them."
        )
    step = getattr(optimizer, "fused_step", None)
    if step is not None:
        result: tuple[optax.Params, optax.OptState] = step(grads, state, params, extra_args)
        return result
    update = optax.with_extra_args_support(optimizer).update
    updates, state = update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state
