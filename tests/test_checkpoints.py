"""Checkpoints with Orbax: states come back whole, on other meshes, and into no other optimizer."""

import functools
import pathlib
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mars_optax
from tests.support import processes, saving, trees

_HALF = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16", "prev_grad_dtype": "bfloat16"}
_ALONE = {"max_norm": None, "second_moment": "gradient", "keep_prev_grad": False}
_mars, _mars_m = mars_optax.mars, mars_optax.mars_m

# Newton-Schulz in float32: bfloat16 would round away what is compared.
_OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformationExtraArgs]] = {
    "mars": functools.partial(_mars, 0.1),
    "mars_bfloat16": functools.partial(_mars, 0.1, **_HALF),
    "mars_8_bits": functools.partial(_mars, 0.1, prev_grad_dtype="float8_e4m3fn"),
    "mars_exact": functools.partial(_mars, 0.1, correction="exact"),
    "mars_without_prev_grad": functools.partial(_mars, 0.1, **_ALONE),
    "mars_amsgrad": functools.partial(_mars, 0.1, amsgrad=True),
    "mars_lion": functools.partial(mars_optax.mars_lion, 0.1),
    "mars_shampoo": functools.partial(mars_optax.mars_shampoo, 0.1, ns_dtype="float32"),
    "mars_m": functools.partial(_mars_m, 0.1, ns_dtype="float32"),
    "storm_adamw": functools.partial(mars_optax.storm_adamw, 0.1),
    "mars_soap": functools.partial(mars_optax.mars_soap, 0.1, one_sided=True),
    "adamw": functools.partial(optax.adamw, 0.1),
}
_RESUMED = ("mars_bfloat16", "mars_8_bits", "mars_exact", "mars_without_prev_grad", "storm_adamw")
# Without a sum there is no order of addition that the layout could change.
_ELEMENTWISE = ("mars_without_prev_grad", "storm_adamw")
_RESUMED_SLOWLY = ("mars", "mars_amsgrad", "mars_lion", "mars_shampoo", "mars_m", "mars_soap")

# Meshes by the shape of (x, y), and where the axes of a matrix and of a vector lie.
_Layout = tuple[tuple[int, int], P, P]
_SAVED: _Layout = ((4, 2), P("x", "y"), P("x"))
_TURNED: _Layout = ((2, 4), P("y", "x"), P(("y", "x")))
_ONE_DEVICE: _Layout = ((1, 1), P(), P())


def _host_tree(seed: int, dtype: str) -> Any:
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (8, 16), "bias": (16,)}
    return {k: rng.standard_normal(s).astype(jnp.dtype(dtype)) for k, s in shapes.items()}


def _shardings(layout: _Layout) -> Any:
    shape, matrix, vector = layout
    devices = jax.devices("cpu")
    mesh = jax.make_mesh(
        shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices[: shape[0] * shape[1]]
    )
    return {"kernel": NamedSharding(mesh, matrix), "bias": NamedSharding(mesh, vector)}


def _fresh(tx: Any, params: Any) -> Any:
    return {"params": params, "opt_state": tx.init(params)}


def _step_of(tx: Any) -> Callable[[Any, Any], Any]:
    @jax.jit
    def step(state: Any, target: Any) -> Any:
        def grad_fn(params: Any) -> Any:
            return jax.tree.map(jnp.subtract, params, target)

        params = state["params"]
        extra = (
            {"grad_fn": grad_fn} if isinstance(tx, optax.GradientTransformationExtraArgs) else {}
        )
        updates, opt_state = tx.update(grad_fn(params), state["opt_state"], params, **extra)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}

    return step


def _template(tx: Any, layout: _Layout, dtype: str) -> Any:
    """Shapes, dtypes and shardings of a state of training, without its arrays."""
    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        _host_tree(0, dtype),
        _shardings(layout),
    )
    fresh = functools.partial(_fresh, tx)
    shardings = jax.jit(fresh).lower(params).compile().output_shardings
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(fresh, params),
        shardings,
    )


class CheckpointTest(parameterized.TestCase):
    def _manager(self) -> ocp.CheckpointManager:
        manager = ocp.CheckpointManager(self.enterContext(tempfile.TemporaryDirectory()))
        self.addCleanup(manager.close)
        return manager

    def _save(self, manager: ocp.CheckpointManager, state: Any) -> None:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()

    def _saved(self, name: str) -> ocp.CheckpointManager:
        manager, tx = self._manager(), _OPTIMIZERS[name]()
        self._save(manager, _fresh(tx, jax.tree.map(jnp.asarray, _host_tree(0, "float32"))))
        return manager

    def _check_resuming(self, name: str) -> None:
        tx, dtype = _OPTIMIZERS[name](), "bfloat16" if "bfloat16" in name else "float32"
        step, targets = _step_of(tx), [_host_tree(seed, dtype) for seed in range(1, 4)]
        state = _fresh(tx, jax.device_put(_host_tree(0, dtype), _shardings(_SAVED)))
        placed = [jax.device_put(target, _shardings(_SAVED)) for target in targets]
        for target in placed[:2]:
            state = step(state, target)
        manager = self._manager()
        self._save(manager, state)
        expected = step(state, placed[2])

        for layout in (_SAVED, _TURNED, _ONE_DEVICE):
            template = _template(tx, layout, dtype)
            restored = manager.restore(1, args=ocp.args.StandardRestore(template))
            trees.assert_same_types(restored, state)
            trees.assert_equal(restored, state)
            for leaf, like in zip(
                jax.tree.leaves(restored), jax.tree.leaves(template), strict=True
            ):
                self.assertTrue(leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim))
            resumed = step(restored, jax.device_put(targets[2], _shardings(layout)))
            if layout is _SAVED or (layout is _TURNED and name in _ELEMENTWISE):
                trees.assert_equal(resumed, expected)
            else:
                # Sums over a matrix are taken in another order; Newton-Schulz amplifies it.
                trees.assert_close(resumed, expected, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(*_RESUMED)
    def test_training_goes_on_from_a_checkpoint(self, name: str):
        self._check_resuming(name)

    @parameterized.parameters(*_RESUMED_SLOWLY)
    @pytest.mark.slow
    def test_training_goes_on_from_a_checkpoint_of_the_others(self, name: str):
        self._check_resuming(name)

    def test_without_a_template_the_state_is_plain_containers_by_the_same_names(self):
        tx = _OPTIMIZERS["mars_8_bits"]()
        state = _fresh(tx, jax.tree.map(jnp.asarray, _host_tree(0, "float32")))
        state = _step_of(tx)(state, _host_tree(1, "float32"))
        manager = self._manager()
        self._save(manager, state)
        plain = manager.restore(1, args=ocp.args.StandardRestore())
        opt_state = plain["opt_state"]
        self.assertIsInstance(opt_state, dict)
        self.assertEqual(opt_state["prev_grad"]["kernel"].dtype, jnp.float8_e4m3fn)
        self.assertIsNone(opt_state["prev_params"])
        by_path = {trees.path_of(p): x for p, x in jax.tree_util.tree_leaves_with_path(state)}
        restored = {trees.path_of(p): x for p, x in jax.tree_util.tree_leaves_with_path(plain)}
        trees.assert_equal(restored, by_path)

    @parameterized.parameters(
        # The optimizer that saved, the one that is to go on, and what the error has to name.
        ("mars", "adamw", "count"),
        ("mars_m", "mars", "nu"),
        ("mars", "mars_exact", "prev_params"),
        ("mars", "mars_amsgrad", "nu_max"),
        ("mars", "mars_8_bits", "prev_grad_scale"),
        ("mars_8_bits", "mars", "prev_grad_scale"),
        ("mars", "mars_without_prev_grad", "prev_grad"),
        ("mars_without_prev_grad", "mars", "prev_grad"),
        ("storm_adamw", "mars", "prev_grad"),
    )
    def test_another_optimizer_is_refused_and_the_field_is_named(
        self, saved: str, wanted: str, field: str
    ):
        manager = self._saved(saved)
        template = jax.eval_shape(
            functools.partial(_fresh, _OPTIMIZERS[wanted]()), _host_tree(0, "float32")
        )
        named = rf"Target path \([^)]*'{field}'[^)]*\) not found|\.{field}:\n"
        with self.assertRaisesRegex(ValueError, named):
            manager.restore(1, args=ocp.args.StandardRestore(template))

    @parameterized.parameters("mars_lion", "mars_m")
    def test_second_moments_that_a_variant_does_not_keep_are_left_out(self, wanted: str):
        # What the documentation warns of: Orbax leaves out what the template has no leaf for.
        template = jax.eval_shape(
            functools.partial(_fresh, _OPTIMIZERS[wanted]()), _host_tree(0, "float32")
        )
        manager = self._saved("mars")
        restored = manager.restore(1, args=ocp.args.StandardRestore(template))["opt_state"]
        trees.assert_same_types(restored, template["opt_state"])
        self.assertIsInstance(restored.nu["kernel"], optax.MaskedNode)

    def test_another_shape_is_refused(self):
        # A tree of one leaf: Orbax leaves the reading of others unfinished, which warns later.
        manager = self._manager()
        self._save(manager, {"kernel": jnp.zeros((8, 16))})
        template = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        with self.assertRaisesRegex(ValueError, r"\(8, 8\) is not compatible.*\(8, 16\)"):
            manager.restore(1, args=ocp.args.StandardRestore(template))

    def test_a_buffer_of_8_bits_does_not_survive_a_cast_to_another_kind(self):
        # What the documentation warns of: the error is silent, and the range overflows.
        tx = _mars(0.1, prev_grad_dtype="float8_e5m2")
        state = _fresh(tx, jax.tree.map(jnp.asarray, _host_tree(0, "float32")))
        manager = self._manager()
        self._save(manager, _step_of(tx)(state, _host_tree(1, "float32")))
        template = jax.eval_shape(
            functools.partial(_fresh, _OPTIMIZERS["mars_8_bits"]()), _host_tree(0, "float32")
        )
        restored = manager.restore(1, args=ocp.args.StandardRestore(template))
        self.assertFalse(trees.all_finite(trees.fields(restored, "prev_grad")))

    def test_another_dtype_of_a_buffer_is_cast(self):
        manager, tx = self._saved("mars"), _OPTIMIZERS["mars_bfloat16"]()
        template = jax.eval_shape(functools.partial(_fresh, tx), _host_tree(0, "float32"))
        restored = manager.restore(1, args=ocp.args.StandardRestore(template))
        trees.assert_same_types(restored, template)


_LIMIT = 120  # seconds


class KilledSaveTest(parameterized.TestCase):
    def _check(self, moments: list[tuple[str, int]]) -> None:
        root = self.enterContext(tempfile.TemporaryDirectory())
        folders = [f"{root}/{event}_{count}" for event, count in moments]
        commands = [
            ["-m", "tests.support.saving", folder, event, str(count), str(_LIMIT)]
            for folder, (event, count) in zip(folders, moments, strict=True)
        ]
        with processes.started(commands) as children:
            for child, _ in children:
                child.wait(_LIMIT)
            codes = [child.returncode for child, _ in children]
            self.assertEqual(codes, [-signal.SIGKILL] * len(moments), processes.report(children))
        template = jax.eval_shape(functools.partial(saving.state_of, 0))
        for folder, moment in zip(folders, moments, strict=True):
            with self.subTest(moment), ocp.CheckpointManager(folder) as manager:
                self.assertEqual(manager.latest_step(), 1)
                for step in (1, 2):
                    restored = manager.restore(step, args=ocp.args.StandardRestore(template))
                    trees.assert_equal(restored, saving.state_of(step))
                    # What the killed save left behind is not in the way of the next one.
                    if step == 1:
                        manager.save(2, args=ocp.args.StandardSave(saving.state_of(2)))
                        manager.wait_until_finished()
                self.assertEqual(sorted(p.name for p in pathlib.Path(folder).iterdir()), ["1", "2"])

    def test_a_save_that_is_killed_leaves_the_last_one_whole(self):
        self._check([("open", 3), ("commit", 1)])

    @pytest.mark.slow
    def test_a_save_that_is_killed_at_any_moment_leaves_the_last_one_whole(self):
        self._check([("os.mkdir", 1), ("os.mkdir", 3), ("os.rename", 1)])
        self._check([("open", count) for count in range(1, 9)])


if __name__ == "__main__":
    absltest.main()
