"""What arguments that many functions share mean, written once, and put into their docstrings."""

import inspect
import re
from collections.abc import Iterable

_SHARED = r"""
Args:
  learning_rate: :math:`\eta_t`, a number >= 0, or a schedule of the step count, which
    starts at 0.
  b1: Decay rate :math:`\beta_1`, in [0, 1), of the momentum. 0 turns the corrections ``"approx"``
    and ``"exact"`` off; the others do not depend on it.
  b2: Decay rate :math:`\beta_2` of the second moment, in [0, 1).
  eps: :math:`\varepsilon` >= 0, added to the root of the second moment after the bias correction.
    With 0 an entry whose gradients have all been 0 becomes NaN, as in :func:`optax.scale_by_adam`.
  eps_root: :math:`\varepsilon_\mathrm{root}` >= 0, added to the second moment inside the root,
    after the bias correction, as in :func:`optax.adamw`. Derivatives through steps are finite at 0,
    too (that of the root of 0 is taken for 0). They take an 8-bit `prev_grad` for a constant.
  gamma: Scale :math:`\gamma_t` of the correction: a number (may be negative); a schedule of the
    step count, which starts at 0; or, for ``"approx"`` and ``"exact"``, an :class:`AdaptiveGamma`,
    a rule for each matrix. Under ``"storm"`` the weight of the fresh gradient, usually in (0, 1];
    without effect under ``"none"``, ``"sarah"`` and ``"svrg"``.
    The coefficient is computed in at least float32 from what arrives;
    :func:`optax.inject_hyperparams` rounds it to the parameters' dtype before, unless its
    ``hyperparam_dtype`` says otherwise.
  alpha: Coefficient :math:`\alpha_t` of ``correction="svrg"``, a number or a schedule; without
    effect under the others.
  inner: An Optax transformation of the corrected and clipped gradients into directions.
  weight_decay: :math:`\lambda` of the matrices, a number or a schedule.
  mask: Which leaves decay: a tree of bools, a prefix of the parameters, or a callable that makes
    one from them, as in :func:`optax.adamw`. None: all.
  max_norm: Bound > 0 on each corrected gradient's norm (in a stack each matrix's); None for none.
  correction: What :math:`c_t` is. ``"none"``: :math:`g_t`. ``"approx"``: as above, with the
    gradient of the previous step. ``"exact"``: with :math:`g'_t`, that of this step's batch at the
    previous parameters, in its place, which ``update(..., grad_fn=f)`` obtains as
    ``f(previous_params)``; `params` is required, and kept. ``"storm"``: :math:`c_t = g_t +
    (1-\gamma_t)(c_{t-1} - g'_t)`. ``"sarah"``: :math:`c_t = g_t + c_{t-1} - g'_t`. ``"svrg"``:
    :math:`c_t = g_t - \alpha_t (f(\tilde x) - \bar g)` with an anchor's parameters and gradient.
    These three begin with :math:`c_1 = g_1`, and the last two take a new anchor at `params` from
    ``update(..., anchor_grad=G)``, if the bool `refresh_anchor`, which may be traced, is not False.
    As in every chain of Optax, extra arguments that are not used are left to others.
  first_step: ``"zeros"``: the previous gradient is 0, as in the reference code, so that
    :math:`c_1 = (1 + k) g_1` with :math:`k = \gamma \beta_1/(1-\beta_1)`; ``"no_correction"``:
    :math:`c_1 = g_1`, which is the paper's :math:`x_0 = x_1` and what timm does.
  optimize_1d: Whether the other leaves get the variance-reduced rule, too. The values
    `*_1d` are checked, but not used then.
  learning_rate_1d: That of the other leaves, alike; None for `learning_rate`.
  b1_1d: Decay rate of their first moment, in [0, 1).
  b2_1d: Decay rate of their second moment, in [0, 1).
  eps_1d: Their epsilon, >= 0; None for `eps`, and for 1e-8 where there is no `eps`.
  eps_root_1d: Their `eps_root`, >= 0; None for `eps_root`, and for 0 where there is no `eps_root`.
  weight_decay_1d: Their weight decay, a number or a schedule; None for `weight_decay`.
  weight_dimension_numbers: Which leaves are matrices, and which of their axes are reduction and
    output axes; slices along other axes are matrices of their own, also for the clip. A
    :class:`optax.contrib.MuonDimensionNumbers` (for all leaves of rank >= 2), a tree of them with
    None for vectors, or a callable ``params -> tree``, such as :func:`dimension_numbers_by_path`
    makes.
  amsgrad: Whether the largest second moment so far takes the place of :math:`v_t`, in every leaf
    that has one: the raw one, as in the reference code, where :func:`optax.amsgrad` takes that
    after bias correction.
  second_moment: ``"corrected"``: :math:`v` from :math:`\tilde c_t`, as the paper and the reference
    code; ``"gradient"``: from :math:`g_t`, as the formula in the reference's README.
  mu_dtype: Storage dtype of the first moments; None for each parameter's own.
  nu_dtype: Storage dtype of the second moments; None for the parameter's own, but at least float32.
    (The reference stores them in the parameter's dtype, where in bfloat16 they stall.)
  prev_grad_dtype: Storage dtype of :math:`g_{t-1}`; None for each parameter's own. An 8-bit float
    is stored with a float32 scale for each row along the last axis; in float16 a gradient beyond
    its range is kept as 65504. Under ``"storm"``, ``"sarah"`` and ``"svrg"`` it is that of
    :math:`c_{t-1}` or of the anchor, and of 16 bits or more.
  keep_prev_grad: Whether the state keeps :math:`g_{t-1}`. Without, it is the same trajectory to
    rounding: an unclipped correction is linear, so that
    :math:`m_t = \beta_1 n_{t-1} + (1-\beta_1)(1+k_t) g_t` with
    :math:`n_t = m_t - \gamma_{t+1} g_t`, which `mu` then holds. Requires ``max_norm=None``,
    ``correction="approx"``, ``prev_grad_dtype=None``, no second moment of corrected gradients
    (``second_moment="gradient"``, or ``optimize_1d=False`` of :func:`mars_shampoo`), and a gamma
    that is a Python number or a schedule (under :func:`optax.inject_hyperparams` with
    ``static_args="gamma"``: of an array, the next step's value is not known).
  implementation: What executes norms, Newton-Schulz and the elementwise part: ``"xla"``;
    ``"pallas"``, kernels for Hopper GPUs and (the elementwise part alone) TPUs; or None, which
    takes them where they were measured to be faster, and XLA elsewhere: on Hopper GPUs with JAX
    0.11, in a compiled program, for Newton-Schulz in 16 bits of several matrices whose shorter
    side is 576 or more; and on one GPU for the norms of large matrices, for what makes one stack
    of the matrices of many leaves, and for small leaves of :func:`mars` and :func:`mars_lion` in
    :func:`fused_step`.
  ns_steps: Newton-Schulz iterations, an integer >= 0; 0 leaves the matrix over its Frobenius norm.
  ns_coeffs: ``"quintic"``, ``"polar_express"``, one triple, or one triple per step.
  ns_dtype: The dtype of the iteration.
  ns_precision: Of its matrix products, as in :func:`jax.numpy.matmul`.
  shampoo_beta: Decay rate of the averages of the preconditioner, in [0, 1); None for `b2`.
  precondition_frequency: Steps from one change of the bases to the next, an integer >= 1.
  max_precond_dim: Longest side of a matrix that is preconditioned, an integer >= 0.
  one_sided: Whether the longer side of each matrix is not preconditioned; of two equal ones it is
    the output.
  precondition_dtype: Storage dtype of the averages and bases of the preconditioner, of at least 16
    bits; None for each parameter's, at least float32. In bfloat16 the bases are orthogonal to two
    digits.
  row_b2: Decay rate, in [0, 1), of a running mean square of each row of the orthogonalized matrix
    (each entry of its output axes), by whose root rows are divided before the matrix is scaled to
    its norm again, as in NorMuon (Li et al., `arXiv 2510.05491
    <https://arxiv.org/abs/2510.05491>`_, with 0.95); None for none. The state keeps one number for
    each row.
  newton_schulz_fn: A function in place of the iteration: it gets the momentum (of MARS-Shampoo,
    divided by 1 - b1) as a stack (batch, in, out) of at least float32, and returns the same shape
    and dtype. The shape factor comes after.

Returns:
  An optimizer. Updates have the parameters' dtypes; decay and learning rate are applied in at least
  float32. Without parameters, `update` works only if `weight_decay`, and
  `weight_decay_1d` where it is used, are the number 0, whatever leaves and `mask` there are.

Raises:
  TypeError: If an argument is of the wrong kind; at ``init``, if a parameter is not inexact; at
    ``update``, if a gradient is not, or the state is another transformation's.
  ValueError: If an argument is out of its range, or does not go with another; at ``init``, if
    declared axes do not fit a leaf; at ``update``, if gradients have other shapes, the state was
    made with other settings, or `params` or `grad_fn` is missing where the correction or a decay
    that is not 0 needs it.
  NotImplementedError: At ``update``, if kernels were asked for and cannot run.
"""
_SECTIONS = ("Args", "Returns", "Raises", "Examples", "References")


def complete(doc: str, parameters: Iterable[str]) -> str:
    """A docstring with an entry for each parameter and each error, and what is returned.

    What it leaves out is the shared entry. One that begins with "..." goes on after that. A
    parameter that has no entry at all is a KeyError, which comes when the package is imported.
    """
    sections, shared = parse(doc), parse(_SHARED)
    if "learning_rate" in parameters:
        sections.setdefault("Returns", shared["Returns"])
    errors = ["TypeError", "ValueError"]
    errors += ["NotImplementedError"] if "implementation" in parameters else []
    for section, names in (("Args", parameters), ("Raises", errors)):
        own, table = entries(sections.get(section, "")), entries(shared[section])
        texts = []
        for name in dict.fromkeys([*names, *own]):
            text = own.get(name, "...")
            if text.startswith("..."):
                text = f"{table[name]}\n   {text.removeprefix('...')}"
            texts.append(f"  {name}: {text.rstrip()}")
        sections[section] = "\n".join(texts)
    parts = [f"{name}:\n{sections[name].rstrip()}" for name in _SECTIONS if name in sections]
    return "\n\n".join([sections[""].rstrip(), *parts])


def parse(doc: str) -> dict[str, str]:
    """The text of each section of a docstring, and under "" what is above them."""
    parts = re.split(rf"^({'|'.join(_SECTIONS)}):\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def entries(section: str) -> dict[str, str]:
    """The text of each entry of a section."""
    parts = re.split(r"^  (\w+): ", section, flags=re.MULTILINE)
    return {name: text.rstrip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
