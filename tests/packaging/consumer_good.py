"""Every public name, used as a user uses it: `mypy --strict` has no complaint, and it runs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import mars_optax

Tree = dict[str, jax.Array]


def loss(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x @ params["kernel"] + params["bias"] - 1.0))


def decays(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def halving(count: jax.typing.ArrayLike) -> jax.Array:
    return 0.1 / (1 + jnp.asarray(count))


params: Tree = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
x = jnp.ones((4, 3))
grads: Tree = jax.grad(loss)(params, x)
axes = MuonDimensionNumbers(reduction_axis=0, output_axis=1)
by_name = mars_optax.dimension_numbers_by_path([("bias", None), ("kernel", axes)], "vector")
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=2, decay_steps=10)

optimizers: list[optax.GradientTransformationExtraArgs] = [
    mars_optax.mars(1e-3),
    mars_optax.mars(schedule, 0.9, 0.95, gamma=halving, weight_decay=halving, mask=decays),
    mars_optax.mars(
        jnp.asarray(0.1),
        mask={"kernel": True, "bias": False},
        max_norm=None,
        optimize_1d=True,
        amsgrad=True,
        second_moment="gradient",
        nu_dtype=jnp.float32,
        keep_prev_grad=False,
    ),
    mars_optax.mars(0.1, learning_rate_1d=schedule, weight_dimension_numbers=by_name),
    mars_optax.mars(0.1, weight_dimension_numbers={"kernel": axes, "bias": None}),
    mars_optax.mars(0.1, weight_decay_1d=None, eps_1d=1e-6, implementation="xla"),
    mars_optax.mars_lion(schedule, mu_dtype="bfloat16", prev_grad_dtype=jnp.bfloat16),
    mars_optax.mars_shampoo(schedule, first_step="no_correction", ns_steps=3),
    mars_optax.mars_m(schedule, ns_coeffs="polar_express", ns_dtype="float32"),
    mars_optax.mars_m(0.1, ns_coeffs=(3.4445, -4.775, 2.0315), ns_precision="highest"),
    mars_optax.mars_m(0.1, row_b2=0.95, gamma=mars_optax.AdaptiveGamma(decay=0.9)),
    mars_optax.mars_soap(schedule, precondition_frequency=2, one_sided=True),
    mars_optax.variance_reduced(optax.scale_by_rms(), schedule, mask=decays),
    optax.chain(
        optax.clip_by_global_norm(1.0),
        mars_optax.ignore_absent_gradients(
            mars_optax.correct_gradients(halving, correction_clip=1)
        ),
        mars_optax.clip_by_leaf_norm(1.0, weight_dimension_numbers=by_name),
        mars_optax.cautious(mars_optax.scale_by_mars(max_norm=None), rescale="count"),
        optax.scale_by_learning_rate(schedule),
    ),
    optax.chain(mars_optax.scale_by_mars_lion(correction="none"), optax.scale(-0.1)),
    optax.masked(mars_optax.scale_by_mars_shampoo(), {"kernel": True, "bias": False}),
    optax.masked(mars_optax.scale_by_mars_m(ns_steps=3), lambda p: {"kernel": True, "bias": False}),
    optax.masked(mars_optax.scale_by_mars_soap(), {"kernel": True, "bias": False}),
]

for tx in optimizers:
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    new_params, state = mars_optax.fused_step(tx, grads, state, params)

# Gradients at the previous parameters, and parts of leaves inside a `jax.shard_map`.
exact = mars_optax.mars(0.1, correction="exact")
storm = mars_optax.storm_adamw(schedule, gamma=halving)


def grad_fn(params: Tree) -> Tree:
    result: Tree = jax.grad(loss)(params, x)
    return result


for tx in (exact, storm):
    state = tx.init(params)
    updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
    new_params, state = mars_optax.fused_step(tx, grads, state, params, grad_fn=grad_fn)


def sharded_step(grads: Tree, state: optax.OptState, params: Tree, specs: Any) -> Any:
    return optimizers[0].update(grads, state, params, param_specs=specs)


description: mars_optax.Description = mars_optax.describe(params, optimizers[0])
leaf: mars_optax.LeafDescription = description.leaves[0]
table: str = f"{description}{leaf.path}{leaf.shape}{leaf.rule}"
number_of_bytes: int = description.state_bytes + leaf.state_bytes + description.counts["matrix"]

state = mars_optax.correct_gradients().init(params)
measures: dict[str, jax.Array] = mars_optax.diagnose(grads, state, gamma=halving, max_norm=None)
matrix: jax.Array = mars_optax.orthogonalize(params["kernel"], steps=3, coeffs="quintic")
rounded = mars_optax.stochastic_apply_updates(params, grads, jax.random.key(0))


States = (
    mars_optax.MarsState,
    mars_optax.MarsLionState,
    mars_optax.MarsShampooState,
    mars_optax.MarsMState,
    mars_optax.MarsSoapState,
    mars_optax.StormAdamwState,
    mars_optax.VarianceReducedState,
    mars_optax.ScaleByMarsState,
    mars_optax.ScaleByMarsLionState,
    mars_optax.ScaleByMarsMState,
    mars_optax.ScaleByMarsShampooState,
    mars_optax.ScaleByMarsSoapState,
    mars_optax.ScaleBySoapState,
    mars_optax.CorrectGradientsState,
)
assert isinstance(state, States)
count: jax.Array = state.count
gamma_state: type[mars_optax.AdaptiveGammaState] = mars_optax.AdaptiveGammaState
