"""The planning formulas: against published sizes, `describe`, and compiled programs on a mesh."""

import contextlib
import functools
import io
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from benchmarks import planning
from tests.support import collectives

_SMALL = planning.Transformer("small", 1, 64, 4, 1, 16, 192, 256)
_LAYOUTS = (planning.Layout(8), planning.Layout(4, 2))
_DIVIDED = P(None, "fsdp", "tensor")
_RULES = mars_optax.dimension_numbers_by_path([("embed|head", None)])
_DECAY = {"weight_decay": 0.1}  # so that every update reads the parameters
_ALONE = {"max_norm": None, "keep_prev_grad": False}

_OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: optax.adamw(0.1),
    "mars": lambda: mars_optax.mars(0.1, **_DECAY),
    "mars, prev_grad in bfloat16": lambda: mars_optax.mars(0.1, prev_grad_dtype="bfloat16"),
    "mars, prev_grad in 8 bits": lambda: mars_optax.mars(0.1, prev_grad_dtype="float8_e4m3fn"),
    "mars, keep_prev_grad=False": lambda: mars_optax.mars(0.1, second_moment="gradient", **_ALONE),
    "mars_lion": lambda: mars_optax.mars_lion(0.1),
    "storm_adamw": lambda: mars_optax.storm_adamw(0.1),
    "mars_m, mars_shampoo": lambda: mars_optax.mars_m(0.1, weight_dimension_numbers=_RULES),
    "mars_m, prev_grad in 8 bits": lambda: mars_optax.mars_m(
        0.1, prev_grad_dtype="float8_e4m3fn", weight_dimension_numbers=_RULES
    ),
    "mars_m, keep_prev_grad=False": lambda: mars_optax.mars_m(
        0.1, weight_dimension_numbers=_RULES, **_ALONE
    ),
}
_VARIANTS = {variant.name: variant for variant in planning.VARIANTS}


def _shapes(model: planning.Transformer) -> dict[str, tuple[int, ...]]:
    """The parameters of a model, each with a name of its own."""
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, of_kind in (("kernel", model.matrices), ("embed", model.embeddings)):
        for shape, count in of_kind.items():
            shapes |= {f"{kind}{shape[0]}x{shape[1]}_{i}": shape for i in range(count)}
    norms = 2 * model.layers + 1
    return shapes | {f"norm{i}": (model.scales // norms,) for i in range(norms)}


def _abstract(model: planning.Transformer) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in _shapes(model).items()}


@contextlib.contextmanager
def _explicit_mesh(layout: planning.Layout) -> Iterator[jax.sharding.Mesh]:
    mesh = jax.make_mesh(
        (layout.fsdp, layout.tensor),
        ("fsdp", "tensor"),
        axis_types=(AxisType.Explicit,) * 2,
        devices=jax.devices("cpu")[: layout.chips],
    )
    with jax.set_mesh(mesh):
        yield mesh


@functools.cache
def _compiled(name: str, layout: planning.Layout) -> Any:
    """The update of an optimizer for the small model on a mesh, gradients and state donated."""
    tx = optax.with_extra_args_support(_OPTIMIZERS[name]())

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params, grad_fn=lambda p: p)

    with _explicit_mesh(layout) as mesh:
        params = {
            name: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(mesh, P("fsdp", "tensor") if leaf.ndim == 2 else P()),
            )
            for name, leaf in _abstract(_SMALL).items()
        }
        places = jax.jit(tx.init).lower(params).compile().output_shardings
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(tx.init, params),
            places,
        )
        jitted = jax.jit(update, donate_argnums=(0, 1), keep_unused=True)
        return jitted.lower(params, state, params).compile()


def _counters(name: str) -> int:
    """Bytes of the step counters, which the formulas leave out."""
    leaves = jax.tree.leaves(jax.eval_shape(_OPTIMIZERS[name]().init, _abstract(_SMALL)))
    return sum(leaf.dtype.itemsize for leaf in leaves if leaf.dtype == jnp.int32)


class MemoryTest(parameterized.TestCase):
    def test_the_models_have_their_published_numbers_of_parameters(self):
        # Those of the published weights of Llama 2.
        self.assertEqual(
            [model.parameters for model in planning.MODELS], [6_738_415_616, 68_976_648_192]
        )

    def test_every_variant_has_an_optimizer_here(self):
        self.assertSetEqual(set(_OPTIMIZERS), set(_VARIANTS))

    @parameterized.parameters(*(name for name in _OPTIMIZERS if name != "AdamW"))
    def test_the_state_on_one_chip_is_what_describe_tells(self, name: str):
        told = mars_optax.describe(_abstract(_SMALL), _OPTIMIZERS[name]())
        self.assertEqual(
            planning.state_bytes(_SMALL, _VARIANTS[name], planning.Layout(1)),
            told.state_bytes - _counters(name),
        )
        self.assertEqual(planning.parameter_bytes(_SMALL, planning.Layout(1)), told.param_bytes)

    @parameterized.product(
        name=[
            "AdamW",
            "mars",
            "mars, prev_grad in 8 bits",
            "storm_adamw",
            "mars_m, keep_prev_grad=False",
        ],
        layout=_LAYOUTS,
    )
    def test_arguments_of_the_compiled_update_are_parameters_gradients_and_state(
        self, name: str, layout: planning.Layout
    ):
        planned = 2 * planning.parameter_bytes(_SMALL, layout)
        planned += planning.state_bytes(_SMALL, _VARIANTS[name], layout) + _counters(name)
        memory = _compiled(name, layout).memory_analysis()
        self.assertEqual(memory.argument_size_in_bytes, planned)

    @parameterized.product(name=["mars", "mars_m, keep_prev_grad=False"], layout=_LAYOUTS)
    def test_temporary_bytes_stay_below_the_formula(self, name: str, layout: planning.Layout):
        planned = planning.update_bytes(_SMALL, _VARIANTS[name], layout)
        temporary = _compiled(name, layout).memory_analysis().temp_size_in_bytes
        self.assertLessEqual(temporary, planned)


class CommunicationTest(parameterized.TestCase):
    @parameterized.product(name=["AdamW", "mars, keep_prev_grad=False"], layout=_LAYOUTS)
    def test_elementwise_variants_receive_nothing(self, name: str, layout: planning.Layout):
        self.assertEmpty(collectives.collectives(_compiled(name, layout).as_text()))
        self.assertEqual(planning.clip_bytes(_SMALL, _VARIANTS[name], layout), 0)

    @parameterized.parameters(*_LAYOUTS)
    def test_the_clip_receives_a_number_for_each_matrix(self, layout: planning.Layout):
        found = collectives.collectives(_compiled("mars", layout).as_text())
        self.assertAlmostEqual(
            sum(c.received for c in found),
            planning.clip_bytes(_SMALL, _VARIANTS["mars"], layout),
        )

    @parameterized.parameters(*_LAYOUTS)
    def test_gathering_every_matrix_receives_them_once(self, layout: planning.Layout):
        name = "mars_m, keep_prev_grad=False"
        found = collectives.collectives(_compiled(name, layout).as_text())
        self.assertEqual({c.times for c in found}, {1})
        work = planning.redundant(_SMALL.matrices, layout)
        # Besides, the norms of the matrices: a number for each.
        found = [c for c in found if c.elements > sum(_SMALL.matrices.values())]
        self.assertAlmostEqual(sum(c.received for c in found), work.received)
        self.assertGreaterEqual(
            _compiled(name, layout).memory_analysis().temp_size_in_bytes, work.held
        )

    @parameterized.parameters(
        # The places of a stack of matrices, from those of its parameter to where it is iterated on:
        # over one axis after the other, as both at once XLA makes it whole on every device first.
        (_LAYOUTS[0], 8, [P(None, "fsdp"), P("fsdp")]),
        (_LAYOUTS[1], 8, [_DIVIDED, P("fsdp", None, "tensor"), P(("fsdp", "tensor"))]),
        (_LAYOUTS[1], 4, [_DIVIDED, P("fsdp", None, "tensor"), P("fsdp")]),
    )
    def test_dividing_the_matrices_receives_what_is_told(
        self, layout: planning.Layout, over: int, places: list[P]
    ):
        count, shape = 11, (64, 192)
        padded = math.ceil(count / over) * over

        def update(x: jax.Array) -> jax.Array:
            for place in places[1:]:
                x = jax.sharding.reshard(x, place)
            x = mars_optax.orthogonalize(x, weight_dimension_numbers=MuonDimensionNumbers(1, 2))
            for place in places[-2::-1]:
                x = jax.sharding.reshard(x, place)
            return x

        with _explicit_mesh(layout) as mesh:
            sharding = NamedSharding(mesh, places[0])
            x = jax.ShapeDtypeStruct((padded, *shape), jnp.float32, sharding=sharding)
            found = collectives.collectives(jax.jit(update).lower(x).compile().as_text())
        work = planning.divided({shape: count}, layout, over=over, width=4)
        self.assertAlmostEqual(sum(c.received for c in found), work.received)
        self.assertEqual({c.times for c in found}, {1})

    def test_a_number_of_chips_that_is_no_axis_is_refused(self):
        with self.assertRaisesRegex(ValueError, "`over`: expected 8 or 4.*got 2"):
            planning.divided(_SMALL.matrices, _LAYOUTS[1], over=2)


class NewtonSchulzTest(parameterized.TestCase):
    @parameterized.parameters((256, 1024), (1024, 256), (512, 512))
    def test_the_operations_are_those_of_the_compiled_iteration(self, *shape: int):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        iteration = functools.partial(mars_optax.orthogonalize, steps=1, dtype="float32")
        counted = jax.jit(iteration).lower(x).compile().cost_analysis()["flops"]
        planned = planning.iteration_flops(shape, steps=1)
        self.assertGreaterEqual(counted, planned)
        # Elementwise operations are counted, too.
        self.assertLess(counted, 1.02 * planned)

    def test_the_busiest_chip_has_the_matrices_that_are_left_over(self):
        shapes = {(64, 192): 5, (192, 64): 4, (64, 64): 1}
        work = planning.divided(shapes, planning.Layout(8), over=8, width=2)
        expected = 2 * planning.iteration_flops((64, 192)) + planning.iteration_flops((64, 64))
        self.assertEqual(work.flops, expected)
        self.assertEqual(work.held, 2 * (2 * 64 * 192 + 64 * 64))


class TablesTest(absltest.TestCase):
    def test_the_page_has_the_tables_that_the_script_prints(self):
        page = pathlib.Path(planning.__file__).parents[1] / "docs" / "sharding.md"
        found = re.search(r"<!-- tables -->\n\n(.*)\n\n<!-- end -->", page.read_text(), re.DOTALL)
        self.assertEqual(found[1], planning.tables())

    def test_the_command_line_changes_the_assumptions(self):
        def printed(*arguments: str) -> str:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                planning.main(arguments)
            return output.getvalue()

        self.assertEqual(printed(), planning.tables() + "\n")
        changed = printed("--chips=16", "--tensor=4", "--matmul_share=0.25", "--iterations=7")
        self.assertIn("FSDP 4 x tensor 4", changed)
        self.assertIn("Newton-Schulz at 0.25 of the peak", changed)
        with self.assertRaisesRegex(SystemExit, "multiples of --tensor=4 as --chips, got 10"):
            printed("--chips=10", "--tensor=4")


if __name__ == "__main__":
    absltest.main()
