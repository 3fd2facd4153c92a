"""Every error of the package: an example that raises it, when it comes, and what to do.

    python -m tests.hardening.error_table

writes the tables of docs/errors.md, below the text there, from the messages of the examples. Which
`raise` an example reaches is read from its traceback, so that the table needs no line numbers.
"""

import ast
import contextlib
import dataclasses
import functools
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from mars_optax._src import mesh
from tests.support import interpreter, meshes

ROOT = pathlib.Path(mars_optax.__file__).parent
PAGE = ROOT.parent / "docs" / "errors.md"

_mars, _mars_m, _shampoo = mars_optax.mars, mars_optax.mars_m, mars_optax.mars_shampoo
_scale, _correct = mars_optax.scale_by_mars, mars_optax.correct_gradients
_by_path = mars_optax.dimension_numbers_by_path

# The sections of the page: where an error comes from.
BUILT = "When an optimizer or a transformation is built"
INIT = "At `init`"
GRADS = "At `update`: gradients, parameters and functions"
STATE = "At `update`: the state"
MESH = "On several devices, and in kernels"
TOOLS = "In the tools"
SECTIONS = (BUILT, INIT, GRADS, STATE, MESH, TOOLS)


@dataclasses.dataclass(frozen=True)
class Example:
    """One way to get an error.

    Attributes:
      section: The section of the page.
      when: When the error comes.
      remedy: What to do, in more words than the message.
      got: What the message has to say about what it got.
      trigger: Raises it.
      needs: The oldest JAX on which it can come.
    """

    section: str
    when: str
    remedy: str
    got: str
    trigger: Callable[[], Any]
    needs: tuple[int, int] = (0, 7)

    @functools.cached_property
    def raised(self) -> Exception:
        """The error."""
        try:
            self.trigger()
        except Exception as error:
            return error
        raise AssertionError(f"nothing was raised: {self.when}")

    @property
    def message(self) -> str:
        """Its text."""
        return str(self.raised)

    @property
    def site(self) -> tuple[str, int]:
        """File and line of the `raise`: the last frame inside the package."""
        frames = traceback.extract_tb(self.raised.__traceback__)
        ours = [f for f in frames if pathlib.Path(f.filename).is_relative_to(ROOT)]
        return str(pathlib.Path(ours[-1].filename).relative_to(ROOT)), int(ours[-1].lineno or 0)


@dataclasses.dataclass(frozen=True)
class Raise:
    """A `raise` in the sources; `template` is its message with placeholders."""

    file: str
    first: int
    last: int
    kind: str
    template: str


def raises() -> Iterator[Raise]:
    """Every `raise` of an error of the package's own; one that passes another's on is none."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert isinstance(node.exc, ast.Call), f"{path}:{node.lineno}"
                (message,) = node.exc.args
                yield Raise(
                    str(path.relative_to(ROOT)),
                    node.lineno,
                    node.end_lineno or node.lineno,
                    ast.unparse(node.exc.func),
                    _template(message),
                )


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    # A message made by a function, of the reason that it is given.
    return f"{{{ast.unparse(node)}}}"


def checked_arguments() -> set[str]:
    """The arguments that are named where a helper of `checks` is called on them."""
    names = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_check = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "checks"
            )
            if is_check and node.args and isinstance(node.args[0], ast.Constant):
                names.add(node.args[0].value)
    return names


def _params() -> Any:
    return {"layer": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}


def _init(specs: Any) -> Any:
    return _mars(0.1, weight_dimension_numbers=specs).init(_params())


def _update(tx: Any, state_of: Any = None, grads: Any = None, **extra: Any) -> Any:
    """An update by `tx`, with the state of another transformation or other gradients."""
    params = _params()
    state = (tx if state_of is None else state_of).init(params)
    return tx.update(params if grads is None else grads, state, params, **extra)


def _nnx_state_for_a_module() -> Any:
    module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    return _mars(0.1).update(nnx.state(module), _mars(0.1).init(module), module)


def _with_bias(bias: Any) -> Any:
    return {"layer": {"kernel": jnp.ones((3, 4)), "bias": bias}}


def _in_shard_map(tx: Any, **extra: Any) -> Any:
    mesh, specs = meshes.mesh(AxisType.Auto), P("x", "y")
    grads = {"kernel": jnp.ones((8, 8))}

    def step(g: Any) -> Any:
        return tx.update(g, tx.init(g), g, **extra)[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.eval_shape(mapped, grads)


def _kernels_for_complex() -> Any:
    with interpreter.always():
        tx, grads = _scale(implementation="pallas"), {"kernel": jnp.ones((3, 4), jnp.complex64)}
        return tx.update(grads, tx.init(grads))


def _kernels_on_cpu() -> Any:
    with interpreter.never(), jax.default_device(jax.devices("cpu")[0]):
        tx = _scale(implementation="pallas")
        return jax.jit(tx.update)(_params(), tx.init(_params()))


def _kernels_on_tpus() -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(interpreter.always())
        for name in ("has_partitioner", "is_one_device"):
            stack.enter_context(mock.patch.object(mesh, name, return_value=False))
        return _update(_scale(implementation="pallas"))


def _kernels_on_both_kinds_of_axes() -> Any:
    mesh = meshes.mesh(AxisType.Explicit, y_type=AxisType.Auto)
    grads = {"kernel": jax.device_put(jnp.ones((8, 128)), NamedSharding(mesh, P("x", "y")))}
    with interpreter.always(), jax.set_mesh(mesh):
        tx = _scale(implementation="pallas")
        return tx.update(grads, tx.init(grads))


def _later(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: make(*args, **kwargs)


_EXACT = {"correction": "exact"}
_WITHOUT = {"max_norm": None, "second_moment": "gradient", "keep_prev_grad": False}
_BEGIN = "Pass the state of the same settings, or begin with `init`: [checkpoints](checkpoints.md)."
_AXES = "Which axes are which: [matrices](getting_started.md#which-parameters-are-matrices)."

EXAMPLES: tuple[Example, ...] = (
    Example(
        BUILT,
        "A learning rate is negative.",
        "Minus the objective is maximized by minus its gradients.",
        "got -0.1",
        _later(_mars, -0.1),
    ),
    Example(
        BUILT,
        "`weight_dimension_numbers` is neither a function nor a tree of axes (at `init`: what it "
        "returns is none).",
        _AXES,
        "got 'kernel'",
        _later(_mars, 0.1, weight_dimension_numbers="kernel"),
    ),
    Example(
        BUILT,
        "A learning rate, another number or (at `update`) what a schedule returns is no real "
        "number, or an array of bools, of complex numbers, or of rank 1 or more.",
        "An array of rank 1 or more would broadcast over each leaf. For a rate of each leaf use "
        "`optax.partition`, for one of each member of an ensemble `jax.vmap`.",
        "got '0.1'",
        _later(_mars, "0.1"),
    ),
    Example(
        BUILT,
        "A decay rate (`b1`, `b2`, `b1_1d`, `b2_1d`) is outside its range.",
        "1 would never forget, and the coefficient of the correction divides by 1 - b1.",
        "got 1.0",
        _later(_mars, 0.1, b1=1.0),
    ),
    Example(
        BUILT,
        "An epsilon is negative.",
        "0 is allowed.",
        "got -1e-08",
        _later(_mars, 0.1, eps=-1e-8),
    ),
    Example(
        BUILT,
        "The bound of a clip (`max_norm`, `correction_clip`) is 0 or less.",
        "None turns the clip off; infinity keeps its arithmetic.",
        "got 0.0",
        _later(_mars, 0.1, max_norm=0.0),
    ),
    Example(
        BUILT,
        "The number of Newton-Schulz steps is no integer, or negative.",
        "5 is the default.",
        "got 2.5",
        _later(_mars_m, 0.1, ns_steps=2.5),
    ),
    Example(
        BUILT,
        "A number that is part of the program (`precondition_frequency`, `max_precond_dim`) is no "
        "Python integer, or too small.",
        "`max_precond_dim=0` leaves every side of a matrix without a preconditioner.",
        "got 0",
        _later(mars_optax.mars_soap, 0.1, precondition_frequency=0),
    ),
    Example(
        BUILT,
        "A choice by name does not exist (`correction`, `first_step`, `second_moment`, "
        "`implementation`, `rescale`, `default`).",
        "The message lists what there is.",
        "got 'aproximate'",
        _later(_mars, 0.1, correction="aproximate"),
    ),
    Example(
        BUILT,
        "A switch is no bool (`amsgrad`, `optimize_1d`, `keep_prev_grad`, `nesterov`).",
        "It decides what is compiled, so it cannot be an array or a tracer: under "
        "`optax.inject_hyperparams` name it in `static_args`.",
        "got 1",
        _later(_mars, 0.1, amsgrad=1),
    ),
    Example(
        BUILT,
        "`newton_schulz_fn` cannot be called.",
        "It maps a stack (batch, in, out) to one of the same shape and dtype.",
        "got 'cubic'",
        _later(_mars_m, 0.1, newton_schulz_fn="cubic"),
    ),
    Example(
        BUILT,
        "What is to be wrapped, run or described is no transformation.",
        "An optimizer is passed, not the function that makes it.",
        "got 3",
        _later(mars_optax.cautious, 3),
    ),
    Example(
        BUILT,
        "An optimizer where directions are wanted (`cautious`, `variance_reduced`).",
        "Its updates have the opposite sign, so that all would be dropped, or climb.",
        "got the optimizer `mars`",
        _later(mars_optax.cautious, _mars(0.1)),
    ),
    Example(
        BUILT,
        "A dtype has no such name.",
        "Anything that `jnp.dtype` accepts.",
        "got 'bfloat61'",
        _later(_mars, 0.1, mu_dtype="bfloat61"),
    ),
    Example(
        BUILT,
        "A dtype is one of integers.",
        "Buffers are floating-point numbers.",
        "got 'int8'",
        _later(_mars, 0.1, prev_grad_dtype="int8"),
    ),
    Example(
        BUILT,
        "A dtype has no 0, with which every buffer begins.",
        "Of 8 bits, `float8_e4m3fn` and `float8_e5m2` will do.",
        "got float8_e8m0fnu",
        _later(_mars, 0.1, prev_grad_dtype=jnp.float8_e8m0fnu),
    ),
    Example(
        BUILT,
        "A moving average is to be kept in 8 bits.",
        "Only the previous gradient can be, which is written anew at every step.",
        "got float8_e4m3fn",
        _later(_mars, 0.1, mu_dtype="float8_e4m3fn"),
    ),
    Example(
        BUILT,
        "The dtype of Newton-Schulz is None.",
        "There is no parameter whose dtype it could take: several share an iteration.",
        "got None",
        _later(_mars_m, 0.1, ns_dtype=None),
    ),
    Example(
        BUILT,
        "`optax.inject_hyperparams` gets the class `AdaptiveGamma` in place of an instance.",
        "It takes whatever can be called for a schedule; an instance cannot.",
        "got Array(0, dtype=int32), as where",
        lambda: optax.inject_hyperparams(_mars)(0.1, gamma=mars_optax.AdaptiveGamma).init(
            _params()
        ),
    ),
    Example(
        BUILT,
        "`ns_coeffs` names no preset.",
        "The message lists the presets.",
        "got 'cubic'",
        _later(_mars_m, 0.1, ns_coeffs="cubic"),
    ),
    Example(
        BUILT,
        "`ns_coeffs` is no triple and no sequence of triples.",
        "A triple (a, b, c) stands for a x + b x^3 + c x^5.",
        "got shape (2,)",
        _later(_mars_m, 0.1, ns_coeffs=(1.0, 2.0)),
    ),
    Example(
        BUILT,
        "There are not as many triples as steps.",
        "Only a preset's last triple serves all further steps.",
        "got 4",
        _later(_mars_m, 0.1, ns_coeffs=[(3.4, -4.8, 2.0)] * 4),
    ),
    Example(
        BUILT,
        "`keep_prev_grad=False` with a setting that needs the previous gradient.",
        "The form without it exists where the correction is linear: "
        "[the formula](maths.md#without-the-previous-gradient).",
        "got False",
        _later(_mars, 0.1, keep_prev_grad=False, second_moment="gradient"),
    ),
    Example(
        BUILT,
        "`keep_prev_grad=False` with a gamma that is an array, or an `AdaptiveGamma`.",
        "The form without the previous gradient needs the next step's gamma in this one.",
        "got False",
        lambda: _mars(0.1, gamma=jnp.asarray(0.1), **_WITHOUT),
    ),
    Example(
        BUILT,
        "An `AdaptiveGamma` with a correction that is neither `approx` nor `exact`.",
        "The gamma of STORM is another quantity, and SVRG and SARAH have none.",
        "got AdaptiveGamma(decay=0.99",
        lambda: _mars(0.1, gamma=mars_optax.AdaptiveGamma(), correction="storm"),
    ),
    Example(
        BUILT,
        "The bounds of an `AdaptiveGamma` are in the wrong order.",
        "Where both are equal gamma is constant.",
        "got 0.5",
        _later(mars_optax.AdaptiveGamma, low=0.5, high=0.1),
    ),
    Example(
        BUILT,
        "`rules` is no list, or a rule no pair of a pattern and dimension numbers.",
        "The first match wins. None, for a leaf that is no matrix, has to be written, too.",
        "got 'kernel'",
        _later(_by_path, ["kernel"]),
    ),
    Example(
        BUILT,
        "A rule's pattern is no regular expression.",
        "Brackets, dots and stars in names have to be escaped.",
        "got 'blocks/['",
        _later(_by_path, [("blocks/[", None)]),
    ),
    Example(
        INIT,
        "A parameter (at `update`: a gradient) is no floating-point array.",
        "Counters, keys and codes are no parameters: keep them apart, by `nnx.split` or "
        "`eqx.partition` for example ([libraries](frameworks.md)).",
        "got dtype int32",
        lambda: _mars(0.1).init({"layer": {"codes": jnp.ones((3, 4), jnp.int32)}}),
    ),
    Example(
        INIT,
        "A parameter (a gradient, a leaf of updates) is no array, but a function, a string or a "
        "tensor of another library.",
        "A model holds more than its parameters ([libraries](frameworks.md)).",
        "got 'gelu'",
        lambda: _mars(0.1).init({"layer": {"kernel": jnp.ones((3, 4)), "activation": "gelu"}}),
    ),
    Example(
        INIT,
        "`weight_dimension_numbers` has another structure than the parameters.",
        f"A prefix of the tree will do: one entry for a whole layer. {_AXES}",
        "got another one: leaf 'layer/bias' has no specification",
        lambda: _init({"layer": {"kernel": MuonDimensionNumbers()}}),
    ),
    Example(
        INIT,
        "A leaf of rank 0 or 1 is declared to be a matrix.",
        "None declares a vector.",
        "got MuonDimensionNumbers",
        lambda: _init({"layer": {"kernel": None, "bias": MuonDimensionNumbers()}}),
    ),
    Example(
        INIT,
        "An axis is both reduction and output axis.",
        _AXES,
        "got MuonDimensionNumbers",
        lambda: _init({"layer": {"kernel": MuonDimensionNumbers(0, 0), "bias": None}}),
    ),
    Example(
        INIT,
        "An axis does not exist, or there is none.",
        _AXES,
        "got 2",
        lambda: _init({"layer": {"kernel": MuonDimensionNumbers(0, 2), "bias": None}}),
    ),
    Example(
        INIT,
        "A direction that orthogonalizes gets a leaf that is no matrix.",
        "`mars_m` and `mars_shampoo` have a rule for vectors, too.",
        "got a leaf that is none",
        lambda: mars_optax.scale_by_mars_m().init(_params()),
    ),
    Example(
        INIT,
        "A rule of `dimension_numbers_by_path` finds no leaf.",
        "A spelling (all paths are listed), or a layer that a filter leaves out: drop its rule.",
        "got 'lm_heed'",
        lambda: _by_path([("lm_heed", None)])(_params()),
    ),
    Example(
        INIT,
        "`ignore_absent_gradients` around `optax.MultiSteps`.",
        "Zeros in one of several gradients are no absence in their mean.",
        "got one inside",
        lambda: mars_optax.ignore_absent_gradients(optax.MultiSteps(_mars(0.1), 2)).init(_params()),
    ),
    Example(
        INIT,
        "The mask of the decay has another tree.",
        "`optax.masked` takes the same masks.",
        "got {'layer': {'kernel': True}} for",
        lambda: _mars(0.1, mask={"layer": {"kernel": True}}).init(_params()),
    ),
    Example(
        INIT,
        "`ignore_absent_gradients` around what keeps no previous gradient.",
        "Around a chain or a partition that has one inside it works.",
        "got one that keeps none",
        lambda: mars_optax.ignore_absent_gradients(_correct(**_EXACT)).init(_params()),
    ),
    Example(
        GRADS,
        "The tree of the gradients (the result of `grad_fn`, `anchor_grad`, updates) has other "
        "leaves.",
        "The message names the first leaf that is missing, or not expected.",
        "got no leaf 'layer/bias'",
        lambda: _update(_mars(0.1), grads={"layer": {"kernel": jnp.ones((3, 4))}}),
    ),
    Example(
        GRADS,
        "A module of Flax NNX and a state of one are mixed.",
        "`nnx.grad` returns a state, which does not fit a module ([libraries](frameworks.md)).",
        "got a `State` for a `Linear`",
        _nnx_state_for_a_module,
    ),
    Example(
        GRADS,
        "A gradient (one that `grad_fn` returns, an `anchor_grad`, updates, a buffer of the state) "
        "has another shape.",
        "The message names the tree and the leaf. What would broadcast is refused, too: it would "
        "change the shape of the state. A mean over the batch is taken before.",
        "got (1,)",
        lambda: _update(_mars(0.1), grads=_with_bias(jnp.ones(1))),
    ),
    Example(
        GRADS,
        "A gradient (one that `grad_fn` returns, an `anchor_grad`) is of integers, or complex "
        "where its parameter is real.",
        "Directions have the dtypes of gradients: of integers they would be rounded to 0.",
        "got dtype int32",
        lambda: _update(_scale(), grads=_with_bias(jnp.ones(4, jnp.int32))),
    ),
    Example(
        GRADS,
        "An optimizer with weight decay is called without the parameters.",
        "Optax's convention: `params` is the third argument.",
        "got None",
        lambda: _mars(0.1).update(_params(), _mars(0.1).init(_params())),
    ),
    Example(
        GRADS,
        'No `grad_fn` is given with `correction="exact"`, STORM, SVRG or SARAH.',
        "It computes gradients of this step's batch at the parameters that it is given: "
        "[estimators](maths.md#estimators).",
        "got None",
        lambda: _update(_mars(0.1, **_EXACT)),
    ),
    Example(
        GRADS,
        'No parameters are given with `correction="exact"`, STORM, SVRG or SARAH.',
        "They become the previous parameters of the next step.",
        "got None",
        lambda: _scale(**_EXACT).update(
            _params(), _scale(**_EXACT).init(_params()), grad_fn=lambda p: p
        ),
    ),
    Example(
        GRADS,
        "`refresh_anchor` is given, and no `anchor_grad`.",
        "Gradients at the present parameters, for example of all data: "
        "[anchors](maths.md#anchors).",
        "got None",
        lambda: _update(_correct(correction="svrg"), grad_fn=lambda p: p, refresh_anchor=True),
    ),
    Example(
        GRADS,
        "`refresh_anchor` is no bool.",
        "One bool says for all leaves whether the anchor of this step is taken: "
        "[anchors](maths.md#anchors).",
        "got None",
        lambda: _update(
            _correct(correction="svrg"),
            grad_fn=lambda p: p,
            anchor_grad=_params(),
            refresh_anchor=None,
        ),
    ),
    Example(
        GRADS,
        "`newton_schulz_fn` returns another shape or dtype.",
        "It works on a stack of matrices and transposes none of them.",
        "got shape (1, 4, 3)",
        lambda: _update(_mars_m(0.1, newton_schulz_fn=lambda x: x.swapaxes(-1, -2))),
    ),
    Example(
        GRADS,
        "`fused_step` is called without the parameters.",
        "It returns the new parameters, and so needs the old ones.",
        "got None",
        lambda: mars_optax.fused_step(_mars(0.1), _params(), _mars(0.1).init(_params()), None),
    ),
    Example(
        STATE,
        "The state is of another kind: another optimizer's, another mode's, or a checkpoint "
        "restored without a template.",
        _BEGIN,
        "got `ScaleByMarsState`",
        lambda: _update(mars_optax.scale_by_mars_lion(), _scale()),
    ),
    Example(
        STATE,
        "The state of a preconditioner is another's: `inner` or `row_b2` was changed.",
        _BEGIN,
        "got 1",
        lambda: _update(mars_optax.mars_m(0.1), mars_optax.mars_m(0.1, row_b2=0.9)),
    ),
    Example(
        STATE,
        "A buffer that the settings need is not there, or one is there that they do not keep: "
        "`keep_prev_grad`, `correction`, `amsgrad`, 8 bits or not were changed.",
        _BEGIN,
        "got None",
        lambda: _update(_scale(max_norm=None, second_moment="gradient"), _scale(**_WITHOUT)),
    ),
    Example(
        MESH,
        "Inside a `shard_map` a leaf may be a part of one, and norms or Newton-Schulz need to know "
        "of which.",
        "[Sharding](sharding.md) has an example.",
        "got None",
        lambda: _in_shard_map(_mars(0.1)),
    ),
    Example(
        MESH,
        "A spec in `param_specs` has more parts than the leaf has axes.",
        "The specs are those of `in_specs` for the parameters.",
        "got PartitionSpec('x', 'y', None)",
        lambda: _in_shard_map(_mars(0.1), param_specs={"kernel": P("x", "y", None)}),
    ),
    Example(
        MESH,
        "Inside a `shard_map`: what works on whole leaves only (a previous gradient of 8 bits, "
        "`cautious`, `correction_clip`).",
        "Outside, on the same mesh, it works.",
        "got 'kernel' with",
        lambda: _in_shard_map(_correct(correction_clip=1.0), param_specs=P("x", "y")),
    ),
    Example(
        MESH,
        'Kernels were asked for by `implementation="pallas"`, and for the device, the version of '
        "JAX or a dtype there are none.",
        "An explicit choice falls back under `jax.vmap` and in derivatives only, which go through "
        "XLA everywhere. [Kernels](kernels.md) lists where there are some.",
        "got 'pallas': a leaf is kept or computed in complex64",
        _kernels_for_complex,
    ),
    Example(
        MESH,
        "The same, found when a program is compiled for a platform.",
        "On this platform pass None or 'xla'.",
        "got 'pallas': there is no kernel for cpu",
        _kernels_on_cpu,
        needs=(0, 10),
    ),
    Example(
        MESH,
        "Kernels were asked for on TPUs, on a mesh with automatic axes.",
        "Nothing tells a kernel there which shard it has.",
        "got 'pallas' on TPUs",
        _kernels_on_tpus,
    ),
    Example(
        MESH,
        "The same for a mesh that has axes of both kinds.",
        "What lies along an automatic axis is not in the type of an array.",
        "got 'pallas' on one with y automatic",
        _kernels_on_both_kinds_of_axes,
    ),
    Example(
        TOOLS,
        "`diagnose` gets gradients of other shapes than the state keeps.",
        "Those of several devices, for example, before their mean is taken.",
        "got (1, 3, 4)",
        lambda: mars_optax.diagnose(
            jax.tree.map(lambda x: x[None], _params()), _mars(0.1).init(_params())
        ),
    ),
    Example(
        TOOLS,
        "`diagnose` gets a number for the gamma of an optimizer that has a rule.",
        "The state does not hold gamma, b1 and the clip.",
        "got 0.025",
        lambda: mars_optax.diagnose(
            _params(), _mars(0.1, gamma=mars_optax.AdaptiveGamma()).init(_params())
        ),
    ),
    Example(
        TOOLS,
        "`orthogonalize` gets an array that is no matrix.",
        _AXES,
        "got x.shape=(2, 3, 4)",
        lambda: mars_optax.orthogonalize(jnp.ones((2, 3, 4))),
    ),
    Example(
        TOOLS,
        "`orthogonalize` gets an array of integers.",
        "The result has the dtype of `x`.",
        "got dtype int32",
        lambda: mars_optax.orthogonalize(jnp.ones((2, 3), jnp.int32)),
    ),
    Example(
        TOOLS,
        "`describe` gets an optimizer in which nothing is of this package.",
        "Wrapped by Optax's functions it may be; its `init` has to be called.",
        "got a `GradientTransformationExtraArgs`",
        lambda: mars_optax.describe(_params(), optax.adamw(0.1)),
    ),
)

_MARK = re.compile(r".*^<!-- Below: made by [^\n]*-->\n", re.MULTILINE | re.DOTALL)


def render() -> str:
    """The page: its text, and the tables."""
    text = _MARK.match(PAGE.read_text())
    assert text is not None, "the page has lost the line that begins its tables"
    parts = [text[0]]
    for section in SECTIONS:
        parts.append(f"### {section}\n")
        parts.append("| message | when it comes | what to do |\n| --- | --- | --- |")
        for example in EXAMPLES:
            if example.section == section:
                kind = next(
                    c for c in type(example.raised).__mro__ if not c.__name__.startswith("_")
                )
                parts.append(
                    f"| **{kind.__name__}** {_cell(example.message)} | {_cell(example.when)} | "
                    f"{_cell(example.remedy)} |"
                )
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    PAGE.write_text(render())
