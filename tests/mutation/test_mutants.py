"""The mutants fit the package as it stands; which test notices them is for `run` to say."""

import collections
import pathlib

from absl.testing import absltest

from tests.mutation import mutants, run

_ROOT = pathlib.Path(__file__).parents[2]


class MutantsTest(absltest.TestCase):
    def test_every_old_text_stands_in_its_file_once(self):
        for mutant in mutants.MUTANTS:
            with self.subTest(mutant.name):
                compile(run.mutated(mutant), mutant.file, "exec")

    def test_no_name_and_no_change_is_there_twice(self):
        names = collections.Counter(m.name for m in mutants.MUTANTS)
        self.assertEqual(set(names.values()), {1})
        texts = collections.Counter((m.file, m.old, m.new) for m in mutants.MUTANTS)
        self.assertEqual(set(texts.values()), {1})

    def test_the_listed_tests_are_there(self):
        for test in {test for m in mutants.MUTANTS for test in m.tests}:
            path, *names = test.split("::")
            text = (_ROOT / path).read_text()
            for name in names:
                # A number that a parameterized test ends with, and the name of its case.
                stem = name.rstrip("0123456789")
                while stem and f" {stem}(" not in text:
                    stem = stem.rpartition("_")[0]
                self.assertTrue(stem, test)

    def test_the_page_is_of_these_mutants(self):
        page = (_ROOT / "docs" / "mutation.md").read_text()
        rows = [line for line in page.splitlines() if line.startswith("| ")]
        for mutant in mutants.MUTANTS:
            self.assertTrue(
                any(row.startswith(f"| {mutant.change} |") for row in rows), mutant.name
            )


if __name__ == "__main__":
    absltest.main()
