"""What programs for GPUs are told otherwise: the same numbers, by passes that copy nothing."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mars_optax
from mars_optax._src import mesh
from tests.support import interpreter, trees

_BUILDS: dict[str, Callable[[], Any]] = {
    "mars": lambda: mars_optax.mars(0.1),
    "mars_without_clip": lambda: mars_optax.mars(0.1, max_norm=None, optimize_1d=True),
    "mars_brain": lambda: mars_optax.mars(0.1, prev_grad_dtype="bfloat16"),
    "mars_half": lambda: mars_optax.mars(0.1, prev_grad_dtype="float16"),
    "mars_8_bits": lambda: mars_optax.mars(0.1, prev_grad_dtype="float8_e4m3fn"),
    "mars_adaptive": lambda: mars_optax.mars(0.1, gamma=mars_optax.AdaptiveGamma()),
    "mars_first_step": lambda: mars_optax.mars(0.1, first_step="no_correction"),
    "mars_lion": lambda: mars_optax.mars_lion(0.1),
    "mars_shampoo": lambda: mars_optax.mars_shampoo(0.1, ns_dtype="float32"),
    "mars_m": lambda: mars_optax.mars_m(0.1, ns_dtype="float32"),
    "mars_soap": lambda: mars_optax.mars_soap(0.1),
    "correct_gradients": mars_optax.correct_gradients,
}
_PARAMS = {"tall": (6, 4), "wide": (3, 5), "bias": (4,)}


def _tree(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in _PARAMS.items()}


def _for_gpus(is_for_gpus: bool = True) -> Any:
    """As a process on one GPU would see it, without kernels."""
    return mock.patch.multiple(
        mesh,
        is_for_gpus=lambda: is_for_gpus,
        is_one_device=lambda: True,
        is_plain=lambda arrays: False,
    )


def _program(tx: Any, *, by: Callable[..., Any] = jax.jit) -> Callable[..., Any]:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return by(step)


def _steps(build: Callable[[], Any], is_for_gpus: bool, bad: float | None = None) -> Any:
    with _for_gpus(is_for_gpus):
        tx = build()
        params, step = _tree(0), _program(tx)
        state = tx.init(params)
        for i in range(3):
            grads = _tree(i + 1)
            if bad is not None and i == 1:
                grads["tall"] = grads["tall"].at[0, 1].set(bad)
            params, state = step(params, state, grads)
        return params, state


def _makers(tx: Any, params: Any) -> set[str]:
    """The operations whose results are the new previous gradients."""
    state = tx.init(params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params)[1].prev_grad

    jaxpr = jax.make_jaxpr(update)(params, state, params).jaxpr
    makers = {id(v): e.params.get("name", e.primitive.name) for e in jaxpr.eqns for v in e.outvars}
    return {makers[id(v)] for v in jaxpr.outvars}


class SameNumbersTest(parameterized.TestCase):
    @parameterized.parameters(*_BUILDS)
    def test_a_trajectory_is_the_same(self, name: str):
        expected, actual = (_steps(_BUILDS[name], is_for_gpus) for is_for_gpus in (False, True))
        trees.assert_same_types(actual, expected)
        # Another program may round products of matrices otherwise.
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        kept = actual[1].prev_grad
        if kept is not None:
            trees.assert_equal(kept, expected[1].prev_grad)

    @parameterized.product(name=["mars", "mars_half", "mars_lion"], bad=[np.nan, np.inf, 1e30])
    def test_what_is_not_finite_is_kept_as_before(self, name: str, bad: float):
        expected, actual = (_steps(_BUILDS[name], is_gpu, bad) for is_gpu in (False, True))
        trees.assert_equal(actual[1].prev_grad, expected[1].prev_grad)

    def test_under_vmap_and_derivatives(self):
        grads = jax.tree.map(lambda *xs: jnp.stack(xs), _tree(1), _tree(2))

        def loss(scale: Any, tx: Any) -> Any:
            params, state, step = _tree(0), tx.init(_tree(0)), _program(tx, by=lambda f: f)
            for factor in (scale, 2 * scale, 3 * scale):
                grads = optax.tree.scale(factor, params)
                params, state = step(params, state, grads)
            return optax.tree.norm(params, squared=True)

        results = []
        for is_for_gpus in (False, True):
            with _for_gpus(is_for_gpus):
                tx = mars_optax.mars(0.1)
                step = _program(tx, by=lambda f: jax.jit(jax.vmap(f, in_axes=(None, None, 0))))
                results.append((step(_tree(0), tx.init(_tree(0)), grads), jax.grad(loss)(1.0, tx)))
        trees.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


class ChoiceTest(parameterized.TestCase):
    @parameterized.parameters("mars", "mars_brain", "mars_lion", "mars_m", "correct_gradients")
    def test_the_gradient_is_chosen_there_and_returned_elsewhere(self, name: str):
        tx = _BUILDS[name]()
        with _for_gpus():
            self.assertEqual(_makers(tx, _tree(0)), {"_where"})
        with _for_gpus(False):
            self.assertNotIn("_where", _makers(tx, _tree(0)))

    def test_kernels_get_it_returned(self):
        # They make a pass of their own: a choice would be one more.
        tx = mars_optax.mars(0.1, implementation="pallas")
        with interpreter.always(), _for_gpus():
            self.assertNotIn("_where", _makers(tx, _tree(0)))

    def test_a_scalar_and_what_is_eager_are_returned(self):
        # JAX chooses among scalars on the device, and an eager choice has a place of its own.
        tx = mars_optax.correct_gradients()
        with _for_gpus():
            self.assertNotIn("_where", _makers(tx, jnp.ones(())))
            on = jax.devices()[1]
            spread = jax.device_put(_tree(1), _over(2, AxisType.Auto, P()))
            state = jax.device_put(tx.init(spread), _over(2, AxisType.Auto, P()))
            _, state = tx.update(spread, state._replace(count=jax.device_put(state.count, on)))
        trees.assert_equal(state.prev_grad, _tree(1))


def _over(devices: int, kind: AxisType, spec: P) -> NamedSharding:
    return NamedSharding(jax.make_mesh((devices,), ("x",), axis_types=(kind,)), spec)


class MeshTest(parameterized.TestCase):
    @parameterized.product(
        kind=[AxisType.Auto, AxisType.Explicit],
        spec=[P("x"), P(None, "x")],
        with_specs=[False, True],
    )
    def test_a_mesh_of_one_device(self, kind: AxisType, spec: P, with_specs: bool):
        extra: Any = {"param_specs": spec} if with_specs else {}
        tx = mars_optax.mars_m(0.1, ns_dtype="float32")
        results = []
        for is_for_gpus in (False, True):
            with _for_gpus(is_for_gpus), jax.set_mesh(_over(1, kind, spec).mesh):
                params = jax.device_put(_tree(0)["tall"], _over(1, kind, spec))
                update = jax.jit(lambda g, s, p: tx.update(g, s, p, **extra))
                results.append(update(params, tx.init(params), params))
        trees.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)

    @parameterized.parameters((P(), P("x")), (P("x"), P()))
    def test_gradients_may_lie_otherwise_than_the_state(self, grads_lie: P, state_lies: P):
        def put(tree: Any, spec: P) -> Any:
            to = _over(2, AxisType.Explicit, spec)
            return jax.tree.map(lambda x: jax.device_put(x, to) if x.ndim else x, tree)

        tx, grads = mars_optax.mars(0.1), {"tall": _tree(0)["tall"]}
        with _for_gpus(), jax.set_mesh(_over(2, AxisType.Explicit, P()).mesh):
            params, state = put(grads, state_lies), put(tx.init(grads), state_lies)
            _, state = jax.jit(tx.update)(put(grads, grads_lie), state, params)
        trees.assert_equal(state.prev_grad, grads)

    def test_averaged_gradients_in_a_shard_map_are_kept_alike(self):
        on = _over(2, AxisType.Auto, P()).mesh
        tx, grads = mars_optax.correct_gradients(), jnp.ones((8, 6))
        state = jax.tree.map(lambda x: jnp.stack([x, x]) if x.ndim else x, tx.init(grads[:4]))

        def step(grads: Any, state: Any) -> Any:
            state = jax.tree.map(lambda x: x[0] if x.ndim else x, state)
            return tx.update(jax.lax.pmean(grads, "x"), state, param_specs=P())[1].prev_grad

        specs = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
        with _for_gpus():
            kept = jax.shard_map(step, mesh=on, in_specs=(P("x"), specs), out_specs=P())
            np.testing.assert_array_equal(jax.jit(kept)(grads, state), grads[:4])

    def test_a_count_of_each_device_leaves_gradients_equal_on_all(self):
        on, tx, grads = _over(2, AxisType.Auto, P()).mesh, mars_optax.correct_gradients(), _tree(0)
        state, counts = tx.init(grads), jnp.zeros(2, jnp.int32)

        def step(grads: Any, state: Any, counts: Any) -> Any:
            state = state._replace(count=counts[0])
            return tx.update(grads, state, param_specs=P())[1].prev_grad

        with _for_gpus():
            specs = (P(), P(), P("x"))
            kept = jax.shard_map(step, mesh=on, in_specs=specs, out_specs=P())
            trees.assert_equal(jax.jit(kept)(grads, state, counts), grads)

    @parameterized.parameters(({"x", "y"}, True), ({"x"}, False), (set(), False))
    def test_an_array_is_undivided_where_all_axes_are_manual(
        self, manual: set[str], expected: bool
    ):
        on = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        seen = []

        def look(x: jax.Array) -> jax.Array:
            seen.append(mesh.is_undivided(x))
            return x

        how: Any = {"mesh": on, "in_specs": P(), "out_specs": P(), "axis_names": manual}
        jax.eval_shape(jax.shard_map(look, **how) if manual else look, jnp.ones((4, 4)))
        self.assertEqual(seen, [expected])


if __name__ == "__main__":
    absltest.main()
