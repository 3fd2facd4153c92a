r"""Times optimizer steps on the parameters of GPT-2, against what the device can do.

From the root of the repository:

    python -m benchmarks.step_time
    python -m benchmarks.step_time --models=small,medium --layouts=flat --rows='adamw|mars'
    python -m benchmarks.step_time --train_step --batch=480 --microbatch=16
    python -m benchmarks.step_time --plot=benchmarks/results/step_time_cpu.json

There are a table on the screen and a JSON file, `--result`, which is written after every row.
"""

import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from jax.extend import backend as jax_backend

from benchmarks import (
    ceilings,
    command,
    environment,
    floors,
    gpt,
    gpt2_shapes,
    report,
    step_candidates,
    step_loop,
    step_report,
    torch_peers,
    train_step,
)

_LAYOUTS = flags.DEFINE_list(
    "layouts", list(gpt2_shapes.LAYOUTS), "A leaf for each layer, or one for all."
)
_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    ["default"],
    f"Of ours, out of {', '.join(step_candidates.IMPLEMENTATIONS)}.",
)
_PLOT = flags.DEFINE_list("plot", [], "Measure nothing: draw these JSON files, each beside it.")
_TRAIN_STEP = flags.DEFINE_bool(
    "train_step", False, "Time whole training steps of a GPT instead of optimizer steps."
)
_TRAIN_MODEL = flags.DEFINE_enum(
    "train_model",
    None,
    list(gpt.SIZES),
    "Size of that GPT; 'tiny' on a processor, else 'gpt2', which is GPT-2 small.",
)
_BATCH = flags.DEFINE_integer("batch", 16, "Windows of a training step.", lower_bound=1)
_MICROBATCH = flags.DEFINE_integer(
    "microbatch", 16, "Windows of a forward and backward pass.", lower_bound=1
)
_ATTENTION = flags.DEFINE_enum(
    "attention", "auto", ["auto", "xla", "cudnn"], "Implementation; cuDNN on a GPU if it can."
)
_REMAT = flags.DEFINE_bool("remat", False, "Compute activations again in the backward pass.")

flags.adopt_module_key_flags(command)

_TRAINED = "(adamw|mars|mars_m|muon)(/xla|/pallas)?(/fused)?"


def default_inner(parameters: int, backend: str) -> int:
    """Returns how many steps a measurement takes.

    On an accelerator enough that calling them from Python does not count, but few for large models.
    """
    return 10 if backend == "cpu" else min(200, max(20, 25 * 10**9 // parameters))


def _selected(
    pattern: re.Pattern[str], implementations: Sequence[str]
) -> list[step_candidates.Candidate]:
    return [
        one for one in step_candidates.candidates(implementations) if pattern.fullmatch(one.name)
    ]


def _jax_row(
    candidate: step_candidates.Candidate, host: dict[str, Any], steps: int, repeats: int
) -> dict[str, Any]:
    """Measures one of JAX's optimizers."""
    transformation = candidate.build(host["params"])
    params = jax.tree.map(jax.device_put, host["params"])
    state = jax.eval_shape(transformation.init, params)
    numbers = gpt2_shapes.dimension_numbers(host["params"], embeddings=False)
    counted = {
        "floor_bytes": floors.step_bytes(params, state, clipped=candidate.clipped),
        "newton_schulz_flops": (
            floors.newton_schulz_flops(params, numbers) if candidate.orthogonalizes else 0
        ),
    }
    measured = step_loop.measure(
        candidate.step(transformation),
        params,
        transformation.init,
        host["grads"],
        host["prev_grads"],
        steps=steps,
        repeats=repeats,
    )
    return counted | measured


def _torch_row(
    name: str, host: dict[str, Any], backend: str, steps: int, repeats: int
) -> dict[str, Any]:
    """Measures one of PyTorch's optimizers."""
    measured = torch_peers.measure(
        name, host["params"], host["grads"], backend=backend, steps=steps, repeats=repeats
    )
    counted = {
        "floor_bytes": torch_peers.step_bytes(name, host["params"]),
        "newton_schulz_flops": 0,
    }
    return counted | measured


def _torch_names(pattern: re.Pattern[str], backend: str) -> list[str]:
    """Returns PyTorch's optimizers that can be measured, and logs why others cannot."""
    names = []
    for name in filter(pattern.fullmatch, torch_peers.NAMES):
        if reason := torch_peers.absent(name, backend):
            logging.info("%s is left out: %s.", name, reason)
        else:
            names.append(name)
    return names


def rows(
    models: Sequence[str],
    layouts: Sequence[str],
    pattern: re.Pattern[str],
    implementations: Sequence[str],
    *,
    inner: int | None,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Measures optimizer steps, PyTorch's first: then their memory is free again.

    Args:
      models: out of `gpt2_shapes.MODELS`.
      layouts: out of `gpt2_shapes.LAYOUTS`; PyTorch's optimizers are measured in "flat".
      pattern: which optimizers, by name.
      implementations: of ours.
      inner: steps in a measurement, None for :func:`default_inner`.
      repeats: measurements of each row.

    Yields:
      A row after the other, complete but for what `step_report.complete` adds.
    """
    backend = jax.default_backend()
    torch_names = _torch_names(pattern, backend)
    for model, layout in itertools.product(models, layouts):
        shapes = gpt2_shapes.shapes(model, layout)
        parameters = gpt2_shapes.parameters(shapes)
        steps = inner or default_inner(parameters, backend)
        common = {
            "model": model,
            "layout": layout,
            "parameters": parameters,
            "leaves": len(jax.tree.leaves(shapes)),
            "steps": steps,
        }
        scales = {"params": 0.02, "grads": 0.01, "prev_grads": 0.01}
        host = {
            name: gpt2_shapes.normal(shapes, scale, seed)
            for seed, (name, scale) in enumerate(scales.items())
        }
        for name in torch_names if layout == "flat" else ():
            measure = functools.partial(_torch_row, name, host, backend, steps, repeats)
            yield command.guarded({"name": name, **common}, measure)
        # The parameters are put there for each row anew: a row gives its buffers up.
        for name in ("grads", "prev_grads"):
            host[name] = jax.tree.map(jax.device_put, host[name])
        for candidate in _selected(pattern, implementations):
            measure = functools.partial(_jax_row, candidate, host, steps, repeats)
            yield command.guarded({"name": candidate.name, **common}, measure)
            gc.collect()


def _work() -> train_step.Work:
    backend = jax.default_backend()
    size = _TRAIN_MODEL.value or ("tiny" if backend == "cpu" else "gpt2")
    width, layers, heads = gpt.SIZES[size]
    tiny = size == "tiny"
    attention = train_step.attention_implementation(_ATTENTION.value, backend)
    # The vocabulary is padded to a multiple of 128, as training scripts of GPT-2 do.
    config = gpt.GPTConfig(
        vocabulary_size=512 if tiny else 50304,
        context=64 if tiny else 1024,
        width=width,
        layers=layers,
        heads=heads,
        biases=True,
        tied=True,
        dtype="bfloat16",
        attention=attention,  # type: ignore[arg-type]
        remat=_REMAT.value,
    )
    return train_step.Work(config, _BATCH.value, _MICROBATCH.value)


def _draw(paths: Sequence[str]) -> None:
    for path in map(pathlib.Path, paths):
        try:
            step_report.plot(json.loads(path.read_text()), path.with_suffix(".png"))
        except ValueError as error:
            raise ValueError(
                f"Expected results of step_time as --plot, got {str(path)!r}: {error}"
            ) from error
        print(f"Written: {path.with_suffix('.png')}.")


def main(argv: Sequence[str]) -> None:
    """Reads the flags, measures, writes and prints the result."""
    try:
        if len(argv) > 1:
            raise ValueError(f"Expected flags only, got {list(argv[1:])}. Write --name=value.")
        if _PLOT.value:
            _draw(_PLOT.value)
            return
        if torch_peers.installed():
            # Before the first use of the device: by default JAX takes most of its memory.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        default = "tiny" if jax.default_backend() == "cpu" else "small"
        models = command.subset(
            "models", command.MODELS.value or [default], list(gpt2_shapes.MODELS)
        )
        layouts = command.subset("layouts", _LAYOUTS.value, gpt2_shapes.LAYOUTS)
        implementations = command.subset(
            "implementations", _IMPLEMENTATIONS.value, step_candidates.IMPLEMENTATIONS
        )
        pattern = command.pattern(command.ROWS.value or (_TRAINED if _TRAIN_STEP.value else ".*"))
        work = _work() if _TRAIN_STEP.value else None
        names = [one.name for one in _selected(pattern, implementations)]
        if not names and not any(map(pattern.fullmatch, torch_peers.NAMES)):
            raise ValueError(f"Expected --rows to match an optimizer, got {pattern.pattern!r}.")
    except (OSError, ValueError) as error:
        sys.exit(f"step_time: {error}")

    tree: dict[str, Any] = {
        "environment": {
            **environment.describe(command.COMMIT.value),
            "backend": jax_backend.get_backend().platform_version,
            **torch_peers.versions(),
        },
        "settings": {
            "models": models,
            "layouts": layouts,
            "rows": pattern.pattern,
            "implementations": implementations,
            "repeats": command.REPEATS.value,
            "train_step": None if work is None else dataclasses.asdict(work),
        },
        "ceilings": ceilings.measure(),
        "rows": [],
        "training": [],
    }
    kind = "step_time" if work is None else "train_step"
    path = command.result_path(kind, tree["environment"]["device"])
    path.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        report.write_json(report.jsonable(tree), path)

    write()
    if work is not None:
        measured = train_step.measure(
            _selected(pattern, implementations),
            work,
            steps=command.INNER.value or 4,
            repeats=command.REPEATS.value,
        )
        tree["training"] = step_report.complete_training(measured, tree["ceilings"])
        write()
    else:
        measured = []
        for row in rows(
            models,
            layouts,
            pattern,
            implementations,
            inner=command.INNER.value,
            repeats=command.REPEATS.value,
        ):
            logging.info(
                "%s, %s, %s: %s", row["model"], row["layout"], row["name"], row.get("ms", "failed")
            )
            measured.append(row)
            tree["rows"] = step_report.complete(measured, tree["ceilings"])
            write()
    about = tree["environment"]
    print("environment: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"\n{step_report.text(tree)}\n\nWritten: {path}.")


if __name__ == "__main__":
    app.run(main)
