"""SOAP against a transcription of its algorithm in float64 NumPy, Adam, and its own symmetries.

Eigenvectors and the columns of Q have signs (phases, for complex matrices) at will: neither the
direction nor the second moment depends on them. Eigenvectors of an eigenvalue that is there more
than once may be any basis of their space, and the direction does depend on that: a first gradient
that is not square leaves a null space on its longer side. Where both sides are preconditioned, the
transcription's bases are put in the state after the first step.
"""

import functools
import logging
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import mesh
from mars_optax._src.variants import soap
from tests.support import trees

STEPS = 14
_STACK = MuonDimensionNumbers(1, 2)


def soap_matrix(grads, *, b1, b2, eps, frequency, beta=None, sides=(True, True), eps_root=0.0):
    """SOAP on one matrix: a dictionary of the direction and the state after every step."""
    beta = b2 if beta is None else beta
    rows, columns = grads[0].shape
    m, v = np.zeros_like(grads[0]), np.zeros((rows, columns))
    gram = [np.zeros((n, n), m.dtype) for n in (rows, columns)]
    q = [np.eye(n, dtype=m.dtype) for n in (rows, columns)]
    history = []
    for t, g in enumerate(grads):
        steps = t if any(sides) else t + 1
        u = np.zeros_like(g)
        if steps:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * np.abs(q[0].conj().T @ g @ q[1]) ** 2
            root = np.sqrt(v / (1 - b2**steps) + eps_root) + eps
            u = q[0] @ (q[0].conj().T @ m @ q[1] / (1 - b1**steps) / root) @ q[1].conj().T
        orders = []
        for side, (new, is_kept) in enumerate(
            zip((g @ g.conj().T, g.conj().T @ g), sides, strict=True)
        ):
            if not is_kept:
                continue
            gram[side] = beta * gram[side] + (1 - beta) * new
            if t == 0:
                q[side] = np.linalg.eigh(gram[side])[1][:, ::-1]
            elif t % frequency == 0:
                image = gram[side] @ q[side]
                order = np.argsort(-np.einsum("ij,ij->j", q[side].conj(), image).real)
                q[side] = np.linalg.qr(image[:, order])[0]
                v = np.take(v, order, axis=side)
                orders.append(order)
        was_sorted = all(np.array_equal(o, np.sort(o)) for o in orders)
        history.append(
            {
                "direction": u,
                "mu": m,
                "nu": v,
                "left": gram[0],
                "right": gram[1],
                "left_basis": q[0].copy(),
                "right_basis": q[1].copy(),
                "was_sorted": was_sorted,
            }
        )
        q = list(q)
    return history


def _grads(shape, steps=STEPS, seed=0, dtype="float64"):
    """Gradients whose norms lie on both sides of 1, and whose large directions change."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, *shape)) * np.exp(rng.normal(size=(steps, 1, *shape[1:])))
    return (x + 1j * rng.normal(size=x.shape) if dtype == "complex128" else x).astype(dtype)


@functools.cache
def _jitted(**options):
    tx = soap.scale_by_soap(**options)
    return tx.init, jax.jit(tx.update)


_BOTH = (True, True)
_ORACLE = {
    "wide": ((3, 5), {}, _BOTH),
    "tall": ((5, 3), {}, _BOTH),
    "square": ((4, 4), {}, _BOTH),
    "row": ((1, 3), {}, _BOTH),
    "complex": ((3, 4), {"dtype": "complex128"}, _BOTH),
    "one_sided_wide": ((3, 5), {"one_sided": True}, (True, False)),
    "one_sided_tall": ((5, 3), {"one_sided": True}, (False, True)),
    "one_sided_square": ((4, 4), {"one_sided": True}, (True, False)),
    "too_long_left": ((5, 3), {"max_precond_dim": 3}, (False, True)),
    "too_long_right": ((3, 5), {"max_precond_dim": 3}, (True, False)),
    "too_long_both": ((4, 5), {"max_precond_dim": 3}, (False, False)),
    "one_side_that_is_too_long": ((4, 5), {"max_precond_dim": 3, "one_sided": True}, 2 * (False,)),
    "own_beta": ((4, 4), {"shampoo_beta": 0.5}, _BOTH),
    "eps_inside": ((4, 4), {"eps_root": 0.01, "eps": 0.1}, _BOTH),
    "every_step": ((4, 4), {"precondition_frequency": 1}, _BOTH),
    "without_memory": ((4, 4), {"b1": 0.0, "b2": 0.0, "shampoo_beta": 0.9}, _BOTH),
}


class OracleTest(parameterized.TestCase):
    @parameterized.named_parameters((f"_{name}", name) for name in _ORACLE)
    def test_every_step_is_that_of_the_transcription(self, name):
        shape, given, sides = _ORACLE[name]
        given = dict(given)
        grads = _grads(shape, dtype=given.pop("dtype", "float64"))
        options = {"b1": 0.9, "b2": 0.8, "eps": 1e-8, "precondition_frequency": 5, **given}
        expected = soap_matrix(
            grads,
            b1=options["b1"],
            b2=options["b2"],
            eps=options["eps"],
            frequency=options["precondition_frequency"],
            beta=options.get("shampoo_beta"),
            eps_root=options.get("eps_root", 0.0),
            sides=sides,
        )
        if all(sides) and name != "row":
            # The order of the columns, and of the second moment with them, is put to the test.
            self.assertFalse(all(step["was_sorted"] for step in expected))
        with trees.float64():
            init, update = _jitted(**options)
            state = init(jnp.asarray(grads[0]))
            for t, (g, step) in enumerate(zip(grads, expected, strict=True)):
                direction, state = update(jnp.asarray(g), state)
                actual = {"direction": direction, "mu": state.mu, "nu": state.nu}
                for side, is_kept, n in zip(("left", "right"), sides, g.shape, strict=True):
                    stack = getattr(state, side)
                    self.assertEqual(stack.shape[1], n if is_kept else 1)
                    if is_kept:
                        actual[side] = stack[0]
                        self._check_basis(getattr(state, f"{side}_basis")[0], step, side, t)
                for field, x in actual.items():
                    np.testing.assert_allclose(
                        x, step[field], rtol=1e-9, atol=1e-9, err_msg=f"{field} of step {t}"
                    )
                if t == 0 and all(sides):
                    bases = {k: jnp.asarray(step[k][None]) for k in ("left_basis", "right_basis")}
                    state = state._replace(**bases)

    def _check_basis(self, basis, step, side, t):
        # At the first step the eigenvectors of 0 are a basis of the null space, any one.
        gram, q = step[side], np.asarray(basis)
        np.testing.assert_allclose(q.conj().T @ q, np.eye(len(q)), atol=1e-12)
        if t == 0:
            values = np.linalg.eigvalsh(gram)[::-1]
            np.testing.assert_allclose(q.conj().T @ gram @ q, np.diag(values), atol=1e-12)
        else:
            overlaps = np.abs(step[f"{side}_basis"].conj().T @ q)
            np.testing.assert_allclose(overlaps, np.eye(len(q)), atol=1e-8)

    def test_slices_of_a_stack_are_matrices_of_their_own(self):
        grads = _grads((4, 2, 4, 3))
        options = {"b1": 0.9, "b2": 0.8, "eps": 1e-8}
        with trees.float64():
            init, update = _jitted(
                **options,
                precondition_frequency=5,
                weight_dimension_numbers=MuonDimensionNumbers(2, 0),
            )
            state = init(jnp.asarray(grads[0]))
            self.assertEqual(state.left.shape, (6, 4, 4))
            for g in grads:
                direction, state = update(jnp.asarray(g), state)
        for i, j in np.ndindex(2, 3):
            mine = grads[:, :, i, :, j].swapaxes(1, 2)
            expected = soap_matrix(mine, frequency=5, **options)[-1]
            for x, key in ((direction, "direction"), (state.mu, "mu"), (state.nu, "nu")):
                x = np.asarray(x)[:, i, :, j].T
                np.testing.assert_allclose(x, expected[key], rtol=1e-9, atol=1e-9, err_msg=key)
            np.testing.assert_allclose(state.left[3 * i + j], expected["left"], atol=1e-12)


class AdamTest(parameterized.TestCase):
    def _assert_equal(self, ours, theirs):
        grads = {"a": _grads((3, 5), 5), "b": _grads((4, 2), 5)}
        with trees.float64(), jax.disable_jit():
            params = jax.tree.map(lambda g: jnp.asarray(g[0]), grads)
            states = [tx.init(params) for tx in (ours, theirs)]
            for t in range(5):
                g = jax.tree.map(lambda g, t=t: jnp.asarray(g[t]), grads)
                (u, states[0]), (v, states[1]) = (
                    tx.update(g, state) for tx, state in zip((ours, theirs), states, strict=True)
                )
                trees.assert_equal(u, v)

    @parameterized.parameters({}, {"eps_root": 1e-3})
    def test_with_identity_bases_it_is_adam(self, **options):
        self._assert_equal(
            soap.scale_by_soap(0.9, 0.8, 1e-6, max_precond_dim=0, **options),
            optax.scale_by_adam(0.9, 0.8, 1e-6, **options),
        )

    def test_with_identity_bases_behind_the_correction_it_is_mars(self):
        self._assert_equal(
            soap.scale_by_mars_soap(0.9, 0.8, 1e-6, 0.1, max_norm=0.5, max_precond_dim=0),
            mars_optax.scale_by_mars(0.9, 0.8, 1e-6, 0.1, max_norm=0.5),
        )


class OptimizerTest(parameterized.TestCase):
    def _run(self, tx, params):
        update = jax.jit(tx.update)
        state = tx.init(params)
        for t in range(4):
            grads = jax.tree.map(lambda p, t=t: jnp.cos(p + t), params)
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    def test_with_identity_bases_it_is_mars(self):
        params = {"kernel": jnp.asarray(_grads((3, 5), 1)[0], "float32"), "bias": jnp.arange(3.0)}
        shared = {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "b2": 0.9,
            "eps": 1e-6,
            "gamma": 0.1,
            "weight_decay": 0.3,
            "mask": lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
            "learning_rate_1d": 0.05,
            "b2_1d": 0.8,
            "max_norm": 0.7,
        }
        ours = self._run(soap.mars_soap(**shared, max_precond_dim=0), params)
        trees.assert_close(ours, self._run(mars_optax.mars(**shared), params), rtol=1e-5, atol=1e-5)

    def test_on_a_quadratic_that_is_not_aligned_with_the_axes_it_ends_below_adam(self):
        rng = np.random.default_rng(0)
        turn = jnp.asarray(np.linalg.qr(rng.normal(size=(8, 8)))[0], "float32")
        scales = jnp.logspace(-2, 0, 8)[:, None]

        def loss(params):
            return jnp.sum(jnp.square(scales * (turn @ params["kernel"]))) + params["bias"] ** 2

        params = {"kernel": jnp.asarray(rng.normal(size=(8, 8)), "float32"), "bias": jnp.ones(())}
        losses = {}
        for name, options in (("soap", {}), ("adam", {"max_precond_dim": 0})):
            tx = soap.mars_soap(optax.cosine_decay_schedule(0.1, 200), **options)

            def step(carry, _, tx=tx):
                params, state = carry
                value, grads = jax.value_and_grad(loss)(params)
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), value

            start = (params, tx.init(params))
            losses[name] = float(
                jax.jit(lambda c, s=step: jax.lax.scan(s, c, None, 200))(start)[1][-1]
            )
        self.assertLess(losses["soap"], 0.2 * losses["adam"])


class SymmetryTest(parameterized.TestCase):
    @parameterized.parameters({}, {"one_sided": True})
    def test_in_a_turned_space_directions_are_turned(self, **options):
        rng = np.random.default_rng(3)
        u, v = (np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(2))
        v = np.eye(4) if options else v
        grads = _grads((4, 4))
        with trees.float64():
            init, update = _jitted(precondition_frequency=3, **options)
            state, turned_state = (init(jnp.zeros((4, 4))) for _ in range(2))
            for g in grads:
                direction, state = update(jnp.asarray(g), state)
                turned, turned_state = update(jnp.asarray(u @ g @ v), turned_state)
                np.testing.assert_allclose(turned, u @ direction @ v, rtol=1e-8, atol=1e-8)
            # Adam's are not.
            self.assertGreater(np.abs(turned - direction).max(), 0.1)

    def test_the_transpose_has_the_transposed_direction(self):
        grads = _grads((4, 4))
        with trees.float64():
            init, update = _jitted(precondition_frequency=3)
            state, other = init(jnp.zeros((4, 4))), init(jnp.zeros((4, 4)))
            for g in grads:
                direction, state = update(jnp.asarray(g), state)
                transposed, other = update(jnp.asarray(g.T), other)
                np.testing.assert_allclose(transposed, direction.T, rtol=1e-8, atol=1e-8)


class RoundingTest(parameterized.TestCase):
    @parameterized.parameters("approx", "sarah", "svrg")
    def test_a_gradient_that_comes_again_is_not_rounding_brought_to_size(self, correction):
        """The first step moves nothing, so that these estimators are the first gradient again."""
        rng = np.random.default_rng(0)
        grad, noise = (rng.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
        directions = []
        for change in (0.0, 1e-7):
            tx = mars_optax.scale_by_mars_soap(correction=correction)
            state = tx.init(grad)
            for _ in range(2):
                first = grad * (1 + change * noise)
                direction, state = tx.update(first, state, grad, grad_fn=lambda _, g=first: g)
            directions.append(direction)
        # Diagonal in its own bases, it has a direction of one entry of size 1 for each side.
        size = np.linalg.norm(directions[0])
        np.testing.assert_allclose(size, 32**0.5, rtol=0.01)
        self.assertLess(np.linalg.norm(directions[0] - directions[1]), 0.1 * size)

    def test_rounding_decides_the_basis_of_the_null_space_and_nothing_else(self):
        """What the docstring says: another basis of it is as good, and full rank ends it."""
        grads = np.random.default_rng(0).normal(size=(4, 4, 6)).astype(np.float32)
        tx = mars_optax.mars_soap(0.1, precondition_frequency=1)
        _, first = tx.update(grads[0], tx.init(grads[0]), grads[0])
        basis = np.array(first.inner_state.right_basis[0])
        null = basis[:, 4:]
        np.testing.assert_allclose(grads[0] @ null, 0.0, atol=1e-5)
        turned = np.concatenate([basis[:, :4], null @ [[0.6, -0.8], [0.8, 0.6]]], axis=1)
        inner = first.inner_state._replace(right_basis=jnp.asarray(turned[None], jnp.float32))
        after = []
        for state in (first, first._replace(inner_state=inner)):
            updates, state = tx.update(grads[1], state, grads[0])
            after.append((updates, state))
        (updates, state), (others, _) = after
        self.assertGreater(float(jnp.max(jnp.abs(updates - others))), 0.01)
        eager, _ = tx.update(grads[2], state, grads[0])
        compiled, _ = jax.jit(tx.update)(grads[2], state, grads[0])
        np.testing.assert_allclose(eager, compiled, atol=1e-5)


class RangeTest(parameterized.TestCase):
    def test_one_outlier_does_not_end_the_training(self):
        """Its square overflows; `optax.apply_if_finite` does not see it, as it is finite."""
        tx = mars_optax.scale_by_mars_soap(max_norm=None, precondition_frequency=1)
        grads = np.random.default_rng(0).standard_normal((8, 6, 4)).astype(np.float32)
        grads[3] *= 1e20
        state = tx.init(grads[0])
        for grad in grads:
            direction, state = jax.jit(tx.update)(grad, state)
            self.assertTrue(bool(jnp.isfinite(direction).all()))

    def test_covariances_in_float16_keep_to_its_range(self):
        tx = soap.scale_by_soap(precondition_dtype="float16", precondition_frequency=1)
        grads = 1e4 * np.random.default_rng(0).standard_normal((4, 6, 4)).astype(np.float32)
        state = tx.init(grads[0])
        for grad in grads:
            direction, state = tx.update(grad, state)
        self.assertTrue(bool(jnp.isfinite(direction).all()))

    @parameterized.parameters("b2", "shampoo_beta")
    def test_a_number_of_numpy_is_a_number(self, name):
        grad = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
        with trees.float64():
            directions = []
            for kind in (float, np.float64):
                tx = soap.scale_by_soap(**{name: kind(0.9)})
                state = tx.init(grad)
                for _ in range(2):
                    direction, state = tx.update(grad, state)
                directions.append(direction)
            trees.assert_equal(*directions)


def _program(x):
    # JAX remembers what it traced.
    return str(jax.make_jaxpr(lambda x: soap._orthogonal(x))(x))


class ExecutionTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.tx = soap.scale_by_soap(precondition_frequency=2, weight_dimension_numbers=_NUMBERS)
        self.params = {"stack": jnp.ones((2, 3, 3)), "square": jnp.ones((4, 4))}

    def _all_grads(self, *batch):
        keys = jax.random.split(jax.random.key(0), len(self.params))
        return {
            name: jax.random.normal(key, (6, *batch, *self.params[name].shape))
            for name, key in zip(self.params, keys, strict=True)
        }

    def _loop(self, update, grads):
        state, directions = self.tx.init(self.params), []
        for t in range(6):
            direction, state = update(jax.tree.map(lambda g, t=t: g[t], grads), state)
            directions.append(direction)
        return jax.tree.map(lambda *x: jnp.stack(x), *directions), state

    def test_eager_jit_and_scan_are_equal(self):
        grads = self._all_grads()
        directions, state = self._loop(self.tx.update, grads)
        # A Householder reflection is rounded otherwise where it is compiled with its neighbours.
        near = {"rtol": 1e-4, "atol": 1e-4}
        trees.assert_close(self._loop(jax.jit(self.tx.update), grads)[0], directions, **near)

        def body(state, g):
            direction, state = self.tx.update(g, state)
            return state, direction

        last, scanned = jax.jit(lambda s, g: jax.lax.scan(body, s, g))(
            self.tx.init(self.params), grads
        )
        trees.assert_close(scanned, directions, **near)
        trees.assert_same_types(last, state)

    def test_vmap_is_a_loop_over_models(self):
        grads = self._all_grads(2)

        def run(grads):
            return self._loop(self.tx.update, grads)[0]

        batched = jax.jit(jax.vmap(run, in_axes=1, out_axes=1))(grads)
        for i in range(2):
            expected = jax.jit(run)(jax.tree.map(lambda g, i=i: g[:, i], grads))
            actual = jax.tree.map(lambda u, i=i: u[:, i], batched)
            trees.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    def test_eager_steps_compile_once(self):
        grads = jax.tree.map(lambda g: g[0], self._all_grads())
        state = self.tx.init(self.params)
        for _ in range(2):
            _, state = self.tx.update(grads, state)
        with self.assertNoLogs("jax", logging.WARNING), jax.log_compiles(True):
            for _ in range(4):  # with a change of the bases, and without
                _, state = self.tx.update(grads, state)

    def test_no_product_is_in_the_low_precision_of_a_device(self):
        grads = {"stack": jnp.ones((2, 3, 3)), "square": jnp.ones((4, 4))}
        program = str(jax.make_jaxpr(self.tx.update)(grads, self.tx.init(grads)))
        products = program.count("dot_general[")
        self.assertGreater(products, 8)
        self.assertEqual(
            program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)"), products
        )

    def test_no_decomposition_is_of_many_large_matrices_at_once(self):
        x = jax.random.normal(jax.random.key(0), (5, 300, 300))
        self.enter_context(mock.patch.object(mesh, "is_one_device", return_value=True))
        self.enter_context(mock.patch.object(jax, "default_backend", return_value="gpu"))
        # JAX's rule for the routine that is slow on them.
        sizes = re.findall(r"f32\[([0-9]+),300,300\] = qr\[", _program(x))
        self.assertCountEqual(sizes, ["2", "1"])
        self.assertTrue(all(300 // int(size) > 128 for size in sizes))
        trees.assert_equal(soap._orthogonal(x), jnp.linalg.qr(x)[0])
        for shape in ((5, 256, 256), (2, 300, 300)):
            self.assertNotIn("scan", _program(jnp.ones(shape)))
        with mock.patch.object(jax, "default_backend", return_value="cpu"):
            self.assertEqual(re.findall(r"f32\[([0-9]+),300,300\] = qr\[", _program(x)), ["1"])
        # The parts of a sharded stack stay where they are.
        mesh.is_one_device.return_value = False
        self.assertNotIn("scan", _program(x))

    @parameterized.parameters("bfloat16", "float16", "float32", "float64", "complex64")
    def test_the_types_of_the_state_stay(self, dtype):
        with trees.float64():
            params = jax.tree.map(lambda x: x.astype(dtype), self.params)
            options = {"mu_dtype": "bfloat16", "precondition_dtype": "bfloat16"}
            for tx in (self.tx, soap.scale_by_soap(weight_dimension_numbers=_NUMBERS, **options)):
                state = before = tx.init(params)
                trees.assert_same_types(jax.eval_shape(tx.init, params), state)
                is_wide = tx is self.tx
                wide = jnp.promote_types(dtype, "float32") if is_wide else None
                low = "complex64" if dtype == "complex64" else "bfloat16"
                self.assertEqual(state.left["square"].dtype, wide if is_wide else low)
                wide_params = jax.tree.map(
                    lambda x: x.astype(jnp.promote_types(x.dtype, "float32")), params
                )
                for grads in (params, wide_params):
                    direction, state = tx.update(grads, state)
                    trees.assert_same_types(state, before)
                    self.assertTrue(
                        all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(direction))
                    )
                self.assertGreater(float(jnp.abs(direction["square"]).sum()), 0.1)

    def test_what_is_not_finite_stays_in_its_matrix(self):
        grads = self._all_grads()
        bad = jax.tree.map(lambda g: g.copy(), grads)
        bad["stack"] = bad["stack"].at[1, 0, 1, 2].set(jnp.nan)
        directions, _ = self._loop(jax.jit(self.tx.update), grads)
        actual, state = self._loop(jax.jit(self.tx.update), bad)
        trees.assert_equal(actual["square"], directions["square"])
        trees.assert_equal(actual["stack"][:, 1], directions["stack"][:, 1])
        self.assertTrue(bool(jnp.isnan(actual["stack"][2:, 0]).all()))
        self.assertFalse(bool(jnp.isnan(state.right_basis["stack"][1]).any()))

    @parameterized.parameters("zeros", "rank_1", "zero_row", "tiny", "huge")
    def test_degenerate_matrices_give_finite_directions(self, kind):
        x = jnp.outer(jnp.arange(1.0, 5.0), jnp.arange(1.0, 7.0))
        grad = {
            "zeros": jnp.zeros((4, 6)),
            "rank_1": x,
            "zero_row": (x + jnp.eye(4, 6)).at[2].set(0.0),
            "tiny": 1e-30 * x,
            "huge": 1e17 * x,
        }[kind]
        init, update = _jitted(precondition_frequency=2)
        state = init(grad)
        for _ in range(5):
            direction, state = update(grad, state)
            for leaf in jax.tree.leaves((direction, state)):
                self.assertTrue(bool(jnp.isfinite(leaf).all()))
        self.assertEqual(float(jnp.abs(direction).max()) > 0, kind not in ("zeros",))

    @parameterized.parameters(((0, 3),), ((3, 0),), ((2, 3, 0),), ((0, 3, 4),))
    def test_empty_matrices(self, shape):
        numbers = _STACK if len(shape) == 3 else None
        tx = soap.scale_by_soap(precondition_frequency=1, weight_dimension_numbers=numbers)
        state = before = tx.init(jnp.zeros(shape))
        for _ in range(2):
            direction, state = tx.update(jnp.zeros(shape), state)
        self.assertEqual(direction.shape, shape)
        trees.assert_same_types(state, before)

    def test_tree_map_params_finds_every_field(self):
        state = optax.tree.map_params(
            self.tx, lambda x, path: path, self.tx.init(self.params), {"stack": "s", "square": "q"}
        )
        for field in state._fields[1:]:
            self.assertEqual(getattr(state, field), {"stack": "s", "square": "q"}, field)


_NUMBERS = {"stack": _STACK, "square": MuonDimensionNumbers(0, 1)}


class FirstStepTest(absltest.TestCase):
    def test_it_finds_the_bases_and_moves_nothing(self):
        tx = soap.scale_by_soap(eps=0.0)
        grads = jax.random.normal(jax.random.key(0), (4, 4))
        direction, state = tx.update(grads, tx.init(grads))
        for x in (direction, state.mu, state.nu):
            self.assertEqual(float(jnp.abs(x).max()), 0.0)
        rotated = state.left_basis[0].T @ grads @ state.right_basis[0]
        singular = jnp.linalg.svd(grads, compute_uv=False)
        np.testing.assert_allclose(jnp.abs(rotated), jnp.diag(singular), atol=1e-5)
        # The second step is Adam's first: of any gradient, the signs in the bases.
        direction, _ = tx.update(jnp.ones((4, 4)) + grads @ grads, state)
        signs = state.left_basis[0].T @ direction @ state.right_basis[0]
        # Small entries are damped by up to a thousandth of the root mean square, squared.
        np.testing.assert_allclose(jnp.abs(signs), 1.0, atol=2e-4)


class StateTest(absltest.TestCase):
    def test_a_state_of_other_settings_is_refused(self):
        grads = {"w": jnp.ones((3, 5))}
        state = soap.scale_by_soap(one_sided=True).init(grads)
        with self.assertRaisesRegex(ValueError, r"`state.right`.*\(1, 5, 5\).*'w'.*\(1, 1, 1\)"):
            soap.scale_by_soap().update(grads, state)

    def test_a_vector_is_refused(self):
        with self.assertRaisesRegex(ValueError, "'b'.*`scale_by_soap` expected a matrix"):
            soap.scale_by_soap().init({"b": jnp.ones(3)})


if __name__ == "__main__":
    absltest.main()
