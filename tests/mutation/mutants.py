"""The mutants: single defects of the package, each with the tests that should notice it."""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes:
      name: Short and unique.
      file: Where, below `mars_optax/_src`.
      old: What stands there, exactly once.
      new: What stands there instead.
      change: The defect, for the table.
      tests: Files or tests, the quickest to notice it first.
    """

    name: str
    file: str
    old: str
    new: str
    change: str
    tests: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Equivalent:
    """A change that nothing can notice, and why: it is not counted."""

    file: str
    change: str
    reason: str


_RANDOM: Final = "tests/parity/test_random_options.py::RandomOptionsTest::test_"
# Seeds: 0 zeros, clip, eps 1e-3; 1 no_correction, vectors of their own, v of g; 2 AMSGrad, v of g,
# rate by a schedule; 4 AMSGrad, v of c, a tight clip.
MARS_0: Final = _RANDOM + "mars_equals_the_oracle0"
MARS_1: Final = _RANDOM + "mars_equals_the_oracle1"
MARS_2: Final = _RANDOM + "mars_equals_the_oracle2"
MARS_4: Final = _RANDOM + "mars_equals_the_oracle4"
LION_4: Final = _RANDOM + "lion_equals_the_oracle4"
SHAMPOO_0: Final = _RANDOM + "shampoo_equals_the_oracle0"
SHAMPOO_3: Final = _RANDOM + "shampoo_equals_the_oracle3"
MARS_M_3: Final = _RANDOM + "mars_m_equals_the_oracle3"

_CHAINS: Final = "tests/parity/test_chains.py"
MARS_CHAIN: Final = _CHAINS + "::ChainTest::test_mars_is_correction_clip_and_adam_to_the_last_bit0"
AXES: Final = "tests/parity/test_axes.py"
NEWTON_SCHULZ: Final = "tests/parity/test_newton_schulz.py"
FREE: Final = "tests/parity/test_memory_free.py::TrajectoryTest::test_it_is_that_of_the_stored_form"
STORM: Final = "tests/parity/test_storm.py"
ESTIMATORS: Final = "tests/parity/test_estimators.py::FormulaTest"
ADAPTIVE: Final = "tests/parity/test_adaptive_gamma.py::RecursionTest"
EXACT: Final = "tests/parity/test_exact.py"
ISOLATION: Final = "tests/contract/test_isolation.py"
CORNERS: Final = "tests/contract/test_corners.py"
STACKS: Final = "tests/contract/test_stacks.py"
TREES: Final = "tests/contract/test_trees.py"
TYPES: Final = "tests/contract/test_state_types.py::StateTypesTest"
INJECT: Final = "tests/contract/test_inject.py::InjectTest"
DONATION: Final = "tests/contract/test_donation.py::DonationTest"
EXECUTE: Final = "tests/kernels/test_execute.py"
NORMS: Final = "tests/kernels/test_norms.py::NormsTest"
FUSED: Final = "tests/kernels/test_fused_step.py::FusedStepTest"
ANY: Final = "tests/test_any_optimizer.py::VarianceReducedTest::test_"
SOAP: Final = "tests/parity/test_soap.py::"
SOAP_SQUARE: Final = SOAP + "OracleTest::test_every_step_is_that_of_the_transcription_square"
LOW: Final = "tests/test_low_precision.py"
WRAPPERS: Final = "tests/test_wrappers.py"
ROUNDING: Final = "tests/test_rounding.py"
DIAGNOSE: Final = "tests/test_diagnose.py::ValueTest"
TOOLS: Final = "tests/test_tools.py"

_CORRECTED: Final = "return grad + coefficient * ("
_COEFFICIENT: Final = "return gamma * b1 / (1 - b1)"
_QUINTIC: Final = '"quintic": ((3.4445, -4.7750, 2.0315),),'
_NORM: Final = "norm = jnp.sqrt(jnp.where(is_positive, squares, one))"
_CLIPPED: Final = "return jnp.where(is_positive & (norm > max_norm), max_norm / norm, one)"
_SQUARED: Final = "grad if nu_of_gradient else c, nu, b2, 2"
_DIRECTION: Final = "return momentum / (root(nu_hat + eps_root) + eps), mu, nu, nu_max"

_LEAF: Final = (
    Mutant(
        "coefficient_plus",
        "leaf/correction.py",
        _COEFFICIENT,
        "return gamma * b1 / (1 + b1)",
        "the coefficient is gamma b1 / (1 + b1)",
        (MARS_0,),
    ),
    Mutant(
        "coefficient_without_b1",
        "leaf/correction.py",
        _COEFFICIENT,
        "return gamma / (1 - b1)",
        "the coefficient is gamma / (1 - b1)",
        (MARS_0,),
    ),
    Mutant(
        "coefficient_without_gamma",
        "leaf/correction.py",
        _COEFFICIENT,
        "return b1 / (1 - b1)",
        "the coefficient is b1 / (1 - b1)",
        (MARS_0,),
    ),
    Mutant(
        "coefficient_narrow",
        "leaf/correction.py",
        "gamma, b1 = precision.upcast_scalar(gamma), precision.upcast_scalar(b1)",
        "gamma, b1 = gamma, b1",
        "the coefficient of bfloat16 hyperparameters is computed in bfloat16",
        (
            CORNERS
            + "::GammaTest::test_a_coefficient_of_low_precision_numbers_is_not_rounded_to_it",
        ),
    ),
    Mutant(
        "correction_sign",
        "leaf/correction.py",
        _CORRECTED,
        _CORRECTED.replace("grad + coeff", "grad - coeff"),
        "the correction is subtracted",
        (MARS_0,),
    ),
    Mutant(
        "correction_from_previous",
        "leaf/correction.py",
        _CORRECTED,
        _CORRECTED.replace("grad +", "prev_grad +"),
        "the correction is added to the previous gradient",
        (MARS_0,),
    ),
    Mutant(
        "clip_not_applied",
        "run.py",
        "c if clip is None else c * clip",
        "c",
        "the factor of the clip is not applied",
        (MARS_0,),
    ),
    Mutant(
        "squares_of_complex",
        "leaf/clipping.py",
        "jnp.sum(jnp.real(x * jnp.conj(y)), axis=axes",
        "jnp.sum(jnp.real(x * y), axis=axes",
        "the square of a complex entry instead of its modulus",
        (TREES + "::ComplexTest::test_mars_uses_the_squared_modulus",),
    ),
    Mutant(
        "clip_below",
        "leaf/clipping.py",
        _CLIPPED,
        _CLIPPED.replace("norm > max_norm", "norm < max_norm"),
        "what is below the bound is scaled up: max for min",
        (MARS_0,),
    ),
    Mutant(
        "clip_to_one",
        "leaf/clipping.py",
        _CLIPPED,
        _CLIPPED.replace("max_norm / norm", "1 / norm"),
        "norms above the bound are brought to 1",
        (MARS_4,),
    ),
    Mutant(
        "clip_without_root",
        "leaf/clipping.py",
        _NORM,
        "norm = jnp.where(is_positive, squares, one)",
        "the squared norm is compared with the bound",
        (MARS_0,),
    ),
    Mutant(
        "clip_unguarded_root",
        "leaf/clipping.py",
        _NORM,
        "norm = jnp.sqrt(squares)",
        "the root has no guard at 0, where it has no derivative",
        (CORNERS + "::DerivativesTest",),
    ),
    Mutant(
        "clip_unguarded_nan",
        "leaf/clipping.py",
        _CLIPPED,
        _CLIPPED.replace("is_positive & (norm > max_norm)", "norm > max_norm"),
        "under a bound below 1 a NaN scales the other entries of its leaf",
        (ISOLATION + "::ContainmentTest::test_a_leaf_with_a_nan_is_not_clipped",),
    ),
    Mutant(
        "momentum_without_weight",
        "leaf/momentum.py",
        "mu = optax.tree.update_moment(c, mu, b1, 1)",
        "mu = b1 * mu + c",
        "the factor 1 - b1 of the momentum is lost",
        (FREE + "1",),
    ),
    Mutant(
        "momentum_decay_exchanged",
        "leaf/momentum.py",
        "mu = optax.tree.update_moment(c, mu, b1, 1)",
        "mu = optax.tree.update_moment(c, mu, 1 - b1, 1)",
        "b1 and 1 - b1 are exchanged in the momentum",
        (MARS_M_3,),
    ),
    Mutant(
        "direction_of_gradient",
        "leaf/momentum.py",
        "return mu, mu",
        "return c, mu",
        "the direction is the corrected gradient, not its average",
        (LION_4,),
    ),
    Mutant(
        "free_without_coefficient",
        "estimator.py",
        "other = jnp.zeros_like(grad)",
        "other = None",
        "the memory-free momentum lacks 1 + k",
        (FREE + "0",),
    ),
    Mutant(
        "free_sign",
        "estimator.py",
        "return momentum + correction.corrected_gradient(jnp.zeros_like(grad), grad, next_gamma)",
        "return momentum - correction.corrected_gradient(jnp.zeros_like(grad), grad, next_gamma)",
        "the memory-free buffer has gamma g with the wrong sign",
        (FREE + "0",),
    ),
    Mutant(
        "bias_correction_late",
        "leaf/momentum.py",
        "decay**count",
        "decay ** (count + 1)",
        "bias corrections are one step ahead",
        (MARS_0,),
    ),
    *(
        Mutant(
            f"quintic_{letter}",
            "leaf/newton_schulz.py",
            _QUINTIC,
            _QUINTIC.replace(old, new),
            f"digits of the coefficient {letter} of the quintic are exchanged",
            (
                NEWTON_SCHULZ + "::RecordedNewtonSchulzTest::test_float64_agrees_with_the_recorded_"
                "result0",
                MARS_M_3,
            ),
        )
        for letter, old, new in (
            ("a", "3.4445", "3.4454"),
            ("b", "4.7750", "4.7570"),
            ("c", "2.0315", "2.0351"),
        )
    ),
    Mutant(
        "polar_safety",
        "leaf/newton_schulz.py",
        "(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)",
        "(a / _SAFETY, b / _SAFETY, c / _SAFETY)",
        "the polynomials of Polar Express are divided by 1.01, not evaluated at x / 1.01",
        (STACKS + "::SpectrumTest::test_polar_express_is_the_optimal_composition",),
    ),
    Mutant(
        "polar_digit",
        "leaf/newton_schulz.py",
        "(3.3184196573706015, -2.488488024314874, 0.51004894012372)",
        "(3.3184196573706015, -2.488488024314874, 0.51040894012372)",
        "digits of a coefficient of Polar Express are exchanged",
        (STACKS + "::SpectrumTest::test_polar_express_is_the_optimal_composition",),
    ),
    Mutant(
        "coefficients_exchanged",
        "leaf/newton_schulz.py",
        "a, b, c = table[jnp.minimum(i, len(table) - 1)]",
        "a, c, b = table[jnp.minimum(i, len(table) - 1)]",
        "b and c are exchanged",
        (MARS_M_3,),
    ),
    Mutant(
        "coefficients_of_first_step",
        "leaf/newton_schulz.py",
        "a, b, c = table[jnp.minimum(i, len(table) - 1)]",
        "a, b, c = table[0]",
        "every step takes the coefficients of the first",
        (NEWTON_SCHULZ + "::NewtonSchulzOracleTest",),
    ),
    Mutant(
        "coefficients_narrow",
        "leaf/newton_schulz.py",
        "table = jnp.asarray(coeffs, precision.compute_dtype(x))",
        "table = jnp.asarray(coeffs, x.dtype)",
        "coefficients are rounded to the dtype of the iteration",
        (NEWTON_SCHULZ + "::LowPrecisionTest",),
    ),
    Mutant(
        "steps_one_less",
        "leaf/newton_schulz.py",
        "        for i in range(steps):\n            x = step(i, x)",
        "        for i in range(steps - 1):\n            x = step(i, x)",
        "one step too few",
        (MARS_M_3,),
    ),
    Mutant(
        "steps_of_loop_one_more",
        "leaf/newton_schulz.py",
        "jax.lax.fori_loop(0, steps, step, x)",
        "jax.lax.fori_loop(0, steps + 1, step, x)",
        "one step too many where they are a loop",
        (STACKS + "::StepsTest",),
    ),
    Mutant(
        "linear_everywhere",
        "leaf/newton_schulz.py",
        "polynomial = a * identity +",
        "polynomial = a +",
        "a is added to all entries of the polynomial, not to its diagonal",
        (MARS_M_3,),
    ),
    Mutant(
        "gram_of_complex",
        "leaf/newton_schulz.py",
        "gram = jnp.matmul(x, jnp.conj(jnp.swapaxes(x, -2, -1))",
        "gram = jnp.matmul(x, (jnp.swapaxes(x, -2, -1))",
        "X X^T for X X^H",
        (TREES + "::ComplexTest",),
    ),
    Mutant(
        "norm_narrow",
        "leaf/newton_schulz.py",
        "wide = precision.upcast(x, real)",
        "wide = x if jnp.iscomplexobj(x) else x.astype(precision.available(dtype))",
        "the Frobenius norm is taken after the cast, in the dtype of the iteration",
        (NEWTON_SCHULZ + "::LowPrecisionTest",),
    ),
    Mutant(
        "norm_without_eps",
        "leaf/newton_schulz.py",
        "norm = norm + precision.upcast_scalar(eps, real)",
        "norm = norm + 0 * precision.upcast_scalar(eps, real)",
        "eps is not added to the Frobenius norm",
        (NEWTON_SCHULZ + "::NewtonSchulzOracleTest",),
    ),
    Mutant(
        "norm_unguarded_root",
        "leaf/newton_schulz.py",
        "jnp.where(squares == 0, zero, jnp.sqrt(jnp.where(squares == 0, one, squares)))",
        "jnp.sqrt(squares)",
        "the root of the Frobenius norm has no guard at 0",
        (CORNERS + "::DerivativesTest",),
    ),
    Mutant(
        "norm_unguarded_division",
        "leaf/newton_schulz.py",
        "result = wide / jnp.where(norm > 0, norm, one)",
        "result = wide / norm",
        "a matrix of zeros is divided by 0 where eps is 0",
        (STACKS + "::IsolationTest::test_a_matrix_of_zeros_stays_one",),
    ),
    Mutant(
        "spectral_orientation",
        "leaf/newton_schulz.py",
        "math.sqrt(max(1.0, fan_out / max(fan_in, 1)))",
        "math.sqrt(max(1.0, fan_in / max(fan_out, 1)))",
        "the factor of Shampoo is that of the transposed matrix",
        (SHAMPOO_0,),
    ),
    Mutant(
        "spectral_without_bound",
        "leaf/newton_schulz.py",
        "math.sqrt(max(1.0, fan_out / max(fan_in, 1)))",
        "math.sqrt(fan_out / max(fan_in, 1))",
        "the factor of Shampoo goes below 1",
        (SHAMPOO_0,),
    ),
    Mutant(
        "spectral_without_root",
        "leaf/newton_schulz.py",
        "math.sqrt(max(1.0, fan_out / max(fan_in, 1)))",
        "max(1.0, fan_out / max(fan_in, 1))",
        "the factor of Shampoo without its root",
        (SHAMPOO_0,),
    ),
    Mutant(
        "rms_of_smaller",
        "leaf/newton_schulz.py",
        "return 0.2 * math.sqrt(max(fan_in, fan_out))",
        "return 0.2 * math.sqrt(min(fan_in, fan_out))",
        "the factor of MARS-M takes the shorter side",
        (MARS_M_3,),
    ),
    Mutant(
        "compute_narrow",
        "leaf/precision.py",
        "jnp.dtype(jnp.float64 if is_double else jnp.float32)",
        "jnp.dtype(jnp.float64 if is_double else jnp.bfloat16)",
        "bfloat16 is computed in bfloat16",
        (TYPES + "::test_stored_dtypes_are_the_documented_ones_mars",),
    ),
    Mutant(
        "nu_narrow",
        "leaf/precision.py",
        "return compute_dtype(x) if dtype is None else available(dtype)",
        "return jnp.finfo(own).dtype if dtype is None else available(dtype)",
        "second moments are kept in the dtype of a bfloat16 parameter",
        (TYPES + "::test_stored_dtypes_are_the_documented_ones_mars",),
    ),
    Mutant(
        "mu_wide",
        "leaf/precision.py",
        "        return jnp.dtype(own)\n",
        "        return compute_dtype(x)\n",
        "first moments and previous gradients of bfloat16 parameters are kept in float32",
        (TYPES + "::test_stored_dtypes_are_the_documented_ones_mars",),
    ),
    Mutant(
        "storage_not_available",
        "leaf/precision.py",
        "return jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))",
        "return jnp.dtype(dtype)",
        "float64 is asked of a JAX that has none",
        (TYPES + "::test_64_bits_are_32_where_jax_has_no_more",),
    ),
    Mutant(
        "scalars_narrow",
        "leaf/precision.py",
        "x.astype(compute_dtype(x) if dtype is None else dtype)",
        "x.astype(x.dtype if dtype is None else dtype)",
        "hyperparameters in bfloat16 stay in it",
        (
            CORNERS
            + "::GammaTest::test_a_coefficient_of_low_precision_numbers_is_not_rounded_to_it",
        ),
    ),
    Mutant(
        "numbers_in_float32",
        "leaf/precision.py",
        "        return float(x) if isinstance(x, float) else x  #",
        "        return jnp.float32(x)  #",
        "Python numbers are rounded to float32",
        (MARS_0,),
    ),
    Mutant(
        "eight_bit_tangents",
        "leaf/quantization.py",
        "wide = jax.lax.stop_gradient(precision.upcast(x))",
        "wide = precision.upcast(x)",
        "derivatives pass through the scales of an 8-bit previous gradient",
        (LOW + "::ScaleTest",),
    ),
    Mutant(
        "eight_bits_unused",
        "leaf/quantization.py",
        "scale = (largest / float(jnp.finfo(dtype).max)).astype(jnp.float32)",
        "scale = largest.astype(jnp.float32)",
        "8-bit buffers use the range to 1 only",
        (LOW + "::ScaleTest",),
    ),
    Mutant(
        "scale_of_leaf",
        "leaf/quantization.py",
        "largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0) if x.ndim else",
        "largest = jnp.broadcast_to(jnp.max(jnp.abs(wide), initial=0), shape) if x.ndim else",
        "one scale for a whole leaf",
        (LOW + "::ScaleTest",),
    ),
    Mutant(
        "scale_of_zeros",
        "leaf/quantization.py",
        "scale = jnp.where(scale == 0, precision.beside(1, scale), scale)",
        "scale = scale + 0",
        "rows of zeros are divided by 0",
        (LOW + "::ScaleTest::test_rows_of_zeros_stay_zeros0",),
    ),
)

_STATE: Final = (
    Mutant(
        "previous_not_kept",
        "estimator.py",
        'return {"prev_grad": trees.copies(updates, like=state.prev_grad)}',
        'return {"prev_grad": trees.copies(state.prev_grad, like=state.prev_grad)}',
        "the previous gradient is never replaced",
        (MARS_0,),
    ),
    Mutant(
        "previous_corrected",
        "estimator.py",
        "fields |= _stored(updates, state)",
        "its = functools.partial(_corrected, k=self.coefficient(state.count))\n"
        "            fields |= _stored(jax.tree.map(its, updates, prev_grad, updates), state)",
        "the state keeps the corrected gradient, not the gradient",
        (MARS_0,),
    ),
    Mutant(
        "previous_params_not_kept",
        "estimator.py",
        "return trees.copies(params, like=state.prev_params)",
        "return trees.copies(state.prev_params, like=state.prev_params)",
        "exact mode evaluates at the initial parameters for ever",
        (EXACT + "::OracleTest",),
    ),
    Mutant(
        "previous_params_of_optimizer_not_kept",
        "assembly.py",
        "prev_params = source.next_params(state, params, extra_args)",
        "prev_params = trees.copies(state.prev_params, like=state.prev_params)",
        "where vectors have a rule of their own, exact mode stays at the initial parameters",
        (EXACT + "::OracleTest",),
    ),
    Mutant(
        "exact_first_step",
        "estimator.py",
        "lambda g: jnp.where(is_first, precision.beside(0, g), g), prev_grad",
        "lambda g: g, prev_grad",
        "exact mode has no zeros before the first step",
        (EXACT + "::OracleTest",),
    ),
    Mutant(
        "no_first_correction_lost",
        "estimator.py",
        'return jnp.where(count == 0, 0.0, k) if self.first_step == "no_correction" else k',
        "return k",
        "`first_step` is without effect",
        (ISOLATION + "::ZeroTest::test_no_first_correction_leaves_the_first_gradient_as_it_is",),
    ),
    Mutant(
        "no_first_correction_twice",
        "estimator.py",
        "return jnp.where(count == 0, 0.0, k) if",
        "return jnp.where(count <= 1, 0.0, k) if",
        "the second step has no correction either",
        (MARS_1,),
    ),
    Mutant(
        "float16_overflows",
        "leaf/precision.py",
        "if not jnp.iscomplexobj(x) and jnp.finfo",
        "if False and jnp.finfo",
        "a gradient beyond float16 is kept as infinity",
        ("tests/test_low_precision.py::ScaleTest",),
    ),
    Mutant(
        "copies_by_reference",
        "leaf/precision.py",
        "return jnp.array(x, dtype=dtype, copy=True)",
        "return jnp.asarray(x, dtype=dtype)",
        "the state shares the buffer of an eager gradient",
        (DONATION + "::test_an_eager_update_shares_no_buffer_with_its_arguments_mars",),
    ),
    Mutant(
        "gamma_of_next_step",
        "estimator.py",
        "k, a = self.coefficient(state.count), updates",
        "k, a = self.coefficient(state.count + 1), updates",
        "a schedule of gamma is read one step ahead",
        (MARS_0,),
    ),
    Mutant(
        "free_gamma_of_this_step",
        "estimator.py",
        "next_k = self.coefficient(optax.safe_increment(state.count))",
        "next_k = self.coefficient(state.count)",
        "the memory-free form reads gamma of this step, not of the next",
        (CORNERS + "::GammaTest",),
    ),
    Mutant(
        "count_overflows",
        "transformation.py",
        "count = optax.safe_increment(state.count)",
        "count = state.count + 1",
        "the count overflows",
        (TYPES + "::test_count_saturates_mars",),
    ),
    Mutant(
        "count_starts_at_zero",
        "transformation.py",
        "**scalars(count))",
        "**scalars(state.count))",
        "bias corrections count from 0",
        (MARS_0,),
    ),
    Mutant(
        "clip_of_leaf",
        "run.py",
        "tuple(sorted(axis % jnp.ndim(grad) for axis in leaf_axes.norm_axes))",
        "tuple(range(jnp.ndim(grad)))",
        "a stack is clipped as one matrix",
        (AXES + "::BatchAxesTest::test_slices_of_a_stack_move_as_the_single_layers0",),
    ),
    Mutant(
        "clip_of_tree",
        "run.py",
        "squares = in_shard_map.sum_parts(squares, updates, axes, specs)",
        "squares = [sum(jnp.sum(y) for y in squares) + 0 * x for x in squares]",
        "all leaves are clipped together",
        (MARS_0,),
    ),
    Mutant(
        "clip_of_gradient",
        "run.py",
        "return estimate.corrected(grad, other[0] if other else None, k)",
        "return grad",
        "the norm is that of the gradient, not of the corrected one",
        (MARS_0,),
    ),
    Mutant(
        "not_narrowed",
        "trees.py",
        "return x if is_key else jnp.asarray(x).astype(jnp.result_type(y))",
        "return x if is_key else jnp.asarray(x)",
        "updates of bfloat16 parameters are float32",
        (TYPES + "::test_types_are_a_fixed_point_of_update_for_all_dtypes_mars",),
    ),
    Mutant(
        "sums_over_devices",
        "in_shard_map.py",
        "total = jax.lax.psum(",
        "total = jax.lax.pmax(",
        "inside a shard_map a norm is that of the largest part",
        (
            "tests/contract/test_shard_map.py::ShardMapTest::test_with_specs_it_is_the_global_result_mars",
        ),
    ),
    Mutant(
        "part_of_first_device",
        "mesh.py",
        "start = jax.lax.axis_index(tuple(axes)) * size",
        "start = 0 * jax.lax.axis_index(tuple(axes)) * size",
        "inside a shard_map every device takes the first part of a direction",
        ("tests/contract/test_shard_map.py::ShardMapTest",),
    ),
)

_DECAYED: Final = "direction = direction + decay * precision.upcast("
_STEP: Final = (
    "            directions, state = rule.update(g, state, finish.params, **extra_args)\n"
)
_FANS: Final = (
    "            math.prod(shape[i] for i in self.reduction),\n"
    "            math.prod(shape[i] for i in self.output),\n"
)

_ASSEMBLY: Final = (
    Mutant(
        "decay_after_rate",
        "run.py",
        _DECAYED,
        _DECAYED.replace("decay *", "decay / scale *"),
        "decay is not multiplied by the learning rate, and its sign is wrong",
        (MARS_1,),
    ),
    Mutant(
        "decay_in_gradient",
        "assembly.py",
        _STEP,
        "            g = jax.tree.map(lambda x, p: x + finish.decay * p, g, finish.params)\n"
        "            finish = run.Finish(finish.params, finish.scale, 0.0, finish.decays)\n"
        + _STEP,
        "decay is part of the gradient: L2 regularization",
        (MARS_1,),
    ),
    Mutant(
        "mask_lost",
        "assembly.py",
        "decays = decays_of(like)",
        "decays = jax.tree.map(lambda _: True, like)",
        "the mask of the decay is without effect",
        ("tests/contract/test_wrappers.py::SubsetTest::test_decay_mask_is_the_one_of_adamw",),
    ),
    Mutant(
        "vector_rate_lost",
        "assembly.py",
        'keys = f"learning_rate{suffix}",',
        'keys = "learning_rate",',
        "`learning_rate_1d` is without effect",
        (MARS_1,),
    ),
    Mutant(
        "vector_decay_lost",
        "assembly.py",
        'f"weight_decay{suffix}"',
        '"weight_decay"',
        "`weight_decay_1d` is without effect",
        (LION_4,),
    ),
    Mutant(
        "decay_narrow",
        "run.py",
        "decay * precision.upcast(param, precision.compute_dtype(direction))",
        "(decay * jnp.asarray(param)).astype(direction.dtype)",
        "the decay of bfloat16 parameters is computed in bfloat16",
        (TYPES + "::test_an_update_in_bfloat16_is_that_in_float32_rounded_once",),
    ),
    Mutant(
        "direction_narrow",
        "assembly.py",
        "wide = jax.tree.map(precision.upcast, updates)",
        "wide = updates",
        "the direction of a bfloat16 gradient is rounded before decay and rate",
        (TYPES + "::test_an_update_in_bfloat16_is_that_in_float32_rounded_once",),
    ),
    Mutant(
        "axes_exchanged",
        "partition.py",
        "else Axes(tuple(range(ndim - 1)), (ndim - 1,), ())",
        "else Axes((ndim - 1,), tuple(range(ndim - 1)), ())",
        "a kernel is taken for (out, in)",
        (SHAMPOO_0,),
    ),
    Mutant(
        "rank_from_two",
        "partition.py",
        "return matrix_from_rank_2(ndim) if ndim == 2 else vector_axes(ndim)",
        "return matrix_from_rank_2(ndim)",
        "matrix variants take leaves of rank 3 for matrices",
        (SHAMPOO_0,),
    ),
    Mutant(
        "rank_exactly_two",
        "partition.py",
        "return vector_axes(ndim) if ndim < 2 else",
        "return vector_axes(ndim) if ndim != 2 else",
        "MARS-AdamW and MARS-Lion take leaves of rank 3 for vectors",
        (MARS_1,),
    ),
    Mutant(
        "norm_of_rows",
        "partition.py",
        "return self.reduction + self.output if self.is_matrix else self.batch",
        "return self.output if self.is_matrix else self.batch",
        "every row of a matrix is clipped on its own",
        (MARS_0,),
    ),
    Mutant(
        "stack_permutation",
        "partition.py",
        "jnp.transpose(unflattened, sorted(range(len(order)), key=order.__getitem__))",
        "jnp.transpose(unflattened, order)",
        "axes of a stack go back by the permutation itself, not by its inverse",
        (AXES + "::BatchAxesTest",),
    ),
    Mutant(
        "negative_axes",
        "partition.py",
        "return tuple(int(i) % ndim for i in sequence)",
        "return tuple(int(i) for i in sequence)",
        "negative axes stay negative",
        (AXES + "::BatchAxesTest",),
    ),
    Mutant(
        "patterns_at_start",
        "partition.py",
        "for rule, spec in compiled if rule.search(path)",
        "for rule, spec in compiled if rule.match(path)",
        "rules by name match the start of a path only",
        (TOOLS + "::DimensionNumbersByPathTest",),
    ),
    Mutant(
        "fused_mask_lost",
        "run.py",
        "scale, decay if decays else None)\n                direction =",
        "scale, decay)\n                direction =",
        "the fused step decays what the mask leaves out",
        (FUSED + "::test_kernels_make_the_parameters_and_state_of_two_calls7",),
    ),
    Mutant(
        "decay_sign",
        "run.py",
        _DECAYED,
        _DECAYED.replace("+ decay", "- decay"),
        "the decay has the wrong sign",
        (MARS_1,),
    ),
    Mutant(
        "fused_update_wide",
        "run.py",
        "precision.upcast(param), update.astype(param.dtype)",
        "precision.upcast(param), update",
        "the fused step does not round the update of a bfloat16 parameter",
        (FUSED + "::test_bfloat16_parameters_are_rounded_as_by_two_calls",),
    ),
    Mutant(
        "fused_other_buffer",
        "run.py",
        "aliases = {i: has_other + i for",
        "aliases = {i: i for",
        "the fused step writes moments over the previous gradient",
        (FUSED + "::test_parameters_and_moments_are_written_over_what_they_were",),
    ),
    Mutant(
        "fused_over_gradient",
        "run.py",
        "aliases[0] = len(present) - 1",
        "aliases[0] = 0",
        "the fused step writes parameters over the gradient",
        (FUSED + "::test_parameters_and_moments_are_written_over_what_they_were",),
    ),
    Mutant(
        "schedules_stay",
        "assembly.py",
        "checks.at(key, rates[key], count)",
        "checks.at(key, rates[key], 0 * count)",
        "schedules of rate and decay stay at their first value",
        (MARS_2,),
    ),
    Mutant(
        "kernels_beside_newton_schulz",
        "variants/mars_m.py",
        '"implementation": implementation or "xla"',
        '"implementation": implementation',
        "MARS-M takes kernels by default, which cost it time",
        (FUSED + "::test_none_are_chosen_beside_newton_schulz0",),
    ),
    Mutant(
        "tail_not_written",
        "kernels/calls.py",
        "mine[operand] = jax.lax.dynamic_update_slice(mine[operand], end[output], (start,))",
        "pass",
        "what fills no block keeps its old value",
        (EXECUTE + "::DefectsTest::test_the_tail_is_written",),
    ),
    Mutant(
        "tail_of_new_array_not_written",
        "kernels/calls.py",
        "is_cut = tiles.covered and tiles.rest",
        "is_cut = False",
        "what fills no block is undefined in outputs of their own",
        (FUSED + "::test_kernels_make_the_updates0",),
    ),
    Mutant(
        "factors_share_a_call",
        "kernels/calls.py",
        "(x.size, x.rows, x.dtypes, x.factor is None, fits)",
        "(x.size, x.rows, x.dtypes, fits)",
        "leaves with and without a factor share a call",
        (EXECUTE + "::KernelsTest::test_leaves_with_and_without_a_factor_share_no_call",),
    ),
    Mutant(
        "small_leaves_with_a_rest",
        "kernels/calls.py",
        " and tiling.fills(leaf.size)",
        "",
        "by default kernels are taken that leave a rest",
        (EXECUTE + "::EndsTest::test_by_default_such_leaves_are_left_to_xla",),
    ),
    Mutant(
        "factor_of_other_row",
        "execute.py",
        "return self.factor.size if math.prod(shape[:leading]) == self.factor.size else None",
        "return self.factor.size",
        "matrices that are not contiguous get each other's factors",
        (EXECUTE + "::KernelsTest::test_any_shape_and_factor",),
    ),
    Mutant(
        "factor_of_first_row",
        "kernels/mosaic_gpu.py",
        "factor = mine[n_operands][row] if has_factor else None",
        "factor = mine[n_operands][0] if has_factor else None",
        "a kernel takes the factor of the first matrix for all",
        (EXECUTE + "::KernelsTest::test_any_shape_and_factor",),
    ),
    Mutant(
        "rest_of_every_row",
        "kernels/tiling.py",
        "length, may_rest = size // rows, rows == 1 and not is_whole",
        "length, may_rest = size // rows, not is_whole",
        "rows of a leaf may end within a block",
        (EXECUTE + "::TilingTest",),
    ),
    Mutant(
        "groups_of_one",
        "kernels/tiling.py",
        "length = lengths[indices[0]]",
        "length = 1",
        "small leaves do not share calls",
        (EXECUTE + "::TilingTest",),
    ),
    Mutant(
        "kernels_of_one_call",
        "execute.py",
        "return is_known and is_one_gpu and is_traced and can_run()",
        "return is_known and is_one_gpu and can_run()",
        "outside of a compiled program each call compiles its kernels",
        (EXECUTE + "::RefusalTest::test_what_pays_is_one_hopper_gpu",),
    ),
    Mutant(
        "norms_last_blocks",
        "kernels/mosaic_gpu.py",
        "rounds = (tiles.blocks - first + per_row - 1) // per_row",
        "rounds = tiles.blocks // per_row",
        "blocks that programs do not share evenly are left out of a norm",
        (NORMS + "::test_sizes_and_rows2",),
    ),
    Mutant(
        "norms_first_row",
        "kernels/mosaic_gpu.py",
        "block = row * tiles.blocks + first + k * per_row",
        "block = first + k * per_row",
        "every matrix of a leaf has the norm of the first",
        (NORMS + "::test_sizes_and_rows4",),
    ),
    Mutant(
        "norms_without_coefficient",
        "kernels/mosaic_gpu.py",
        "value = fn(values, tuple(scalars_ref[k] for k in range(scalars.size)))",
        "value = fn(values, tuple(0 * scalars_ref[k] for k in range(scalars.size)))",
        "kernels take the norm of the gradient, not of the corrected one",
        (NORMS + "::test_sizes_and_rows0",),
    ),
    Mutant(
        "norms_of_other_leaves",
        "kernels/calls.py",
        "for i, leaf, total in zip(indices, mine, jnp.sum(sums, axis=2), strict=True):",
        "for i, leaf, total in zip(indices[::-1], mine, jnp.sum(sums, axis=2), strict=True):",
        "leaves that share a call get each other's norms",
        (NORMS + "::test_leaves_of_a_kind_share_a_call_and_keep_their_order",),
    ),
    Mutant(
        "norms_of_whole_leaves",
        "execute.py",
        "return math.prod(self.shape[:leading]) if is_last else None",
        "return math.prod(self.shape[:leading])",
        "matrices that are not contiguous are summed as rows",
        (NORMS + "::test_what_blocks_do_not_fill_is_left_to_xla2",),
    ),
    Mutant(
        "norms_of_shards",
        "execute.py",
        'if implementation == "pallas" and can_run() and mesh.is_plain(operands):',
        'if implementation == "pallas" and can_run():',
        "kernels take norms of leaves that may be sharded",
        (NORMS + "::test_on_several_devices_it_is_left_to_xla",),
    ),
    Mutant(
        "norms_of_stacks",
        "kernels/calls.py",
        "if t and t.rows == 1 and t.block == tiling.BLOCKS[0]",
        "if t and t.block == tiling.BLOCKS[0]",
        "by default kernels are taken for the norms of stacked matrices",
        (NORMS + "::test_by_default_large_leaves_with_one_norm",),
    ),
    Mutant(
        "norms_derivative",
        "mesh.py",
        "lambda primals, tangents: jax.jvp(xla, primals, tangents)",
        "lambda primals, tangents: (xla(*primals), xla(*primals))",
        "kernels have another derivative than the same function by XLA",
        (NORMS + "::test_batches_and_derivatives_are_those_of_xla",),
    ),
)

_NEW: Final = 'new = a if self.correction == "svrg" else corrected'

_VARIANTS: Final = (
    Mutant(
        "nu_of_gradient_always",
        "variants/adamw.py",
        _SQUARED,
        "grad, nu, b2, 2",
        "v averages the squares of g where those of c are due",
        (MARS_0,),
    ),
    Mutant(
        "nu_of_corrected_always",
        "variants/adamw.py",
        _SQUARED,
        "c, nu, b2, 2",
        "v averages the squares of c where those of g are due",
        (MARS_1,),
    ),
    Mutant(
        "nu_with_b1",
        "variants/adamw.py",
        _SQUARED,
        _SQUARED.replace("b2", "b1"),
        "v decays by b1",
        (MARS_0,),
    ),
    Mutant(
        "amsgrad_minimum",
        "variants/adamw.py",
        "nu_max = jnp.maximum(nu_max, nu)",
        "nu_max = jnp.minimum(nu_max, nu)",
        "AMSGrad keeps the smallest v",
        (MARS_2,),
    ),
    Mutant(
        "amsgrad_corrected",
        "variants/adamw.py",
        "nu_max = jnp.maximum(nu_max, nu)\n"
        "    nu_hat = (nu if nu_max is None else nu_max) / nu_correction",
        "nu_max = jnp.maximum(nu_max, nu / nu_correction)\n"
        "    nu_hat = nu / nu_correction if nu_max is None else nu_max",
        "AMSGrad takes the maximum after bias correction, as Optax has it",
        (MARS_2,),
    ),
    Mutant(
        "amsgrad_unused",
        "variants/adamw.py",
        "nu_hat = (nu if nu_max is None else nu_max) / nu_correction",
        "nu_hat = nu / nu_correction",
        "AMSGrad keeps its maximum and does not use it",
        (MARS_2,),
    ),
    Mutant(
        "eps_in_root",
        "variants/adamw.py",
        _DIRECTION,
        _DIRECTION.replace("(root(nu_hat + eps_root) + eps)", "root(nu_hat + eps_root + eps)"),
        "eps is added inside the root",
        (MARS_0,),
    ),
    Mutant(
        "eps_before_correction",
        "variants/adamw.py",
        _DIRECTION,
        _DIRECTION.replace("+ eps)", "+ eps / jnp.sqrt(nu_correction))"),
        "eps is added before bias correction",
        (MARS_0,),
    ),
    Mutant(
        "mu_uncorrected",
        "variants/adamw.py",
        "momentum = mu / mu_correction\n",
        "momentum = mu\n",
        "the momentum has no bias correction",
        (MARS_0,),
    ),
    Mutant(
        "nu_corrected_by_b1",
        "variants/adamw.py",
        'own["nu_correction"] = bias_correction(beta2, count)',
        'own["nu_correction"] = bias_correction(beta1, count)',
        "the bias correction of v is that of the momentum",
        (MARS_0,),
    ),
    Mutant(
        "vector_decay_rates_exchanged",
        "variants/adamw.py",
        'scale_by_mars, settings["b1_1d"], settings["b2_1d"], **own',
        'scale_by_mars, settings["b2_1d"], settings["b1_1d"], **own',
        "b1_1d and b2_1d are exchanged",
        (MARS_1,),
    ),
    Mutant(
        "vectors_corrected",
        "variants/adamw.py",
        'return lambda correction: make(correction="none")',
        'return lambda correction: make(correction="approx")',
        "vectors are corrected, too",
        (LION_4,),
    ),
    Mutant(
        "vector_eps_lost",
        "variants/adamw.py",
        "own[key] = value",
        "pass",
        "`eps_1d` is without effect",
        (MARS_1,),
    ),
    Mutant(
        "optimize_1d_lost",
        "variants/adamw.py",
        "if optimize_1d:\n        return None",
        "if False:\n        return None",
        "`optimize_1d` is without effect",
        (MARS_0,),
    ),
    Mutant(
        "lion_of_gradient",
        "variants/lion.py",
        "return jnp.sign(momentum), mu",
        "return jnp.sign(arrays[1]), mu",
        "Lion takes the sign of the gradient",
        (LION_4,),
    ),
    Mutant(
        "lion_without_sign",
        "variants/lion.py",
        "return jnp.sign(momentum), mu",
        "return momentum, mu",
        "Lion without its sign",
        (LION_4,),
    ),
    Mutant(
        "shampoo_divisor",
        "variants/shampoo.py",
        "newton_schulz.spectral_factor, 1 - precision.upcast_scalar(b1)",
        "newton_schulz.spectral_factor, None",
        "Shampoo does not divide the momentum by 1 - b1",
        (SHAMPOO_3,),
    ),
    Mutant(
        "shampoo_eps",
        "variants/shampoo.py",
        "(*how, eps, newton_schulz_fn)",
        "(*how, 1e-8, newton_schulz_fn)",
        "`eps` of Shampoo is without effect",
        (SHAMPOO_3,),
    ),
    Mutant(
        "mars_m_factor",
        "variants/mars_m.py",
        "orthogonalize.transformation(iteration, newton_schulz.rms_factor, numbers)",
        "orthogonalize.transformation(iteration, newton_schulz.spectral_factor, numbers)",
        "MARS-M has the factor of Shampoo",
        (MARS_M_3,),
    ),
    Mutant(
        "factor_orientation",
        "orthogonalize.py",
        "y * factor(*its.axes.fans(y.shape))",
        "y * factor(*reversed(its.axes.fans(y.shape)))",
        "factors get (out, in)",
        (SHAMPOO_0,),
    ),
    Mutant(
        "norm_of_stack",
        "orthogonalize.py",
        "normalize(x, a.norm_axes)",
        "normalize(x, tuple(range(x.ndim)))",
        "one Frobenius norm for a whole stack",
        (
            NEWTON_SCHULZ
            + "::NewtonSchulzOracleTest::test_one_call_on_a_stack_treats_its_matrices_"
            "apart",
        ),
    ),
    Mutant(
        "long_side_squared",
        "stacks.py",
        "return jnp.swapaxes(stack, 1, 2) if stack.shape[1] > stack.shape[2] else stack",
        "return jnp.swapaxes(stack, 1, 2) if stack.shape[1] < stack.shape[2] else stack",
        "the Gram matrix is that of the long side",
        (STACKS + "::BoundTest",),
    ),
    Mutant(
        "stacks_unbounded",
        "stacks.py",
        "        if total + size > LARGEST:\n",
        "        if total > LARGEST:\n",
        "stacks outgrow their bound",
        (STACKS + "::BoundTest::test_no_leaves_are_joined_beyond_the_bound",),
    ),
    Mutant(
        "padding_kept",
        "reshard.py",
        "    for place in reversed(path[:-1]):\n"
        "        result = mesh.reshard(result, _spec(place))\n"
        "    return result[: stack.shape[0]] if missing else result",
        "    for place in reversed(path[:-1]):\n"
        "        result = mesh.reshard(result, _spec(place))\n"
        "    return result[missing :] if missing else result",
        "the padding of a stack is taken for its first matrices",
        ("tests/contract/test_stacks_on_meshes.py",),
    ),
    Mutant(
        "storm_coefficient",
        "estimator.py",
        "return 1 - gamma",
        "return gamma",
        "STORM takes gamma for 1 - gamma",
        (STORM + "::EstimatorTest",),
    ),
    Mutant(
        "storm_first_step",
        "estimator.py",
        "a = trees.choose(is_new, anchor, state.prev_corrected)",
        "a = state.prev_corrected",
        "the first estimate of STORM is gamma g",
        (STORM + "::EstimatorTest",),
    ),
    Mutant(
        "storm_keeps_gradient",
        "estimator.py",
        _NEW,
        _NEW.replace("else corrected", "else updates"),
        "STORM keeps the gradient, not its estimate",
        (STORM + "::EstimatorTest",),
    ),
    Mutant(
        "storm_nesterov_correction",
        "variants/adamw.py",
        "b1 * (mu / next_mu_correction)",
        "b1 * (mu / mu_correction)",
        "Nesterov momentum has the bias correction of this step",
        (STORM + "::AdamWTest",),
    ),
    Mutant(
        "correction_clip_of_leaf",
        "estimator.py",
        "optax.tree.norm(added, squared=True)",
        "max(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(added))",
        "`correction_clip` bounds the largest leaf alone",
        (STORM + "::EstimatorTest",),
    ),
    Mutant(
        "alpha_lost",
        "estimator.py",
        'return checks.at("alpha", self.alpha, count)',
        "return 1.0",
        "`alpha` of SVRG is without effect",
        (ESTIMATORS,),
    ),
    Mutant(
        "svrg_anchor_not_kept",
        "estimator.py",
        _NEW,
        "new = corrected",
        "SVRG keeps the corrected gradient in place of the anchor's",
        (ESTIMATORS,),
    ),
    Mutant(
        "svrg_snapshot_moves",
        "estimator.py",
        "params = trees.choose(is_new, params, state.prev_params)",
        "params = trees.choose(True, params, state.prev_params)",
        "the parameters of SVRG's anchor move at every step",
        (ESTIMATORS,),
    ),
    Mutant(
        "refresh_anchor_lost",
        "estimator.py",
        'return jnp.asarray(extra_args.get("refresh_anchor", True))',
        "return jnp.asarray(True)",
        "`refresh_anchor` is without effect",
        (ESTIMATORS,),
    ),
    Mutant(
        "anchor_without_its_gradient",
        "estimator.py",
        "prev_grad = trees.choose(is_new, updates, prev_grad)",
        "prev_grad = trees.choose(False, updates, prev_grad)",
        "a step with a new anchor takes its batch's gradient at the previous parameters",
        (ESTIMATORS,),
    ),
    Mutant(
        "adaptive_gamma_of_seen",
        "estimator.py",
        'unseen = updates if self.correction == "approx" else prev_grad',
        "unseen = updates",
        "in exact mode an adaptive gamma predicts the gradient at the new parameters",
        (ADAPTIVE,),
    ),
    Mutant(
        "adaptive_gamma_unbounded",
        "adaptive.py",
        "jnp.clip(ratio, self.low, self.high)",
        "ratio",
        "`low` and `high` of an adaptive gamma are without effect",
        (ADAPTIVE,),
    ),
    Mutant(
        "cautious_zero_agrees",
        "wrappers.py",
        "(jnp.real(u * jnp.conj(g)) > 0)",
        "(jnp.real(u * jnp.conj(g)) >= 0)",
        "an entry without gradient agrees with any direction",
        (WRAPPERS + "::CautiousTest",),
    ),
    Mutant(
        "cautious_without_floor",
        "wrappers.py",
        "agrees /= jnp.maximum(jnp.mean(agrees), 1e-3) if agrees.size else 1",
        "agrees /= jnp.mean(agrees) if agrees.size else 1",
        "the cautious scale has no floor",
        (WRAPPERS + "::CautiousTest",),
    ),
    Mutant(
        "cautious_count",
        "wrappers.py",
        "agrees *= agrees.size / (jnp.sum(agrees) + 1)",
        "agrees *= agrees.size / jnp.maximum(jnp.sum(agrees), 1)",
        "the cautious scale by count lacks its + 1",
        (WRAPPERS + "::CautiousTest",),
    ),
    Mutant(
        "absent_by_entry",
        "wrappers.py",
        "absent = {path: jnp.all(grad == 0) for path, grad in flat}",
        "absent = {path: jnp.any(grad == 0) for path, grad in flat}",
        "one entry of 0 makes a gradient absent",
        (WRAPPERS + "::IgnoreAbsentGradientsTest",),
    ),
    Mutant(
        "absent_forgets",
        "wrappers.py",
        "lambda node: choose(node, next(old_nodes)), state",
        "lambda node: node, state",
        "an absent leaf forgets its last gradient",
        (WRAPPERS + "::IgnoreAbsentGradientsTest",),
    ),
    Mutant(
        "rounding_by_a_coin",
        "rounding.py",
        "(odds * step < jnp.abs(rest))",
        "(odds < 0.5) & (rest != 0)",
        "stochastic rounding goes either way with the same odds",
        (ROUNDING,),
    ),
    Mutant(
        "rounding_away",
        "rounding.py",
        "jnp.where(rest < 0, -largest, largest)",
        "jnp.where(rest < 0, largest, -largest)",
        "stochastic rounding goes to the neighbour on the other side",
        (ROUNDING,),
    ),
    Mutant(
        "rounding_one_key",
        "rounding.py",
        "optax.tree.split_key_like(key, params)",
        "jax.tree.map(lambda _: key, params)",
        "all leaves are rounded by the same numbers",
        (ROUNDING,),
    ),
    Mutant(
        "rounding_of_rounded",
        "rounding.py",
        "total = precision.upcast(param) + precision.upcast(update)",
        "total = precision.upcast(param + update)",
        "the sum is rounded before it is rounded stochastically",
        (ROUNDING,),
    ),
    Mutant(
        "diagnose_gamma",
        "diagnose.py",
        'checks.at("gamma", gamma, node.count)',
        'checks.at("gamma", gamma, node.count + 1)',
        "`diagnose` reads a schedule of gamma one step ahead",
        (DIAGNOSE + "::test_a_scheduled_gamma_is_taken_at_the_count_of_the_state",),
    ),
    Mutant(
        "diagnose_norm",
        "diagnose.py",
        "squares = _inner(c, c)",
        "squares = _inner(g, g)",
        "`diagnose` takes the gradient for the corrected one",
        (DIAGNOSE,),
    ),
)

_ROWS: Final = "tests/test_row_normalization.py::"
_ROW_NORMALIZATION: Final = (
    Mutant(
        "rows_of_columns",
        "row_normalization.py",
        "clipping.squares(x, axes.reduction)",
        "clipping.squares(x, axes.output)",
        "columns in place of rows are evened out",
        (_ROWS + "OracleTest::test_it_is_the_rule_in_float64_wide",),
    ),
    Mutant(
        "row_norm_not_kept",
        "row_normalization.py",
        "x / divisor * root(before / _nonzero(after))",
        "x / divisor",
        "a matrix whose rows are even has another norm",
        (_ROWS + "OracleTest::test_it_is_the_rule_in_float64_wide",),
    ),
    Mutant(
        "row_length_of_a_part",
        "row_normalization.py",
        "length = axes.fans(x.shape)[0] * _over_devices(1, within)",
        "length = axes.fans(x.shape)[0]",
        "inside a shard_map a row is as long as its part",
        (_ROWS + "MeshTest::test_in_a_shard_map_with_specs_checked",),
    ),
    Mutant(
        "rows_of_a_part",
        "row_normalization.py",
        "before, after = _over_devices(totals, across)",
        "before, after = totals",
        "inside a shard_map the norm of a matrix is that of a device's rows",
        (_ROWS + "MeshTest::test_in_a_shard_map_with_specs_checked",),
    ),
    Mutant(
        "row_divisor_zero",
        "row_normalization.py",
        "divisor = _nonzero(root(average) + precision.upcast_scalar(eps, dtype))",
        "divisor = root(average) + precision.upcast_scalar(eps, dtype)",
        "without an epsilon, rows of zeros become NaN",
        (_ROWS + "PropertiesTest::test_zeros_stay_zero_and_wake_up_finite_without_eps",),
    ),
    Mutant(
        "row_average_of_roots",
        "row_normalization.py",
        "optax.tree.update_moment(mean, nu.astype(dtype), decay, 1)",
        "optax.tree.update_moment(mean, nu.astype(dtype), decay, 2)",
        "the average is of fourth powers",
        (_ROWS + "OracleTest::test_it_is_the_rule_in_float64_wide",),
    ),
)

_PRECONDITIONERS: Final = (
    Mutant(
        "adam_momentum_exchanged",
        "variants/adamw.py",
        "mu = optax.tree.update_moment(c, mu, b1, 1)",
        "mu = optax.tree.update_moment(c, mu, 1 - b1, 1)",
        "b1 and 1 - b1 are exchanged in the momentum of Adam",
        (MARS_0,),
    ),
    Mutant(
        "inner_of_gradient",
        "transformation.py",
        "inner.update(result, before",
        "inner.update(updates, before",
        "the preconditioner gets the gradient, neither corrected nor clipped",
        (ANY + "with_adam_it_is_mars0",),
    ),
    Mutant(
        "inner_state_wide",
        "transformation.py",
        "trees.cast_like(new, state.inner_state)",
        "new",
        "the state of a preconditioner takes the dtypes of the gradients",
        (ANY + "a_preconditioner_gets_matrices_in_float32_parameters_and_extra_arguments",),
    ),
    Mutant(
        "inner_without_parameters",
        "transformation.py",
        "inner.update(result, before, params, **its)",
        "inner.update(result, before, None, **its)",
        "the preconditioner gets no parameters",
        (ANY + "a_preconditioner_gets_matrices_in_float32_parameters_and_extra_arguments",),
    ),
    Mutant(
        "inner_state_lost",
        "assembly.py",
        'inner_state = getattr(parts[0], "inner_state", None)',
        "inner_state = None",
        "an optimizer drops the state of its preconditioner",
        (ANY + "with_adam_it_is_mars0",),
    ),
    Mutant(
        "mask_inverted",
        "assembly.py",
        "lambda _: bool(m), below",
        "lambda _: not m, below",
        "what the mask leaves out decays, and the rest does not",
        ("tests/contract/test_wrappers.py::SubsetTest::test_decay_mask_is_the_one_of_adamw",),
    ),
    Mutant(
        "soap_moves_at_first",
        "variants/soap.py",
        "is_skipped = (count == 0) & has_basis",
        "is_skipped = jnp.zeros([], bool)",
        "SOAP moves in its first step, before it has bases",
        (SOAP + "FirstStepTest",),
    ),
    Mutant(
        "soap_count",
        "variants/soap.py",
        "step = jnp.maximum(count, 1) if has_basis else",
        "step = optax.safe_increment(count) if has_basis else",
        "the bias corrections of SOAP count the skipped step",
        (SOAP_SQUARE,),
    ),
    Mutant(
        "soap_order",
        "variants/soap.py",
        "order = jnp.argsort(-sizes, axis=2)",
        "order = jnp.argsort(sizes, axis=2)",
        "QR keeps the span of small eigenvalues",
        (SOAP_SQUARE,),
    ),
    Mutant(
        "soap_nu_stays",
        "variants/soap.py",
        "nu = jnp.take_along_axis(nu, order, axis=1 + side)",
        "pass",
        "the second moments do not follow the order of the bases",
        (SOAP_SQUARE,),
    ),
    Mutant(
        "soap_bases_stay",
        "variants/soap.py",
        "basis = jnp.linalg.qr(jnp.take_along_axis(image, order, axis=2))[0]",
        "basis = jnp.take_along_axis(basis, order, axis=2)",
        "the bases of SOAP stay those of the first gradient",
        (SOAP_SQUARE,),
    ),
    Mutant(
        "soap_beta_lost",
        "variants/soap.py",
        "beta = b2 if shampoo_beta is None else shampoo_beta",
        "beta = b2",
        "`shampoo_beta` is without effect",
        (SOAP + "OracleTest::test_every_step_is_that_of_the_transcription_own_beta",),
    ),
    Mutant(
        "soap_nu_not_rotated",
        "variants/soap.py",
        "_rotated(seen, *bases), nu, beta2, 2",
        "seen, nu, beta2, 2",
        "the second moments of SOAP are of the gradient's own entries",
        (SOAP_SQUARE,),
    ),
    Mutant(
        "soap_not_damped",
        "variants/soap.py",
        "nu_hat += noise**2 * jnp.mean(nu_hat, axis=(1, 2), keepdims=True)",
        "pass",
        "SOAP brings rounding errors to full size",
        (SOAP + "RoundingTest",),
    ),
    Mutant(
        "soap_infinite_gram",
        "variants/soap.py",
        "jnp.where(is_finite, average, gram)",
        "average",
        "SOAP keeps a covariance that has overflowed",
        (SOAP + "RangeTest",),
    ),
    Mutant(
        "inner_gets_all_arguments",
        "transformation.py",
        'for k, x in extra_args.items() if k != "prev_grad" and x is not None}',
        "for k, x in extra_args.items()}",
        "the preconditioner gets arguments that are the package's own",
        (ANY.partition("::")[0] + "::VarianceReducedTest",),
    ),
    Mutant(
        "inner_state_narrow",
        "transformation.py",
        "before = trees.cast_like(before, jax.eval_shape(inner.init, result))",
        "pass",
        "the preconditioner gets a state in 16 bits beside directions in 32",
        (ANY.partition("::")[0] + "::VarianceReducedTest",),
    ),
    Mutant(
        "soap_longer_side",
        "variants/soap.py",
        "one_sided and side != (fans[0] > fans[1])",
        "one_sided and side == (fans[0] > fans[1])",
        "one-sided SOAP preconditions the longer side",
        (SOAP + "OracleTest::test_every_step_is_that_of_the_transcription_one_sided_wide",),
    ),
    Mutant(
        "soap_products_narrow",
        "variants/soap.py",
        'functools.partial(jnp.matmul, precision="highest")',
        "jnp.matmul",
        "the products of SOAP have the default precision of a device",
        (SOAP + "ExecutionTest::test_no_product_is_in_the_low_precision_of_a_device",),
    ),
)

MUTANTS: Final = (
    *_LEAF,
    *_STATE,
    *_ASSEMBLY,
    *_VARIANTS,
    *_ROW_NORMALIZATION,
    *_PRECONDITIONERS,
)

EQUIVALENT: Final = (
    Equivalent(
        "leaf/clipping.py",
        "`norm >= max_norm` for `norm > max_norm`",
        "at the bound itself the factor is 1 either way",
    ),
    Equivalent(
        "assembly.py",
        "a decay of 0 is multiplied and added like any other",
        "0 times a finite parameter is 0: it only costs time",
    ),
    Equivalent(
        "leaf/newton_schulz.py",
        "products of the polynomial in another order",
        "the same in exact arithmetic; the recorded references differ in it, and both are followed",
    ),
    Equivalent(
        "kernels/tiling.py",
        "another bound on the rest of a leaf",
        "which part is a block and which is the rest changes no value",
    ),
)
