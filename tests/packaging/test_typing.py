"""What mypy tells users: nothing where they are right, and every mistake that types can show."""

import pathlib
import re
import runpy
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest

import mars_optax
from tests.support import pages

_HERE = pathlib.Path(__file__).parent
_GOOD, _BAD = _HERE / "consumer_good.py", _HERE / "consumer_bad.py"


def _expected(path: pathlib.Path) -> set[tuple[str, int, str]]:
    """File, line and code of each error that a file is marked to have."""
    return {
        (path.name, number, code)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (mark := re.search(r"  # E: ([a-z,-]+)$", line))
        for code in mark.group(1).split(",")
    }


class TypingTest(absltest.TestCase):
    def test_every_public_name_has_a_right_and_a_wrong_use(self):
        public = {name for name in vars(mars_optax) if not name.startswith("_")}
        self.assertIn("mars_shampoo", public)
        for name in public:
            self.assertRegex(_GOOD.read_text(), rf"\bmars_optax\.{name}\b")
        functions = {name for name in public if name.islower()}
        for name in functions:
            self.assertRegex(_BAD.read_text(), rf"\bmars_optax\.{name}\(.*  # E: ")

    @pytest.mark.slow
    def test_mypy_finds_the_marked_mistakes_and_no_other(self):
        with tempfile.TemporaryDirectory() as scratch:
            # The example of a new variant is checked as if it were a file of the package.
            example = pathlib.Path(scratch, "example_variant.py")
            example.write_text(pages.example_text())
            result = subprocess.run(
                [
                    *(sys.executable, "-m", "mypy", "--config-file", _HERE / "mypy.ini"),
                    *("--cache-dir", scratch, "--no-error-summary", _GOOD, _BAD, example),
                ],
                capture_output=True,
                text=True,
                cwd=_HERE.parent.parent,
            )
        self.assertEmpty(result.stderr)
        found = re.findall(r"^(\S+?):(\d+): error: .*\[([a-z-]+)\]$", result.stdout, re.MULTILINE)
        errors = {(pathlib.Path(path).name, int(line), code) for path, line, code in found}
        self.assertSetEqual(errors, _expected(_BAD), result.stdout)

    @pytest.mark.slow
    def test_what_is_right_for_mypy_runs(self):
        names = runpy.run_path(str(_GOOD))
        self.assertIn("matrix", names["table"])
        self.assertGreater(names["number_of_bytes"], 0)


if __name__ == "__main__":
    absltest.main()
