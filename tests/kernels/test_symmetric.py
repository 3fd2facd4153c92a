"""Symmetric products by a kernel, against float64: blocks, ends, transposes, programs for GPUs."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mars_optax
from mars_optax._src import execute, mesh
from mars_optax._src.leaf import newton_schulz
from tests.support import interpreter, trees

if jax.__version_info__ < (0, 10):
    pytest.skip("kernels need JAX 0.10", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from mars_optax._src.kernels import calls, symmetric

_AUTO = AxisType.Auto
_IS_GPU = jax.default_backend() == "gpu"
_NUMBERS = (3.4445, -4.7750, 2.0315)
# Two blocks in turn, or one shared, of three programs.
_IN_TURN = symmetric.Tuning(block=64, stages=2, programs=3)
_SHARED = symmetric.Tuning(groups=1, parts=2, stages=3, programs=3)
# Of X, and of X X^T.
_PADDED = {(3, 64, 128), (3, 64, 64)}
_BY_THREE = symmetric.Tuning(block=192, groups=1, parts=3, stages=3, programs=3)
_needs_the_interpreter = pytest.mark.skipif(
    not (_IS_GPU or hasattr(plgpu, "InterpretGPUParams")),
    reason="before JAX 0.11 Pallas interprets no transposed references",
)


def _interpreter() -> Any:
    # What is not written is NaN, and a read of it is no number either.
    return False if _IS_GPU else plgpu.InterpretGPUParams(uninitialized_memory="nan")


def _stack(shape: tuple[int, ...], dtype: str = "bfloat16", *, is_symmetric: bool) -> jax.Array:
    values = np.random.default_rng(shape).standard_normal(shape) / np.sqrt(shape[-1])
    if is_symmetric:
        values = (values + values.swapaxes(1, 2)) / 2
    return jnp.asarray(values, dtype)


class ProductTest(parameterized.TestCase):
    def check(
        self,
        shape: tuple[int, int, int],
        tuning: symmetric.Tuning,
        numbers: tuple[float, float, float] | None = None,
        dtype: str = "bfloat16",
    ):
        x = _stack(shape, dtype, is_symmetric=numbers is not None)
        coefficients = None if numbers is None else jnp.asarray(numbers, jnp.float32)
        run = jax.jit(lambda x: symmetric.product(x, coefficients, tuning, _interpreter()))
        actual = run(x)
        wide = np.asarray(x, np.float64)
        expected = wide @ wide.swapaxes(1, 2)
        if numbers is not None:
            a, b, c = (float(np.float32(number)) for number in numbers)
            expected = a * np.eye(shape[1]) + b * wide + c * expected
        self.assertEqual(actual.dtype, dtype)
        # Half a unit of the last place, and what sums in float32 lose.
        rtol = float(jnp.finfo(dtype).eps) / 2
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol, atol=1e-5)
        for below in range(0, shape[1], tuning.block):
            for column in range(0, below, tuning.block):
                rows, columns = (slice(at, at + tuning.block) for at in (below, column))
                np.testing.assert_array_equal(
                    actual[:, rows, columns], actual[:, columns, rows].swapaxes(1, 2)
                )

    @parameterized.product(
        case=[((2, 192, 128), _IN_TURN), ((2, 256, 192), _SHARED)], has_numbers=[False, True]
    )
    @_needs_the_interpreter
    def test_blocks_and_their_transposes(self, case: Any, has_numbers: bool):
        (batch, m, n), tuning = case
        if has_numbers:
            self.check((batch, m, m), tuning, _NUMBERS)
        else:
            self.check((batch, m, n), tuning)

    @parameterized.parameters(False, True)
    @_needs_the_interpreter
    def test_blocks_over_the_ends(self, has_numbers: bool):
        numbers = _NUMBERS if has_numbers else None
        # A warpgroup of the second block has no rows, in the last case two.
        self.check((2, 192, 192), _SHARED, numbers)
        self.check((2, 192, 192), dataclasses.replace(_IN_TURN, block=128), numbers)
        self.check((1, 256, 256), _BY_THREE, numbers)

    @_needs_the_interpreter
    def test_programs_with_one_block_and_slots_that_stay_empty(self):
        self.check((4, 64, 64), dataclasses.replace(_IN_TURN, stages=4))
        self.check((1, 64, 64), dataclasses.replace(_IN_TURN, stages=4), _NUMBERS)

    @_needs_the_interpreter
    def test_float16(self):
        self.check((1, 128, 256), _IN_TURN, dtype="float16")

    @parameterized.product(
        shape=[(12, 768, 3072), (48, 1600, 6400)],
        tuning=[symmetric.Tuning(), dataclasses.replace(_SHARED, stages=5), _BY_THREE],
    )
    def test_it_lowers_for_a_gpu(self, shape: Any, tuning: symmetric.Tuning):
        def both(x: jax.Array, coefficients: jax.Array) -> jax.Array:
            return symmetric.product(symmetric.product(x, None, tuning), coefficients, tuning)

        structs = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((3,), "float32")
        text = jax.export.export(jax.jit(both), platforms=["cuda"])(*structs).mlir_module()
        self.assertEqual(text.count("mosaic_gpu_v2"), 2)

    def test_it_lowers_with_64_bit_types(self):
        table = np.asarray(newton_schulz.PRESETS["quintic"], np.float32)
        iterated = functools.partial(newton_schulz.iterated, steps=2)
        with interpreter.never(), trees.float64():
            run = jax.jit(lambda x: calls.newton_schulz(iterated, x, table, interpret=False))
            struct = jax.ShapeDtypeStruct((2, 192, 256), jnp.bfloat16)
            text = jax.export.export(run, platforms=["cuda"])(struct).mlir_module()
        # Once, for all steps.
        self.assertEqual(text.count("mosaic_gpu_v2"), 2)

    def test_every_block_on_or_below_the_diagonal_once(self):
        indices = jnp.arange(40 * 41 // 2)
        for blocks in range(1, 41):
            places = symmetric.place(indices, jnp.full_like(indices, blocks))
            rows, columns = (np.asarray(x)[: blocks * (blocks + 1) // 2].tolist() for x in places)
            expected = [(i, j) for i in range(blocks) for j in range(i + 1)]
            self.assertCountEqual(zip(rows, columns, strict=True), expected)

    def test_registers_are_no_more_than_there_are(self):
        for warpgroups in range(2, 8):
            threads = 128 * (warpgroups + 1)
            launched = 65536 // threads // 8 * 8 * threads
            registers = symmetric._registers(warpgroups)
            self.assertLessEqual(128 * (warpgroups * registers + symmetric._LOADER), launched)
            self.assertGreater(128 * (warpgroups * (registers + 8) + symmetric._LOADER), launched)


def _by_xla(x: jax.Array, numbers: Any, *, tuning: Any, interpret: Any) -> jax.Array:
    """What a kernel computes."""
    del tuning, interpret
    wide = x.astype(jnp.float32)
    product = wide @ wide.swapaxes(1, 2)
    if numbers is not None:
        product = numbers[0] * jnp.eye(x.shape[1]) + numbers[1] * wide + numbers[2] * product
    return product.astype(x.dtype)


class IteratedTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # What was traced with a stand-in must not be found again.
        self.addCleanup(symmetric.polynomial.cache_clear)
        symmetric.polynomial.cache_clear()

    def test_steps_are_those_of_xla(self):
        table = jnp.asarray(newton_schulz.PRESETS["polar_express"], jnp.float32)
        # Of sizes that are padded.
        x = jnp.asarray(_stack((3, 40, 72), is_symmetric=False), jnp.float32)
        x = x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
        with mock.patch.object(symmetric, "_compiled", side_effect=_by_xla) as product:
            for steps in (0, 3, len(table) + 4):
                iterated = functools.partial(newton_schulz.iterated, steps=steps)
                actual = calls.newton_schulz(iterated, x, table, interpret=True)
                np.testing.assert_allclose(actual, iterated(x, table), rtol=2e-4, atol=2e-5)
        self.assertEqual({call.args[0].shape for call in product.call_args_list}, _PADDED)

    def test_derivatives_and_batches_are_those_of_xla(self):
        table = jnp.asarray(newton_schulz.PRESETS["quintic"], jnp.float32)
        x = jnp.asarray(_stack((2, 64, 64), is_symmetric=False), jnp.float32) / 8
        iterated = functools.partial(newton_schulz.iterated, steps=2)

        def kernels(x: jax.Array, table: jax.Array) -> jax.Array:
            return calls.newton_schulz(iterated, x, table, interpret=True)

        def gradient(run: Any) -> Any:
            return jax.grad(lambda x, table: jnp.sum(run(x, table) ** 3), argnums=(0, 1))

        nothing = lambda *args, **how: jnp.nan * _by_xla(*args, **how)  # noqa: E731
        with mock.patch.object(symmetric, "_compiled", nothing):
            self.assertTrue(jnp.all(jnp.isnan(kernels(x, table))))
            actual = gradient(kernels)(x, table)
            batched = jax.vmap(kernels, in_axes=(0, None))(jnp.stack([x, -x]), table)
        for one, other in zip(actual, gradient(iterated)(x, table), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(batched[1], iterated(-x, table))

    @pytest.mark.skipif(_IS_GPU, reason="there kernels run")
    def test_kernels_that_cannot_run_are_refused(self):
        x = jnp.eye(64)
        run = functools.partial(mars_optax.orthogonalize, implementation="pallas")
        self.enter_context(interpreter.never())
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        for wrap in (lambda run: run, jax.jit):
            with self.assertRaisesRegex(NotImplementedError, "`implementation`.*for cpu"):
                wrap(run)(x)
        # What they do not know is XLA's.
        run(x, dtype="float32")
        self.enter_context(mock.patch.object(execute, "_refusal", return_value="a reason"))
        with self.assertRaisesRegex(NotImplementedError, "a reason"):
            run(x)

    @_needs_the_interpreter
    def test_a_step_of_kernels(self):
        table = jnp.asarray(newton_schulz.PRESETS["quintic"], jnp.float32)
        x = _stack((2, 128, 192), is_symmetric=False)
        x = (x / 8).astype(x.dtype)
        iterated = functools.partial(newton_schulz.iterated, steps=1)
        run = jax.jit(lambda x: calls.newton_schulz(iterated, x, table, interpret=not _IS_GPU))
        wide = np.asarray(x, np.float64)
        gram = wide @ wide.swapaxes(1, 2)
        a, b, c = np.asarray(table[0], np.float64)
        expected = (a * np.eye(128) + b * gram + c * gram @ gram) @ wide
        # Both factors are rounded to 8 bits before they are multiplied.
        np.testing.assert_allclose(np.asarray(run(x), np.float64), expected, rtol=0.03, atol=3e-3)


class DoorTest(parameterized.TestCase):
    """What is left to XLA, and what a device's own matrices are."""

    def setUp(self):
        super().setUp()
        self.enter_context(interpreter.elsewhere())
        self.addCleanup(symmetric.polynomial.cache_clear)
        symmetric.polynomial.cache_clear()
        if not _IS_GPU:
            # What a kernel computes, on any version.
            self.enter_context(mock.patch.object(symmetric, "_compiled", _by_xla))
            self.enter_context(mock.patch.object(calls, "_INTERPRETS", (0,)))

    def has_kernels(self, shape: tuple[int, ...], dtype: str = "bfloat16", **options: Any) -> bool:
        """Whether kernels make the products of the momentum of one leaf of that shape."""
        params = {"x": jnp.zeros(shape)}
        dims = optax.contrib.MuonDimensionNumbers(-2, -1)
        options = {"weight_dimension_numbers": dims, "ns_dtype": dtype, **options}
        tx = mars_optax.scale_by_mars_m(**options)
        state = jax.eval_shape(tx.init, params)
        with mock.patch.object(symmetric, "_compiled", side_effect=_by_xla) as product:
            symmetric.polynomial.cache_clear()
            jax.eval_shape(tx.update, params, state, params)
        return product.called

    @parameterized.parameters(
        (None, "bfloat16", (16, 640, 576), True),
        (None, "bfloat16", (16, 640, 575), False),
        (None, "float32", (16, 640, 576), False),
        # All at once without kernels, and more padding than is worth it.
        (None, "bfloat16", (10, 640, 576), False),
        (None, "bfloat16", (16, 640, 600), False),
        (None, "bfloat16", (16, 704, 636), True),
        ("xla", "bfloat16", (16, 640, 576), False),
        ("pallas", "bfloat16", (1, 40, 48), True),
        ("pallas", "float16", (1, 40, 48), True),
        ("pallas", "bfloat16", (1, 31, 48), False),
        ("pallas", "float32", (1, 40, 48), False),
    )
    def test_kernels_where_they_are_faster_or_asked_for(
        self, implementation: Any, dtype: str, shape: tuple[int, ...], expected: bool
    ):
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        faster = mock.patch.object(execute, "kernels_are_faster", return_value=True)
        with faster:
            actual = self.has_kernels(shape, dtype, implementation=implementation)
        self.assertEqual(actual, expected)
        with mock.patch.object(execute, "kernels_are_faster", return_value=False):
            actual = self.has_kernels(shape, dtype, implementation=implementation)
        self.assertEqual(actual, expected and implementation is not None)

    def test_what_no_kernel_knows_is_by_xla(self):
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        self.assertTrue(self.has_kernels((64, 64), implementation="pallas"))
        self.assertFalse(
            self.has_kernels((64, 64), implementation="pallas", ns_precision="highest")
        )
        self.assertFalse(
            self.has_kernels((64, 64), implementation="pallas", ns_steps=jnp.asarray(2))
        )

    def test_beside_automatic_axes_it_is_left_to_xla(self):
        if _IS_GPU or jax.device_count() < 4:
            self.skipTest("needs four devices that run what stands for a kernel")
        on = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(_AUTO,) * 2)

        def direction(x: jax.Array) -> jax.Array:
            return mars_optax.orthogonalize(x, implementation="pallas")

        seen = []
        for names in ({"x", "y"}, {"x"}):
            how: Any = {"in_specs": P(), "out_specs": P(), "check_vma": False}
            run = jax.shard_map(direction, mesh=on, axis_names=names, **how)
            with mock.patch.object(symmetric, "_compiled", side_effect=_by_xla) as product:
                symmetric.polynomial.cache_clear()
                jax.eval_shape(jax.jit(run), jnp.ones((64, 64)))
            seen.append(product.called)
        self.assertEqual(seen, [True, False])

    def test_by_default_it_is_asked_of_what_a_device_has(self):
        if jax.device_count() < 2:
            self.skipTest("needs two devices")
        on = jax.make_mesh((2,), ("x",), axis_types=(_AUTO,), devices=jax.devices()[:2])
        x = jax.device_put(jnp.ones((256, 256)), NamedSharding(on, P("x")))
        with mock.patch.object(execute, "kernels_are_faster", return_value=False) as asked:
            jax.jit(mars_optax.orthogonalize).lower(x).compile()
        self.assertIn((True,), [call.args[1:] for call in asked.call_args_list])

    @parameterized.parameters((1408, 128), (1472, 192))
    def test_large_blocks_of_large_matrices(self, rows: int, block: int):
        with mock.patch.object(symmetric, "_compiled", side_effect=_by_xla) as product:
            jax.eval_shape(symmetric.polynomial(True), jnp.ones((1, rows, rows)), jnp.ones(3))
        blocks = [call.kwargs["tuning"].block for call in product.call_args_list]
        self.assertEqual(blocks, [block, block])

    def test_orthogonalize_takes_what_it_is_told(self):
        with self.assertRaisesRegex(ValueError, "`implementation`: expected .*got 'triton'"):
            mars_optax.orthogonalize(jnp.ones((2, 2)), implementation="triton")  # type: ignore[arg-type]
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        self.enter_context(mock.patch.object(execute, "kernels_are_faster", return_value=True))
        for implementation in ("xla", None):
            with mock.patch.object(symmetric, "_compiled", side_effect=_by_xla) as product:
                symmetric.polynomial.cache_clear()
                run = functools.partial(mars_optax.orthogonalize, implementation=implementation)
                jax.eval_shape(run, jnp.ones((4096, 4096)))
            self.assertEqual(product.called, implementation is None)

    @parameterized.product(kind=["automatic", "explicit", "shard_map"], spec=[("x", None), ()])
    def test_on_a_mesh_a_device_works_on_matrices_of_its_own(self, kind: str, spec: Any):
        if _IS_GPU or jax.device_count() < 4:
            self.skipTest("needs four devices that run what stands for a kernel")
        types = AxisType.Explicit if kind == "explicit" else AxisType.Auto
        on = jax.make_mesh((4,), ("x",), axis_types=(types,), devices=jax.devices()[:4])
        params = {
            "a": jnp.asarray(np.random.default_rng(0).standard_normal((8, 256, 320)), jnp.float32),
            "b": jnp.asarray(np.random.default_rng(1).standard_normal((320, 256)), jnp.float32),
        }
        numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
        specs = {"a": P(None, *spec), "b": P(*spec)}

        def direction(implementation: str, grads: Any) -> Any:
            tx = mars_optax.scale_by_mars_m(
                implementation=implementation, weight_dimension_numbers=numbers, ns_steps=2
            )
            more = {"param_specs": specs} if kind == "shard_map" else {}
            # Made inside, the state is a device's own.
            return tx.update(grads, tx.init(grads), grads, **more)[0]

        def run(implementation: str) -> Any:
            fn = functools.partial(direction, implementation)
            with jax.set_mesh(on):
                placed = jax.tree.map(
                    lambda x, to: jax.device_put(x, NamedSharding(on, to)), params, specs
                )
                if kind == "shard_map":
                    how: Any = {"in_specs": (specs,), "out_specs": specs, "check_vma": False}
                    fn = jax.shard_map(fn, mesh=on, **how)
                return jax.jit(fn)(placed)

        with mock.patch.object(symmetric, "_compiled", side_effect=_by_xla) as product:
            symmetric.polynomial.cache_clear()
            actual = run("pallas")
        # No device has all ten matrices; in a shard_map each has its leaves whole.
        self.assertTrue(product.called)
        slices = {call.args[0].shape[0] for call in product.call_args_list}
        self.assertLess(max(slices), 10)
        expected = run("xla")
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            self.assertEqual(one.sharding, other.sharding)
            # XLA rounds the square of A to bfloat16, kernels do not.
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05)


if __name__ == "__main__":
    absltest.main()
