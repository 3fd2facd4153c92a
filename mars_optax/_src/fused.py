"""From gradients to new parameters in one call."""

from typing import Any

import optax

from mars_optax._src import checks


def fused_step(
    optimizer: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    r"""Updates the parameters: `optimizer.update` and :func:`optax.apply_updates` in one call.

    The result is the same, to the rounding of compiled sums. In a compiled program for one Hopper
    GPU, with JAX 0.11, small leaves (biases, scales of norms) share kernels in :func:`mars` and
    :func:`mars_lion`, where XLA launches one for each. With ``implementation="pallas"`` kernels
    update every leaf of fewer than 2^31 elements, parameters and state in place. Elsewhere, and for
    any other optimizer, this is those two calls, which XLA fuses under :func:`jax.jit`.

    Args:
      optimizer: Any optimizer. One of this package by itself is fused; a rule alone (`scale_by_*`),
        one inside another, or one that needs `grad_fn` and has a rule for vectors, is not.
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
    if (step := getattr(optimizer, "fused_step", None)) is not None:
        return step(grads, state, params, extra_args)
    update = optax.with_extra_args_support(optimizer).update
    updates, state = update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state
