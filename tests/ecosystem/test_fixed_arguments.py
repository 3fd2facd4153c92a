"""A trainer that calls `update` with three arguments, where the optimizer needs a fourth.

`with_fixed_arguments` is the page's. Under `jax.pmap`, and inside `jax.shard_map` with
`check_vma=False`, no type says whether a device has all of a parameter.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.ecosystem import plain
from tests.support import trees


def with_fixed_arguments(tx, **fixed):
    """The optimizer with these extra arguments in every call of `update`."""

    def update(grads, state, params=None, **extra_args):
        return tx.update(grads, state, params, **fixed, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def train_state(tx):
    return TrainState.create(apply_fn=None, params=plain.params(), tx=tx)


def step(state, batch):
    grads = jax.lax.pmean(plain.grad(state.params, batch), "data")
    return state.apply_gradients(grads=grads)


class FixedArgumentsTest(parameterized.TestCase):
    def test_the_function_is_the_one_of_the_page(self):
        self.assertIn(inspect.getsource(with_fixed_arguments), plain.page())

    @parameterized.parameters("pmap", "shard_map")
    def test_a_train_state_on_four_devices_is_one_on_one(self, way: str):
        tx = with_fixed_arguments(plain.optimizer("mars_m"), param_specs=P())
        state = train_state(tx)
        if way == "pmap":
            mapped = jax.pmap(step, axis_name="data")
            state = jax.tree.map(lambda x: jnp.stack([x] * 4), state)
            batches = [jax.tree.map(lambda x: x.reshape(4, 2, -1), plain.batch(t)) for t in (0, 1)]
        else:
            mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
            specs = {"in_specs": (P(), P("data")), "out_specs": P()}
            mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
            batches = [plain.batch(t) for t in (0, 1)]
        for batch in batches:
            state = plain.jit(mapped)(state, batch) if way == "shard_map" else mapped(state, batch)
        expected, _ = plain.train(
            plain.optimizer("mars_m"), plain.params(), jax.tree.map(lambda x: x[:2], plain.BATCHES)
        )
        for device in range(4) if way == "pmap" else (...,):
            actual = jax.tree.map(lambda x, device=device: x[device], state.params)
            trees.assert_close(actual, expected, **plain.CLOSE)

    def test_without_it_an_error_names_the_argument(self):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
        with self.assertRaisesRegex(ValueError, "param_specs"):
            jax.eval_shape(mapped, train_state(plain.optimizer("mars_m")), plain.batch(0))


class LineSearchTest(parameterized.TestCase):
    def test_behind_exact_mode_the_search_finds_the_step_of_the_parts(self):
        batch = plain.batch(0)
        value_fn = functools.partial(plain.loss, batch=batch)

        def taking_grad_fn(params, grad_fn=None):
            del grad_fn
            return value_fn(params)

        rule = plain.optimizer("mars", correction="exact")
        search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
        params, grad_fn = plain.params(), jax.grad(value_fn)
        value, grads = jax.value_and_grad(value_fn)(params)
        tx = optax.chain(rule, search)
        actual, _ = tx.update(
            grads,
            tx.init(params),
            params,
            value=value,
            grad=grads,
            value_fn=taking_grad_fn,
            grad_fn=grad_fn,
        )
        direction, _ = rule.update(grads, rule.init(params), params, grad_fn=grad_fn)
        expected, _ = search.update(
            direction, search.init(params), params, value=value, grad=grads, value_fn=value_fn
        )
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        self.assertLess(float(value_fn(optax.apply_updates(params, actual))), float(value))


if __name__ == "__main__":
    absltest.main()
