"""The exact mode, whose previous gradient is that of this batch at the previous parameters.

Covers the recorded trajectories in closed loop, the NumPy oracle on gradients of our own, every
way in which a user reaches `update` (jit, scan, chain, masked, MultiSteps, injected
hyperparameters, Flax), data parallelism, what is refused, and what the second gradient buys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.parity import test_trajectories as recorded
from tests.support import goldens, numpy_reference, trees

GOLDENS = [name for name in goldens.names() if name.startswith("exact_")]
# Adam divides a gradient's entry by its own size: where it is all but 0, its rounding shows in the
# parameter. The same case in float64 has no such allowance.
PARAMS_ATOL = {"exact_adamw__mlp_optimize_1d": 1e-5}
_jit = functools.partial(jax.jit, compiler_options=recorded.QUICKLY)
# The recorded problem multiplies by weights from the right, and the recorded optimizer took them
# for PyTorch's (out, in).
TORCH = MuonDimensionNumbers(reduction_axis=1, output_axis=0)


def _optimizer_of(golden):
    """The exact optimizer that follows a recorded case, without a transpose."""
    overrides = {"correction": "exact"}
    if golden.ns_dtype is not None:
        # One clip for the stack `mix` of rank 3, as there.
        specs = {2: TORCH, 3: MuonDimensionNumbers(reduction_axis=(0, 1), output_axis=2)}
        overrides["weight_dimension_numbers"] = {
            leaf: specs[golden.init[leaf].ndim] if leaf in golden.matrices else None
            for leaf in golden.leaves
        }
    if golden.impl == "official_mars_m":
        mix = golden.init["mix"].shape
        orthogonalize = functools.partial(
            mars_optax.orthogonalize,
            steps=golden.hyperparameters["ns_steps"],
            dtype=golden.ns_dtype,
            precision="highest",
            weight_dimension_numbers=MuonDimensionNumbers(1, 2),
        )

        def newton_schulz(x):
            if x[0].size != np.prod(mix):
                return orthogonalize(x)
            # Its factor there is of the first two axes, ours of all reduction axes.
            factor = np.sqrt(max(mix[:2]) / max(x.shape[1:]))
            stack = recorded.orthogonalized_by_one_norm(golden, x.reshape(mix))
            return factor * stack.reshape(x.shape)

        overrides["newton_schulz_fn"] = newton_schulz
    return recorded.optimizer_of(golden, **overrides)


_GRADS = {}


def _grad_of(golden):
    """The gradient of the recorded problem, clipped as the training script does."""
    kind = golden.meta["problem"]["kind"]
    if kind not in _GRADS:
        _GRADS[kind] = _jit(jax.grad(goldens.loss_of(golden)))

    def grad(params, x, y):
        grads = _GRADS[kind](params, x, y)
        if bound := golden.meta["grad_clip"]:
            scale = jnp.minimum(1.0, bound / (optax.tree.norm(grads) + 1e-6))
            grads = optax.tree.scale(scale, grads)
        return grads

    return grad


class RecordedTest(recorded.RecordedTestCase):
    @parameterized.parameters(*GOLDENS)
    def test_recorded_trajectory_is_followed_in_closed_loop(self, name):
        golden = goldens.load(name)
        steps = golden.meta["steps"]
        self.enter_context(recorded.precision_of(golden))
        self.enter_context(jax.default_matmul_precision("highest"))
        tx, grad = _optimizer_of(golden), _grad_of(golden)

        params = jax.tree.map(jnp.asarray, golden.init)
        x, y = (jnp.asarray(golden.extra[key]) for key in ("data/x", "data/y"))
        state, history, grads = tx.init(params), [], []
        for t in range(steps):
            grads.append(grad(params, x[t], y[t]))
            updates, state = tx.update(
                grads[-1], state, params, grad_fn=functools.partial(grad, x=x[t], y=y[t])
            )
            params = optax.apply_updates(params, updates)
            history.append(params)

        tight = {"rtol": 1e-10, "atol": 1e-10}
        strict = recorded.tolerances_of(golden, "params")
        strict["atol"] = PARAMS_ATOL.get(name, strict["atol"])
        # The loop feeds the rounding of parameters back into the gradients.
        loose = tight if golden.is_float64 else {"rtol": 1e-4, "atol": 1e-5}
        fields = goldens.state_by_field(state)
        self.assertNotIn("prev_grad", fields)
        (prev_params,) = trees.fields(state, "prev_params")
        for leaf in golden.leaves:
            for t in range(steps):
                where = f"{name} {leaf} step {t + 1}"
                goldens.assert_close(
                    history[t][leaf],
                    golden.params[leaf][t],
                    **strict,
                    what=f"params {where}",
                )
                goldens.assert_close(
                    grads[t][leaf], golden.grads[leaf][t], **loose, what=f"gradient {where}"
                )
            np.testing.assert_array_equal(prev_params[leaf], history[-2][leaf], err_msg=leaf)
            for field in ("mu", "nu"):
                if leaf not in golden.state.get(field, {}):
                    continue
                if leaf not in fields.get(field, {}):
                    np.testing.assert_array_equal(golden.state[field][leaf], 0.0)
                    continue
                goldens.assert_close(
                    fields[field][leaf],
                    golden.state[field][leaf],
                    **loose,
                    what=f"{name} {leaf} final {field}",
                )
        # What it keeps for the next step is the gradient of the next batch at these parameters.
        following = grad(prev_params, x[steps], y[steps])
        for leaf, gradient in golden.state["prev_grad"].items():
            goldens.assert_close(following[leaf], gradient, **loose, what=f"{name} {leaf} next")

    def test_both_regimes_of_the_clips_are_recorded(self):
        clipped = [goldens.load(name).meta["clipped_steps"] for name in GOLDENS]
        counts = {count for case in clipped for count in case.values()}
        self.assertContainsSubset({0, 12}, counts)
        self.assertIn(1.0, {goldens.load(name).meta["grad_clip"] for name in GOLDENS})


STEPS = 4
LAYERS = {"kernel": (4, 3), "square": (3, 3), "bias": (3,), "scale": ()}
FACTORIES = ("mars", "mars_lion", "mars_shampoo", "mars_m")
DIRECTIONS = ("scale_by_mars", "scale_by_mars_lion", "scale_by_mars_shampoo", "scale_by_mars_m")


def _loss(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["kernel"] + params["bias"])
    return jnp.mean((params["scale"] * (hidden @ params["square"]) - y) ** 2)


_grad = jax.jit(jax.grad(_loss))


def _params(seed=0, dtype=None):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in LAYERS.items()}


def _batches(steps=STEPS, size=8, seed=1):
    """Batches stacked along a leading axis; large targets take some gradients over the clip."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(steps, size, 4))), jnp.asarray(
        2.0 * rng.normal(size=(steps, size, 3))
    )


def _at(batches, t):
    return jax.tree.map(lambda x: x[t], batches)


def _updated(tx, params, state, batch, grad=_grad, **kwargs):
    """One step in exact mode: the new parameters and the new state."""
    updates, state = tx.update(
        grad(params, batch), state, params, grad_fn=lambda p: grad(p, batch), **kwargs
    )
    return optax.apply_updates(params, updates), state


def _train(tx, params, batches, grad=_grad):
    """Steps in closed loop: the parameters after each of them, and the state.

    Operation by operation, which compiles little.
    """
    state, history = tx.init(params), []
    for t in range(len(batches[0])):
        params, state = _updated(tx, params, state, _at(batches, t), grad)
        history.append(params)
    return jax.tree.map(lambda *x: jnp.stack(x), *history), state


def _steps(tx, params, batches):
    """The same under jit: the last parameters, and the state."""
    step, state = _jit(functools.partial(_updated, tx)), tx.init(params)
    for t in range(len(batches[0])):
        params, state = step(params, state, _at(batches, t))
    return params, state


def _optimizer(name, **kwargs):
    if name in FACTORIES:
        kwargs = {"learning_rate": 0.1, **kwargs}
    if name.endswith(("_shampoo", "_m")):
        kwargs = {"ns_dtype": "float32", **kwargs}
    return getattr(mars_optax, name)(correction="exact", **kwargs)


@functools.cache
def _expected(name, *, optimize_1d=False):
    """What the standard batches make of the standard parameters, and the optimizer."""
    kwargs = {} if name == "mars_m" else {"optimize_1d": optimize_1d}
    tx = _optimizer(name, **kwargs)
    return tx, *_train(tx, _params(), _batches())


def _quadratic(params, curvatures):
    """The gradient of a problem that takes few operations."""
    return jax.tree.map(jnp.multiply, params, curvatures)


def _only_matrices(tree):
    return {name: leaf for name, leaf in tree.items() if len(LAYERS[name]) == 2}


class OracleTest(parameterized.TestCase):
    """In float64 each leaf equals the NumPy rules, given both gradients of every step."""

    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    def _oracle(self, name, leaf, param, grads, prev_grads, *, optimize_1d, **common):
        rule = {"mars": "adamw", "mars_lion": "lion", "mars_shampoo": "shampoo"}.get(name, name)
        if len(LAYERS[leaf]) < 2:
            if not optimize_1d:
                return numpy_reference.adamw_leaf(param, grads, lr=0.05, weight_decay=0.1)
            rule = "adamw" if rule == "shampoo" else rule
        return numpy_reference.mars_leaf(
            param, grads, rule=rule, lr=0.05, prev_grads=prev_grads, **common
        )

    @parameterized.parameters(
        ("mars", False, "zeros"),
        ("mars", True, "no_correction"),
        ("mars_lion", False, "no_correction"),
        ("mars_lion", True, "zeros"),
        ("mars_shampoo", False, "zeros"),
        ("mars_shampoo", True, "no_correction"),
        ("mars_m", False, "zeros"),
        ("mars_m", False, "no_correction"),
    )
    def test_every_leaf_equals_the_oracle(self, name, optimize_1d, first_step):
        common = {"gamma": 0.4, "b1": 0.9, "weight_decay": 0.02, "max_norm": 1.0}
        kwargs = {"optimize_1d": optimize_1d} if name != "mars_m" else {"weight_decay_1d": 0.1}
        if name.endswith(("_shampoo", "_m")):
            kwargs["ns_dtype"] = "float64"
        tx = _optimizer(name, learning_rate=0.05, first_step=first_step, **common, **kwargs)
        params, batches = _params(), _batches()
        history, state = _train(tx, params, batches)
        before = jax.tree.map(lambda p, h: jnp.concatenate([p[None], h[:-1]]), params, history)
        grads = jax.vmap(_grad)(before, batches)
        prev_params = jax.tree.map(lambda p, b: jnp.concatenate([p[None], b[:-1]]), params, before)
        prev_grads = jax.vmap(_grad)(prev_params, batches)
        if first_step == "zeros":
            prev_grads = jax.tree.map(lambda g: g.at[0].set(0.0), prev_grads)
        state = goldens.state_by_field(state)
        for leaf, shape in LAYERS.items():
            trajectory = self._oracle(
                name,
                leaf,
                *(
                    goldens.oriented(np.asarray(x[leaf]), len(shape))
                    for x in (params, grads, prev_grads)
                ),
                optimize_1d=optimize_1d,
                **common,
            )
            for ours, theirs, what in (
                (history[leaf], trajectory.params, "params"),
                (state["mu"][leaf], trajectory.mu, "mu"),
            ):
                goldens.assert_close(
                    goldens.oriented(np.asarray(ours), len(shape)),
                    theirs,
                    rtol=1e-10,
                    atol=1e-10,
                    what=f"{name} {leaf} {what}",
                )

    @parameterized.parameters("zeros", "no_correction")
    def test_the_links_compose_to_exact_mars_to_the_last_bit(self, first_step):
        options = {"correction": "exact", "first_step": first_step}
        ours = mars_optax.scale_by_mars(0.9, 0.97, gamma=0.1, max_norm=0.5, **options)
        chain = optax.chain(
            mars_optax.correct_gradients(0.1, 0.9, **options),
            mars_optax.clip_by_leaf_norm(0.5),
            optax.scale_by_adam(0.9, 0.97),
        )
        curvatures = [_params(seed) for seed in range(2, 5)]
        histories = []
        for direction in (ours, chain):
            tx = optax.chain(direction, optax.scale_by_learning_rate(0.1))
            params = _params()
            state, history = tx.init(params), []
            with jax.disable_jit():
                for curvature in curvatures:
                    params, state = _updated(tx, params, state, curvature, _quadratic)
                    history.append(params)
            histories.append(history)
        trees.assert_equal(*histories)

    def test_gamma_one_is_the_momentum_of_storm(self):
        """With k = b1 / (1 - b1) the zeros before the first step make m_1 = g_1, as in STORM."""
        b1 = 0.8
        tx = mars_optax.scale_by_mars_lion(b1, gamma=1.0, max_norm=None, correction="exact")
        storm = mars_optax.correct_gradients(gamma=1 - b1, correction="storm")

        @_jit
        def step(params, state, storm_state, batch):
            grads, grad_fn = _grad(params, batch), functools.partial(_grad, batch=batch)
            _, state = tx.update(grads, state, params, grad_fn=grad_fn)
            corrected, storm_state = storm.update(grads, storm_state, params, grad_fn=grad_fn)
            params = jax.tree.map(lambda p, c: p - 0.1 * c, params, corrected)
            return params, state, storm_state, corrected

        params, batches = _params(), _batches()
        state, storm_state = tx.init(params), storm.init(params)
        for t in range(STEPS):
            params, state, storm_state, corrected = step(
                params, state, storm_state, _at(batches, t)
            )
            trees.assert_close(state.mu, corrected, rtol=1e-12, atol=1e-12)


class StateTest(parameterized.TestCase):
    @parameterized.parameters(*FACTORIES, *DIRECTIONS, "correct_gradients")
    def test_it_keeps_the_previous_parameters_in_place_of_the_previous_gradient(self, name):
        tx, params = _optimizer(name), _params()
        if name in DIRECTIONS[2:]:
            params = _only_matrices(params)
        state = tx.init(params)
        moved = jax.tree.map(lambda p: p + 0.1, params)
        _, later = tx.update(params, state, moved, grad_fn=lambda p: p)
        for node, expected in ((state, params), (later, moved)):
            (prev_params,) = trees.fields(node, "prev_params")
            trees.assert_equal(prev_params, expected)
            self.assertEmpty(trees.fields(node, "prev_grad"))
            self.assertEmpty(trees.fields(node, "prev_grad_scale"))

    @parameterized.parameters(*FACTORIES, *DIRECTIONS, "correct_gradients")
    def test_types_of_the_state_are_a_fixed_point_for_half_precision(self, name):
        tx = _optimizer(name)
        for params_dtype, grads_dtype, prev_dtype in (
            ("bfloat16", "bfloat16", "bfloat16"),
            ("bfloat16", "float32", "bfloat16"),
            ("bfloat16", "float32", "float32"),
            ("float32", "bfloat16", "float32"),
            ("float16", "float32", "float16"),
        ):
            params = _params(dtype=params_dtype)
            if name in DIRECTIONS[2:]:
                params = _only_matrices(params)
            grads = optax.tree.cast(params, grads_dtype)

            def update(state, params=params, grads=grads, dtype=prev_dtype):
                return tx.update(grads, state, params, grad_fn=lambda p: optax.tree.cast(p, dtype))

            state = jax.eval_shape(tx.init, params)
            updates, new_state = jax.eval_shape(update, state)
            trees.assert_same_types(new_state, state)
            self.assertEmpty(trees.weak_leaves((updates, new_state)))
            trees.assert_same_types(updates, params if name in FACTORIES else grads)
            (prev_params,) = trees.fields(state, "prev_params")
            trees.assert_same_types(prev_params, jax.eval_shape(lambda p=params: p))

    def test_half_precision_parameters_are_trained(self):
        params, batches = _params(dtype="bfloat16"), _batches()
        moved, state = _steps(_optimizer("mars"), params, jax.tree.map(jnp.bfloat16, batches))
        self.assertTrue(trees.all_finite((moved, state)))
        for leaf, start in params.items():
            self.assertEqual(moved[leaf].dtype, jnp.bfloat16)
            self.assertTrue(bool(jnp.any(moved[leaf] != start)), leaf)

    @parameterized.parameters(True, False)
    def test_parameters_and_state_can_both_be_donated(self, optimize_1d):
        tx = _optimizer("mars", optimize_1d=optimize_1d)
        params, batches = _params(), _batches()
        state = tx.init(params)
        step = _jit(functools.partial(_updated, tx), donate_argnums=(0, 1))
        for t in range(2):
            params, state = step(params, state, _at(batches, t))
        # An eager update must not keep the parameters by reference either.
        _, state = tx.update(params, state, params, grad_fn=lambda p: p)
        params, state = step(params, state, _at(batches, 2))
        self.assertTrue(trees.all_finite((params, state)))

    @parameterized.parameters(True, False)
    def test_grad_fn_is_called_once_with_all_previous_parameters(self, optimize_1d):
        tx = _optimizer("mars", optimize_1d=optimize_1d)

        @_jit
        def step(params, state, batch):
            seen = []

            def grad_fn(prev_params):
                seen.append(prev_params)
                return _grad(prev_params, batch)

            updates, state = tx.update(_grad(params, batch), state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state, seen

        params, batches = _params(), _batches()
        state, previous = tx.init(params), params
        for t in range(3):
            before = params
            params, state, seen = step(params, state, _at(batches, t))
            trees.assert_equal(seen, [previous])
            previous = before


class WrapperTest(parameterized.TestCase):
    """Whatever stands between the user and the optimizer hands `grad_fn` on."""

    @parameterized.parameters(*FACTORIES)
    def test_jitted_steps_equal_eager_ones(self, name):
        tx, history, _ = _expected(name)
        params, _ = _steps(tx, _params(), _batches())
        # Newton-Schulz amplifies what the compiler contracts.
        trees.assert_close(params, _at(history, -1), rtol=1e-4, atol=1e-4)

    def test_a_scan_equals_single_steps(self):
        tx, history, state = _expected("mars")
        carry = _params(), tx.init(_params())

        def step(carry, batch):
            carry = _updated(tx, *carry, batch)
            return carry, carry[0]

        scanned = _jit(functools.partial(jax.lax.scan, step))(carry, _batches())
        trees.assert_close(scanned[1], history, rtol=1e-5, atol=1e-6)
        trees.assert_close(scanned[0][1], state, rtol=1e-5, atol=1e-6)

    @parameterized.parameters("mars", "mars_m")
    def test_micro_batches_equal_the_big_batch(self, name):
        """`grad_fn` is to average over the micro-batches of the step, as `MultiSteps` does."""
        tx, expected, expected_state = _expected(name)
        params, batches, every = _params(), _batches(), 2
        micro = jax.tree.map(lambda x: x.reshape(STEPS, every, 4, *x.shape[2:]), batches)
        multi = optax.MultiSteps(tx, every_k_schedule=every)

        def average(params, batch):
            return jax.tree.map(lambda g: g.mean(0), jax.vmap(_grad, (None, 0))(params, batch))

        @_jit
        def step(params, state, part, batch):
            updates, state = multi.update(
                _grad(params, part), state, params, grad_fn=lambda p: average(p, batch)
            )
            return optax.apply_updates(params, updates), state

        state = multi.init(params)
        for t in range(STEPS):
            batch = _at(micro, t)
            for i in range(every):
                params, state = step(params, state, _at(batch, i), batch)
        # Sums of another order, which Newton-Schulz amplifies.
        trees.assert_close(params, _at(expected, -1), rtol=1e-4, atol=1e-4)
        (prev_params,) = trees.fields(state.inner_opt_state, "prev_params")
        (expected_prev,) = trees.fields(expected_state, "prev_params")
        trees.assert_close(prev_params, expected_prev, rtol=1e-4, atol=1e-4)

    def test_a_chain_clips_one_gradient_and_grad_fn_the_other(self):
        """A global clip in front belongs into `grad_fn`, too."""
        clip = optax.clip_by_global_norm(0.5)

        def clipped(params, batch):
            return clip.update(_grad(params, batch), clip.init(params))[0]

        tx, params, batches = _optimizer("mars"), _params(), _batches()
        norms = jax.vmap(lambda b: optax.tree.norm(_grad(params, b)))(batches)
        self.assertGreater(float(min(norms)), 0.5)
        expected, _ = _train(tx, params, batches, clipped)
        chained = optax.chain(clip, tx)

        def step(params, state, batch):
            updates, state = chained.update(
                _grad(params, batch), state, params, grad_fn=lambda p: clipped(p, batch)
            )
            return optax.apply_updates(params, updates), state

        state = chained.init(params)
        for t in range(STEPS):
            params, state = step(params, state, _at(batches, t))
        trees.assert_close(params, _at(expected, -1), rtol=1e-5, atol=1e-6)

    @parameterized.parameters(
        ("mars", True), ("mars_lion", False), ("mars_shampoo", True), ("mars_m", False)
    )
    def test_injected_hyperparameters_equal_constant_ones(self, name, optimize_1d):
        _, expected, _ = _expected(name, optimize_1d=optimize_1d)
        kwargs = {} if name == "mars_m" else {"optimize_1d": optimize_1d}
        if name in ("mars_shampoo", "mars_m"):
            kwargs["ns_dtype"] = "float32"
        tx = optax.inject_hyperparams(getattr(mars_optax, name))(
            learning_rate=0.1, correction="exact", **kwargs
        )
        history, state = _train(tx, _params(), _batches())
        # Injected numbers are float32, and 1 - b1 of them is off by 1e-7.
        trees.assert_close(history, expected, rtol=1e-4, atol=1e-4)
        self.assertIn("gamma", state.hyperparams)

    def test_an_injected_gamma_changed_by_hand_takes_effect(self):
        params, batches = _params(), _batches(3)
        tx = optax.inject_hyperparams(mars_optax.mars)(
            learning_rate=0.1, gamma=0.5, correction="exact"
        )
        step = functools.partial(_updated, tx)
        _, state = step(params, tx.init(params), _at(batches, 0))
        moved = jax.tree.map(lambda p: p + 0.1, params)
        corrected, _ = step(moved, state, _at(batches, 1))
        state.hyperparams["gamma"] = jnp.zeros([])
        plain, _ = step(moved, state, _at(batches, 1))
        self.assertGreater(float(jnp.max(jnp.abs(corrected["kernel"] - plain["kernel"]))), 1e-4)

    @parameterized.parameters(("mars", "partition"), ("mars_m", "masked"))
    def test_a_frozen_leaf_is_filled_in_by_grad_fn(self, name, through):
        """The wrapped optimizer knows only what it trains: `grad_fn` differentiates by that."""
        tx, params, batches = _optimizer(name), _params(), _batches(3)
        trained = {leaf: leaf != "square" for leaf in LAYERS}
        if through == "masked":
            wrapped = optax.chain(
                optax.masked(tx, trained),
                optax.masked(optax.set_to_zero(), {leaf: not t for leaf, t in trained.items()}),
            )
        else:
            wrapped = optax.partition(
                {True: tx, False: optax.set_to_zero()}, trained, mask_compatible_extra_args=False
            )
        rest = {"square": params["square"]}

        def grad_of_trained(p, batch):
            return jax.grad(lambda q: _loss({**rest, **q}, batch))(p)

        trained_params = {leaf: p for leaf, p in params.items() if trained[leaf]}
        expected, _ = _train(tx, trained_params, batches, grad_of_trained)

        def step(params, state, batch):
            def grad_fn(prev):
                def loss(prev):
                    known = {k: v for k, v in prev.items() if trained[k]}
                    return _loss({**params, **known}, batch)

                return jax.grad(loss)(prev)

            updates, state = wrapped.update(_grad(params, batch), state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        state = wrapped.init(params)
        for t in range(3):
            params, state = step(params, state, _at(batches, t))
        trees.assert_equal(params["square"], rest["square"])
        for leaf in trained_params:
            # Newton-Schulz amplifies the rounding of another gradient function.
            np.testing.assert_allclose(params[leaf], expected[leaf][-1], rtol=1e-4, atol=1e-4)

    @parameterized.parameters(
        ("mars", True), ("mars_lion", False), ("mars_shampoo", False), ("mars_m", True)
    )
    def test_nnx_optimizer_equals_plain_arrays(self, name, jitted):
        class Net(nnx.Module):
            def __init__(self):
                for leaf, value in _params().items():
                    setattr(self, leaf, nnx.Param(value))

        def loss(model, batch):
            return _loss({leaf: getattr(model, leaf)[...] for leaf in LAYERS}, batch)

        def step(model, optimizer, batch):
            graph, _, rest = nnx.split(model, nnx.Param, ...)

            def grad_fn(prev_params):
                # Of pure arrays, as `nnx.Optimizer` gives the parameters to the optimizer.
                return jax.grad(lambda p: loss(nnx.merge(graph, p, rest), batch))(prev_params)

            optimizer.update(model, nnx.grad(loss)(model, batch), grad_fn=grad_fn)

        tx, expected, _ = _expected(name)
        model, batches = Net(), _batches()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = nnx.jit(step) if jitted else step
        for t in range(STEPS):
            step(model, optimizer, _at(batches, t))
        for leaf, trajectory in expected.items():
            # Newton-Schulz amplifies what the compiler contracts.
            np.testing.assert_allclose(
                getattr(model, leaf)[...], trajectory[-1], rtol=1e-4, atol=1e-4, err_msg=leaf
            )

    @parameterized.parameters(("mars", True), ("mars_m", False))
    def test_a_step_that_is_not_finite_leaves_every_field_alone(self, name, optimize_1d):
        tx, _, _ = _expected(name, optimize_1d=optimize_1d)
        tx = optax.apply_if_finite(tx, max_consecutive_errors=3)
        params, batches = _params(), _batches()
        step = _jit(functools.partial(_updated, tx))
        params, state = step(params, tx.init(params), _at(batches, 0))
        broken = jax.tree.map(lambda x: x * jnp.nan, _at(batches, 1))
        same_params, same = step(params, state, broken)
        trees.assert_equal(same_params, params)
        trees.assert_equal(same.inner_state, state.inner_state)
        self.assertFalse(bool(same.last_finite))


class RefusalTest(parameterized.TestCase):
    @parameterized.parameters(*FACTORIES, *DIRECTIONS, "correct_gradients")
    def test_update_says_how_to_pass_what_is_missing(self, name):
        tx, params = _optimizer(name), _only_matrices(_params())
        state = tx.init(params)
        for kwargs, wanted in (
            ({"params": params}, "grad_fn"),
            ({"params": params, "grad_fn": None}, "grad_fn"),
            ({"params": params, "grad_fn": params}, "grad_fn"),
            ({"grad_fn": lambda p: p}, "params"),
        ):
            with self.subTest(str(kwargs.keys())), self.assertRaises(ValueError) as caught:
                tx.update(params, state, **kwargs)
            self.assertIn(f"`{wanted}`", str(caught.exception))
        with self.assertRaisesRegex(ValueError, r"update\(grads, state, params, grad_fn=grad_fn\)"):
            tx.update(params, state, params)

    @parameterized.product(
        name=["mars", "mars_m", "scale_by_mars_lion", "correct_gradients"],
        case=[
            ("structure", lambda p: {"kernel": p["kernel"]}),
            ("structure", lambda p: list(p.values())),
            ("structure", lambda p: None),
            ("structure", lambda p: (1.0, p)),
            ("kernel", lambda p: {**p, "kernel": p["kernel"].T}),
            ("square", lambda p: {**p, "square": jnp.zeros(())}),
        ],
    )
    def test_a_result_of_another_structure_or_shape_is_refused(self, name, case):
        says, grad_fn = case
        tx, params = _optimizer(name), _only_matrices(_params())
        with self.assertRaises(ValueError) as caught:
            tx.update(params, tx.init(params), params, grad_fn=grad_fn)
        self.assertIn("`grad_fn`", str(caught.exception))
        self.assertIn(says, str(caught.exception))


class ShardingTest(parameterized.TestCase):
    @parameterized.parameters(("mars", True), ("mars_shampoo", False))
    def test_a_data_parallel_run_equals_one_device(self, name, optimize_1d):
        devices = jax.devices("cpu")
        if len(devices) < 8:
            self.skipTest("needs eight CPU devices, which tests/conftest.py asks for")
        tx, expected, _ = _expected(name, optimize_1d=optimize_1d)
        mesh = jax.make_mesh((8,), ("data",), devices=devices[:8])
        params = jax.device_put(_params(), NamedSharding(mesh, P()))
        batches = jax.device_put(_batches(), NamedSharding(mesh, P(None, "data")))
        step, state = _jit(functools.partial(_updated, tx)), jax.jit(tx.init)(params)
        for t in range(STEPS):
            params, state = step(params, state, _at(batches, t))
        # Sums over shards are added in another order; Newton-Schulz amplifies it.
        trees.assert_close(params, _at(expected, -1), rtol=1e-4, atol=1e-4)
        for leaf in jax.tree.leaves(trees.fields(state, "prev_params")):
            self.assertTrue(leaf.sharding.is_fully_replicated)


class VarianceTest(parameterized.TestCase):
    """On a noisy quadratic along a slow path, the distance of the momentum to the true gradient."""

    STEPS, SIZE, B1 = 400, 20, 0.95

    def _mean_squared_error(self, correction, gamma, speed):
        """The errors of the momentum and of the gradient itself."""
        curvature = jnp.linspace(0.1, 1.0, self.SIZE)
        path = jnp.sin(speed * jnp.arange(self.STEPS)[:, None] + jnp.arange(self.SIZE))
        noise = jax.random.normal(jax.random.key(0), (2, self.STEPS, self.SIZE))
        tx = mars_optax.scale_by_mars_lion(
            self.B1, gamma, max_norm=None, correction=correction, first_step="no_correction"
        )

        def step(state, inputs):
            x, additive, multiplicative = inputs

            def grad_fn(x):
                return (curvature + 0.05 * multiplicative) * x + 0.5 * additive

            _, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
            errors = jnp.stack([state.mu, grad_fn(x)]) - curvature * x
            return state, jnp.sum(errors**2, axis=1)

        _, errors = _jit(functools.partial(jax.lax.scan, step))(tx.init(path[0]), (path, *noise))
        # The moving average begins with 0, which takes some time to be forgotten.
        return jnp.mean(errors[100:], axis=0)

    @parameterized.parameters((0.025, 0.95), (0.2, 0.7), (1.0, 0.1))
    def test_the_exact_estimate_is_better_than_the_approximate_one(self, gamma, ratio):
        """The more so the larger gamma is: only the approximation is paid with noise."""
        exact, raw = self._mean_squared_error("exact", gamma, speed=0.002)
        approx, _ = self._mean_squared_error("approx", gamma, speed=0.002)
        self.assertLess(float(exact), ratio * float(approx))
        self.assertLess(float(exact), 0.1 * float(raw))

    def test_the_exact_estimate_lags_less_than_an_average(self):
        average, _ = self._mean_squared_error("none", 0.0, speed=0.02)
        exact, _ = self._mean_squared_error("exact", 1.0, speed=0.02)
        self.assertLess(float(exact), 0.5 * float(average))


if __name__ == "__main__":
    absltest.main()
