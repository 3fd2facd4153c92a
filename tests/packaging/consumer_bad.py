"""Mistakes that `mypy --strict` is to find: each line marked `# E: code`, and no other."""

import jax
import jax.numpy as jnp
import optax

import mars_optax

params = {"kernel": jnp.ones((3, 2))}
grads = params

mars_optax.mars()  # E: call-arg
mars_optax.mars(0.1, betas=(0.9, 0.99))  # E: call-arg
mars_optax.mars(0.1, lr_1d=0.1)  # E: call-arg
mars_optax.mars("fast")  # E: arg-type
mars_optax.mars(0.1, gamma=None)  # E: arg-type
mars_optax.mars(0.1, gamma=lambda: 0.1)  # E: arg-type
mars_optax.mars(0.1, max_norm="one")  # E: arg-type
mars_optax.mars(0.1, correction="svgr")  # E: arg-type
mars_optax.mars(0.1, first_step="zero")  # E: arg-type
mars_optax.mars(0.1, second_moment="clipped")  # E: arg-type
mars_optax.mars(0.1, implementation="triton")  # E: arg-type
mars_optax.mars(0.1, optimize_1d="no")  # E: arg-type
mars_optax.mars(0.1, 0.9, 0.99, 1e-8, 0.025, 0.0, None, 1.0)  # E: call-arg
mars_optax.mars_lion(0.1, b2=0.99)  # E: call-arg
mars_optax.mars_shampoo(0.1, ns_steps="five")  # E: arg-type
mars_optax.mars_m(0.1, ns_coeffs=5)  # E: arg-type
mars_optax.mars_m(0.1, amsgrad=True)  # E: call-arg
mars_optax.mars_soap(0.1, precondition_frequency="10")  # E: arg-type
mars_optax.variance_reduced(0.1, 0.1)  # E: arg-type
mars_optax.storm_adamw(0.1, correction="approx")  # E: call-arg
mars_optax.scale_by_mars(learning_rate=0.1)  # E: call-arg
mars_optax.scale_by_mars_lion(b2=0.99)  # E: call-arg
mars_optax.scale_by_mars_shampoo(ns_precision=32.0)  # E: arg-type
mars_optax.scale_by_mars_m(keep_prev_grad=None)  # E: arg-type
mars_optax.scale_by_mars_soap(keep_prev_grad=True)  # E: call-arg
mars_optax.correct_gradients(correction="previous")  # E: arg-type
mars_optax.clip_by_leaf_norm(weight_dimension_number=None)  # E: call-arg
mars_optax.cautious(0.1)  # E: arg-type
mars_optax.cautious(mars_optax.scale_by_mars(), rescale="median")  # E: arg-type
mars_optax.ignore_absent_gradients()  # E: call-arg
mars_optax.dimension_numbers_by_path([("kernel", 1)])  # E: list-item
mars_optax.dimension_numbers_by_path([], default="rank3")  # E: arg-type
mars_optax.orthogonalize("kernel")  # E: arg-type
mars_optax.orthogonalize(jnp.ones((2, 2)), 5)  # E: call-arg
mars_optax.stochastic_apply_updates(params, grads, 0)  # E: arg-type
mars_optax.describe(params)  # E: call-arg
mars_optax.fused_step(mars_optax.mars(0.1), grads)  # E: call-arg
mars_optax.adamw(0.1)  # E: attr-defined
mars_optax.ScaleByMarsState()  # E: call-arg

state_bytes: str = mars_optax.describe(params, mars_optax.mars(0.1)).state_bytes  # E: assignment
norm: float = mars_optax.diagnose(grads, optax.EmptyState())["norm"]  # E: assignment
schedule: optax.Schedule = mars_optax.mars(0.1)  # E: assignment
matrix: list[jax.Array] = mars_optax.orthogonalize(jnp.ones((2, 2)))  # E: assignment
updates: int = mars_optax.mars(0.1).init(params)  # E: assignment
