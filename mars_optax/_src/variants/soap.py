"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, alone and on corrected gradients."""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_optax._src import assembly, checks, in_shard_map, mesh, named, partition, trees, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf import precision
from mars_optax._src.leaf.momentum import bias_correction
from mars_optax._src.leaf.root import root
from mars_optax._src.states import State
from mars_optax._src.transformation import rule
from mars_optax._src.variants import adamw

# Entries in the bases are damped below so many units of rounding of their root mean square.
_NOISE: Final = 2**13
# Sides up to which a stack of matrices is decomposed by one call, as tiny ones are to be: a guess.
_TINY: Final = 256
_ABSENT: Final[Any] = np.zeros((0, 0, 0), np.float32)


class ScaleBySoapState(NamedTuple):
    """State of the preconditioner of :func:`scale_by_mars_soap`, trees like the parameters.

    The last four have for each leaf a stack (slices, n, n), n the length of the matrices' side, or
    1 where that side is not preconditioned: dtype=precondition_dtype or at least float32.
    """

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=int32
    mu: optax.Updates  # average of g, dtype=mu_dtype or the parameter's
    nu: optax.Updates  # average of |g|^2 in the bases, real, dtype=nu_dtype or at least float32
    left: optax.Updates  # average of g g^H
    right: optax.Updates  # average of g^H g
    left_basis: optax.Updates  # approximate eigenvectors of `left`, its columns
    right_basis: optax.Updates  # those of `right`


def scale_by_soap(
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    shampoo_beta: jax.typing.ArrayLike | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    one_sided: bool = False,
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    precondition_dtype: types.DType = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    eps_root: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """The preconditioner of :func:`scale_by_mars_soap`, alone."""
    beta = b2 if shampoo_beta is None else shampoo_beta
    checks.decay_rate("b1", b1)
    checks.decay_rate("b2", b2)
    checks.decay_rate("shampoo_beta", beta)
    checks.non_negative("eps", eps)
    checks.non_negative("eps_root", eps_root)
    checks.static_integer("precondition_frequency", precondition_frequency, least=1)
    checks.static_integer("max_precond_dim", max_precond_dim, least=0)
    checks.flag("one_sided", one_sided)
    mu_dtype = checks.recursive_dtype("mu_dtype", mu_dtype)
    nu_dtype = checks.recursive_dtype("nu_dtype", nu_dtype)
    gram_dtype = checks.recursive_dtype("precondition_dtype", precondition_dtype)
    partition.check_spec(weight_dimension_numbers)
    axes_of = functools.partial(partition.resolve_axes, weight_dimension_numbers)

    def length(fans: tuple[int, ...], side: int) -> int:
        """That of a side of matrices, or 0 if it is not preconditioned."""
        is_left_out = one_sided and side != (fans[0] > fans[1])
        return 0 if is_left_out or fans[side] > max_precond_dim else fans[side]

    def init_fn(params: optax.Params) -> ScaleBySoapState:
        checks.inexact_leaves(params)
        axes = axes_of(params)
        partition.require_matrices(axes, params, "scale_by_soap")
        partition.record_axes(axes)
        what = "`init` of `scale_by_soap`, to be called outside of it,"
        in_shard_map.require_whole(params, {}, what)

        def squares(p: Any, a: partition.Axes, side: int) -> jax.Array:
            dtype = precision.compute_dtype(p) if gram_dtype is None else gram_dtype
            zero = trees.zeros(p, dtype)  # lies on the parameter's devices
            n, stack = length(a.fans(zero.shape), side), a.to_stack(mesh.whole(zero))
            # One number in place of none: Orbax saves no empty arrays.
            rows = jnp.sum(stack, axis=2 - side) if n else jnp.sum(stack, axis=(1, 2))[:, None]
            return rows[:, :, None] * rows[:, None, :]

        of_side = (functools.partial(squares, side=side) for side in (0, 1, 0, 1))
        mu, nu = trees.zeros(params, mu_dtype), trees.zeros(params, nu_dtype, averages_squares=True)
        count = jnp.zeros([], jnp.int32)
        return ScaleBySoapState(count, mu, nu, *(jax.tree.map(fn, params, axes) for fn in of_side))

    def advance(count: jax.Array, *row: jax.Array) -> tuple[jax.Array, ...]:
        """The direction of a stack, and its state before a change of the bases."""
        dtype = precision.compute_dtype(*row)
        x, mu, nu, left, right, *bases = (precision.upcast(y, dtype) for y in row)
        scalars = (precision.upcast_scalar(y, dtype) for y in (b1, b2, beta, eps, eps_root))
        beta1, beta2, gram_beta, outside, inside = scalars
        has_basis = any(basis.size for basis in bases)
        is_skipped = (count == 0) & has_basis
        step = jnp.maximum(count, 1) if has_basis else optax.safe_increment(count)
        seen = jnp.where(is_skipped, 0, x)
        mu = optax.tree.update_moment(seen, mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(_rotated(seen, *bases), nu, beta2, 2)
        mu_hat = _rotated(mu, *bases) / bias_correction(beta1, step).astype(dtype)
        nu_hat = nu / bias_correction(beta2, step).astype(dtype)
        if has_basis:
            # What rounding leaves of a gradient in its own basis is not to be brought to size.
            noise = _NOISE * jnp.finfo(dtype).eps
            nu_hat += noise**2 * jnp.mean(nu_hat, axis=(1, 2), keepdims=True)
        direction = _rotated(mu_hat / (root(nu_hat + inside) + outside), *map(_adjoint, bases))
        grams = []
        for gram, y in ((left, x), (right, _adjoint(x))):
            if gram.size:
                average = gram_beta * gram + (1 - gram_beta) * _matmul(y, _adjoint(y))
                # One outlier may overflow: no later step has bases of infinite averages.
                is_finite = jnp.all(jnp.isfinite(average), axis=(1, 2), keepdims=True)
                gram = mesh.invariant(jnp.where(is_finite, average, gram), gram)
            grams.append(gram)
        return jnp.where(is_skipped, 0, direction), mu, nu, *grams, *bases

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        wanted = dict.fromkeys(("mu", "nu"), updates)
        checks.state(state, ScaleBySoapState, "scale_by_soap", wanted)
        layouts = in_shard_map.layouts(updates, axes_of(updates), extra_args, "SOAP")
        three = trees.rows((updates, state.mu, state.nu))
        stacks = [list(map(y.stack, row)) for y, row in zip(layouts, three, strict=True)]
        where, advice = "these settings", "Pass the state that `init` made with these settings."
        sides = [[length(x.shape[1:], side) for side in (0, 1, 0, 1)] for x, *_ in stacks]
        for i, field in enumerate(state._fields[3:]):
            shapes = [
                (len(x), *2 * [max(1, n[i])]) for (x, *_), n in zip(stacks, sides, strict=True)
            ]
            squares = [np.broadcast_to(0.0, shape) for shape in shapes]
            wanted = jax.tree.unflatten(jax.tree.structure(updates), squares)
            checks.same_shapes(f"state.{field}", getattr(state, field), wanted, where, advice)
        table = trees.rows((updates, *state[1:]))
        rows = []
        for mine, (_, _, _, *matrices), n in zip(stacks, table, sides, strict=True):
            present = (x if k else _ABSENT for x, k in zip(matrices, n, strict=True))
            rows.append(advance(state.count, *mine, *present))
        changed = _changed([row[2:] for row in rows], state.count, precondition_frequency)
        results = []
        for layout, old, row, (nu, *matrices), n in zip(
            layouts, table, rows, changed, sides, strict=True
        ):
            pairs = zip((*row[:2], nu), old, strict=False)
            direction, *moments = (layout.leaf(*pair) for pair in pairs)
            kept_sides = [x if k else y for x, y, k in zip(matrices, old[3:], n, strict=True)]
            kept = zip((*moments, *kept_sides), old[1:], strict=True)
            results.append((direction, *(precision.copied(x, y.dtype) for x, y in kept)))
        direction, *fields = trees.unzip(results, (updates, *state[1:]))
        return direction, ScaleBySoapState(optax.safe_increment(state.count), *fields)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, 1, 2))


# The default of some devices has three digits, and Adam would bring what that leaves to size.
_matmul = functools.partial(jnp.matmul, precision="highest")


def _rotated(x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """Q_L^H x Q_R, without the bases of sides that are not preconditioned."""
    x = _matmul(_adjoint(left), x) if left.size else x
    return _matmul(x, right) if right.size else x


def _orthogonal(x: jax.Array) -> jax.Array:
    """The first factor of the QR decomposition of each matrix of a stack."""
    return _in_groups(lambda y: jnp.linalg.qr(y)[0], x)


def _in_groups(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A decomposition of each matrix of a stack, of as many at once as go well."""
    together, backend = len(x), jax.default_backend()
    if backend == "gpu" and x.shape[-1] > _TINY:
        # JAX gives a stack with rows / slices <= 128 to a routine for tiny matrices.
        together = max(1, x.shape[-1] // 129)
    elif backend == "cpu":
        # Two stacks at a time were seen to wait for each other's threads for ever (JAX 0.10).
        together = 1
    is_whole = mesh.is_local(x) and mesh.explicit(x) is None
    return jax.lax.map(fn, x, batch_size=together) if together < len(x) and is_whole else fn(x)


@jax.jit
def _changed(rows: Any, count: jax.Array, frequency: int) -> Any:
    """Rows (nu, left, right, left_basis, right_basis) after the change of bases, if it is due.

    Compiled: run eagerly, the branches would be compiled anew at every step.
    """

    def first(nu: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        grams = matrices[:2]
        # In the order of power iteration, large eigenvalues first.
        vectors = functools.partial(_in_groups, lambda y: jnp.linalg.eigh(y)[1])
        return nu, *grams, *(jnp.flip(vectors(x), 2) if x.size else x for x in grams)

    def power_step(nu: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
        grams, bases = matrices[:2], []
        for side, (gram, basis) in enumerate(zip(grams, matrices[2:], strict=True)):
            if basis.size:
                image = _matmul(gram, basis)
                sizes = jnp.sum(jnp.real(jnp.conj(basis) * image), axis=1, keepdims=True)
                # QR keeps the span of the first columns: those of large eigenvalues are to be so.
                order = jnp.argsort(-sizes, axis=2)
                basis = _orthogonal(jnp.take_along_axis(image, order, axis=2))
                order = order if side else jnp.swapaxes(order, 1, 2)
                nu = jnp.take_along_axis(nu, order, axis=1 + side)
            bases.append(basis)
        return nu, *grams, *bases

    def each(fn: Callable[..., Any]) -> Any:
        return lambda: [fn(*row) for row in rows]

    branch = jnp.where(count % frequency > 0, 2, jnp.minimum(count, 1))
    return jax.lax.switch(branch, [each(first), each(power_step), lambda: rows])


class ScaleByMarsSoapState(State):
    """State of :func:`scale_by_mars_soap`; `inner_state` is a :class:`ScaleBySoapState`."""


@named.named
def scale_by_mars_soap(
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    gamma: Gamma = 0.025,
    *,
    shampoo_beta: jax.typing.ArrayLike | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    one_sided: bool = False,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    precondition_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    eps_root: jax.typing.ArrayLike = 0.0,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates of matrices by Adam in the eigenbasis of Shampoo's preconditioner.

    .. math::

      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      v_t = \beta_2 v_{t-1} + (1-\beta_2) |Q_L^H \tilde c_t Q_R|^2 \\
      u_t &= Q_L \frac{Q_L^H m_t Q_R / (1-\beta_1^{t-1})}
        {\sqrt{v_t / (1-\beta_2^{t-1}) + \varepsilon_\mathrm{root}} + \varepsilon} Q_R^H \\
      L_t &= \beta L_{t-1} + (1-\beta) \tilde c_t \tilde c_t^H, \qquad
      R_t = \beta R_{t-1} + (1-\beta) \tilde c_t^H \tilde c_t

    with the corrected and clipped gradient :math:`\tilde c_t` of :func:`scale_by_mars_m`, for each
    matrix (in, out). Every `precondition_frequency` steps, after that, the bases take a step of
    power iteration: :math:`Q_L` becomes the Q factor of :math:`L_t Q_L`, whose columns are ordered
    by their estimated eigenvalues, and :math:`v_t` with them; so for :math:`Q_R`. A side that is
    not preconditioned has the identity for a basis; without any, this is :func:`scale_by_mars`.

    As in the reference code the first step only finds the bases, by an eigendecomposition of
    :math:`L_1` and :math:`R_1`; its direction, :math:`m_1` and :math:`v_1` are 0. In its own
    eigenbasis the first gradient is diagonal, and Adam would bring what rounding leaves beside that
    to the size of the rest. Should the same gradient come again, entries below a thousandth of
    their root mean square (in float32; 2e-12 in float64) are damped. Until enough gradients have
    come, eigenvectors of 0 are arbitrary, and with them the directions: those of two devices or
    programs may differ.

    Args:
      weight_dimension_numbers: ... None: every leaf is a matrix (in, out) of rank 2.
      eps_root: Added to the second moment inside the root, after the bias correction, >= 0. Steps
        have no derivative where eigenvalues of a preconditioner coincide, as for gradients of 0.

    Returns:
      A transformation with state :class:`ScaleByMarsSoapState`.

    Raises:
      ValueError: ... Also at ``init``, if a leaf is no matrix, or inside a ``shard_map`` may be a
        part of one.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.scale_by_mars_soap()
      >>> state = tx.init(jnp.zeros((2, 2)))
      >>> for grads in (jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.array([[2.0, 1.0], [0.0, 3.0]])):
      ...     direction, state = tx.update(grads, state)
      ...     print(f"{jnp.linalg.norm(direction):.1f}")
      0.0
      2.0

    References:
      Vyas et al., `SOAP: Improving and Stabilizing Shampoo using Adam
      <https://arxiv.org/abs/2409.11321>`_, 2024, Algorithm 3. Reference code:
      https://github.com/nikhilvyas/SOAP, which adds epsilon before the bias corrections.
    """
    settings, default = locals(), partition.matrix_at_rank_2
    inner = scale_by_soap(**assembly.accepted(scale_by_soap, settings))
    return rule("scale_by_mars_soap", ScaleByMarsSoapState, settings, inner=inner, default=default)


class MarsSoapState(State):
    """State of :func:`mars_soap`; `inner_state` is a :class:`ScaleBySoapState`."""


@named.named
def mars_soap(
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    gamma: Gamma = 0.025,
    weight_decay: types.ScalarOrSchedule = 0.0,
    mask: types.Mask | None = None,
    *,
    shampoo_beta: jax.typing.ArrayLike | None = None,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    one_sided: bool = False,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    learning_rate_1d: types.ScalarOrSchedule | None = None,
    b1_1d: jax.typing.ArrayLike = 0.9,
    b2_1d: jax.typing.ArrayLike = 0.95,
    eps_1d: jax.typing.ArrayLike | None = None,
    weight_decay_1d: types.ScalarOrSchedule | None = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    mu_dtype: types.DType = None,
    nu_dtype: types.DType = None,
    precondition_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    eps_root: jax.typing.ArrayLike = 0.0,
    eps_root_1d: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-SOAP: Adam in Shampoo's eigenbasis, on variance-reduced gradients.

    Matrices are updated by :math:`x_{t+1} = x_t - \eta_t (u_t + \lambda x_t)` with the direction
    :math:`u_t` of :func:`scale_by_mars_soap`, which is 0 at the first step, and all other leaves by
    AdamW with the values `*_1d`. While the gradients so far have a lower rank than a side is long,
    as after the first one of a matrix that is not square, rounding decides a part of each new
    basis: two programs, such as an eager and a jitted one, may part by a step or more. From one
    state with preconditioners of full rank they agree to rounding.

    Args:
      weight_dimension_numbers: ... None: leaves of exactly rank 2. Embeddings and output layers are
        among these: name them to leave them out.
      eps_root: That of :func:`scale_by_mars_soap`, >= 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
      >>> tx = mars_optax.mars_soap(learning_rate=0.1)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     updates, state = tx.update(params, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{jnp.sum(params['kernel'] ** 2) / 2:.1f}", end=" ")
      7.1 6.6 6.1

    References:
      Those of :func:`scale_by_mars_soap`. Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_,
      2025, Algorithm 1, whose preconditioner is arbitrary.
    """
    settings = locals()
    vectors = adamw.for_vectors(settings)
    return assembly.optimizer("mars_soap", scale_by_mars_soap, settings, MarsSoapState, vectors)
