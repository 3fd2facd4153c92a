"""What Optax asks of the optimizers in its `contrib`, asked of ours.

Its common tests run every optimizer on a parabola and on Rosenbrock's function, under `jit` and
without, with injected hyperparameters, `tree_map_params`, accumulation, extra arguments and state
that keeps types and places. Injection, accumulation, types and places have files of their own
(`test_inject`, `test_wrappers`, `test_state_types`, `test_sharding`); the rest is here.
"""

import contextlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests.support import trees

_STEPS = 4000
_WITHOUT_DECAY = {"weight_decay": 0.0, "weight_decay_1d": 0.0}


def _optimizers(rate: float) -> dict[str, Any]:
    # Signs and orthogonal matrices have no length of their own: only a falling rate ends the walk.
    falling = optax.linear_schedule(rate, 0.0, _STEPS)
    precise = {"ns_dtype": "float32"}
    return {
        "mars": mars_optax.mars(falling, **_WITHOUT_DECAY),
        "mars_lion": mars_optax.mars_lion(falling, **_WITHOUT_DECAY),
        "mars_shampoo": mars_optax.mars_shampoo(falling, **_WITHOUT_DECAY, **precise),
        "mars_m": mars_optax.mars_m(falling, **_WITHOUT_DECAY, **precise),
        "storm_adamw": mars_optax.storm_adamw(falling, weight_decay=0.0),
    }


def _parabola(dtype: Any) -> tuple[Any, Any, Any]:
    """Start, goal and loss: squared distances, of a matrix and of a vector."""
    goal = {"w": jnp.array([[1.0, -1.0], [0.5, 2.0]], dtype), "b": jnp.array([1.0, -1.0], dtype)}
    start = {"w": jnp.array([[-1.0, 4.0], [1.0, 0.0]], dtype), "b": jnp.array([-1.0, 3.0], dtype)}
    if jnp.issubdtype(dtype, jnp.complexfloating):
        goal = jax.tree.map(lambda x: x * (1 - 0.5j), goal)

    def loss(params: Any) -> jax.Array:
        squares = jax.tree.map(lambda p, q: jnp.sum(jnp.square(jnp.abs(p - q))), params, goal)
        return sum(jax.tree.leaves(squares))

    return start, goal, loss


def _rosenbrock(dtype: Any) -> tuple[Any, Any, Any]:
    """Start, goal and loss: the valley, its two coordinates one matrix."""
    start, goal = {"w": jnp.zeros((2, 1), dtype)}, {"w": jnp.ones((2, 1), dtype)}

    def loss(params: Any) -> jax.Array:
        x, y = params["w"][:, 0]
        return jnp.square(1.0 - x) + 100.0 * jnp.square(y - jnp.square(x))

    return start, goal, loss


def _minimized(tx: Any, start: Any, loss: Any) -> tuple[Any, Any]:
    """The parameters after all steps, in one compiled loop, and the state."""

    def grad_fn(params: Any) -> Any:
        # Of a real function JAX gives the conjugate of the direction of steepest ascent.
        return jax.tree.map(jnp.conj, jax.grad(loss)(params))

    def body(carry: Any, _: None) -> Any:
        params, state = carry
        # Arguments that are not ours are passed over, as every chain with a line search has them.
        updates, state = tx.update(
            grad_fn(params), state, params, grad_fn=grad_fn, value=loss(params), value_fn=loss
        )
        return (optax.apply_updates(params, updates), state), None

    state = optax.tree.map_params(tx, lambda x: x, tx.init(start))
    return jax.jit(lambda *carry: jax.lax.scan(body, carry, None, length=_STEPS)[0])(start, state)


class ConvergenceTest(parameterized.TestCase):
    def _check(self, name: str, problem: Any, dtype: str, rate: float):
        with trees.float64() if dtype == "float64" else contextlib.nullcontext():
            start, goal, loss = problem(dtype)
            params, state = _minimized(_optimizers(rate)[name], start, loss)
            trees.assert_same_types(params, start)
            trees.assert_close(params, goal, rtol=3e-2, atol=3e-2)
            for count in trees.fields(state, "count"):
                self.assertEqual(int(count), _STEPS)

    @parameterized.parameters("mars", "mars_lion", "mars_shampoo", "mars_m", "storm_adamw")
    def test_the_valley_leads_to_its_end(self, name: str):
        self._check(name, _rosenbrock, "float32", rate=0.01)

    @parameterized.parameters(("mars", "complex64"), ("mars_m", "bfloat16"))
    def test_the_parabolas_lowest_point_is_found(self, name: str, dtype: str):
        self._check(name, _parabola, dtype, rate=0.05)

    @parameterized.product(
        name=("mars", "mars_lion", "mars_shampoo", "mars_m", "storm_adamw"),
        dtype=("float16", "bfloat16", "float64"),
    )
    @pytest.mark.slow
    def test_the_parabolas_lowest_point_is_found_in_other_dtypes(self, name: str, dtype: str):
        self._check(name, _parabola, dtype, rate=0.05)


class VariantsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_a_step_is_the_same_compiled_or_not(self):
        tx = mars_optax.mars(0.1)
        params = [-jnp.ones((2, 3)), jnp.ones((2, 5, 2)), jnp.ones(3)]
        grads = jax.tree.map(jnp.negative, params)
        state = self.variant(tx.init)(params)
        updates, state = self.variant(tx.update)(grads, state, params)
        # Entries of a leaf are alike: the first step is the rate against the gradient, and decay.
        for update, gradient, expected in zip(updates, grads, (0.1, 0.1, 0.09), strict=True):
            np.testing.assert_allclose(update / -jnp.sign(gradient), expected, rtol=1e-5)


if __name__ == "__main__":
    absltest.main()
