"""Bandwidth and operations per second, from times that are given."""

from unittest import mock

from absl.testing import absltest

from benchmarks.steps import timing


class CeilingsTest(absltest.TestCase):
    def seconds(self, *seconds: float) -> None:
        times = mock.Mock(side_effect=[1000 * one for one in seconds])
        self.enterContext(mock.patch.object(timing, "milliseconds", times))

    def test_a_pass_reads_and_writes_all_bytes_and_the_fastest_counts(self):
        self.seconds(3.0, 2.0, 4.0, 1e9, 1e9, 1e9)
        bandwidth = timing.copy_bandwidth(1024, steps=5, repeats=3)
        self.assertEqual(bandwidth, 2 * 1024 * 5 / 2.0)

    def test_eight_copies_count_where_they_are_faster(self):
        self.seconds(1e9, 1e9, 4.0, 2.0)
        self.assertEqual(timing.copy_bandwidth(1024, steps=5, repeats=2), 2 * 1024 * 8 / 2.0)

    def test_products_are_of_a_multiplication_and_an_addition_each(self):
        self.seconds(3.0, 2.0)
        self.assertEqual(timing.matmul_flops(16, steps=5, repeats=2), 2 * 16**3 * 5 / 2.0)


if __name__ == "__main__":
    absltest.main()
