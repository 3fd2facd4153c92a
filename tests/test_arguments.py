"""Docstrings: they describe every argument, and in the sources no description stands twice."""

import inspect
import re
import subprocess
import sys

import pytest
from absl.testing import absltest, parameterized

import mars_optax
from mars_optax._src import arguments, named

_FUNCTIONS = [name for name in mars_optax.__all__ if inspect.isfunction(getattr(mars_optax, name))]
_SHARED = arguments.parse(arguments._SHARED)


def _entries(doc: str, section: str) -> dict[str, str]:
    """The entries of a section, each on one line."""
    found = arguments.entries(arguments.parse(doc).get(section, ""))
    return {name: " ".join(text.split()) for name, text in found.items()}


class PublicDocstringsTest(parameterized.TestCase):
    @parameterized.parameters(*_FUNCTIONS)
    def test_each_parameter_has_one_entry_in_order(self, name: str):
        function = getattr(mars_optax, name)
        # Sections are found by their headings here, not by the code under test.
        section = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(function), re.M | re.S)[1]
        found = re.findall(r"^  \**(\w+): \S", section, re.M)
        self.assertEqual(found, list(inspect.signature(function).parameters))
        self.assertNotRegex(section, r": \.\.\.|^ *$")

    @parameterized.parameters(*_FUNCTIONS)
    def test_no_entry_of_the_sources_repeats_the_shared_one(self, name: str):
        source = inspect.unwrap(getattr(mars_optax, name)).__doc__
        for section in ("Args", "Raises"):
            shared = _entries(arguments._SHARED, section)
            for entry, text in _entries(source, section).items():
                if text.startswith("..."):
                    self.assertIn(entry, shared)
                    self.assertNotEmpty(text.removeprefix("...").strip())
                elif entry in shared:
                    self.assertFalse(text.startswith(shared[entry]), entry)

    @parameterized.parameters(*_FUNCTIONS)
    def test_what_the_source_says_is_kept(self, name: str):
        source = inspect.unwrap(getattr(mars_optax, name)).__doc__
        sections = arguments.parse(inspect.getdoc(getattr(mars_optax, name)))
        for section, text in arguments.parse(source).items():
            if section in ("Args", "Raises"):
                for own in arguments.entries(text).values():
                    self.assertIn(own.removeprefix("...").strip(), sections[section])
            else:
                self.assertEqual(sections[section].strip(), text.strip())
        order = re.findall(
            r"^(Args|Returns|Raises|Examples):$", inspect.getdoc(getattr(mars_optax, name)), re.M
        )
        self.assertEqual(order, ["Args", "Returns", "Raises", "Examples"])

    @parameterized.parameters(
        ("scale_by_mars", "b1", "in [0, 1)"),
        ("scale_by_mars", "b2", "in [0, 1)"),
        ("scale_by_mars", "eps", ">= 0"),
        ("scale_by_mars", "eps_root", ">= 0"),
        ("scale_by_mars", "gamma", "may be negative"),
        ("scale_by_mars", "max_norm", "Bound > 0"),
        ("scale_by_mars", "correction", '``"exact"``'),
        ("scale_by_mars", "first_step", '``"no_correction"``'),
        ("scale_by_mars", "weight_dimension_numbers", "None: each leaf is clipped as a whole."),
        ("mars_lion", "learning_rate", "starts at 0. Every entry moves by it"),
        ("mars_m", "weight_dimension_numbers", "makes. None: leaves of exactly rank 2."),
        ("mars_shampoo", "ns_steps", "an integer >= 0"),
        ("storm_adamw", "gamma", "usually in (0, 1]"),
    )
    def test_ranges_and_what_is_particular_are_named(self, name: str, argument: str, text: str):
        doc = inspect.getdoc(getattr(mars_optax, name))
        self.assertIn(text, _entries(doc, "Args")[argument])

    def test_errors_of_kernels_are_those_of_functions_that_can_run_them(self):
        for name in ("scale_by_mars", "mars_m", "storm_adamw", "correct_gradients"):
            function = getattr(mars_optax, name)
            errors = ["TypeError", "ValueError"]
            if "implementation" in inspect.signature(function).parameters:
                errors.append("NotImplementedError")
            self.assertEqual(list(_entries(inspect.getdoc(function), "Raises")), errors)


class CompletionTest(absltest.TestCase):
    def test_an_argument_without_a_description_is_an_error(self):
        def tx(b1, unheard_of):
            """A function."""

        with self.assertRaisesRegex(KeyError, "unheard_of"):
            named.named(tx)

    def test_an_entry_is_shared_or_its_own_or_both(self):
        def tx(b1, b2, mine):  # noqa: D417
            """A function.

            Args:
              mine: An argument
                of its own.
              b2: ... More of it.

            Returns:
              Nothing.
            """

        section = arguments.parse(named.named(tx).__doc__)["Args"]
        shared = _entries(arguments._SHARED, "Args")
        self.assertEqual(
            " ".join(section.split()),
            f"b1: {shared['b1']} b2: {shared['b2']} More of it. mine: An argument of its own.",
        )
        self.assertEqual(tx.__doc__.count("\n"), 9)

    def test_a_function_whose_docstring_was_stripped_stays_without(self):
        def tx(unheard_of):
            return unheard_of

        self.assertIsNone(named.named(tx).__doc__)

    @pytest.mark.slow  # JAX is compiled anew for this level of optimization
    def test_the_package_imports_without_docstrings(self):
        program = "import mars_optax; print(mars_optax.mars.__doc__, mars_optax.mars(0.5))"
        output = subprocess.check_output([sys.executable, "-OO", "-c", program], text=True)
        self.assertEqual(output.strip(), "None mars(learning_rate=0.5)")


if __name__ == "__main__":
    absltest.main()
