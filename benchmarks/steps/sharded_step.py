r"""Times optimizer steps on parameters that are sharded over several devices.

From the root of the repository:

    python -m benchmarks.steps.sharded_step
    python -m benchmarks.steps.sharded_step --host_devices=8
    python -m benchmarks.steps.sharded_step --devices=1,2 --shardings=flat/fsdp \
        --optimizers='mars_m*'

There are a table on the screen and, in the folder `--out`, `results.json`, which is written after
every row.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import logging
from jax.extend import backend as jax_backend
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import command, gpt2_shapes, output
from benchmarks.steps import step_candidates, step_loop, timing
from tests.support import collectives

AXIS = "devices"
# The leaves, as in `gpt2_shapes.LAYOUTS`, and how they are sharded.
LAYOUTS = (
    "flat/replicated",
    "flat/fsdp",
    "stacked/replicated",
    "stacked/fsdp",
    "stacked/layers",
)

_spec: Any = PartitionSpec  # untyped in JAX
_THRESHOLD = "mars_optax._src.reshard.SHORTEST_TO_DIVIDE"


def parser() -> command.Flags:
    """Returns the flags."""
    parser = command.Flags("steps.sharded_step", __doc__)
    timing.add_flags(parser)
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--host_devices", type=command.positive, help="run on so many devices of the processor"
    )
    group.add_argument(
        "--devices",
        type=command.listed,
        help="numbers of devices, of each the first ones; by default all that there are",
    )
    group.add_argument(
        "--shardings",
        type=command.subset(LAYOUTS),
        default="flat/replicated,flat/fsdp,stacked/layers",
        help=f"some of {','.join(LAYOUTS)}",
    )
    group.add_argument(
        "--loop_if",
        type=command.seconds,
        default=5.0,
        help="time steps in a compiled loop, too, where the step compiled in so many seconds",
    )
    group.add_argument("--limit", type=command.seconds, help="begin no row after so many seconds")
    return parser


def make_mesh(devices: int) -> Mesh:
    """Makes a mesh of the first of the devices, whose axis is left to the compiler."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


def fsdp_spec(shape: Sequence[int], devices: int) -> PartitionSpec:
    """Returns the spec of an array that is cut along its largest axis.

    Args:
      shape: of the array.
      devices: number of pieces.

    Returns:
      A spec with the largest axis that is a multiple of `devices`, the first of equally large ones.
      An array without such an axis stays whole.
    """
    divisible = [axis for axis, size in enumerate(shape) if size and size % devices == 0]
    if not divisible:
        spec: PartitionSpec = _spec()
        return spec
    largest = max(divisible, key=lambda axis: shape[axis])
    spec = _spec(*(AXIS if axis == largest else None for axis in range(len(shape))))
    return spec


def _layers_spec(path: Any, shape: Sequence[int], devices: int) -> PartitionSpec:
    if getattr(path[0], "key", None) != "blocks":
        return fsdp_spec(shape, devices)
    if shape[0] % devices:
        raise ValueError(
            f"Expected a multiple of {devices} layers, to give each device as many, got "
            f"{shape[0]}. Take a number of --devices that divides it."
        )
    spec: PartitionSpec = _spec(AXIS)
    return spec


def of_params(params: Any, sharding: str, mesh: Mesh) -> Any:
    """Chooses the shardings of the parameters.

    Args:
      params: tree of :func:`gpt2_shapes.shapes`, concrete or abstract.
      sharding: "replicated"; "fsdp", see :func:`fsdp_spec`; or "layers", the leaves of all layers
        along their first axis, and the others as in "fsdp".
      mesh: of one axis, `AXIS`.

    Returns:
      A tree of shardings.

    Raises:
      ValueError: If the layers do not come out even.
    """
    devices = mesh.shape[AXIS]
    specs: dict[str, Callable[[Any, Sequence[int]], PartitionSpec]] = {
        "replicated": lambda path, shape: _spec(),
        "fsdp": lambda path, shape: fsdp_spec(shape, devices),
        "layers": lambda path, shape: _layers_spec(path, shape, devices),
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, specs[sharding](path, leaf.shape)), params
    )


def of_state(state: Any, params: Any, where: Any, mesh: Mesh) -> Any:
    """Chooses the shardings of an optimizer's state: each buffer lies as its parameter.

    Args:
      state: the state, concrete or abstract, in whatever wrappers.
      params: the parameters that it was made for, likewise.
      where: the parameters' shardings.
      mesh: their mesh.

    Returns:
      A tree of shardings: those of leaves whose path ends with a parameter's and which have its
      shape are the parameter's; the others are replicated.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    by_path = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(where), strict=True)
    }
    lengths = {len(path) for path in by_path}

    def of_leaf(path: Any, leaf: Any) -> NamedSharding:
        for length in lengths:
            shape, sharding = by_path.get(path[len(path) - length :], (None, None))
            if sharding is not None and shape == leaf.shape:
                found: NamedSharding = sharding
                return found
        return NamedSharding(mesh, _spec())

    return jax.tree_util.tree_map_with_path(of_leaf, state)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An optimizer and how its matrices are shared out.

    Attributes:
      name: what the report calls it.
      candidate: the optimizer.
      redundant: whether every device works on all matrices that are not already spread, instead
        of on its part.
    """

    name: str
    candidate: step_candidates.Candidate
    redundant: bool = False

    def sharing(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which the step has to be traced and compiled."""
        # Out of reach for the short side of any matrix.
        return mock.patch(_THRESHOLD, 1 << 30) if self.redundant else contextlib.nullcontext()


def entries() -> list[Entry]:
    """Lists what is timed."""
    named = {one.name: one for one in step_candidates.candidates()}
    listed = [
        Entry("mars_m", named["mars_m"]),
        Entry("mars_m_redundant", named["mars_m"], redundant=True),
    ]
    others = ("mars_shampoo", "mars", "mars_no_clip", "adamw", "muon")
    return listed + [Entry(name, named[name]) for name in others]


def default_inner(parameters: int, backend: str) -> int:
    """Returns how many steps a measurement takes: fewer for large models."""
    return 3 if backend == "cpu" else min(20, max(5, 4 * 10**9 // parameters))


def _compiled(
    fn: Callable[..., Any], pinned: tuple[Any, Any], *args: Any
) -> tuple[jax.stages.Compiled, float, float]:
    """Compiles a step or a loop; returns the seconds of tracing with lowering, and of compiling."""
    began = time.perf_counter()
    lowered = jax.jit(fn, donate_argnums=(0, 1), out_shardings=pinned).lower(*args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, traced - began, time.perf_counter() - traced


def _found(compiled: jax.stages.Compiled) -> list[collectives.Total]:
    text = compiled.as_text()
    assert text is not None
    return collectives.totals(collectives.collectives(text))


def measure(
    entry: Entry,
    host: dict[str, Any],
    layout: str,
    devices: int,
    *,
    steps: int,
    repeats: int,
    loop_if: float,
) -> dict[str, Any]:
    """Times an optimizer's step on a mesh of automatic axes.

    Parameters and state are donated, and pinned to where they were. The gradients of all steps are
    the same, sharded as the parameters, and so are the previous gradients, see
    :func:`step_loop.build_loop`.

    Args:
      entry: the optimizer.
      host: "params", "grads" and "prev_grads", as NumPy arrays.
      layout: out of `LAYOUTS`.
      devices: how many.
      steps: number of steps before the devices are waited for.
      repeats: number of times that is timed.
      loop_if: seconds that compiling the step may take for the loop to be timed, too.

    Returns:
      The figures.
    """
    mesh = make_mesh(devices)
    where = of_params(host["params"], layout.partition("/")[2], mesh)
    params, grads, prev_grads = (
        jax.device_put(host[name], where) for name in ("params", "grads", "prev_grads")
    )
    transformation = entry.candidate.build(host["params"])
    step = entry.candidate.step(transformation)
    abstract = jax.eval_shape(transformation.init, params)
    state_where = of_state(abstract, params, where, mesh)
    state = jax.jit(transformation.init, out_shardings=state_where)(params)
    carry = step_loop.Carry.of(abstract, params)
    pinned = (where, carry.carried(state_where))
    values = [params, carry.carried(state)]
    outside = carry.outside(prev_grads)
    # The state's own previous gradients are not used: their memory is free.
    del params, state

    with entry.sharing():
        one, trace_seconds, compile_seconds = _compiled(
            step_loop.build_step(step, carry), pinned, *values, grads, outside
        )

    def run_steps() -> list[Any]:
        for _ in range(steps):
            values[:] = one(*values, grads, outside)
        return values

    timing.wait(run_steps())
    found = _found(one)
    memory = one.memory_analysis()
    figures: dict[str, Any] = {
        "trace_seconds": trace_seconds,
        "compile_seconds": compile_seconds,
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        "collectives": [dataclasses.asdict(one) for one in found],
        "collective_bytes": sum(one.bytes for one in found),
        "collective_in_loop": any(one.in_loop for one in found),
        **timing.summary([timing.milliseconds(run_steps) / steps for _ in range(repeats)]),
    }
    if compile_seconds <= loop_if:
        with entry.sharing():
            loop, _, loop_seconds = _compiled(
                step_loop.build_loop(step, carry, steps), pinned, *values, grads, outside
            )

        def run_loop() -> list[Any]:
            values[:] = loop(*values, grads, outside)
            return values

        timing.wait(run_loop())
        times = timing.summary([timing.milliseconds(run_loop) / steps for _ in range(repeats)])
        figures |= {f"loop_{name}": value for name, value in times.items()} | {
            "loop_compile_seconds": loop_seconds,
            # Less than that of a step, where the compiler took one out of the loop.
            "loop_collective_bytes": sum(one.bytes for one in _found(loop)) / steps,
        }
    step_loop.require_finite(values[0])
    return figures


def _layouts(devices: int, wanted: Sequence[str]) -> list[str]:
    """Returns the layouts for a number of devices: one device has all shardings alike."""
    if devices > 1:
        return list(wanted)
    return list(dict.fromkeys(f"{layout.partition('/')[0]}/replicated" for layout in wanted))


def rows(
    models: Sequence[str],
    layouts: Sequence[str],
    devices: Sequence[int],
    names: Sequence[str],
    *,
    inner: int | None,
    repeats: int,
    loop_if: float,
    limit: float | None,
) -> Iterator[dict[str, Any]]:
    """Measures optimizer steps on several numbers of devices.

    Args:
      models: out of `gpt2_shapes.MODELS`.
      layouts: out of `LAYOUTS`; on one device what is sharded there is whole.
      devices: numbers of devices.
      names: of the optimizers.
      inner: steps in a measurement, None for :func:`default_inner`.
      repeats: measurements of each row.
      loop_if: see :func:`measure`.
      limit: seconds after which no row begins any more; those are there with the reason.

    Yields:
      A row after the other, complete but for what :func:`complete` adds.
    """
    began = time.monotonic()
    chosen = [one for one in entries() if one.name in names]

    @functools.lru_cache(maxsize=1)
    def trees(model: str, leaves: str) -> dict[str, Any]:
        return gpt2_shapes.operands(gpt2_shapes.shapes(model, leaves))

    def figures(entry: Entry, model: str, layout: str, count: int, steps: int) -> dict[str, Any]:
        if limit is not None and time.monotonic() - began > limit:
            raise TimeoutError(f"left out, as --limit={limit:g} seconds were over.")
        host = trees(model, layout.partition("/")[0])
        return measure(entry, host, layout, count, steps=steps, repeats=repeats, loop_if=loop_if)

    for model, count in itertools.product(models, devices):
        for layout, entry in itertools.product(_layouts(count, layouts), chosen):
            # On one device there is nothing to share out.
            if entry.redundant and count == 1:
                continue
            shapes = gpt2_shapes.shapes(model, layout.partition("/")[0])
            parameters = gpt2_shapes.parameters(shapes)
            steps = inner or default_inner(parameters, jax.default_backend())
            row = {
                "name": entry.name,
                "model": model,
                "layout": layout,
                "devices": count,
                "parameters": parameters,
                "leaves": len(jax.tree.leaves(shapes)),
                "steps": steps,
            }
            if entry.redundant:
                row["patched"] = f"{_THRESHOLD} = {1 << 30}"
            yield command.guarded(
                row, functools.partial(figures, entry, model, layout, count, steps)
            )
            gc.collect()


def _group(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["layout"], row["devices"]


def complete(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the ratios to AdamW's step, where that was measured on the same devices alike."""
    good = [row for row in measured if "error" not in row]
    adamw = {_group(row): row for row in good if row["name"] == "adamw"}
    completed = []
    for row in measured:
        new = dict(row)
        baseline = adamw.get(_group(row), {})
        for ratio, key in (("over_adamw", "ms"), ("loop_over_adamw", "loop_ms")):
            if key in row and key in baseline:
                new[ratio] = row[key] / baseline[key]
        completed.append(new)
    return completed


_HEADER = [
    "optimizer",
    "ms",
    "range",
    "x adamw",
    "loop ms",
    "x adamw",
    "trace s",
    "compile s",
    "temp MB",
    "moved MB",
    "in loop",
    "collectives",
]


def _cells(row: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{one['count']} {one['kind']}" for one in row["collectives"])
    return [
        row["name"],
        output.cell(row, "ms", ".3f"),
        f"{row['ms_min']:.3f}..{row['ms_max']:.3f}",
        output.cell(row, "over_adamw", ".2f"),
        output.cell(row, "loop_ms", ".3f"),
        output.cell(row, "loop_over_adamw", ".2f"),
        output.cell(row, "trace_seconds", ".1f"),
        output.cell(row, "compile_seconds", ".1f"),
        output.cell(row, "temporary_bytes", ".1f", 1e-6),
        output.cell(row, "collective_bytes", ".3f", 1e-6),
        "yes" if row["collective_in_loop"] else "no",
        kinds or "none",
    ]


def text(measured: Sequence[dict[str, Any]]) -> str:
    """Formats rows as tables, one for each model, layout and number of devices."""
    parts = []
    for (model, layout, devices), group in itertools.groupby(measured, _group):
        first, *_ = members = list(group)
        title = (
            f"{model}, {layout}, {devices} device{'s' * (devices > 1)}: "
            f"{first['parameters']:,} parameters in {first['leaves']} leaves"
        )
        lines = [output.section(title, _HEADER, _cells, members)]
        lines += [f"{row['name']}: with {row['patched']}" for row in members if "patched" in row]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _numbers(given: Sequence[str] | None) -> list[int]:
    there = jax.device_count()
    if given is None:
        return [there]
    if not given or not all(one.isdecimal() and 1 <= int(one) <= there for one in given):
        raise ValueError(
            f"Expected --devices from 1 to the {there} that there are, got {list(given)}. On a "
            "processor --host_devices makes more."
        )
    return [int(one) for one in given]


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, measures, writes and prints the result."""
    flags = parser()
    args = flags.parse_args(argv)
    if args.host_devices is not None:
        jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call, unused-ignore]
        jax.config.update("jax_num_cpu_devices", args.host_devices)  # type: ignore[no-untyped-call, unused-ignore]
    try:
        models = args.model or ["tiny" if jax.default_backend() == "cpu" else "small"]
        devices = _numbers(args.devices)
        names = command.matching(args.optimizers or ["*"], [one.name for one in entries()])
        out = output.make_folder(args.out)
    except ValueError as error:
        flags.fail(error)

    tree: dict[str, Any] = {
        "environment": {
            **output.environment(args.commit),
            "backend": jax_backend.get_backend().platform_version,
        },
        "settings": {
            "models": models,
            "shardings": args.shardings,
            "devices": devices,
            "optimizers": names,
            "repeats": args.repeats,
            "loop_if": args.loop_if,
            "limit": args.limit,
        },
        "rows": [],
    }
    path = out / "results.json"
    command.announce(
        "sharded_step",
        f"optimizer steps of {', '.join(names)}; "
        f"numbers of devices: {', '.join(map(str, devices))}",
        f"{output.devices()}, GPT-2 {', '.join(models)}, random numbers",
        path,
    )
    measured = []
    for row in rows(
        models,
        args.shardings,
        devices,
        names,
        inner=args.steps,
        repeats=args.repeats,
        loop_if=args.loop_if,
        limit=args.limit,
    ):
        logging.info(
            "%s, %s, devices: %d, %s: %s", *_group(row), row["name"], row.get("ms", "failed")
        )
        measured.append(row)
        tree["rows"] = complete(measured)
        output.write_json(output.jsonable(tree), path)
    return command.conclude(tree, text(tree["rows"]), path)


if __name__ == "__main__":
    command.run("sharded_step", main, rows=True)
