"""One call for the update and its application: the same result, by XLA and by kernels."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from mars_optax._src import execute, mesh
from mars_optax._src.kernels import tiling
from tests import registry
from tests.support import interpreter, trees

# Leaves with blocks and rests of blocks, and so many small ones of a size that they share a kernel.
SHAPES = {
    "embed": (37, 64),
    "layers": [{"kernel": (64, 64), "bias": (128,)} for _ in range(9)],
    "stack": (3, 16, 64),
    "scale": (),
    "tail": (301,),
    "empty": (0, 4),
}
_STACKED = optax.contrib.MuonDimensionNumbers(1, 2)


def _tree(seed: int, dtype: str = "float32", scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    make = lambda shape: jnp.asarray(scale * rng.standard_normal(shape), dtype)  # noqa: E731
    return jax.tree.map(make, SHAPES, is_leaf=is_shape)


def _numbers(params: Any) -> Any:
    def of(path: Any, leaf: Any) -> Any:
        if leaf.ndim == 3:
            return _STACKED
        return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(of, params)


def _by_two_calls(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _by_two_programs(tx: Any) -> Any:
    """The same, compiled apart: in one program XLA may leave out the rounding of the update."""
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = update(grads, state, params)
        return apply(params, updates), state

    return step


def _train(
    tx: Any, step: Any, dtype: str = "float32", steps: int = 3, compiled: bool = True
) -> Any:
    params = _tree(0, dtype)
    state = tx.init(params)
    step = jax.jit(step) if compiled else step
    for i in range(steps):
        params, state = step(_tree(i + 1, dtype, 0.3), state, params)
    return params, state


_IS_GPU = jax.default_backend() == "gpu"
_NS = {"ns_dtype": "float32", "ns_precision": "highest"}
_NS_NAMES = ("shampoo", "mars_m")
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mars": (mars_optax.mars, {}),
    "amsgrad": (mars_optax.mars, {"amsgrad": True, "optimize_1d": True, "weight_decay": 0.1}),
    "no_clip": (mars_optax.mars, {"max_norm": None, "gamma": lambda count: 0.02 + 0.01 * count}),
    "schedules": (
        mars_optax.mars,
        {"learning_rate": lambda n: 0.1 / (1 + n), "weight_decay": lambda n: 0.1 / (1 + n)},
    ),
    "memory_free": (
        mars_optax.mars,
        {"keep_prev_grad": False, "max_norm": None, "second_moment": "gradient"},
    ),
    "bf16_state": (
        mars_optax.mars,
        {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16", "prev_grad_dtype": "bfloat16"},
    ),
    "float8": (mars_optax.mars, {"prev_grad_dtype": "float8_e4m3fn"}),
    "mask": (mars_optax.mars, {"mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)}),
    "lion": (mars_optax.mars_lion, {"weight_decay": 0.1}),
    "shampoo": (mars_optax.mars_shampoo, _NS),
    "mars_m": (mars_optax.mars_m, _NS),
}
# Programs differ in which sums are contracted to one rounding; Newton-Schulz amplifies that, and
# a sum near the middle between two numbers of a low storage precision goes to the one or the other.
_TOLERANCES = {"shampoo": 1e-4, "mars_m": 1e-4, "bf16_state": 1e-2, "float8": 1e-2}


# Their norms are those of another.
_ALIKE = ("schedules", "memory_free", "mask", "shampoo")


def _tolerance(name: str) -> float:
    # On CPUs both programs contract alike.
    return _TOLERANCES.get(name, 2e-6) if name in _NS_NAMES or _IS_GPU else 2e-6


def make(name: str, **kwargs: Any) -> Any:
    """The optimizer of one row of `VARIANTS`."""
    factory, options = VARIANTS[name]
    options = {"learning_rate": 0.05, "weight_dimension_numbers": _numbers, **options, **kwargs}
    return factory(**options)


class FusedStepTest(parameterized.TestCase):
    @parameterized.parameters(*VARIANTS)
    @interpreter.elsewhere()
    def test_kernels_make_the_parameters_and_state_of_two_calls(self, name: str):
        tx = make(name, implementation="xla")
        expected = _train(tx, lambda *args: _by_two_calls(tx, *args))
        tx = make(name, implementation="pallas")
        actual = _train(tx, lambda *args: mars_optax.fused_step(tx, *args))
        trees.assert_same_types(actual, expected)
        tolerance = _tolerance(name)
        trees.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    @parameterized.parameters(*(name for name in VARIANTS if name not in _ALIKE))
    @interpreter.elsewhere()
    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
    def test_on_one_device_kernels_take_the_norms_too(self, name: str):
        self.check_norms(name)

    @parameterized.parameters(*_ALIKE)
    @interpreter.elsewhere()
    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
    @pytest.mark.slow
    def test_on_one_device_kernels_take_the_norms_of_settings_alike(self, name: str):
        self.check_norms(name)

    def check_norms(self, name: str):
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        tx = make(name, implementation="xla", gamma=0.4)
        expected = _train(tx, lambda *args: _by_two_calls(tx, *args))
        tx = make(name, implementation="pallas", gamma=0.4)
        step = lambda *args: mars_optax.fused_step(tx, *args)  # noqa: E731
        actual = _train(tx, step)
        trees.assert_same_types(actual, expected)
        tolerance = _tolerance(name)
        trees.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        jaxpr = str(jax.make_jaxpr(step)(_tree(1), tx.init(_tree(0)), _tree(0)))
        # Of nine kernels eight share a call, and so do biases that are clipped; one for the stack.
        # The embedding ends within a block.
        options = VARIANTS[name][1]
        n_calls = 5 if "optimize_1d" in options else 3
        n_calls = 0 if options.get("max_norm", 1.0) is None else n_calls
        self.assertEqual(jaxpr.count("name=mars_norms"), n_calls)

    @parameterized.parameters("mars", "lion", "mars_m")
    @interpreter.elsewhere()
    def test_kernels_make_the_updates(self, name: str):
        tx = make(name, implementation="xla")
        expected = _train(tx, lambda *args: _by_two_calls(tx, *args))
        tx = make(name, implementation="pallas")
        actual = _train(tx, lambda *args: _by_two_calls(tx, *args))
        trees.assert_same_types(actual, expected)
        tolerance = _tolerance(name)
        trees.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    @interpreter.elsewhere()
    def test_bfloat16_parameters_are_rounded_as_by_two_calls(self):
        tx = make("mars", implementation="xla")
        expected = _train(tx, _by_two_programs(tx), "bfloat16", steps=1, compiled=False)
        tx = make("mars", implementation="pallas")
        actual = _train(tx, lambda *args: mars_optax.fused_step(tx, *args), "bfloat16", steps=1)
        trees.assert_same_types(actual, expected)
        # Units in the last place of bfloat16, of the update and of the sum, where the float32 sums
        # differ before they are rounded.
        trees.assert_close(actual, expected, rtol=2.0**-7, atol=1e-4)
        # The second moment is in float32, where sums differ in their last bits. What fills no block
        # is left to XLA, which on a GPU rounds the sum alone.
        low = [(x, y) for x, y in _pairs(actual, expected) if x.dtype == jnp.bfloat16]
        same = [
            np.mean(_in_blocks(x) == _in_blocks(y)) for x, y in low if x.size >= tiling.WARPGROUP
        ]
        self.assertGreater(min(same), 0.99)

    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
    def test_what_is_chosen_where_kernels_are_faster(self):
        """As on one Hopper GPU, with the interpreter in the place of the GPU."""
        tx = make("mars", implementation="xla")
        expected = _train(tx, lambda *args: _by_two_calls(tx, *args))
        tx = make("mars")
        with (
            interpreter.elsewhere(),
            mock.patch.object(execute, "kernels_are_faster", return_value=True),
        ):
            actual = _train(tx, lambda *args: mars_optax.fused_step(tx, *args))
            arguments = (_tree(1), tx.init(_tree(0)), _tree(0))
            jaxpr = jax.make_jaxpr(lambda *args: mars_optax.fused_step(tx, *args))(*arguments)
        trees.assert_same_types(actual, expected)
        trees.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
        # Eight of the nine biases share one kernel, all else is left to XLA.
        self.assertEqual(str(jaxpr).count("name=mars_step"), 1)

    @parameterized.parameters("mars_m", "shampoo")
    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
    def test_none_are_chosen_beside_newton_schulz(self, name: str):
        tx = make(name)
        step = lambda *args: mars_optax.fused_step(tx, *args)  # noqa: E731
        arguments = (_tree(1), tx.init(_tree(0)), _tree(0))
        with (
            interpreter.elsewhere(),
            mock.patch.object(execute, "kernels_are_faster", return_value=True),
        ):
            self.assertNotIn("name=mars_", str(jax.make_jaxpr(step)(*arguments)))
        trees.assert_equal(step(*arguments), _by_two_calls(tx, *arguments))

    @parameterized.parameters("mars", "lion", "mars_m")
    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
    def test_an_update_takes_the_norms_of_large_matrices_by_kernels(self, name: str):
        rng = np.random.default_rng(0)
        params, grads = (
            {k: jnp.asarray(rng.standard_normal((512, 256)), jnp.float32) for k in "ab"}
            for _ in range(2)
        )
        expected = make(name, implementation="xla")
        state = expected.init(params)
        tx = make(name)
        with (
            interpreter.elsewhere(),
            mock.patch.object(execute, "kernels_are_faster", return_value=True),
        ):
            jaxpr = str(jax.make_jaxpr(tx.update)(grads, state, params))
            actual = jax.jit(tx.update)(grads, state, params)
        # They share a call; the update is one fusion with what follows, by XLA.
        counts = tuple(jaxpr.count(f"name=mars_{what}") for what in ("norms", "step"))
        self.assertEqual(counts, (1, 0))
        expected = jax.jit(expected.update)(grads, state, params)
        # Newton-Schulz amplifies what the norms' sums round.
        trees.assert_close(actual, expected, rtol=2e-6, atol=1e-4 if name == "mars_m" else 2e-6)

    def test_those_without_an_implementation_take_none(self):
        params = {"a": jnp.ones((512, 256))}
        for tx, extra_args in (
            (mars_optax.mars_soap(0.1), {}),
            (mars_optax.variance_reduced(optax.scale_by_rms(), 0.1), {}),
            (mars_optax.storm_adamw(0.1, correction_clip=1.0), {"grad_fn": lambda params: params}),
        ):
            step = functools.partial(mars_optax.fused_step, tx, **extra_args)
            with (
                interpreter.elsewhere(),
                mock.patch.object(execute, "kernels_are_faster", return_value=True),
            ):
                jaxpr = jax.make_jaxpr(step)(params, tx.init(params), params)
            self.assertNotIn("name=mars_", str(jaxpr))

    def test_parameters_and_moments_are_written_over_what_they_were(self):
        tx, kernels = (
            mars_optax.mars(0.1, amsgrad=True, optimize_1d=True, implementation=implementation)
            for implementation in ("xla", "pallas")
        )
        grads, params = {"x": jnp.full((2, 3), 0.5)}, {"x": jnp.ones((2, 3))}
        _, state = tx.update(grads, tx.init(params), params)
        seen: list[execute.Leaf] = []
        run = execute.elementwise

        def by_xla(fn: Any, leaves: Any, scalars: Any, implementation: Any) -> Any:
            seen.extend(leaves)
            return run(fn, leaves, scalars, "xla")

        with mock.patch.object(execute, "elementwise", by_xla):
            mars_optax.fused_step(kernels, grads, state, params)
        (leaf,) = seen
        fields = (state.mu, state.nu, state.nu_max)
        for out, tree in enumerate((params, *fields)):
            np.testing.assert_array_equal(leaf.operands[leaf.aliases[out]], tree["x"])

    def test_by_default_it_is_two_calls_and_without_kernels(self):
        self.enter_context(mock.patch.object(execute, "kernels_are_faster", return_value=False))
        tx = make("mars")
        step = lambda *args: mars_optax.fused_step(tx, *args)  # noqa: E731
        arguments = (_tree(1), tx.init(_tree(0)), _tree(0))
        self.assertNotIn("mars_step", str(jax.make_jaxpr(step)(*arguments)))
        trees.assert_equal(step(*arguments), _by_two_calls(tx, *arguments))

    @parameterized.named_parameters(*registry.select())
    def test_every_transformation_has_it(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        state = tx.init(params)
        actual = mars_optax.fused_step(tx, entry.grads(), state, params)
        trees.assert_equal(actual, _by_two_calls(tx, entry.grads(), state, params))

    def test_optax_and_its_wrappers_have_it(self):
        inner = mars_optax.mars(0.1, implementation="xla")
        chain = optax.chain(optax.clip_by_global_norm(1.0), inner)
        for tx in (optax.adam(0.1), chain, optax.with_extra_args_support(optax.sgd(0.1))):
            params, grads = {"x": jnp.ones((2, 3))}, {"x": jnp.full((2, 3), 0.5)}
            actual = mars_optax.fused_step(tx, grads, tx.init(params), params)
            trees.assert_equal(actual, _by_two_calls(tx, grads, tx.init(params), params))

    def test_exact_mode_gets_its_function(self):
        tx = mars_optax.mars(0.1, correction="exact")
        params = {"x": jnp.ones((2, 3)), "b": jnp.ones(3)}
        grads = jax.tree.map(lambda p: 0.5 * p, params)
        grad_fn = lambda p: jax.tree.map(lambda x: 0.5 * x, p)  # noqa: E731
        state = tx.init(params)
        actual = mars_optax.fused_step(tx, grads, state, params, grad_fn=grad_fn)
        updates, new_state = tx.update(grads, state, params, grad_fn=grad_fn)
        trees.assert_equal(actual, (optax.apply_updates(params, updates), new_state))

    def test_no_parameters_is_an_error_that_says_so(self):
        tx = mars_optax.mars(0.1, weight_decay_1d=0.0)
        state = tx.init({"x": jnp.ones(3)})
        with self.assertRaisesRegex(ValueError, r"`params`: expected the parameters, got None"):
            mars_optax.fused_step(tx, {"x": jnp.ones(3)}, state, None)

    @interpreter.elsewhere()
    def test_parameters_and_state_are_donated(self):
        tx = make("mars", implementation="pallas")
        params = _tree(0)
        step = jax.jit(
            lambda grads, state, params: mars_optax.fused_step(tx, grads, state, params),
            donate_argnums=(1, 2),
        )
        first = step(_tree(1, scale=0.3), tx.init(params), params)
        second = _tree(2, scale=0.3)
        params, state = step(second, first[1], first[0])
        donated = [x for x in jax.tree.leaves(first) if x.ndim]
        self.assertTrue(all(x.is_deleted() for x in donated))
        self.assertFalse(second["embed"].is_deleted())
        by_xla = make("mars", implementation="xla")
        expected = _train(by_xla, lambda *args: _by_two_calls(by_xla, *args), steps=2)
        trees.assert_close((params, state), expected, rtol=2e-6, atol=2e-6)


def _in_blocks(x: jax.Array) -> np.ndarray:
    """The elements that kernels compute, flat."""
    return np.asarray(x).reshape(-1)[: x.size - x.size % tiling.WARPGROUP]


def _pairs(actual: Any, expected: Any) -> list[tuple[Any, Any]]:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return [(x, y) for x, y in pairs if x.size]


if __name__ == "__main__":
    absltest.main()
