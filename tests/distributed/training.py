"""Some steps of a tiny model with every optimizer, on one device or the mesh of all processes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mars_optax

STEPS = 3
LAYOUTS = {"data_parallel": P(), "fsdp": P("data")}

# Every public optimizer. Newton-Schulz in float32: bfloat16 would round away what is compared.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformationExtraArgs]] = {
    "mars": functools.partial(mars_optax.mars, 0.05),
    "mars_exact": functools.partial(mars_optax.mars, 0.05, correction="exact"),
    "mars_lion": functools.partial(mars_optax.mars_lion, 0.01),
    "mars_shampoo": functools.partial(mars_optax.mars_shampoo, 0.05, ns_dtype="float32"),
    "mars_m": functools.partial(mars_optax.mars_m, 0.05, ns_dtype="float32"),
    "mars_m_8_bits": functools.partial(
        mars_optax.mars_m, 0.05, ns_dtype="float32", prev_grad_dtype="float8_e4m3fn"
    ),
    "storm_adamw": functools.partial(mars_optax.storm_adamw, 0.05, gamma=0.3),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run left: the parameters and the optimizer's state, and the loss of every step."""

    params: Any
    state: Any
    losses: list[Any]


def _host_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"wide": (8, 16), "bias": (16,), "tall": (16, 8)}
    return {k: rng.standard_normal(s).astype(np.float32) / 4 for k, s in shapes.items()}


def _host_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    x, y = rng.standard_normal((2, 16, 8)).astype(np.float32)
    return x, y


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["wide"] + params["bias"])
    return jnp.mean(jnp.square(hidden @ params["tall"] - y))


def _step_of(tx: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        grad_fn = jax.grad(lambda params: _loss(params, x, y))
        loss = _loss(params, x, y)
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state, loss

    return step


def run(name: str, mesh: jax.sharding.Mesh | None = None, layout: str = "fsdp") -> Trained:
    """Trains with an optimizer: on one device, or with `mesh` in one of the `LAYOUTS`."""
    tx = OPTIMIZERS[name]()
    step: Any = jax.jit(_step_of(tx))

    def place(host: np.ndarray, spec: P) -> Any:
        if mesh is None:
            return jnp.asarray(host)
        # Each process gives the shards of its own devices.
        return jax.make_array_from_callback(
            host.shape, NamedSharding(mesh, spec), lambda index: host[index]
        )

    params = {key: place(host, LAYOUTS[layout]) for key, host in _host_params().items()}
    state = jax.jit(tx.init)(params)
    losses = []
    for i in range(STEPS):
        x, y = (place(host, P("data")) for host in _host_batch(i))
        params, state, loss = step(params, state, x, y)
        losses.append(loss)
    return Trained(params, state, losses)


def leaves(trained: Trained) -> Iterator[tuple[str, Any]]:
    """The arrays of a run with their names."""
    tree = {"params": trained.params, "state": trained.state, "losses": trained.losses}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf
