"""Every recorded trajectory is followed step by step, and ends in the recorded state.

Each leaf's parameters are compared after every step, its state after the last. What cannot be
compared is listed in `EXCLUDED`, with its reason, and nowhere else.
"""

import contextlib
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.support import goldens, trees

_ROOT = "1e-15 is added under the root there, which shows beside a tiny second moment"

# Patterns of "case/leaf/item", an item being `params` or a field of the state.
EXCLUDED = {
    r"pytorch_optimizer_adamw__tiny/.*/params": _ROOT,
    r"pytorch_optimizer_adamw__default__small/(attn|proj|conv)/params": _ROOT,
    r"pytorch_optimizer_adamw__default__mixed/attn/params": _ROOT,
    r"mars_m__(default|clip_c|lr_schedule|options)__.*/conv[34]/.*": (
        "stacks are clipped and normalised there by one norm over all their matrices and scaled by "
        "their first two dimensions; here the matrices of a stack are independent. "
        "test_stacks_follow_from_the_links compares these leaves"
    ),
    r"mars_m_efficient__.*/(attn|proj|square|row)/mu": (
        "its buffer is not the momentum; test_memory_free compares it"
    ),
}

# `test_newton_schulz` and `test_exact` read the others.
ELSEWHERE = {name for name in goldens.names() if name.startswith(("newton_schulz__", "exact_"))}
TRAJECTORIES = sorted(set(goldens.names()) - ELSEWHERE)
SCANNED = (
    "mars_adamw__lr_schedule__mixed",
    "mars_lion__wd0.1_optimize_1d__mixed",
    "mars_m__options__mixed__f64",
)
STACKED = (
    "mars_m__default__large__ns32",
    "mars_m__options__mixed__f64",
    "mars_m__lr_schedule__mixed__ns32",
)


def precision_of(golden):
    """The optimizer is built inside as well: there a dtype may mean float64."""
    return trees.float64() if golden.is_float64 else contextlib.nullcontext()


def _reason(case, leaf, item):
    """Why an item is left out, or None."""
    for pattern, reason in EXCLUDED.items():
        if re.fullmatch(pattern, f"{case}/{leaf}/{item}"):
            return reason
    return None


def _items(golden):
    """Every (leaf, item) of a recorded case."""
    for leaf in golden.leaves:
        yield leaf, "params"
        for field, recorded in golden.state.items():
            if leaf in recorded:
                yield leaf, field


def _by_step(values):
    """A schedule that reads a table; the table becomes an array only under the test's dtype."""
    values = np.asarray(values, np.float64)
    return lambda count: jnp.asarray(values)[count]


def _learning_rates(golden, h, factor):
    """The main learning rate and that of the vector leaves, `factor` times it."""
    if golden.meta["lr_per_step"] is None:
        return h["lr"], h["lr"] * factor
    rates = golden.learning_rates()
    return _by_step(rates), _by_step(rates * factor)


def _ns_options(golden):
    if golden.ns_dtype is None:
        return {}
    return {"ns_dtype": golden.ns_dtype, "ns_precision": "highest"}


def _with_eps_before_correction(factory, golden, eps_of, **kwargs):
    """Adds eps before bias correction, as an eps that changes from step to step after it.

    (root + eps) / correction is root / correction + eps / correction, `correction` being
    sqrt(1 - b2^t).

    Args:
      factory: An optimizer of this package.
      golden: Gives the number of steps and the precision.
      eps_of: For each eps argument of `factory`, its value and the b2 that goes with it.
      **kwargs: The other arguments.

    Returns:
      The optimizer, under `optax.inject_hyperparams`.
    """
    count = np.arange(1, golden.meta["steps"] + 1)
    schedules = {
        name: _by_step(value / np.sqrt(1.0 - b2**count)) for name, (value, b2) in eps_of.items()
    }
    injected = optax.inject_hyperparams(
        factory,
        static_args=tuple(kwargs),
        hyperparam_dtype=jnp.float64 if golden.is_float64 else jnp.float32,
    )
    return injected(**kwargs, **schedules)


def _dimension_numbers(golden):
    """Declares the matrices of rank 2; PyTorch's (out, in, ...) convolutions keep their axes."""

    def of(leaf):
        rank = golden.init[leaf].ndim
        if leaf not in golden.matrices or rank < 2:
            return None
        if rank == 2:
            return MuonDimensionNumbers(reduction_axis=0, output_axis=1)
        if golden.impl == "pytorch_optimizer":
            return MuonDimensionNumbers(reduction_axis=tuple(range(1, rank)), output_axis=0)
        return None

    return {leaf: of(leaf) for leaf in golden.leaves}


def _official_mars(golden, h, **overrides):
    """An optimizer for the hyperparameters `h`, which hold for all leaves or for a group."""
    learning_rate, learning_rate_1d = _learning_rates(golden, h, golden.meta["lr_1d_factor"])
    gamma = h["gamma"] if golden.meta["gamma_per_step"] is None else _by_step(golden.gammas())
    (b1, b2), (b1_1d, b2_1d) = h["betas"], h["betas_1d"]
    options = {
        "b1": b1,
        "gamma": gamma,
        "weight_decay": h["weight_decay"],
        "optimize_1d": h["optimize_1d"],
        "learning_rate_1d": learning_rate_1d,
        "b1_1d": b1_1d,
        "b2_1d": b2_1d,
        "weight_decay_1d": h["weight_decay_1d"],
    }
    match h["mars_type"]:
        case "mars-lion":
            options |= {
                "eps_1d": h["eps"],
                "weight_dimension_numbers": mars_optax.dimension_numbers_by_path([]),
            }
            return mars_optax.mars_lion(learning_rate, **(options | overrides))
        case "mars-shampoo":
            options |= {"b2": b2, "eps": h["eps"], **_ns_options(golden)}
            return mars_optax.mars_shampoo(learning_rate, **(options | overrides))
        case "mars-adamw":
            options |= {
                "b2": b2,
                "eps": h["eps"],
                "amsgrad": h["amsgrad"],
                "weight_dimension_numbers": mars_optax.dimension_numbers_by_path([]),
            }
            return mars_optax.mars(learning_rate, **(options | overrides))
        case unknown:
            raise ValueError(unknown)


def _cautious(golden, directions, rescale, learning_rates, decays):
    """Cautious directions of matrices and vectors, each with its learning rate and its decay."""
    chains = {
        rule: optax.chain(
            mars_optax.cautious(direction, rescale=rescale),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(learning_rate),
        )
        for (rule, direction), learning_rate, decay in zip(
            directions.items(), learning_rates, decays, strict=True
        )
    }
    return optax.partition(
        chains, {leaf: "matrix" if leaf in golden.matrices else "vector" for leaf in golden.leaves}
    )


def _timm(golden):
    h = golden.hyperparameters
    learning_rate, learning_rate_1d = _learning_rates(golden, h, h["lr_1d_factor"])
    b1_1d, b2_1d = h["betas_1d"] or h["betas"]
    options = {
        "b1": h["betas"][0],
        "gamma": h["gamma"],
        "weight_decay": h["weight_decay"],
        "first_step": "no_correction",
        "optimize_1d": h["optimize_1d"],
        "learning_rate_1d": learning_rate_1d,
        "b1_1d": b1_1d,
        "b2_1d": b2_1d,
        "eps_1d": h["eps"],
        "weight_decay_1d": None,
    }
    if h["mars_type"] == "lion":
        return mars_optax.mars_lion(learning_rate, **options)
    if h["caution"]:
        (b1, b2), eps = h["betas"], h["eps"]
        directions = {
            "matrix": mars_optax.scale_by_mars(b1, b2, eps, h["gamma"], first_step="no_correction"),
            "vector": mars_optax.scale_by_mars(b1_1d, b2_1d, eps, correction="none", max_norm=None),
        }
        return _cautious(golden, directions, "mean", (learning_rate, learning_rate_1d), (0.0, 0.0))
    return mars_optax.mars(learning_rate, b2=h["betas"][1], eps=h["eps"], **options)


def _pytorch_optimizer(golden):
    h = golden.hyperparameters
    (b1, b2), (b1_1d, b2_1d) = h["betas"], h["betas_1d"]
    options = {
        "learning_rate": h["lr"],
        "b1": b1,
        "gamma": h["gamma"],
        "weight_decay": h["weight_decay"],
        "optimize_1d": h["optimize_1d"],
        "learning_rate_1d": h["lr_1d"],
        "b1_1d": b1_1d,
        "b2_1d": b2_1d,
        "weight_decay_1d": h["weight_decay_1d"],
    }
    eps = {"eps_1d": (h["eps"], b2_1d)}
    if h["cautious"]:
        directions = {
            rule: _with_eps_before_correction(
                mars_optax.scale_by_mars, golden, {"eps": (h["eps"], betas[1])}, **arguments
            )
            for rule, betas, arguments in (
                ("matrix", (b1, b2), {"b1": b1, "b2": b2, "gamma": h["gamma"]}),
                (
                    "vector",
                    (b1_1d, b2_1d),
                    {"b1": b1_1d, "b2": b2_1d, "correction": "none", "max_norm": None},
                ),
            )
        }
        decays = h["weight_decay"], h["weight_decay_1d"]
        return _cautious(golden, directions, "count", (h["lr"], h["lr_1d"]), decays)
    match h["mars_type"]:
        case "lion":
            return _with_eps_before_correction(mars_optax.mars_lion, golden, eps, **options)
        case "shampoo":
            return _with_eps_before_correction(
                mars_optax.mars_shampoo,
                golden,
                eps,
                eps=h["eps"],
                weight_dimension_numbers=_dimension_numbers(golden),
                **_ns_options(golden),
                **options,
            )
        case "adamw":
            return _with_eps_before_correction(
                mars_optax.mars,
                golden,
                {"eps": (h["eps"], b2), **eps},
                b2=b2,
                amsgrad=h["ams_bound"],
                **options,
            )
        case unknown:
            raise ValueError(unknown)


def _mars_m(golden, **overrides):
    h = golden.hyperparameters
    b1_1d, b2_1d = h["adamw_betas"]
    options = {
        "learning_rate": _learning_rates(golden, h, 1.0)[0],
        "b1": h["momentum"],
        "gamma": h["gamma"],
        "weight_decay": h["wd"],
        "ns_steps": h["ns_steps"],
        "b1_1d": b1_1d,
        "b2_1d": b2_1d,
        "weight_dimension_numbers": _dimension_numbers(golden),
        "max_norm": 1.0,
        **_ns_options(golden),
    }
    return _with_eps_before_correction(
        mars_optax.mars_m,
        golden,
        {"eps_1d": (h["adamw_eps"], b2_1d)},
        **(options | overrides),
    )


def optimizer_of(golden, **overrides):
    """The optimizer of this package that follows a recorded case.

    Args:
      golden: The case.
      **overrides: Arguments of the optimizer that the official cases are to have besides, or
        instead.
    """
    match golden.impl:
        case "official_mars" if golden.meta["groups"] is not None:
            first, second = golden.meta["groups"]
            labels = {leaf: "a" if leaf in first["params"] else "b" for leaf in golden.leaves}
            return optax.partition(
                {
                    "a": _official_mars(golden, golden.group(first["params"][0])),
                    "b": _official_mars(golden, golden.group(second["params"][0])),
                },
                labels,
            )
        case "official_mars":
            return _official_mars(golden, golden.hyperparameters, **overrides)
        case "official_mars_m":
            return _mars_m(golden, **overrides)
        case "official_mars_m_efficient":
            return _mars_m(golden, max_norm=None, **overrides)
        case "timm":
            return _timm(golden)
        case "pytorch_optimizer":
            return _pytorch_optimizer(golden)
        case unknown:
            raise ValueError(unknown)


def _oriented_tree(golden, arrays):
    return {leaf: goldens.oriented(x, golden.init[leaf].ndim) for leaf, x in arrays.items()}


def _gradients_at(golden, t):
    return jax.tree.map(jnp.asarray, _oriented_tree(golden, _at(golden.grads, t)))


def _at(arrays, t):
    return {leaf: x[t] for leaf, x in arrays.items()}


def _initial_params(golden):
    return jax.tree.map(jnp.asarray, _oriented_tree(golden, golden.init))


# LLVM's optimizations take most of a compilation, longer than all steps together.
QUICKLY = {"xla_backend_optimization_level": 0}
_STEPS = {}


def _optimizer_and_step(golden, **overrides):
    """Cases that differ in their gradients only share an optimizer, and one compilation."""
    configuration = (
        "impl",
        "hyperparameters",
        "groups",
        "adamw_params",
        "lr_per_step",
        "gamma_per_step",
        "dtype",
        "newton_schulz",
    )
    shapes = {leaf: x.shape for leaf, x in golden.init.items()}
    key = json.dumps([shapes, overrides, *(golden.meta[name] for name in configuration)])
    if key not in _STEPS:
        tx = optimizer_of(golden, **overrides)
        step = jax.jit(functools.partial(_step, tx), compiler_options=QUICKLY)
        _STEPS[key] = tx, step
    return _STEPS[key]


def _step(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def follow(golden, **overrides):
    """Runs a case with one jitted step; returns each leaf's parameters by step, and the state."""
    tx, step = _optimizer_and_step(golden, **overrides)
    params = _initial_params(golden)
    state = tx.init(params)
    history = []
    for t in range(golden.meta["steps"]):
        params, state = step(_gradients_at(golden, t), state, params)
        history.append(params)
    return jax.tree.map(lambda *leaf: np.stack(leaf), *history), state


def follow_in_scan(golden):
    """As `follow`, in one `jax.lax.scan`."""
    tx = optimizer_of(golden)
    params = _initial_params(golden)
    grads = jax.tree.map(jnp.asarray, _oriented_tree(golden, golden.grads))

    def step(carry, grads):
        params, state = carry
        params, state = _step(tx, grads, state, params)
        return (params, state), params

    (_, state), history = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, tx.init(params)), grads
    )
    return history, state


def _update_scale(golden, leaf):
    """The factor in front of an orthogonalized update, learning rate included."""
    out, fan_in = golden.init[leaf].shape[0], golden.init[leaf][0].size
    if golden.impl.startswith("official_mars_m"):
        factor = 0.2 * np.sqrt(max(out, fan_in))
    else:
        factor = np.sqrt(max(1.0, out / fan_in))
    return golden.hyperparameters["lr"] * factor


def tolerances_of(golden, item):
    """Relative tolerance, and absolute tolerance in units of the largest entry."""
    if golden.is_float64:
        return {"rtol": 1e-10, "atol": 1e-10}
    return {"rtol": 1e-5, "atol": 1e-6 if item == "params" else 2e-6}


def orthogonalized_by_one_norm(golden, stack):
    """Orthogonalizes the matrices of a stack, all divided by the norm of the stack, as MARS-M."""
    matrices = stack.reshape(-1, *stack.shape[-2:])
    # An eps that lifts the norm of each matrix to that of the stack.
    eps = jnp.linalg.norm(stack) - jnp.linalg.norm(matrices, axis=(1, 2)) + 1e-7
    one = functools.partial(
        mars_optax.orthogonalize,
        steps=golden.hyperparameters["ns_steps"],
        dtype=golden.ns_dtype,
        precision="highest",
    )
    return jax.vmap(lambda m, e: one(m, eps=e))(matrices, eps).reshape(stack.shape)


class RecordedTestCase(parameterized.TestCase):
    """Assertions that compare a run with a recorded one."""

    def assert_params_follow(self, golden, leaf, history):
        rank = golden.init[leaf].ndim
        actual = goldens.oriented(np.asarray(history[leaf]), rank)
        expected = golden.params[leaf]
        if golden.ns_dtype == "bfloat16" and leaf in golden.matrices:
            start = golden.init[leaf][None]
            scale = _update_scale(golden, leaf)
            ours, theirs = (
                np.diff(np.concatenate([start, x]), axis=0) / scale for x in (actual, expected)
            )
            for t in range(golden.meta["steps"]):
                where = f"{golden.name} {leaf} step {t + 1}"
                # bfloat16 takes the recorded entries up to 0.091 away from the float64 iteration,
                # ours up to 0.06. A mistake would show in the mean, rounding does not.
                np.testing.assert_allclose(ours[t], theirs[t], rtol=0, atol=0.12, err_msg=where)
                error = np.sqrt(np.mean((ours[t] - theirs[t]) ** 2))
                self.assertLess(error, 0.04, where)
            return
        for t in range(golden.meta["steps"]):
            goldens.assert_close(
                actual[t],
                expected[t],
                **tolerances_of(golden, "params"),
                what=f"{golden.name} {leaf} params after step {t + 1}",
            )

    def assert_state_matches(self, golden, leaf, field, state):
        ours = state.get(field, {})
        recorded = golden.state[field][leaf]
        if field == "prev_grad" and leaf not in golden.matrices:
            self.assertNotIn(leaf, ours, "AdamW needs no previous gradient")
            return
        if field == "nu" and leaf not in ours:
            np.testing.assert_array_equal(recorded, 0.0, "recorded, but never written")
            return
        actual = goldens.oriented(np.asarray(ours[leaf]), golden.init[leaf].ndim)
        goldens.assert_close(
            actual,
            recorded,
            **tolerances_of(golden, field),
            what=f"{golden.name} {leaf} final {field}",
        )


class TrajectoryTest(RecordedTestCase):
    def assert_follows(self, golden, history, state):
        compared = 0
        state = goldens.state_by_field(state)
        for leaf, item in _items(golden):
            if _reason(golden.name, leaf, item) is not None:
                continue
            compared += 1
            if item == "params":
                self.assert_params_follow(golden, leaf, history)
            else:
                self.assert_state_matches(golden, leaf, item, state)
        self.assertGreater(compared, 0)

    @parameterized.parameters(*TRAJECTORIES)
    def test_recorded_trajectory_is_followed(self, name):
        golden = goldens.load(name)
        with precision_of(golden):
            history, state = follow(golden)
            self.assert_follows(golden, history, state)

    @parameterized.parameters(*SCANNED)
    def test_recorded_trajectory_is_followed_inside_scan(self, name):
        golden = goldens.load(name)
        with precision_of(golden):
            history, state = follow_in_scan(golden)
            self.assert_follows(golden, history, state)

    @parameterized.parameters(*STACKED)
    def test_stacks_follow_from_the_links(self, name):
        """The public links express the reference's treatment of a stack: one norm for all of it."""
        golden = goldens.load(name)
        h = golden.hyperparameters
        with precision_of(golden):
            leaves = [leaf for leaf in golden.matrices if golden.init[leaf].ndim > 2]
            momentum = optax.chain(
                mars_optax.correct_gradients(h["gamma"], h["momentum"]),
                mars_optax.clip_by_leaf_norm(1.0),
                optax.ema(h["momentum"], debias=False),
            )

            def orthogonalized(x):
                return 0.2 * np.sqrt(max(x.shape[:2])) * orthogonalized_by_one_norm(golden, x)

            @jax.jit
            def step(grads, state, params, lr):
                mu, state = momentum.update(grads, state)
                updates = jax.tree.map(
                    lambda m, p: -lr * (orthogonalized(m) + h["wd"] * p), mu, params
                )
                return optax.apply_updates(params, updates), state

            params = {leaf: jnp.asarray(golden.init[leaf]) for leaf in leaves}
            state = momentum.init(params)
            history = []
            for t, lr in enumerate(golden.learning_rates()):
                grads = {leaf: jnp.asarray(golden.grads[leaf][t]) for leaf in leaves}
                params, state = step(grads, state, params, lr)
                history.append(params)
            for leaf in leaves:
                for t, ours in enumerate(history):
                    goldens.assert_close(
                        ours[leaf],
                        golden.params[leaf][t],
                        **tolerances_of(golden, "params"),
                        what=f"{name} {leaf} params after step {t + 1}",
                    )
                goldens.assert_close(
                    state[-1].ema[leaf],
                    golden.state["mu"][leaf],
                    **tolerances_of(golden, "mu"),
                    what=f"{name} {leaf} final momentum",
                )

    def test_gradients_of_our_own_close_the_loop(self):
        golden = goldens.load("approx_adamw__mlp")
        tx, loss_fn = optimizer_of(golden), goldens.loss_of(golden)

        @jax.jit
        def step(params, state, x, y):
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss, grads

        # The recorded problem multiplies by w1 and w2 from the right: they are (in, out) already.
        params = jax.tree.map(jnp.asarray, golden.init)
        state = tx.init(params)
        for t in range(golden.meta["steps"]):
            x, y = golden.extra["data/x"][t], golden.extra["data/y"][t]
            # GPUs multiply float32 matrices in lower precision unless told otherwise.
            with jax.default_matmul_precision("highest"):
                params, state, loss, grads = step(params, state, x, y)
            # The loop feeds rounding back: a gradient's tolerance, not a single update's.
            self.assertAlmostEqual(loss, golden.extra["loss"][t], delta=1e-4 * abs(loss))
            for leaf in golden.leaves:
                where = f"{leaf} step {t + 1}"
                tolerance = {"rtol": 1e-4, "atol": 1e-5}
                goldens.assert_close(
                    grads[leaf], golden.grads[leaf][t], what=f"gradient {where}", **tolerance
                )
                goldens.assert_close(
                    params[leaf], golden.params[leaf][t], what=f"params {where}", **tolerance
                )

    def test_every_exclusion_excludes_something_and_every_case_is_compared(self):
        items = {
            (name, leaf, item) for name in TRAJECTORIES for leaf, item in _items(goldens.load(name))
        }
        for pattern in EXCLUDED:
            self.assertTrue(
                any(re.fullmatch(pattern, "/".join(item)) for item in items),
                f"{pattern} excludes nothing",
            )
        compared = {case for case, leaf, item in items if _reason(case, leaf, item) is None}
        self.assertEqual(compared | ELSEWHERE, set(goldens.names()))
        for leaves in (SCANNED, STACKED):
            self.assertLessEqual(set(leaves), compared)


if __name__ == "__main__":
    absltest.main()
