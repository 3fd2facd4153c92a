"""Stacks made by a kernel of the leaves themselves: turned matrices, and what is left to XLA."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

from mars_optax._src import execute, mesh, orthogonalize, partition
from tests.support import interpreter, trees

if jax.__version_info__ < (0, 10):
    pytest.skip("kernels need JAX 0.10", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from mars_optax._src.kernels import gather

_IS_GPU = jax.default_backend() == "gpu"


def _matrices(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def _by_xla(
    leaves: Any, divisors: jax.Array, shape: Any, dtype: Any, interpret: Any = False
) -> jax.Array:
    """What the kernel writes."""
    del interpret
    turned = [x if x.shape == tuple(shape) else x.T for x in leaves]
    return (jnp.stack(turned) / divisors[:, None, None]).astype(dtype)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels are taken by default from JAX 0.11 on"
)
class KernelTest(parameterized.TestCase):
    @parameterized.parameters(
        ("bfloat16", (64, 64), [(64, 64)]),
        ("bfloat16", (64, 192), [(192, 64), (64, 192), (192, 64)]),
        ("float16", (128, 192), [(128, 192), (192, 128)]),
    )
    def test_a_stack(self, dtype: str, shape: tuple[int, int], shapes: list[tuple[int, int]]):
        leaves, divisors = _matrices(*shapes), 1.5 + jnp.arange(len(shapes))
        # What is not written is NaN.
        how = False if _IS_GPU else plgpu.InterpretGPUParams(uninitialized_memory="nan")
        run = jax.jit(lambda *args: gather.stacked(*args, shape, dtype, how))
        actual = run(leaves, divisors)
        self.assertEqual(actual.dtype, dtype)
        np.testing.assert_array_equal(actual, _by_xla(leaves, divisors, shape, dtype))

    @parameterized.parameters(False, True)
    def test_it_lowers_for_a_gpu(self, has_64_bits: bool):
        def run(*args: Any) -> jax.Array:
            return gather.stacked(*args, (128, 256), "bfloat16")

        struct = jax.ShapeDtypeStruct
        leaves = [struct(shape, jnp.float32) for shape in ((128, 256), (256, 128))]
        with trees.float64() if has_64_bits else mock.MagicMock():
            lowered = jax.export.export(jax.jit(run), platforms=["cuda"])
            text = lowered(leaves, struct((2,), jnp.float32)).mlir_module()
        self.assertEqual(text.count("mosaic_gpu_v2"), 1)


class DoorTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(interpreter.always())
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        faster = mock.patch.object(execute, "kernels_are_faster", side_effect=self.are_faster)
        self.enter_context(faster)
        self.is_faster = True

    def are_faster(self, operands: Any, is_local: bool = False) -> bool:
        del is_local
        return self.is_faster and all(isinstance(x, jax.core.Tracer) for x in operands)

    def run_both(self, run: Any, *args: Any) -> tuple[Any, Any, int]:
        """The results with a kernel and without, and how often there was one."""
        results, calls = [], 0
        for self.is_faster in (True, False):
            with mock.patch.object(gather, "stacked", side_effect=_by_xla) as stacked:
                results.append(jax.jit(lambda *args: run(*args))(*args))
                calls += stacked.call_count
        return *results, calls

    @parameterized.named_parameters(
        ("wide_and_tall", [(64, 128), (128, 64), (64, 128)], {}, 1),
        ("in_two_stacks", [(64, 64), (64, 128), (64, 64), (128, 64)], {}, 2),
        ("alone", [(64, 64), (64, 128)], {}, 0),
        ("of_other_sizes", [(64, 96), (96, 64)], {}, 0),
        ("not_rounded", [(64, 64)] * 2, {"dtype": "float32"}, 0),
        ("by_xla", [(64, 64)] * 2, {"implementation": "xla"}, 0),
        ("of_several_axes", [(2, 32, 64), (64, 64)], {}, 1),
        ("beside_a_stack", [(2, 64, 64), (64, 64)], {"reduction": -2}, 0),
        # A square matrix lies in memory as its transpose, which no shape says.
        ("transposed", [(64, 64)] * 2, {"reduction": -1}, 0),
        ("more_than_a_launch_takes", [(64, 64)] * 65, {}, 2),
    )
    def test_which_stacks_a_kernel_makes(self, shapes: Any, options: dict[str, Any], count: int):
        reduction = options.pop("reduction", None)
        axes = []
        for shape in shapes:
            ndim = len(shape)
            of_matrix = tuple(range(ndim - 1)) if reduction is None else reduction
            output = -2 if reduction == -1 else -1
            numbers = optax.contrib.MuonDimensionNumbers(of_matrix, output)
            axes.append(partition.resolve_axes(numbers, jnp.zeros(shape)))
        run = orthogonalize.Orthogonalization(steps=0, **options)
        kernel, xla, calls = self.run_both(lambda leaves: run(leaves, axes), _matrices(*shapes))
        self.assertEqual(calls, count)
        for one, other in zip(kernel, xla, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_derivatives_and_batches_are_those_of_xla(self):
        axes = [partition.matrix_from_rank_2(2)] * 2
        run = orthogonalize.Orthogonalization(steps=1)
        leaves = _matrices((64, 128), (128, 64))

        def loss(leaves: Any) -> jax.Array:
            return sum(jnp.sum(x**3) for x in run(leaves, axes))

        batch = [jnp.stack([x, 2 * x]) for x in leaves]
        for fn, args in ((jax.grad(loss), leaves), (jax.vmap(lambda x: run(x, axes)), batch)):
            kernel, xla, _ = self.run_both(fn, args)
            for one, other in zip(kernel, xla, strict=True):
                self.assertGreater(jnp.max(jnp.abs(one)), 0)
                np.testing.assert_array_equal(one, other)


if __name__ == "__main__":
    absltest.main()
