"""Faults: numbers that are not finite, steps that are skipped, checkpoints that do not fit, kills.

What `docs/errors.md` promises. That a NaN stays in its leaf and slice under `update` is tested for
every entry of the registry in `tests/contract/test_isolation.py`; here are the other ways to a new
parameter: kernels, stacks of the matrices of several leaves, and stacks on meshes.
"""

import functools
import pathlib
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import mesh, reshard
from tests import registry
from tests.hardening import interrupted
from tests.support import interpreter, meshes, processes, trees

_ROOT = pathlib.Path(__file__).parents[2]
_NS = {"ns_dtype": "float32", "ns_steps": 2}
_STACK = MuonDimensionNumbers(1, 2)

# Matrices that share a stack, one of them turned, a stack of three of their size, and vectors that
# share a kernel.
_SHAPES: dict[str, tuple[int, ...]] = {
    "first": (8, 16),
    "second": (8, 16),
    "turned": (16, 8),
    "stack": (3, 8, 16),
    **{f"bias{i}": (128,) for i in range(9)},
}
_NUMBERS = {
    name: None if len(shape) == 1 else _STACK if len(shape) == 3 else MuonDimensionNumbers()
    for name, shape in _SHAPES.items()
}


def _tree(seed: int, names: Sequence[str] = tuple(_SHAPES)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(_SHAPES[name]).astype(np.float32) for name in names}


def _make(name: str, **options: Any) -> Any:
    factory = getattr(mars_optax, name)
    options = {"weight_dimension_numbers": _NUMBERS, **options}
    return factory(0.1, **options, **(_NS if name in ("mars_m", "mars_shampoo") else {}))


def _two_steps(tx: Any) -> Callable[..., Any]:
    """New parameters and states after two steps by `fused_step`."""

    @jax.jit
    def run(params: Any, first: Any, second: Any) -> Any:
        state = tx.init(params)
        for grads in (first, second):
            params, state = mars_optax.fused_step(tx, grads, state, params)
        return params, state

    return run


def _of_others(result: Any, sick: str) -> dict[str, Any]:
    """All arrays of parameters and state but those of one leaf."""
    flat = jax.tree_util.tree_leaves_with_path(result)
    by_path = {trees.path_of(path): np.asarray(leaf) for path, leaf in flat}
    return {path: x for path, x in by_path.items() if path.split("/")[-1] != sick}


class ContainmentTest(parameterized.TestCase):
    def _check(self, run: Callable[..., Any], place: Callable[[Any], Any] = lambda x: x) -> None:
        params, grads = _tree(0), [_tree(1), _tree(2)]
        clean = run(*map(place, (params, *grads)))
        cases = [("first", (2, 3), np.nan), ("turned", (9, 1), np.inf), ("bias4", (7,), np.nan)]
        for name, where, value in (*cases, ("stack", (1, 2, 3), -np.inf)):
            ill = _tree(1)
            ill[name][where] = value
            result = run(*map(place, (params, ill, grads[1])))
            # It did something.
            self.assertFalse(trees.all_finite(result[0][name]), name)
            trees.assert_equal(_of_others(result, name), _of_others(clean, name))
            if name == "stack":
                for kept in (0, 2):
                    np.testing.assert_array_equal(result[0][name][kept], clean[0][name][kept])

    @interpreter.always()
    def test_leaves_in_one_kernel(self):
        self._check(_two_steps(_make("mars", implementation="pallas")))

    @parameterized.parameters("mars_lion", "mars_shampoo", "mars_m")
    @pytest.mark.slow
    @interpreter.always()
    def test_leaves_in_one_kernel_of_the_others(self, name: str):
        self._check(_two_steps(_make(name, implementation="pallas")))

    @parameterized.parameters("mars_m", "mars_shampoo")
    def test_matrices_of_several_leaves_in_one_stack(self, name: str):
        with mock.patch.object(mesh, "is_one_device", return_value=True):
            self._check(_two_steps(_make(name)))

    def _check_on_a_mesh(self, name: str, axis_type: AxisType) -> None:
        mesh = meshes.mesh(axis_type)
        specs = {"first": P("x", "y"), "second": P("x", "y"), "turned": P("y", "x")}

        def place(tree: Any) -> Any:
            return {
                k: jax.device_put(v, NamedSharding(mesh, specs.get(k, P())))
                for k, v in tree.items()
            }

        # So that matrices of this size travel.
        with jax.set_mesh(mesh), mock.patch.object(reshard, "SHORTEST_TO_DIVIDE", 4):
            self._check(_two_steps(_make(name)), place)

    @parameterized.parameters(("mars_m", AxisType.Explicit), ("mars_shampoo", AxisType.Auto))
    def test_matrices_that_travel_over_a_mesh(self, name: str, axis_type: AxisType):
        self._check_on_a_mesh(name, axis_type)

    @parameterized.parameters(
        ("mars_m", AxisType.Auto),
        ("mars_shampoo", AxisType.Explicit),
        ("mars", AxisType.Explicit),
        ("mars_lion", AxisType.Auto),
    )
    @pytest.mark.slow
    def test_leaves_on_every_mesh(self, name: str, axis_type: AxisType):
        self._check_on_a_mesh(name, axis_type)

    @parameterized.parameters((None,), (_STACK,))
    def test_a_nan_turns_the_clip_of_its_matrix_off_and_an_infinity_makes_it_zero(self, numbers):
        tx = mars_optax.clip_by_leaf_norm(1.0, weight_dimension_numbers=numbers)
        mine = [1] if numbers else [0, 1, 2]
        for value, others in ((jnp.nan, 3.0), (jnp.inf, 0.0)):
            grads = {"stack": jnp.full((3, 2, 2), 3.0).at[1, 0, 0].set(value)}
            clipped, _ = tx.update(grads, tx.init(grads))
            clipped = np.asarray(clipped["stack"])
            self.assertEqual(np.argwhere(np.isnan(clipped)).tolist(), [[1, 0, 0]])
            np.testing.assert_array_equal(clipped[mine][~np.isnan(clipped[mine])], others)
            rest = [i for i in range(3) if i not in mine]
            np.testing.assert_allclose(clipped[rest], 0.5, rtol=1e-6)

    def test_without_a_norm_it_stays_in_its_entry(self):
        grads = {"w": jnp.ones((2, 2)).at[0, 1].set(jnp.nan)}
        for tx in (mars_optax.scale_by_mars(max_norm=None), mars_optax.correct_gradients()):
            direction, _ = tx.update(grads, tx.init(grads))
            np.testing.assert_array_equal(jnp.isnan(direction["w"]), jnp.isnan(grads["w"]))

    def test_a_bound_on_all_leaves_together_is_lost_for_all(self):
        tx = mars_optax.correct_gradients(correction_clip=1.0)
        for value, expected in ((jnp.nan, 1.475), (jnp.inf, 1.0)):
            grads = {"ill": jnp.full(2, value), "well": jnp.ones(2)}
            corrected, _ = tx.update(grads, tx.init(grads))
            self.assertTrue(bool(jnp.isnan(corrected["ill"]).all()))
            np.testing.assert_allclose(corrected["well"], expected, rtol=1e-6)

    def test_a_leaf_that_was_lost_stays_lost(self):
        tx, good = mars_optax.scale_by_mars(), {"w": jnp.ones((2, 2))}
        state = tx.init(good)
        ill = {"w": good["w"].at[0, 1].set(jnp.inf)}
        for grads in (ill, good, good):
            direction, state = tx.update(grads, state)
        np.testing.assert_array_equal(jnp.isnan(direction["w"]), jnp.isinf(ill["w"]))
        self.assertTrue(trees.all_finite(state.prev_grad))


class SkippedStepsTest(parameterized.TestCase):
    @parameterized.parameters(
        "mars", "mars_float8", "mars_lion", "mars_shampoo", "mars_m", "mars_exact", "storm_adamw"
    )
    def test_good_bad_bad_good_is_good_good(self, name: str):
        entry = registry.get(name)
        tx, params = optax.apply_if_finite(entry.shared(), 3), entry.params()
        grads = [entry.grads(step) for step in range(3)]
        # One bad entry is enough, of either kind.
        leaves, structure = jax.tree.flatten(entry.grads(3))
        bad = [
            structure.unflatten([*leaves[:-1], jnp.full_like(leaves[-1], value)])
            for value in (jnp.nan, jnp.inf)
        ]
        _, _, between = trees.run(tx, params, [*grads[:2], *bad])
        last = {trees.path_of(p): g for p, g in jax.tree_util.tree_leaves_with_path(grads[1])}
        if name not in ("mars_float8", "mars_exact", "storm_adamw"):
            for kept in trees.fields(between, "prev_grad"):
                for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
                    np.testing.assert_array_equal(leaf, last[trees.path_of(path)])
        _, params_after, after = trees.run(tx, params, [*grads[:2], *bad, grads[2]])
        _, expected_params, expected = trees.run(tx, params, grads)
        trees.assert_equal(params_after, expected_params)
        trees.assert_equal(after.inner_state, expected.inner_state)
        self.assertEqual(int(after.total_notfinite), 2)

    def test_more_bad_steps_than_allowed_go_through(self):
        tx = optax.apply_if_finite(mars_optax.correct_gradients(), max_consecutive_errors=1)
        params = {"w": jnp.ones(2)}
        bad = {"w": jnp.full(2, jnp.nan)}
        _, _, state = trees.run(tx, params, [params, bad], apply=False)
        trees.assert_equal(state.inner_state.prev_grad, params)
        _, _, state = trees.run(tx, params, [params, bad, bad], apply=False)
        self.assertTrue(bool(jnp.isnan(state.inner_state.prev_grad["w"]).all()))

    @parameterized.parameters("mars", "mars_m")
    def test_gradients_that_overflow_float16_leave_no_trace(self, name: str):
        entry = registry.get(name)
        tx = entry.shared()

        @jax.jit
        def step(params: Any, state: Any, scale: Any, batch: Any) -> Any:
            # What a backward pass in half precision gives for a loss times `scale`.
            half = jax.tree.map(lambda g: (scale * g).astype(jnp.float16), batch)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, half)
            is_finite = jnp.isfinite(optax.tree.norm(grads))
            updates, new_state = tx.update(grads, state, params)
            new = (optax.apply_updates(params, updates), new_state)
            kept = jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, (params, state))
            return *kept, jnp.where(is_finite, scale, scale / 2), is_finite

        def train(batches: Sequence[Any]) -> Any:
            params, state, scale = entry.params(), tx.init(entry.params()), jnp.float32(2.0**12)
            finite = []
            for batch in batches:
                params, state, scale, is_finite = step(params, state, scale, batch)
                finite.append(bool(is_finite))
            return (params, state), finite

        good = [entry.grads(seed) for seed in range(3)]
        large = entry.grads(3, scale=2.0**10)
        actual, finite = train([good[0], large, large, good[1], good[2]])
        self.assertEqual(finite, [True, False, False, True, True])
        # Scales are powers of 2: what was not skipped has the same bits.
        trees.assert_equal(actual, train(good)[0])

    def test_float16_gradients_near_its_end(self):
        """The corrected gradient is larger than any float16, and computed in float32."""
        grads = {"w": jnp.full((2, 2), 60000, jnp.float16)}
        tx = mars_optax.scale_by_mars()
        self.assertTrue(trees.all_finite(tx.update(grads, tx.init(grads))))
        # The link hands it on in the gradients' dtype.
        tx = mars_optax.correct_gradients()
        corrected, state = tx.update(grads, tx.init(grads))
        self.assertTrue(bool(jnp.isinf(corrected["w"]).all()))
        trees.assert_equal(state.prev_grad, grads)


_ALONE = {"max_norm": None, "second_moment": "gradient"}
_SETTINGS: dict[str, Callable[[], Any]] = {
    "mars": functools.partial(mars_optax.mars, 0.1),
    "alone": functools.partial(mars_optax.mars, 0.1, **_ALONE),
    "without": functools.partial(mars_optax.mars, 0.1, **_ALONE, keep_prev_grad=False),
    "none": functools.partial(mars_optax.mars, 0.1, correction="none"),
    "exact": functools.partial(mars_optax.mars, 0.1, correction="exact"),
    "all": functools.partial(mars_optax.mars, 0.1, optimize_1d=True),
    "all_exact": functools.partial(mars_optax.mars, 0.1, optimize_1d=True, correction="exact"),
    "amsgrad": functools.partial(mars_optax.mars, 0.1, amsgrad=True),
    "float8": functools.partial(mars_optax.mars, 0.1, prev_grad_dtype="float8_e4m3fn"),
    "bfloat16": functools.partial(
        mars_optax.mars, 0.1, mu_dtype="bfloat16", prev_grad_dtype="bfloat16"
    ),
    "schedule": functools.partial(mars_optax.mars, lambda count: 0.1, optimize_1d=True),
    "lion": functools.partial(mars_optax.mars_lion, 0.1),
    "mars_m": functools.partial(mars_optax.mars_m, 0.1),
    "storm": functools.partial(mars_optax.storm_adamw, 0.1),
    "link": mars_optax.correct_gradients,
    "link_exact": functools.partial(mars_optax.correct_gradients, correction="exact"),
    "link_storm": functools.partial(mars_optax.correct_gradients, correction="storm"),
}


def _small(rows: int = 3) -> dict[str, jax.Array]:
    return {"kernel": jnp.ones((rows, 4)), "bias": jnp.ones(4)}


def _traced(tx: Any, state: Any, params: Any) -> Any:
    """The types of what `update` returns, without compiling it."""

    def update(state: Any) -> Any:
        return tx.update(params, state, params, grad_fn=lambda p: p)

    return jax.eval_shape(update, state)


class SettingsTest(parameterized.TestCase):
    """A state is given to the optimizer of other settings."""

    @parameterized.parameters(
        ("without", "alone", r"`state\.prev_grad`: expected a tree .*got None"),
        ("alone", "without", r"`state\.prev_grad`: expected None .*got a tree"),
        ("none", "mars", r"`state\.prev_grad`: expected a tree .*got None"),
        ("mars", "none", r"`state\.prev_grad`: expected None .*got a tree"),
        ("all", "all_exact", r"`state\.prev_grad`: expected None .*got a tree"),
        ("all_exact", "all", r"`state\.prev_grad`: expected a tree .*got None"),
        ("mars", "exact", r"`state\.prev_grad`: expected None .*got a tree"),
        ("exact", "mars", r"`state\.prev_grad`: expected a tree .*got None"),
        ("mars", "float8", r"`state\.prev_grad_scale`: expected a tree .*got None"),
        ("float8", "mars", r"`state\.prev_grad_scale`: expected None .*got a tree"),
        ("mars", "amsgrad", r"`state\.nu_max`: expected a tree .*got None"),
        ("amsgrad", "mars", r"`state\.nu_max`: expected None .*got a tree"),
        ("mars", "all", r"`state\.prev_grad`: expected a tree .*got no leaf 'bias'"),
        ("all", "mars", r"`state\.prev_grad`: expected a tree .*got a further leaf 'bias'"),
        ("mars", "lion", "`state`: expected a `MarsLionState`.* got `MarsState`"),
        ("lion", "mars_m", "`state`: expected a `MarsMState`.* got `MarsLionState`"),
        ("mars", "storm", "`state`: expected a `StormAdamwState`.* got `MarsState`"),
        ("link", "link_exact", r"`state\.prev_grad`: expected None .*got a tree"),
        ("link_exact", "link", r"`state\.prev_grad`: expected a tree .*got None"),
        ("link_storm", "link_exact", r"`state\.prev_corrected`: expected None .*got a tree"),
        ("link_exact", "link_storm", r"`state\.prev_corrected`: expected a tree .*got None"),
    )
    def test_it_says_what_does_not_fit(self, saved: str, wanted: str, says: str):
        params = _small()
        state = _SETTINGS[saved]().init(params)
        with self.assertRaisesRegex((ValueError, TypeError), says):
            _traced(_SETTINGS[wanted](), state, params)

    @parameterized.parameters("mars", "all", "mars_m", "link")
    def test_plain_containers_are_no_state(self, name: str):
        """What Orbax restores without a template."""
        tx, params = _SETTINGS[name](), _small()

        def plain(node: Any) -> Any:
            if hasattr(node, "_asdict"):
                return {key: plain(value) for key, value in node._asdict().items()}
            if isinstance(node, dict):
                return {key: plain(value) for key, value in node.items()}
            return [plain(x) for x in node] if isinstance(node, tuple) else node

        with self.assertRaisesRegex(TypeError, "`state`: expected .* got `(dict|list)`"):
            _traced(tx, plain(tx.init(params)), params)

    @parameterized.parameters(
        *((name, rows) for name in ("mars", "all_exact", "exact", "float8") for rows in (2, 4))
    )
    def test_the_state_of_other_shapes_names_leaf_and_field(self, name: str, rows: int):
        tx = _SETTINGS[name]()
        field = r"`state\.(mu|prev_params|prev_grad)`"
        says = rf"'kernel'.*{field}|{field}.*'kernel'"
        with self.assertRaisesRegex(ValueError, says) as caught:
            _traced(tx, tx.init(_small(rows)), _small())
        for shape in ((rows, 4), (3, 4)):
            self.assertIn(str(shape), str(caught.exception))

    @parameterized.parameters("prev_grad", "nu", "mu", "prev_grad_scale")
    def test_one_field_of_another_shape_is_named(self, field: str):
        tx = mars_optax.scale_by_mars(prev_grad_dtype="float8_e4m3fn")
        params = _small()
        state = tx.init(params)
        wrong = {**getattr(state, field), "bias": jnp.zeros(5)}
        with self.assertRaisesRegex(ValueError, rf"`state\.{field}`") as caught:
            _traced(tx, state._replace(**{field: wrong}), params)
        self.assertIn("'bias'", str(caught.exception))
        self.assertIn("(5,)", str(caught.exception))

    @parameterized.parameters("mars", "mars_m", "link")
    def test_a_leaf_too_few_or_too_many_is_named(self, name: str):
        tx, params = _SETTINGS[name](), _small()
        fewer = {"kernel": params["kernel"]}
        with self.assertRaisesRegex(ValueError, "leaf '(kernel2|bias)'"):
            _traced(tx, tx.init(params), {"kernel": params["kernel"], "kernel2": params["kernel"]})
        with self.assertRaisesRegex(ValueError, "'bias'"):
            _traced(tx, tx.init(params), fewer)
        with self.assertRaisesRegex(ValueError, "'bias'"):
            _traced(tx, tx.init(fewer), params)

    @parameterized.parameters(("mars", "bfloat16"), ("bfloat16", "mars"))
    def test_buffers_keep_the_dtypes_that_they_have(self, saved: str, wanted: str):
        params = _small()
        state = _SETTINGS[saved]().init(params)
        _, after = _traced(_SETTINGS[wanted](), state, params)
        trees.assert_same_types(after, jax.eval_shape(lambda: state))

    @parameterized.parameters(("schedule", "all"), ("without", "none"))
    def test_what_a_state_cannot_show_goes_on(self, saved: str, wanted: str):
        params = _small()
        state = _SETTINGS[saved]().init(params)
        _, after = _traced(_SETTINGS[wanted](), state, params)
        trees.assert_same_types(after, jax.eval_shape(lambda: state))

    @interpreter.always()
    def test_another_implementation_goes_on_with_the_same_state(self):
        params, grads = _tree(0, ["first", "bias0"]), _tree(1, ["first", "bias0"])
        make = functools.partial(mars_optax.mars, 0.1)
        tx, kernels = make(implementation="xla"), make(implementation="pallas")
        _, _, state = trees.run(tx, params, [grads])
        results = [mars_optax.fused_step(t, grads, state, params) for t in (tx, kernels)]
        trees.assert_same_types(*results)
        # The compiler contracts other sums in a kernel.
        trees.assert_close(*results, rtol=1e-6, atol=1e-7)


def _recipe() -> Callable[[Any, Any], str | None]:
    """`first_difference` of the page."""
    page = (_ROOT / "docs" / "errors.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (b for b in blocks if "def first_difference" in b)
    names: dict[str, Any] = {}
    exec(compile(block, "errors.md", "exec"), names)
    return names["first_difference"]


class CheckpointTest(parameterized.TestCase):
    def _saved(self, state: Any) -> str:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with ocp.CheckpointManager(folder) as manager:
            manager.save(1, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
        return folder

    def test_the_recipe_names_the_first_leaf_that_differs(self):
        params, difference = _small(), _recipe()

        def template(name: str, rows: int = 3) -> Any:
            return jax.eval_shape(lambda: {"opt_state": _SETTINGS[name]().init(_small(rows))})

        state = {"opt_state": _SETTINGS["mars"]().init(params)}
        handler = ocp.StandardCheckpointHandler()
        with ocp.CheckpointManager(self._saved(state), item_handlers=handler) as manager:
            saved = manager.item_metadata(1)
        self.assertIsNone(difference(saved, template("mars")))
        for name, rows, path in (
            ("lion", 3, "opt_state/nu/kernel"),
            ("exact", 3, "opt_state/prev_grad/kernel: in the checkpoint only"),
            ("without", 3, "opt_state/prev_grad/kernel"),
            ("float8", 3, "opt_state/prev_grad/kernel"),
            ("amsgrad", 3, "opt_state/nu_max/bias"),
            ("bfloat16", 3, "opt_state/mu/bias"),
            ("mars", 4, "opt_state/mu/kernel"),
        ):
            found = difference(saved, template(name, rows))
            self.assertIsNotNone(found, name)
            self.assertIn(path, found)

    def test_a_file_that_was_cut_short_is_an_error_that_names_the_leaf(self):
        # A tree of one leaf: Orbax leaves the reading of others unfinished, which warns later.
        folder = self._saved({"kernel": jnp.ones((64, 64))})
        largest = max(
            (p for p in pathlib.Path(folder, "1", "default", "d").iterdir()),
            key=lambda p: p.stat().st_size,
        )
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        template = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
        with (
            ocp.CheckpointManager(folder) as manager,
            self.assertRaisesRegex(ValueError, '"kernel/'),
        ):
            manager.restore(1, args=ocp.args.StandardRestore(template))


_LIMIT = 120  # seconds, for a machine that is busy


class InterruptedTest(parameterized.TestCase):
    def _run(self, *arguments: Any) -> tuple[int, str]:
        command = ["-m", "tests.hardening.interrupted", *map(str, arguments), str(_LIMIT)]
        with processes.started([command]) as children:
            ((child, output),) = children
            child.wait(_LIMIT)
            return child.returncode, processes.output_of(output)

    @pytest.mark.slow
    def test_training_that_was_killed_goes_on_bit_for_bit(self):
        """In one process: `tests/test_checkpoints.py`, for every optimizer."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        killed_at = interrupted.SAVE_EVERY + 1
        code, output = self._run("train", folder, killed_at)
        self.assertEqual(code, -signal.SIGKILL, output)
        # It was killed after a step that no checkpoint has.
        code, output = self._run("compare", folder, killed_at)
        self.assertEqual(code, 0, output)
        self.assertIn(f"resumed at {interrupted.SAVE_EVERY}", output)

    @pytest.mark.slow
    def test_no_file_cut_short_is_read_as_something_else(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        code, output = self._run("damage", folder, 0)
        self.assertEqual(code, 0, output)
        self.assertRegex(output, r"refused: [1-9]\d*")


if __name__ == "__main__":
    absltest.main()
