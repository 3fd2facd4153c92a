"""The plain loop: a small network on a dict of arrays, which every framework is held to."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mars_optax
from tests.parity.test_trajectories import QUICKLY

jit = functools.partial(jax.jit, compiler_options=QUICKLY)
STEPS = 4
_RNG = np.random.default_rng(0)
# Batches of eight rows, one for each step: what frameworks and the plain loop are trained on.
BATCHES = (
    _RNG.standard_normal((STEPS, 8, 3)).astype(np.float32),
    3 * _RNG.standard_normal((STEPS, 8, 2)).astype(np.float32),
)
# What the two loops may differ by: sums of another order, which Newton-Schulz amplifies.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def params() -> dict[str, dict[str, jax.Array]]:
    """Two dense layers, their kernels (in, out)."""
    rng = np.random.default_rng(1)

    def dense(fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        kernel, bias = rng.standard_normal((fan_in, fan_out)), rng.standard_normal(fan_out)
        return {"bias": jnp.asarray(bias, "float32"), "kernel": jnp.asarray(kernel, "float32")}

    return {"first": dense(3, 5), "second": dense(5, 2)}


def apply(params: Any, x: jax.Array) -> jax.Array:
    """The network's output."""
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"] + params["second"]["bias"]


def loss(params: Any, batch: Any) -> jax.Array:
    """The mean square of the network's error."""
    x, y = batch
    return jnp.mean(jnp.square(apply(params, x) - y))


grad = jax.grad(loss)


def optimizer(name: str, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose correction, clip and decay all show in the result.

    Corrected gradients of `loss` have norms from 10 to 40: some are clipped, and some are not, so
    that a factor left in them shows.
    """
    precise = {"ns_dtype": "float32"} if name in ("mars_m", "mars_shampoo") else {}
    settings = {"gamma": 0.2, "weight_decay": 0.1, "max_norm": 20.0, **precise, **kwargs}
    return getattr(mars_optax, name)(0.1, **settings)


def train(
    tx: optax.GradientTransformation,
    params: Any,
    batches: Any = BATCHES,
    grad: Callable[[Any, Any], Any] = grad,
) -> tuple[Any, Any]:
    """One `update` after the other: the parameters after the last step, and the state."""
    update = optax.with_extra_args_support(tx).update

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = update(
            grad(params, batch), state, params, grad_fn=lambda p: grad(p, batch)
        )
        return (optax.apply_updates(params, updates), state), None

    return jit(lambda carry: jax.lax.scan(step, carry, batches)[0])((params, tx.init(params)))


@functools.cache
def trained(name: str, **kwargs: Any) -> tuple[Any, Any]:
    """What `train` makes of the network: compiled once for all tests of a process."""
    return train(optimizer(name, **kwargs), params())


def page() -> str:
    """The page that tells users what is tested here."""
    return (pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()


def batch(step: int) -> Any:
    """The batch of a step."""
    return jax.tree.map(lambda x: x[step], BATCHES)
