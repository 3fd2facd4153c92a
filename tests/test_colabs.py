"""The notebooks: complete as they are stored, free of what is a machine's own, and they run."""

import ast
import base64
import io
import json
import pathlib
import re
import tarfile
import tempfile

import nbformat
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from IPython.core.inputtransformer2 import TransformerManager

from colabs import execute

_RESULTS = execute.FOLDER.parent / "benchmarks" / "results"
_NOTEBOOKS = execute.notebooks()
_NAMES = [path.stem for path in _NOTEBOOKS]
_CASES = [(f"_{name}", name) for name in _NAMES]
# The one that compiles least.
_QUICKEST = "kernels_and_time"
_MACHINE = re.compile(r"/(home|root|tmp|usr|opt|mnt|work|Users|var)/|[A-Z]:\\\\|site-packages")


def _read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(execute.FOLDER / f"{name}.ipynb", as_version=4)


def _images(notebook: nbformat.NotebookNode) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in execute.outputs(notebook)]
    return [base64.b64decode(image) for image in found if image is not None]


def _python(source: str) -> str:
    """The source without what only IPython understands."""
    return TransformerManager().transform_cell(source)


class _NotebookTest(parameterized.TestCase):
    def _folder(self) -> pathlib.Path:
        return pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))


class StoredTest(_NotebookTest):
    def test_the_table_lists_every_notebook(self):
        listed = re.findall(r"\]\((\w+)\.ipynb\)", (execute.FOLDER / "README.md").read_text())
        self.assertCountEqual(listed, _NAMES)

    @parameterized.named_parameters(*_CASES)
    def test_it_is_valid_and_as_the_executor_leaves_it(self, name: str):
        notebook = _read(name)
        nbformat.validate(notebook)
        self.assertEqual(execute.clean(_read(name)), notebook)
        self.assertStartsWith(notebook.cells[0].source, "# ")
        ids = [cell["id"] for cell in notebook.cells]
        self.assertLen(set(ids), len(ids))

    @parameterized.named_parameters(*_CASES)
    def test_its_outputs_are_those_of_one_run_of_its_code_without_error(self, name: str):
        notebook = _read(name)
        self.assertEqual(
            notebook.metadata.get(execute.EXECUTED),
            execute.code_hash(notebook),
            f"the code is newer than its outputs: python -m colabs.execute {name}",
        )
        counts = [cell.execution_count for cell in execute.code_cells(notebook)]
        self.assertEqual(counts, list(range(1, len(counts) + 1)))
        outputs = execute.outputs(notebook)
        self.assertTrue(any(output.output_type == "stream" for output in outputs))
        for output in outputs:
            self.assertIn(output.output_type, ("stream", "display_data", "execute_result"))
            self.assertNotEqual(output.get("name"), "stderr")
        self.assertNotEmpty(_images(notebook))
        for image in _images(notebook):
            self.assertStartsWith(image, b"\x89PNG")

    @parameterized.named_parameters(*_CASES)
    def test_it_is_small_and_has_nothing_of_the_machine(self, name: str):
        path = execute.FOLDER / f"{name}.ipynb"
        self.assertLess(path.stat().st_size, 400_000)  # with the result twice
        notebook = _read(name)
        for output in execute.outputs(notebook):
            text = output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
            self.assertNotRegex(text, _MACHINE)
            self.assertNotRegex(text, r"object at 0x|Warning")
        for cell in notebook.cells:
            self.assertNotRegex(cell.source, _MACHINE)

    @parameterized.named_parameters(*_CASES)
    def test_its_result_is_a_large_plot_at_the_top(self, name: str):
        notebook = _read(name)
        # The title, the installation, what the plot shows, and the plot.
        (first, *_) = _images(nbformat.v4.new_notebook(cells=notebook.cells[:4]))
        width, height = (int.from_bytes(first[n : n + 4]) for n in (16, 20))
        self.assertGreaterEqual(width, 800)
        self.assertGreaterEqual(height, 450)

    @parameterized.named_parameters(*_CASES)
    def test_readers_wait_with_a_progress_bar_and_see_no_sizes_of_the_tests(self, name: str):
        code = "\n".join(cell.source for cell in execute.code_cells(_read(name))[1:])
        self.assertIn("from tqdm.auto import tqdm", code)
        self.assertIn("tqdm(", code)
        self.assertNotIn("TOY", code)

    @parameterized.named_parameters(*_CASES)
    def test_it_imports_only_what_its_readers_have(self, name: str):
        cells = execute.code_cells(_read(name))
        for cell in cells:
            for node in ast.walk(ast.parse(_python(cell.source))):
                modules = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                for module in modules:
                    self.assertNotIn(module.split(".")[0], ("benchmarks", "colabs", "tests"))
                    self.assertNotIn("._src", module)

    def test_small_sizes_are_set_after_the_notebooks_own(self):
        sources = ["%pip install x", "A, B = 1, 2\nC = A", "D = [B]"]
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        notebook = nbformat.v4.new_notebook(cells=cells)
        execute.make_small(notebook, {"B": "5", "D": "D * 2"})
        expected = ["%pip install x", "A, B = 1, 2\nC = A\nB = 5", "D = [B]\nD = D * 2"]
        self.assertEqual([cell.source for cell in notebook.cells], expected)
        with self.assertRaisesRegex(ValueError, "'E'"):
            execute.make_small(notebook, {"A": "0", "E": "0"})

    def test_recorded_times_are_those_of_the_benchmark(self):
        (cell,) = (
            c for c in execute.code_cells(_read("kernels_and_time")) if "RECORDED = {" in c.source
        )
        (recorded,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(cell.source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECORDED"
        )
        for title, layout in zip(recorded, ("flat", "stacked"), strict=True):
            path = _RESULTS / f"step_time_small_{layout}_h200.json"
            rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
            for name, numbers in recorded[title].items():
                key = name.lower().replace("-", "_").replace(", fused_step", "/fused")
                row = rows[key]
                self.assertStartsWith(title, str(row["leaves"]))
                found = (round(row["ms"], 3), round(row["floor_ms"], 3), row["kernels"])
                self.assertEqual(numbers, found, name)

    def test_cifar10_is_read_from_its_binary_records(self):
        (cell,) = (
            c for c in execute.code_cells(_read("cifar10_resnet")) if "def read_cifar10" in c.source
        )
        names: dict = {"np": np, "pathlib": pathlib, "tarfile": tarfile}
        exec(compile(cell.source, "cifar10_resnet", "exec"), names)
        images = np.random.default_rng(0).integers(256, size=(3, 32, 32, 3), dtype=np.uint8)
        path = self._folder() / "cifar.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for n, file in enumerate(["test_batch.bin", "data_batch_1.bin", "data_batch_2.bin"]):
                record = bytes([n]) + images[n].transpose(2, 0, 1).tobytes()
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{file}")
                info.size = len(record)
                archive.addfile(info, io.BytesIO(record))
        (train_images, train_labels), (test_images, test_labels) = names["read_cifar10"](path)
        np.testing.assert_array_equal(np.round(train_images * 255), images[1:])
        np.testing.assert_array_equal(np.round(test_images * 255), images[:1])
        self.assertEqual((train_labels.tolist(), test_labels.tolist()), ([1, 2], [0]))


class ExecutedTest(_NotebookTest):
    def _check_runs(self, name: str):
        ran, stored = execute.execute(execute.FOLDER / f"{name}.ipynb", toy=True), _read(name)
        self.assertEqual(len(_images(ran)), len(_images(stored)))
        self.assertEqual([c.source for c in ran.cells], [c.source for c in stored.cells])

    def test_the_quickest_notebook_runs(self):
        self._check_runs(_QUICKEST)

    @parameterized.named_parameters(*(case for case in _CASES if case[1] != _QUICKEST))
    @pytest.mark.slow
    def test_a_notebook_runs(self, name: str):
        self._check_runs(name)

    @pytest.mark.slow
    def test_a_warning_in_a_cell_is_an_error(self):
        cell = nbformat.v4.new_code_cell("import warnings\nwarnings.warn('careful')")
        path = self._folder() / "warns.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        with self.assertRaisesRegex(ValueError, "careful"):
            execute.execute(path, toy=True)


if __name__ == "__main__":
    absltest.main()
