"""Turns the times of steps into a table and a plot."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks import report

Row = dict[str, Any]

BASELINES = {"over_adamw": "adamw", "over_torch": "torch_adamw_fused"}
_TORCH_LAYOUT = "flat"


def complete(rows: Sequence[Row], ceilings: Mapping[str, Any]) -> list[Row]:
    """Adds to rows what needs the ceilings or another row.

    Args:
      rows: the rows of one run; those with an "error" stay as they are.
      ceilings: what :func:`benchmarks.ceilings.measure` returned.

    Returns:
      New rows: with "floor_ms" and "share_of_floor", with "matmul_ms" and "share_of_matmul" for
      those with Newton-Schulz, and with the ratios to `BASELINES`, where these were measured for
      the same model. Those to Optax's AdamW are to the one of the same layout; PyTorch's has only
      one layout.
    """
    measured = {
        (row["name"], row["model"], row["layout"]): row["ms"] for row in rows if "error" not in row
    }
    completed = []
    for row in rows:
        if "error" in row:
            completed.append(dict(row))
            continue
        floor_ms = 1000 * row["floor_bytes"] / ceilings["copy_bytes_per_second"]
        new = {**row, "floor_ms": floor_ms, "share_of_floor": floor_ms / row["ms"]}
        if row["newton_schulz_flops"]:
            flops = row["newton_schulz_flops"]
            matmul_ms = 1000 * flops / ceilings["bfloat16_matmul_flop_per_second"]
            new |= {"matmul_ms": matmul_ms, "share_of_matmul": matmul_ms / row["ms"]}
        for ratio, name in BASELINES.items():
            layout = _TORCH_LAYOUT if name.startswith("torch") else row["layout"]
            if baseline := measured.get((name, row["model"], layout)):
                new[ratio] = row["ms"] / baseline
        completed.append(new)
    return completed


def complete_training(rows: Sequence[Row], ceilings: Mapping[str, Any]) -> list[Row]:
    """Adds to rows of training steps what needs the ceilings or another row.

    Args:
      rows: what :func:`benchmarks.train_step.measure` returned.
      ceilings: what :func:`benchmarks.ceilings.measure` returned.

    Returns:
      New rows, with "share_of_matmul" and, where "sgd" and "adamw" were measured, the percent that
      a step takes longer than theirs.
    """
    measured = {row["name"]: row["ms"] for row in rows if "error" not in row}
    completed = []
    for row in rows:
        new = dict(row)
        if "error" not in row:
            peak = ceilings["bfloat16_matmul_flop_per_second"]
            new["share_of_matmul"] = row["model_flop_per_second"] / peak
            for name in ("sgd", "adamw"):
                if name in measured:
                    new[f"percent_over_{name}"] = 100 * (row["ms"] / measured[name] - 1)
        completed.append(new)
    return completed


def _format(row: Row, key: str, form: str, factor: float = 1.0) -> str:
    value = row.get(key)
    return "-" if value is None else format(factor * value, form)


_HEADER = [
    "optimizer",
    "ms",
    "range",
    "floor B",
    "of floor",
    "of matmul",
    "x adamw",
    "x torch",
    "trace s",
    "compile s",
    "temp MB",
    "kernels",
    "copied B",
    "hoisted",
]


def _cells(row: Row) -> list[str]:
    per_parameter = 1 / row["parameters"]
    return [
        row["name"],
        _format(row, "ms", ".3f"),
        f"{row['ms_min']:.3f}..{row['ms_max']:.3f}",
        _format(row, "floor_bytes", ".1f", per_parameter),
        _format(row, "share_of_floor", ".2f"),
        _format(row, "share_of_matmul", ".2f"),
        _format(row, "over_adamw", ".2f"),
        _format(row, "over_torch", ".2f"),
        _format(row, "trace_seconds", ".1f"),
        _format(row, "compile_seconds", ".1f"),
        _format(row, "temporary_bytes", ".0f", 1e-6),
        _format(row, "kernels", "d", 1),
        _format(row, "copied_bytes", ".1f", per_parameter),
        _format(row, "hoisted_arrays", "d", 1),
    ]


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups rows by model and layout, in order of appearance."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["model"], row["layout"]), []).append(row)
    return grouped


def _failures(rows: Sequence[Row]) -> list[str]:
    return [f"{row['name']}: no figures. {row['error']}" for row in rows if "error" in row]


def text(tree: Mapping[str, Any]) -> str:
    """Formats a result as tables, with what was not measured and why below them.

    Args:
      tree: what `step_time` writes as JSON.
    """
    ceilings = tree["ceilings"]
    parts = [
        f"Copy {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, bfloat16 products "
        f"{ceilings['bfloat16_matmul_flop_per_second'] / 1e12:.2f} TFLOP/s, both measured here."
    ]
    for (model, layout), rows in groups(tree["rows"]).items():
        first = rows[0]
        good = [row for row in rows if "error" not in row]
        table = report.aligned([_HEADER, *map(_cells, good)]) if good else ""
        title = f"{model}, {layout}: {first['parameters']:,} parameters in {first['leaves']} leaves"
        parts.append("\n".join(filter(None, [title, table, *_failures(rows)])))
    if tree["training"]:
        header = ["training step", "ms", "range", "% over sgd", "% over adamw", "of matmul"]
        good = [row for row in tree["training"] if "error" not in row]
        cells = [
            [
                row["name"],
                _format(row, "ms", ".2f"),
                f"{row['ms_min']:.2f}..{row['ms_max']:.2f}",
                _format(row, "percent_over_sgd", "+.2f"),
                _format(row, "percent_over_adamw", "+.2f"),
                _format(row, "share_of_matmul", ".2f"),
            ]
            for row in good
        ]
        first = tree["training"][0]
        title = f"{first['parameters']:,} parameters, {first['tokens']:,} tokens a step"
        parts.append(
            "\n".join([title, report.aligned([header, *cells]), *_failures(tree["training"])])
        )
    return "\n\n".join(parts)


def plot(tree: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws what share of its time each step needs at least, one panel for model and layout.

    Args:
      tree: what `step_time` writes as JSON.
      path: the PNG file to write.

    Raises:
      ValueError: If there is nothing to draw, or it is no result of `step_time`.
    """
    rows = tree.get("rows") if isinstance(tree, Mapping) else None
    if not isinstance(rows, list):
        raise ValueError("Expected a tree with a list `rows`, got none.")
    measured = [row for row in rows if "error" not in row]
    if not measured:
        raise ValueError("Expected rows with figures to draw, got none. Measure some first.")
    if not all("share_of_floor" in row for row in measured):
        raise ValueError("Expected rows with `share_of_floor`, got others: not of step_time.")
    drawn = groups(measured)
    heights = [1.0 + 0.28 * len(rows) for rows in drawn.values()]
    figure, axes = plt.subplots(
        nrows=len(drawn),
        figsize=(7.5, sum(heights)),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for ax, ((model, layout), rows) in zip(axes[:, 0], drawn.items(), strict=True):
        names = [row["name"] for row in rows]
        moved = [row["share_of_floor"] for row in rows]
        multiplied = [row.get("share_of_matmul", 0.0) for row in rows]
        ends = [sum(shares) for shares in zip(moved, multiplied, strict=True)]
        ax.barh(names, moved, label="bytes at the bandwidth of a copy")
        ax.barh(names, multiplied, left=moved, label="Newton-Schulz at the rate of products")
        for name, row, end in zip(names, rows, ends, strict=True):
            ax.annotate(f" {row['ms']:.3g} ms", (end, name), va="center", fontsize=8)
        ax.invert_yaxis()
        ax.set_title(f"GPT-2 {model}, {layout}", fontsize=10)
        ax.grid(alpha=0.3, axis="x")
        ax.axvline(1.0, color="black", linewidth=0.8)
        # Room for the milliseconds behind the bars.
        ax.set_xlim(0, 1.15 * max(1.0, *ends))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    environment = tree["environment"]
    axes[-1, 0].set_xlabel(
        f"share of a step's time, {environment['device']}, JAX {environment['jax']}"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
