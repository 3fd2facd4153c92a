"""What every command writes: tables, files of JSON, and what a result was measured with."""

import importlib.metadata
import json
import math
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import mars_optax


def _commit() -> str:
    """Returns the commit of the checkout, marked where the working tree differs from it."""
    root = pathlib.Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


def devices() -> str:
    """Returns how many devices of which kind there are, in words."""
    kind, count = jax.devices()[0].device_kind.replace("cpu", "CPU"), jax.device_count()
    return f"one {kind} device" if count == 1 else f"{count} {kind} devices"


def environment(commit: str | None = None) -> dict[str, str | int]:
    """Returns the device, the versions of the software, and the commit.

    Args:
      commit: what to record as the commit, where the code lies outside of its checkout; None asks
        git.
    """
    devices = jax.devices()
    packages = ("jax", "jaxlib", "optax", "flax", "numpy")
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "mars_optax": mars_optax.__version__,
        "commit": commit or _commit(),
    }


# Of these numbers keep all digits in JSON: a run is found again by them.
_EXACT = ("settings", "every_setting", "learning_rate")


def jsonable(value: Any, *, exact: bool = False) -> Any:
    """Replaces what JSON lacks, and shortens numbers.

    Args:
      value: a tree of mappings and lists.
      exact: whether numbers keep all their digits, not 6; settings and learning rates always do.

    Returns:
      The tree, with null for a number that is not finite.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if exact else float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: jsonable(inner, exact=exact or key in _EXACT) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner, exact=exact) for inner in value]
    return value


def make_folder(out: str) -> pathlib.Path:
    """Makes the folder of the results, or raises a `ValueError` that names the flag `--out`."""
    folder = pathlib.Path(out)
    try:
        if not out:
            raise ValueError("no name")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"Expected a folder that can be made as --out, got {error}.") from error
    return folder


def write_json(tree: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a tree as JSON, with a list of numbers on one line."""
    indented = json.dumps(tree, indent=1, allow_nan=False)
    compact = re.sub(
        r'\[[^\[\]{}"]*\]', lambda numbers: " ".join(numbers.group().split()), indented
    )
    path.write_text(compact + "\n")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lays out rows of cells as a table, the first row as its header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def cell(row: Mapping[str, Any], key: str, form: str, factor: float = 1) -> str:
    """Formats a multiple of a figure of a row; "-" where it was not measured."""
    value = row.get(key)
    return "-" if value is None else format(factor * value, form)


def section(
    title: str,
    header: Sequence[str],
    cells: Callable[[dict[str, Any]], Sequence[str]],
    rows: Sequence[dict[str, Any]],
) -> str:
    """Formats rows as a table below a title, and says below it why some have no figures."""
    good = [row for row in rows if "error" not in row]
    table = [aligned([header, *map(cells, good)])] if good else []
    failed = [f"{row['name']}: no figures. {row['error']}" for row in rows if "error" in row]
    return "\n".join([title, *table, *failed])
