"""Executes the notebooks of this folder and stores their outputs."""

import argparse
import ast
import hashlib
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = pathlib.Path(__file__).parent
EXECUTED = "executed_code_sha256"

# What the tests run instead, in seconds: expressions for variables that a notebook sets.
TOY = {
    "choosing_a_variant": {
        "STEPS": "2",
        "RATES": "[1e-3, 1e-2]",
        "GAMMAS": "[0.0, 0.1]",
        "SEEDS": "2",
        "CONTEXT": "8",
        "BATCH": "2",
        "WIDTH": "8",
        "VALIDATION_WINDOWS": "16",
        "CANDIDATES": "{name: CANDIDATES[name] for name in ('AdamW', 'MARS-M')}",
    },
    "cifar10_resnet": {"EPOCHS": "1", "WIDTHS": "(4, 8)", "RATES": "[8e-3]", "SEEDS": "1"},
    "exact_against_approx": {
        "PATH_STEPS": "20",
        "GAMMAS": "3",
        "STEPS": "4",
        "RATES": "[1e-2]",
        "SEEDS": "1",
        "JOBS": "{'exact': JOBS['exact']}",
    },
    "first_training_run": {
        "STEPS": "4",
        "RATES": "[1.6e-2]",
        "MOST_RATES": "1",
        "SEEDS": "[1]",
        "CONTEXT": "8",
        "BATCH": "2",
        "WIDTH": "16",
        "HEADS": "2",
        "LAYERS": "1",
        "VALIDATION_WINDOWS": "8",
    },
    "kernels_and_time": {
        "LAYERS": "2",
        "SHORT": "16",
        "LONG": "32",
        "LEAVES": "[1, 4]",
        "MEASURE": "True",
    },
    "sharded_training": {"STEPS": "1", "BATCH": "16", "LAYERS": "2"},
}

# What differs between two machines or two runs of the same notebook is not stored.
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> list[pathlib.Path]:
    """Returns the notebooks in the order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: pathlib.Path, *, toy: bool, timeout: float = 3600) -> NotebookNode:
    """Runs a notebook from its first cell to its last in a process of its own.

    Args:
      path: the notebook; it is not written to.
      toy: whether to run it at the small sizes that `TOY` has for the tests.
      timeout: seconds that one cell may take.

    Returns:
      The notebook with the outputs of this run, cleaned, and a mark of the code that made them.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
      ValueError: a cell wrote to stderr, for example a warning, or `TOY` has a variable that the
        notebook does not set.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    env = {
        **os.environ,
        "PYTHONPATH": _with_root(os.environ.get("PYTHONPATH")),
        # Progress bars are for readers who wait. Nor do they need the widgets here.
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    if toy:
        make_small(notebook, TOY.get(path.stem, {}))
        # Compiling is nearly all that a toy run does.
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # An empty folder: what a notebook needs, it has to bring.
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            # Its warning that the local connection is not encrypted is none of the notebook's.
            extra_arguments=["--log-level=ERROR"],
        )
        client.execute(env=env)
    for output in outputs(notebook):
        if output.get("name") == "stderr":
            raise ValueError(
                f"{path.name}: expected nothing on stderr, got {output['text']!r}. Correct what "
                "the cell does, or silence what is harmless."
            )
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    notebook = clean(notebook)
    notebook.metadata[EXECUTED] = code_hash(notebook)
    return notebook


def make_small(notebook: NotebookNode, values: dict[str, str]) -> None:
    """Gives variables other values, at the end of each cell that sets them."""
    missing = set(values)
    for cell in code_cells(notebook)[1:]:  # the first one installs
        assigned = {
            node.id
            for statement in ast.parse(cell.source).body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            for node in ast.walk(target)
            if isinstance(node, ast.Name)
        }
        cell.source += "".join(f"\n{k} = {v}" for k, v in values.items() if k in assigned)
        missing -= assigned
    if missing:
        raise ValueError(f"expected cells that set {sorted(missing)}: correct `TOY`.")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Returns the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_hash(notebook: NotebookNode) -> str:
    """Returns a hash of the code, which shows whether outputs are older than it.

    The first cell, which installs the package, makes none.
    """
    code = [cell.source for cell in code_cells(notebook)[1:]]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def _with_root(path: str | None) -> str:
    """Puts this checkout first, so that its package is what the notebooks import."""
    return os.pathsep.join([str(FOLDER.parent), *filter(None, [path])])


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    """Returns all outputs of all cells."""
    return [output for cell in code_cells(notebook) for output in cell.get("outputs", [])]


def clean(notebook: NotebookNode) -> NotebookNode:
    """Strips what is not the notebook's: times, versions of the kernel, the editor's marks."""
    kept = {key: notebook.metadata[key] for key in (EXECUTED,) if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict({**_METADATA, **kept})
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
    for output in outputs(notebook):
        if "metadata" in output:
            output.metadata = NotebookNode()
    return notebook


def main(arguments: list[str] | None = None) -> None:
    """Executes the notebooks that the command line names, by default all of them."""
    parser = argparse.ArgumentParser(prog="python -m colabs.execute", description=__doc__)
    names: Any = [path.stem for path in notebooks()]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--toy", action="store_true", help="run small, store nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names):
        parser.error(f"expected names out of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    for name in options.names or names:
        path = FOLDER / f"{name}.ipynb"
        began = time.perf_counter()
        notebook = execute(path, toy=options.toy)
        if not options.toy:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
