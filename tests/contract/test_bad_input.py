"""Wrong arguments: every one is refused, and the message says which, what was expected and got."""

import contextlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests import registry
from tests.support import trees

_NAN = float("nan")
_MATRIX_OPTIMIZERS = ("mars_shampoo", "mars_m")
_OPTIMIZERS = ("mars", "mars_lion", *_MATRIX_OPTIMIZERS)
_MATRIX_DIRECTIONS = ("scale_by_mars_shampoo", "scale_by_mars_m")
_DIRECTIONS = ("scale_by_mars", "scale_by_mars_lion", *_MATRIX_DIRECTIONS)
_LINKS = ("correct_gradients", "clip_by_leaf_norm")
_ALL = (*_OPTIMIZERS, *_DIRECTIONS, *_LINKS)


class Bad(NamedTuple):
    """A wrong value of an argument; the message holds every fragment of `says`."""

    argument: str
    value: Any
    says: tuple[str, ...] = ()


VALUES = (
    Bad("correction", "aproximate", ("approx", "aproximate")),
    Bad("correction", None, ("approx", "None")),
    Bad("first_step", "ones", ("zeros", "no_correction", "ones")),
    Bad("second_moment", "raw", ("corrected", "gradient", "raw")),
    Bad("implementation", "cuda", ("xla", "cuda")),
    Bad("b1", 1.0, ("1.0",)),
    Bad("b1", -0.1, ("-0.1",)),
    Bad("b1", _NAN, ("nan",)),
    Bad("b1", "0.9", ("0.9",)),
    Bad("b2", 1.0, ("1.0",)),
    Bad("b2", _NAN, ("nan",)),
    Bad("b1_1d", 1.5, ("1.5",)),
    Bad("b2_1d", -1.0, ("-1.0",)),
    Bad("eps", -1e-8, ("-1e-08",)),
    Bad("eps", _NAN, ("nan",)),
    Bad("eps_1d", -1.0, ("-1.0",)),
    Bad("eps_root", -1.0, ("-1.0",)),
    Bad("eps_root_1d", -1.0, ("-1.0",)),
    Bad("max_norm", 0.0, ("0.0", "None")),
    Bad("max_norm", -1.0, ("-1.0",)),
    Bad("max_norm", _NAN, ("nan",)),
    Bad("correction_clip", 0.0, ("0.0",)),
    Bad("gamma", "0.025", ("0.025",)),
    Bad("ns_steps", -1, ("-1",)),
    Bad("ns_steps", 2.5, ("2.5",)),
    Bad("ns_steps", "five", ("five",)),
    # Arrays of one entry and more.
    *(
        Bad(name, np.ones(shape, np.float32), ("rank 0", "array"))
        for name in (
            *("learning_rate", "learning_rate_1d", "weight_decay", "weight_decay_1d", "gamma"),
            *("alpha", "b1", "b2_1d", "eps", "eps_root_1d", "max_norm", "ns_steps"),
        )
        for shape in ((1,), (3, 4))
    ),
    # Arrays of rank 0 that are no real numbers.
    *(
        Bad(name, np.asarray(value), ("a real array of rank 0", str(value)))
        for name in ("learning_rate", "gamma", "b1", "b2", "eps", "max_norm")
        for value in (True, 0.5j)
    ),
    Bad("gamma", mars_optax.AdaptiveGamma, ("call the class: `AdaptiveGamma()`",)),
    Bad("ns_coeffs", "cubic", ("quintic", "polar_express", "cubic")),
    Bad("ns_coeffs", (1.0, 2.0), ("2",)),
    Bad("ns_coeffs", ((1.0, 2.0), (3.0, 4.0)), ("2",)),
    Bad("ns_coeffs", np.zeros((5, 3, 1)), ("(5, 3, 1)",)),
    Bad("ns_coeffs", [(3.4, -4.8, 2.0)] * 4, ("4", "5", "ns_steps")),
    Bad("ns_dtype", "bfloat61", ("bfloat61",)),
    Bad("ns_dtype", "int32", ("int32",)),
    Bad("mu_dtype", "float23", ("float23",)),
    Bad("mu_dtype", "int8", ("int8",)),
    Bad("nu_dtype", "half precision", ("half precision",)),
    Bad("prev_grad_dtype", "fp8", ("fp8",)),
    Bad("newton_schulz_fn", 3.0, ("3.0",)),
    Bad("newton_schulz_fn", "cubic", ("cubic",)),
    Bad("weight_dimension_numbers", "rank2", ("rank2",)),
)


def _cases():
    for name in _ALL:
        entry = registry.get(name)
        for number, bad in enumerate(VALUES):
            if entry.accepts(bad.argument):
                yield (f"_{name}_{bad.argument}_{number}", entry, bad)


class ArgumentTest(parameterized.TestCase):
    @parameterized.named_parameters(*_cases())
    def test_a_wrong_value_is_refused_by_name(self, entry: registry.Entry, bad: Bad):
        # Also where it is not used.
        unused = bad.argument.endswith("_1d") and entry.accepts("optimize_1d")
        for settings in ({}, {"optimize_1d": True})[: 1 + unused]:
            with self.assertRaises((ValueError, TypeError)) as caught:
                entry.make(**{bad.argument: bad.value}, **settings).init(entry.params())
            message = str(caught.exception)
            for fragment in (bad.argument, *bad.says):
                self.assertIn(fragment, message)
            self.assertGreater(len(message), len(bad.argument) + 20)

    def test_every_case_concerns_some_factory(self):
        concerned = {bad.argument for _, _, bad in _cases()}
        self.assertSetEqual(concerned, {bad.argument for bad in VALUES})

    @parameterized.parameters(*_OPTIMIZERS)
    def test_traced_values_pass_unchecked(self, name: str):
        entry = registry.get(name)
        params = entry.params()

        @jax.jit
        def build_with(b1, max_norm, gamma):
            tx = entry.precise(b1=b1, max_norm=max_norm, gamma=gamma)
            return tx.update(params, tx.init(params), params)[0]

        for arguments in ((2.0, 1.0, 0.025), (0.9, -1.0, jnp.nan), (0.9, 1.0, 0.025)):
            updates = build_with(*arguments)
            self.assertEqual(jax.tree.structure(updates), jax.tree.structure(params))

    @parameterized.product(
        argument=["learning_rate", "learning_rate_1d", "weight_decay", "gamma", "alpha"],
        value=[np.ones(1, np.float32), np.ones((3, 4), np.float32), None, np.bool_(True), 1j],
    )
    def test_what_a_schedule_returns_is_refused_at_the_step(self, argument: str, value: Any):
        correction = {"gamma": "storm", "alpha": "svrg"}.get(argument, "approx")
        entry = registry.get("mars")
        tx = entry.make(correction=correction, **{argument: lambda _: value})
        params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
        with self.assertRaisesRegex(TypeError, f"`{argument}`: expected .* rank 0.* got .*"):
            jax.eval_shape(
                lambda p, s: tx.update(p, s, p, grad_fn=lambda p: p), params, tx.init(params)
            )

    @parameterized.parameters("learning_rate", "gamma", "b1")
    def test_traced_arrays_are_refused_unless_real_and_of_rank_0(self, argument: str):
        params = {"kernel": jnp.ones((3, 4))}

        def init(x: Any) -> Any:
            return registry.get("mars").make(**{argument: x}).init(params)

        with self.assertRaisesRegex(TypeError, f"`{argument}`: expected .* rank 0"):
            jax.eval_shape(init, jnp.full(4, 0.1))
        for dtype in (bool, jnp.complex64):
            with self.assertRaisesRegex(TypeError, f"`{argument}`: expected .* a real array"):
                jax.eval_shape(jax.vmap(init), jnp.ones(4, dtype))
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32):
            jax.eval_shape(jax.vmap(init), jnp.full(4, 0.1, dtype))

    @parameterized.parameters(*_OPTIMIZERS, *_DIRECTIONS)
    def test_pallas_is_refused_rather_than_replaced(self, name: str):
        entry = registry.get(name)
        with self.assertRaises(NotImplementedError) as caught:
            tx = entry.make(implementation="pallas")
            tx.update(entry.grads(), tx.init(entry.params()), entry.params())
        self.assertIn("pallas", str(caught.exception).lower())
        self.assertIn("implementation", str(caught.exception))

    @parameterized.product(
        name=["mars", "mars_m", "clip_by_leaf_norm"],
        case=[
            ("b1", 0.0),
            ("b2", 0.0),
            ("eps", 0.0),
            ("ns_steps", 0),
            ("max_norm", None),
            ("max_norm", float("inf")),
            ("gamma", -0.1),
            ("gamma", 0),
        ],
    )
    def test_ranges_include_their_ends(self, name: str, case):
        entry, (argument, value) = registry.get(name), case
        if not entry.accepts(argument):
            return
        tx = entry.precise(**{argument: value})
        updates, _, state = trees.run(tx, entry.params(), [entry.grads()] * 2)
        self.assertTrue(trees.all_finite((updates, state)))


_BAD_SPECS = (
    ("overlapping", MuonDimensionNumbers(0, 0), ("0",)),
    ("overlapping_after_wrapping", MuonDimensionNumbers(1, -1), ("-1",)),
    ("twice_the_same", MuonDimensionNumbers((0, 0), 1), ("(0, 0)",)),
    ("out_of_range", MuonDimensionNumbers(0, 2), ("2",)),
    ("far_below", MuonDimensionNumbers(-3, 1), ("-3",)),
    ("no_reduction_axis", MuonDimensionNumbers((), 1), ("()",)),
    ("no_output_axis", MuonDimensionNumbers(0, ()), ("()",)),
    ("not_whole", MuonDimensionNumbers(0.5, 1), ("0.5",)),
    ("not_a_spec", "matrix", ("matrix",)),
)


class SpecTest(parameterized.TestCase):
    def _refused(self, entry, params, specs, *fragments):
        with self.assertRaises((ValueError, TypeError)) as caught:
            entry.make(weight_dimension_numbers=specs).init(params)
        for fragment in fragments:
            self.assertIn(fragment, str(caught.exception))

    @parameterized.product(
        name=[*_OPTIMIZERS, *_DIRECTIONS, "clip_by_leaf_norm"],
        case=_BAD_SPECS,
    )
    def test_axes_that_do_not_fit_name_the_leaf(self, name: str, case):
        _, spec, fragments = case
        params = {"block": {"kernel": jnp.ones((3, 4))}}
        self._refused(
            registry.get(name),
            params,
            {"block": {"kernel": spec}},
            "block/kernel",
            *fragments,
        )

    @parameterized.product(
        name=[*_OPTIMIZERS, *_DIRECTIONS, "clip_by_leaf_norm"],
        shape=[(), (3,)],
    )
    def test_a_matrix_spec_on_a_leaf_of_low_rank_names_the_leaf(self, name: str, shape):
        params = {"block": {"A_log": jnp.ones(shape)}}
        specs = {"block": {"A_log": MuonDimensionNumbers()}}
        self._refused(registry.get(name), params, specs, "block/A_log", str(shape))

    @parameterized.parameters(*_OPTIMIZERS, "scale_by_mars", "clip_by_leaf_norm")
    def test_a_bare_spec_that_fits_not_every_matrix_names_the_leaf(self, name: str):
        params = {"one": jnp.ones((3, 4)), "three": jnp.ones((2, 3, 4))}
        self._refused(registry.get(name), params, MuonDimensionNumbers(1, 2), "one", "(3, 4)")

    @parameterized.parameters(*_OPTIMIZERS, *_DIRECTIONS, "clip_by_leaf_norm")
    def test_a_spec_tree_of_another_structure_is_refused(self, name: str):
        params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
        spec = MuonDimensionNumbers()
        for specs in ({"a": spec}, {"a": spec, "b": spec, "c": None}, [spec, spec]):
            self._refused(registry.get(name), params, specs, "weight_dimension_numbers")
        self._refused(registry.get(name), params, lambda _: {"a": spec}, "weight_dimension_numbers")

    @parameterized.product(
        name=_MATRIX_DIRECTIONS,
        shape=[(), (3,), (2, 3, 4)],
    )
    def test_directions_of_matrices_take_nothing_else(self, name: str, shape):
        params = {"good": jnp.ones((3, 4)), "block": {"other": jnp.ones(shape)}}
        with self.assertRaises(ValueError) as caught:
            registry.get(name).make().init(params)
        self.assertIn("block/other", str(caught.exception))
        self.assertIn(str(shape), str(caught.exception))
        self.assertIn("weight_dimension_numbers", str(caught.exception))

    @parameterized.parameters(*_MATRIX_DIRECTIONS)
    def test_a_leaf_declared_no_matrix_is_refused_by_directions_of_matrices(self, name: str):
        params = {"good": jnp.ones((3, 4)), "other": jnp.ones((3, 4))}
        specs = {"good": MuonDimensionNumbers(), "other": None}
        self._refused(registry.get(name), params, specs, "other")


class LeafTest(parameterized.TestCase):
    @parameterized.product(name=_ALL, dtype=["int32", "bool"])
    def test_parameters_that_are_no_floats_are_refused_by_path(self, name: str, dtype: str):
        params = {"good": jnp.ones((3, 4)), "block": {"codes": jnp.ones((3, 4), dtype)}}
        with self.assertRaises(TypeError) as caught:
            registry.get(name).make().init(params)
        self.assertIn("block/codes", str(caught.exception))
        self.assertIn(dtype, str(caught.exception))

    @parameterized.parameters(*_OPTIMIZERS)
    def test_decay_needs_the_parameters(self, name: str):
        entry = registry.get(name)
        tx = entry.make(weight_decay=0.1, weight_decay_1d=0.1)
        with self.assertRaises(ValueError) as caught:
            tx.update(entry.grads(), tx.init(entry.params()))
        self.assertIn("params", str(caught.exception))

    @parameterized.parameters(
        ({}, True),
        ({"weight_decay": 0.1, "weight_decay_1d": 0.0, "mask": False}, True),
        ({"weight_decay_1d": None}, False),
        ({"optimize_1d": True}, False),
    )
    def test_the_decays_alone_decide_about_that(self, settings, needs: bool):
        """Neither leaves nor a mask, as `Returns` says; `optimize_1d` does not use that of 0.1."""
        params = jnp.ones((3, 2))  # no leaf is a vector
        tx = mars_optax.mars(1.0, **settings)
        raises = self.assertRaisesRegex(ValueError, "`params`.* may decay")
        with raises if needs else contextlib.nullcontext():
            tx.update(params, tx.init(params))

    @parameterized.parameters(*_OPTIMIZERS, *_DIRECTIONS, "correct_gradients")
    def test_gradients_of_another_structure_or_shape_leave_the_state_alone(self, name: str):
        entry = registry.get(name)
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        _, _, state = trees.run(tx, params, [grads])
        before = trees.copy(state)
        for wrong in (
            {"another": jnp.ones((2, 2))},
            [jnp.ones((5, 4))],
            jax.tree.map(lambda g: jnp.ones((*g.shape, 7)), grads),
            # These broadcast, and would change the shapes of the state.
            jax.tree.map(lambda g: jnp.ones((1,) * g.ndim), grads),
        ):
            with self.subTest(str(wrong)), self.assertRaises((ValueError, TypeError)):
                jax.eval_shape(tx.update, wrong, state, params)
        trees.assert_equal(state, before)


class NewtonSchulzFunctionTest(parameterized.TestCase):
    @parameterized.product(
        name=[*_MATRIX_OPTIMIZERS, *_MATRIX_DIRECTIONS],
        case=[
            ("transposed", lambda x: x.swapaxes(-1, -2), "shape"),
            ("summed", lambda x: x.sum(0), "shape"),
            ("other_dtype", lambda x: x.astype(jnp.float16), "float16"),
            ("nothing", lambda x: None, "None"),
        ],
    )
    def test_another_shape_or_dtype_is_refused(self, name: str, case):
        _, function, fragment = case
        entry = registry.get(name)
        with self.assertRaises((ValueError, TypeError)) as caught:
            tx = entry.make(newton_schulz_fn=function)
            state = tx.init(entry.params())
            jax.eval_shape(tx.update, entry.grads(), state, entry.params())
        self.assertIn("newton_schulz_fn", str(caught.exception))
        self.assertIn(fragment, str(caught.exception))

    @parameterized.parameters(*_MATRIX_DIRECTIONS)
    def test_it_gets_a_stack_and_the_shape_factor_comes_after(self, name: str):
        entry, seen = registry.get(f"{name}_specs"), []

        def stub(x):
            seen.append((x.shape, x.dtype))
            return x

        tx = entry.make(newton_schulz_fn=stub, max_norm=None, gamma=0.0)
        params, grads = entry.params(), entry.grads()
        updates, _, state = trees.run(tx, params, [grads])
        self.assertEqual(set(seen), {((3, 4, 5), jnp.dtype("float32"))})
        factor = np.sqrt(5 / 4) / 0.05 if name == "scale_by_mars_shampoo" else 0.2 * np.sqrt(5)
        np.testing.assert_allclose(
            updates["kernel"], factor * state.mu["kernel"], rtol=1e-5, atol=1e-7
        )


class ToolsTest(parameterized.TestCase):
    @parameterized.parameters((2,), (0,), (1,), (3,), (4,))
    def test_orthogonalize_takes_rank_two_or_a_spec(self, rank: int):
        x = jnp.ones((2,) * rank)
        if rank == 2:
            self.assertEqual(mars_optax.orthogonalize(x).shape, x.shape)
            return
        with self.assertRaises(ValueError) as caught:
            mars_optax.orthogonalize(x)
        self.assertIn(str(x.shape), str(caught.exception))
        if rank > 2:
            self.assertIn("weight_dimension_numbers", str(caught.exception))

    @parameterized.named_parameters(
        ("steps", {"steps": -1}, ("steps", "-1")),
        ("fraction", {"steps": 1.5}, ("steps", "1.5")),
        ("preset", {"coeffs": "cubic"}, ("coeffs", "cubic", "quintic")),
        ("short", {"coeffs": (1.0,)}, ("coeffs",)),
        ("bools", {"coeffs": jnp.ones(3, bool)}, ("`coeffs`", "real numbers", "got Array([ True")),
        ("complex", {"coeffs": jnp.full((5, 3), 1j)}, ("`coeffs`", "real", "got Array([[0.+1.j")),
        ("triple_of_bools", {"coeffs": (jnp.array(True),) * 3}, ("real", "got (Array(True")),
        ("dtype", {"dtype": "int32"}, ("dtype", "int32")),
        ("eps", {"eps": -1.0}, ("eps", "-1.0")),
        (
            "spec",
            {"weight_dimension_numbers": MuonDimensionNumbers(0, 0)},
            ("0",),
        ),
    )
    def test_orthogonalize_refuses(self, kwargs, fragments):
        with self.assertRaises((ValueError, TypeError)) as caught:
            mars_optax.orthogonalize(jnp.ones((2, 3)), **kwargs)
        for fragment in fragments:
            self.assertIn(fragment, str(caught.exception))

    def test_orthogonalize_refuses_integers(self):
        with self.assertRaises(TypeError) as caught:
            mars_optax.orthogonalize(jnp.ones((2, 3), jnp.int32))
        self.assertRegex(str(caught.exception), "^`x`: expected .* got dtype int32. Pass ")

    def test_a_rule_that_matches_no_leaf_is_refused(self):
        specs = mars_optax.dimension_numbers_by_path([("kernel", None), ("lm_heed", None)])
        params = {"kernel": jnp.ones((2, 3)), "lm_head": jnp.ones((2, 3))}
        for call in (specs, mars_optax.mars(0.1, weight_dimension_numbers=specs).init):
            with self.assertRaises(ValueError) as caught:
                call(params)
            self.assertIn("lm_heed", str(caught.exception))
            self.assertIn("lm_head", str(caught.exception))

    @parameterized.named_parameters(
        ("regular_expression", [("blocks/[", None)], {}, r"blocks/\["),
        ("pattern_type", [(3, None)], {}, "3"),
        ("spec", [("a", "matrix")], {}, "matrix"),
        ("rule", ["kernel"], {}, "kernel"),
        ("default", [("a", None)], {"default": "rank3"}, "rank3.*|.*rank3"),
    )
    def test_bad_rules_are_refused_when_built(self, rules, kwargs, pattern):
        with self.assertRaises((ValueError, TypeError)) as caught:
            mars_optax.dimension_numbers_by_path(rules, **kwargs)
        self.assertRegex(str(caught.exception), re.compile(pattern))


class ExactModeTest(parameterized.TestCase):
    """What exact mode, STORM and the form without a buffer cannot do without."""

    @parameterized.product(
        case=[
            *((name, "exact") for name in (*_OPTIMIZERS, *_DIRECTIONS, "correct_gradients")),
            ("correct_gradients", "storm"),
        ],
        missing=["grad_fn", "params"],
    )
    def test_it_says_what_is_missing(self, case, missing: str):
        name, correction = case
        entry = registry.get(name)
        decay = {name: 0.0 for name in ("weight_decay", "weight_decay_1d") if entry.accepts(name)}
        tx = entry.make(correction=correction, **decay)
        params, grads = entry.params(), entry.grads()
        state = tx.init(params)
        with self.assertRaises(ValueError) as caught:
            if missing == "grad_fn":
                tx.update(grads, state, params)
            else:
                tx.update(grads, state, grad_fn=lambda p: p)
        self.assertIn(f"`{missing}`", str(caught.exception))
        self.assertIn("grad_fn=", str(caught.exception))

    @parameterized.parameters("mars", "scale_by_mars_m", "correct_gradients")
    def test_gradients_of_another_structure_or_shape_are_refused(self, name: str):
        entry = registry.get(name)
        tx, params, grads = entry.make(correction="exact"), entry.params(), entry.grads()
        state = tx.init(params)
        for grad_fn in (
            lambda p: {"another": jnp.ones((2, 2))},
            lambda p: jax.tree.map(lambda x: jnp.ones((1,) * x.ndim), p),
        ):
            with self.assertRaises((ValueError, TypeError)) as caught:
                jax.eval_shape(lambda s, f=grad_fn: tx.update(grads, s, params, grad_fn=f), state)
            self.assertIn("grad_fn", str(caught.exception))

    @parameterized.product(
        case=[("mars", "exact"), ("mars_m", "sarah"), ("scale_by_mars", "svrg")],
        dtype=["complex64", "int32", "bool"],
    )
    def test_gradients_of_another_kind_are_refused(self, case, dtype: str):
        name, correction = case
        tx = registry.get(name).make(correction=correction)
        params = {"layer": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
        state = tx.init(params)
        wrong = {"layer": {**params["layer"], "kernel": jnp.ones((3, 4), dtype)}}
        says = f"`grad_fn`: expected a real .* for leaf 'layer/kernel'.* got dtype {dtype}"
        with self.assertRaisesRegex(TypeError, says):
            tx.update(params, state, params, grad_fn=lambda _: wrong)
        # Of another width they are welcome.
        half = jax.tree.map(lambda p: p.astype("bfloat16"), params)
        tx.update(params, state, params, grad_fn=lambda _: half)

    @parameterized.named_parameters(
        ("clip", "mars_lion", {}, "max_norm"),
        ("second_moment", "mars", {"max_norm": None}, "second_moment"),
        ("exact", "mars_m", {"max_norm": None, "correction": "exact"}, "correction"),
    )
    def test_doing_without_the_previous_gradient_names_what_conflicts(self, name, kwargs, says):
        entry = registry.get(name)
        with self.assertRaises(ValueError) as caught:
            entry.make(keep_prev_grad=False, **kwargs).init(entry.params())
        self.assertIn("keep_prev_grad", str(caught.exception))
        self.assertIn(says, str(caught.exception))


if __name__ == "__main__":
    absltest.main()
