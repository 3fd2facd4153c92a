"""The registry is complete: nothing public that is an optimizer escapes the contract tests."""

import inspect

import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry

_PUBLIC = tuple(name for name in vars(mars_optax) if not name.startswith("_"))


def _returns_a_transformation(value: object) -> bool:
    if not inspect.isfunction(value):
        return False
    return "GradientTransformation" in str(inspect.signature(value).return_annotation)


class EnrolmentTest(parameterized.TestCase):
    def test_every_public_transformation_is_enrolled(self):
        public = {name for name in _PUBLIC if _returns_a_transformation(getattr(mars_optax, name))}
        self.assertContainsSubset({"mars", "scale_by_mars", "correct_gradients"}, public)
        enrolled = {entry.factory.__name__ for entry in registry.ENTRIES if entry.core}
        self.assertSetEqual(public, enrolled)

    def test_entries_have_names_of_their_own(self):
        names = [entry.name for entry in registry.ENTRIES]
        self.assertLen(set(names), len(names))

    @parameterized.named_parameters(*registry.select(where=lambda entry: bool(entry.skips)))
    def test_what_is_skipped_is_a_contract_and_has_a_reason(self, entry: registry.Entry):
        self.assertContainsSubset(entry.skips, registry.CONTRACTS)
        self.assertTrue(all(entry.skips.values()))

    def test_every_public_name_exists_and_is_documented(self):
        for name in _PUBLIC:
            value = getattr(mars_optax, name)
            if callable(value):
                self.assertTrue(inspect.getdoc(value), name)

    @parameterized.named_parameters(*registry.select())
    def test_what_is_returned_takes_extra_arguments(self, entry: registry.Entry):
        self.assertIsInstance(entry.make(), optax.GradientTransformationExtraArgs)


if __name__ == "__main__":
    absltest.main()
