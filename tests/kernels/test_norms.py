"""Squares of norms by kernels, against float64: sizes, rows, dtypes, values, transformations."""

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
from mars_optax._src.kernels import calls, tiling
from tests.support import interpreter, trees

_K = 0.475
_IS_GPU = jax.default_backend() == "gpu"


def _corrected(operands: Any, scalars: Any, dtype: Any) -> jax.Array:
    grad, prev = (x.astype(dtype) for x in operands)
    return grad + scalars[0] * (grad - prev)


def _leaf(
    shape: tuple[int, ...], axes: Any = None, dtypes: Any = ("float32",) * 2, seed: int = 0
) -> execute.NormLeaf:
    rng = np.random.default_rng([seed, *shape])
    operands = tuple(jnp.asarray(rng.standard_normal(shape), dtype) for dtype in dtypes)
    axes = tuple(range(len(shape))) if axes is None else axes
    return execute.NormLeaf(operands, (jnp.float32,), axes)


def _run(leaves: list[execute.NormLeaf], implementation: Any, fn: Any = _corrected) -> Any:
    def on(data: Any, k: Any) -> list[jax.Array]:
        mine = [dataclasses.replace(x, operands=y) for x, y in zip(leaves, data, strict=True)]
        return execute.squares(fn, mine, [k], implementation)

    return jax.jit(on)([x.operands for x in leaves], jnp.float32(_K))


def _oracle(leaf: execute.NormLeaf) -> np.ndarray:
    grad, prev = (np.asarray(x, np.float64) for x in leaf.operands)
    return np.sum((grad + _K * (grad - prev)) ** 2, axis=leaf.axes, keepdims=True)


def _calls(leaves: list[execute.NormLeaf], implementation: Any) -> int:
    return str(jax.make_jaxpr(lambda: _run(leaves, implementation))()).count("name=mars_norms")


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="kernels need JAX 0.10")
class NormsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # As on one device, with the interpreter where that is no Hopper GPU.
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        self.enter_context(interpreter.elsewhere())

    def check(self, leaves: list[execute.NormLeaf], count: int, rtol: float = 1e-6):
        self.assertEqual(_calls(leaves, "pallas"), count)
        expected = [_oracle(leaf) for leaf in leaves]
        is_all = all(calls.tiling_of_norms(leaf) for leaf in leaves)
        # What kernels do is not done by XLA; a GPU's program has both.
        by_xla = (
            mock.Mock(side_effect=AssertionError)
            if is_all and not _IS_GPU
            else execute._squares_by_xla
        )
        with mock.patch.object(execute, "_squares_by_xla", by_xla):
            actual = _run(leaves, "pallas")
        self.assertEqual([x.dtype for x in actual], [jnp.float32] * len(leaves))
        self.assertEqual([x.shape for x in actual], [x.shape for x in expected])
        trees.assert_close(actual, expected, rtol=rtol, atol=0)

    @parameterized.parameters(
        ((128,), None),  # one block, and programs without any
        ((2, 64), None),
        ((1031, 128), None),  # programs with one block and with two
        ((50, 2560), None),
        ((3, 1024), (1,)),  # rows of blocks
        ((3, 16, 64), (1, 2)),
        ((2, 3, 16, 8), (2, 3)),
        ((300, 128), (1,)),  # more rows than programs for a leaf
    )
    def test_sizes_and_rows(self, shape: tuple[int, ...], axes: Any):
        self.check([_leaf(shape, axes)], 1)

    @parameterized.parameters(
        ((7,), None),  # no block
        ((3, 100), (1,)),  # rows that end within a block
        ((16, 4, 64), (0, 2)),  # matrices that are not contiguous
        ((16, 64), (0,)),
        ((1600, 3), None),  # blocks and a rest
        ((), None),
        ((0, 4), None),
    )
    def test_what_blocks_do_not_fill_is_left_to_xla(self, shape: tuple[int, ...], axes: Any):
        self.check([_leaf(shape, axes)], 0)

    def test_leaves_of_a_kind_share_a_call_and_keep_their_order(self):
        leaves = [_leaf((8, 128), seed=i) for i in range(tiling.GROUP + 1)]
        leaves.insert(2, _leaf((4, 8, 32), (1, 2)))
        leaves.insert(5, _leaf((1024,), dtypes=("bfloat16", "float32")))
        leaves.insert(0, _leaf((5,)))
        self.check(leaves, 4)

    @parameterized.parameters("bfloat16", "float16")
    def test_low_precision_is_widened(self, dtype: str):
        self.check([_leaf((8, 128), dtypes=(dtype, "float32"))], 1)
        self.check([_leaf((8, 128), dtypes=("float32", dtype))], 1)
        self.check([_leaf((8, 128), dtypes=(dtype, dtype))], 1)

    def test_other_dtypes_are_left_to_xla(self):
        leaf = _leaf((8, 128))
        with trees.float64():
            wide = dataclasses.replace(leaf, out_dtypes=(jnp.dtype("float64"),))
            self.assertEqual(_calls([wide], "pallas"), 0)
            (actual,) = _run([wide], "pallas")
            self.assertEqual(actual.dtype, jnp.float64)
            # The coefficient is a float32 here.
            trees.assert_close(actual, _oracle(leaf), rtol=1e-7, atol=0)
            self.assertEqual(_calls([_leaf((8, 128), dtypes=("float64", "float32"))], "pallas"), 0)

    @parameterized.parameters(np.nan, np.inf, 1e30)
    def test_what_is_not_finite_stays_in_its_matrix(self, value: float):
        first, second = _leaf((2, 8, 128), (1, 2)), _leaf((8, 128), seed=1)
        grad = first.operands[0].at[1, 3, 5].set(value)
        first = dataclasses.replace(first, operands=(grad, first.operands[1]))
        actual = _run([first, second], "pallas")
        np.testing.assert_allclose(actual[0][0], _oracle(first)[0], rtol=1e-6)
        self.assertFalse(np.isfinite(actual[0][1]).any())
        np.testing.assert_allclose(actual[1], _oracle(second), rtol=1e-6)

    def test_batches_and_derivatives_are_those_of_xla(self):
        leaf = _leaf((8, 128))

        def by(implementation: Any) -> Any:
            def norm(grad: jax.Array, k: Any) -> jax.Array:
                mine = dataclasses.replace(leaf, operands=(grad, leaf.operands[1]))
                (result,) = execute.squares(_corrected, [mine], [k], implementation)
                return jnp.sum(result)

            grad, k = leaf.operands[0], jnp.float32(_K)
            batch = jnp.stack([grad, 2 * grad, -grad])
            return (
                jax.jit(jax.grad(norm, argnums=(0, 1)))(grad, k),
                jax.jit(jax.vmap(norm, in_axes=(0, None)))(batch, k),
                jax.jit(jax.vmap(norm, in_axes=(None, 0)))(grad, jnp.asarray([0.0, 0.5])),
            )

        trees.assert_close(by("pallas"), by("xla"), rtol=1e-6, atol=1e-6)

    def test_by_default_large_leaves_with_one_norm(self):
        large = (tiling.SMALL // 128 + 16, 128)
        others = [(tiling.SMALL // 128, 128), (tiling.SMALL // 128 + 8, 128), (65537,)]
        leaves = [
            _leaf(others[0]),
            _leaf(large),
            _leaf((2, *large), (1, 2)),
            *map(_leaf, others[1:]),
        ]
        with mock.patch.object(execute, "kernels_are_faster", return_value=False):
            self.assertEqual(_calls(leaves, None), 0)
        with mock.patch.object(execute, "kernels_are_faster", return_value=True):
            self.assertEqual(_calls(leaves, None), 1)
            self.assertEqual(_calls([leaves[0], *leaves[2:]], None), 0)
        self.assertEqual(_calls(leaves, "xla"), 0)

    def test_programs_have_as_many_blocks_each_where_they_can(self):
        self.assertEqual(calls.programs_per_row(1152, 128), 128)
        self.assertEqual(calls.programs_per_row(864, 128), 108)
        self.assertEqual(calls.programs_per_row(3, 1024), 3)
        # A prime has no such number.
        self.assertEqual(calls.programs_per_row(1031, 1024), 1024)
        self.assertEqual(calls.programs_per_row(5, 0), 1)

    def test_programs_of_a_call_are_divided_among_its_leaves(self):
        # Before JAX 0.10 it cannot be imported.
        from mars_optax._src.kernels import mosaic_gpu

        leaves = [_leaf((257, 128), seed=i) for i in range(tiling.GROUP + 1)]
        leaves.append(_leaf((2, 256, 128), (1, 2)))
        with mock.patch.object(
            mosaic_gpu, "partial_squares", wraps=mosaic_gpu.partial_squares
        ) as sums:
            self.check(leaves, 3)
        counts = [call.kwargs["per_row"] for call in sums.call_args_list]
        # 1024 programs for eight leaves, for one of 257 blocks, and for two rows of 16 blocks.
        self.assertEqual(set(counts), {128, 257, 16})

    @parameterized.parameters(None, "pallas")
    def test_meshes_with_types_are_left_to_xla(self, implementation: Any):
        leaf = _leaf((1024, 256))
        pays = mock.patch.object(mesh, "is_one_device", return_value=True)
        device = mock.Mock(compute_capability="9.0")
        for kind in (AxisType.Explicit, AxisType.Auto):
            devices = jax.make_mesh((1,), ("x",), axis_types=(kind,), devices=jax.devices()[:1])
            for spec in (P(), P("x"), P(None, "x")):
                put = jax.device_put(leaf.operands, NamedSharding(devices, spec))
                placed = dataclasses.replace(leaf, operands=put)
                with pays:
                    (actual,) = _run([placed], implementation)
                np.testing.assert_allclose(actual, _oracle(leaf), rtol=1e-6)
                with (
                    mock.patch.object(jax, "default_backend", return_value="gpu"),
                    mock.patch.object(jax, "devices", return_value=[device]),
                    mock.patch.object(jax, "__version_info__", (0, 11, 2)),
                ):
                    self.assertEqual(_calls([placed], implementation), kind == AxisType.Auto)

    def test_a_shard_map_on_one_device_is_left_to_xla(self):
        leaf = _leaf((1024, 256))
        devices = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
        mapped = jax.shard_map(
            lambda data: _run(_with([leaf], [data]), "pallas")[0],
            mesh=devices,
            in_specs=P(),
            out_specs=P(),
        )
        actual = jax.jit(mapped)(leaf.operands)
        np.testing.assert_allclose(actual, _oracle(leaf), rtol=1e-6)

    def test_where_no_kernel_can_run_it_is_left_to_xla(self):
        with mock.patch.object(execute, "can_run", return_value=False):
            self.assertEqual(_calls([_leaf((8, 128))], "pallas"), 0)

    def test_what_pays_is_asked_with_all_operands(self):
        leaves = [_leaf((8, 128)), _leaf((4, 128))]
        with mock.patch.object(execute, "kernels_are_faster", return_value=False) as pays:
            execute.squares(_corrected, leaves, [_K], None)
        (seen,), _ = pays.call_args
        self.assertEqual(list(map(id, seen)), [id(x) for y in leaves for x in y.operands])

    def test_places_beyond_32_bits_and_rows_beyond_a_grid_are_left_to_xla(self):
        struct = jax.ShapeDtypeStruct
        for shape, axes, fits in (
            ((2**20, 2**10), (0, 1), True),
            ((2**20, 2**11), (0, 1), False),
            ((65535, 128), (1,), True),
            ((65536, 128), (1,), False),
        ):
            leaf = execute.NormLeaf((struct(shape, jnp.float32),) * 2, (jnp.float32,), axes)
            self.assertEqual(calls.tiling_of_norms(leaf) is not None, fits, shape)

    def test_on_several_devices_it_is_left_to_xla(self):
        with mock.patch.object(mesh, "is_one_device", return_value=False):
            self.assertEqual(_calls([_leaf((8, 128))], "pallas"), 0)

    def test_a_program_for_a_gpu_has_a_kernel_for_each_kind(self):
        leaves = [_leaf((8, 256), seed=i) for i in range(2 * tiling.GROUP)] + [_leaf((8, 512))]
        with interpreter.never():
            exported = jax.export.export(
                jax.jit(lambda data: _run(_with(leaves, data), "pallas")), platforms=["cuda"]
            )([x.operands for x in leaves])
        text = exported.mlir_module()
        # The first two of three calls are the same function, which is lowered once.
        self.assertEqual(text.count("mosaic_gpu_v2"), 2)

    def test_a_program_for_others_has_none(self):
        leaves = [_leaf((8, 256))]
        for platform in ("cpu", "tpu"):
            with interpreter.never():
                exported = jax.export.export(
                    jax.jit(lambda data: _run(_with(leaves, data), "pallas")),
                    platforms=[platform],
                )([x.operands for x in leaves])
            self.assertNotIn("mosaic", exported.mlir_module())
            self.assertNotIn("tpu_custom_call", exported.mlir_module())


class StepTest(absltest.TestCase):
    """What a step takes norms of."""

    def test_on_gpus_those_read_one_by_one_share_no_array(self):
        params = {"x": jnp.ones((2, 3)), "y": jnp.ones((3, 3))}
        for tx, is_apart in (
            (mars_optax.scale_by_mars(), False),
            (mars_optax.scale_by_mars_m(), True),
        ):
            for is_for_gpus in (False, True):
                with mock.patch.object(mesh, "is_for_gpus", return_value=is_for_gpus):
                    # A function of its own: what was traced before is kept.
                    update = functools.partial(tx.update)
                    program = jax.make_jaxpr(update)(params, tx.init(params), params)
                barriers = [x for x in program.eqns if x.primitive.name == "optimization_barrier"]
                norms = [x for x in barriers if {y.aval.size for y in x.invars} == {1}]
                self.assertEqual([len(x.invars) for x in norms], [2] * (is_apart and is_for_gpus))

    def _leaf_of(self, tx: Any, grads: Any, params: Any) -> execute.NormLeaf:
        with mock.patch.object(execute, "squares", wraps=execute.squares) as squares:
            tx.update(grads, tx.init(params), params)
        (leaf,) = squares.call_args.args[1]
        return leaf

    def test_the_arithmetic_is_that_of_the_widest_array(self):
        with trees.float64():
            tx = mars_optax.scale_by_mars(mu_dtype="float64")
            grads = {"x": jnp.ones((2, 3), jnp.float32)}
            self.assertEqual(self._leaf_of(tx, grads, grads).out_dtypes, (jnp.float64,))
            tx = mars_optax.scale_by_mars(nu_dtype="float32", mu_dtype="float32")
            self.assertEqual(self._leaf_of(tx, grads, grads).out_dtypes, (jnp.float32,))

    def test_axes_are_in_order_and_not_negative(self):
        numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=1)
        tx = mars_optax.scale_by_mars(weight_dimension_numbers={"x": numbers})
        grads = {"x": jnp.ones((5, 2, 3))}
        leaf = self._leaf_of(tx, grads, grads)
        self.assertEqual((leaf.axes, leaf.rows), ((1, 2), 5))


def _with(leaves: list[execute.NormLeaf], data: Any) -> list[execute.NormLeaf]:
    return [dataclasses.replace(x, operands=y) for x, y in zip(leaves, data, strict=True)]


if __name__ == "__main__":
    absltest.main()
