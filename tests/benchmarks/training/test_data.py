"""Reading text and tokens, splitting them, and cutting batches."""

import hashlib
import lzma
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from benchmarks.training import data


class DataTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def write(self, name: str, content: bytes) -> pathlib.Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def write_tokens(self, name: str, tokens: list[int]) -> pathlib.Path:
        return self.write(name, np.asarray(tokens, "<u2").tobytes())


class StandardLibraryTest(DataTest):
    def setUp(self):
        super().setUp()
        self.names = [f"module_{index}.py" for index in range(64)]
        for name in self.names:
            self.write(f"lib/{name}", f"<{name}>".encode())
        self.root = self.folder / "lib"

    def test_every_file_is_in_exactly_one_part(self):
        corpus = data.load_standard_library(self.root)
        train, validation = corpus.train.tobytes(), corpus.validation.tobytes()
        for name in self.names:
            mark = f"<{name}>".encode()
            held_out = data.is_held_out(name)
            self.assertEqual(train.count(mark), not held_out)
            self.assertEqual(validation.count(mark), held_out)
        self.assertBetween(sum(map(data.is_held_out, self.names)), 1, 16)

    def test_another_file_moves_no_file_to_the_other_part(self):
        before = data.load_standard_library(self.root)
        self.write("lib/package/added.py", b"<added>")
        after = data.load_standard_library(self.root)
        self.assertFalse(data.is_held_out("package/added.py"))
        self.assertEqual(before.validation.tobytes(), after.validation.tobytes())
        self.assertNotEqual(before.description["sha256"], after.description["sha256"])

    def test_the_same_files_give_the_same_corpus(self):
        one, two = (data.load_standard_library(self.root) for _ in range(2))
        np.testing.assert_array_equal(one.train, two.train)
        self.assertEqual(one.description, two.description)

    @parameterized.parameters(
        "test/a.py", "json/tests/b.py", "encodings/c.py", "site-packages/d.py"
    )
    def test_folders_that_differ_between_builds_are_left_out(self, name: str):
        before = data.load_standard_library(self.root).description
        self.write(f"lib/{name}", b"left out")
        self.assertEqual(data.load_standard_library(self.root).description, before)

    def test_a_module_named_like_a_left_out_folder_is_read(self):
        before = data.load_standard_library(self.root).description["files"]
        self.write("lib/test.py", b"kept")
        self.assertEqual(data.load_standard_library(self.root).description["files"], before + 1)

    def test_the_running_interpreter_has_megabytes_of_source(self):
        corpus = data.load_standard_library()
        self.assertEqual(corpus.vocabulary_size, 256)
        self.assertGreater(len(corpus.train), 3_000_000)
        self.assertBetween(len(corpus.validation) / len(corpus.train), 0.02, 0.15)

    def test_a_folder_without_source_is_an_error(self):
        with self.assertRaisesRegex(ValueError, r"got 0 files.*--data_file"):
            data.load_standard_library(self.folder / "nothing")


class FilesTest(DataTest):
    def test_a_token_file_is_read_as_little_endian_16_bit_integers(self):
        path = self.write("train.bin", bytes([1, 0, 0, 1, 255, 255]))
        self.assertEqual(data.read_tokens(path).tolist(), [1, 256, 65535])

    def test_any_other_file_is_read_as_bytes(self):
        path = self.write("book.txt", "né".encode())
        corpus = data.load_files(path, path)
        self.assertEqual(corpus.train.tolist(), [110, 195, 169])
        self.assertEqual(corpus.vocabulary_size, 256)

    def test_the_vocabulary_of_a_token_file_is_found_in_both_parts(self):
        train, validation = self.write_tokens("a.bin", [1, 2]), self.write_tokens("b.bin", [7])
        self.assertEqual(data.load_files(train, validation).vocabulary_size, 8)
        self.assertEqual(data.load_files(train, validation, 50257).vocabulary_size, 50257)

    def test_without_a_validation_file_the_end_is_held_out(self):
        corpus = data.load_files(self.write_tokens("train.bin", list(range(100))))
        self.assertEqual(corpus.train.tolist(), list(range(95)))
        self.assertEqual(corpus.validation.tolist(), list(range(95, 100)))

    def test_what_is_held_out_has_a_hash_of_its_own(self):
        train, validation = self.write("a.txt", b"x" * 99 + b"y"), self.write("b.txt", b"z")
        whole, apart = data.load_files(train, held_out=0.01), data.load_files(train, validation)
        for corpus, held_out in ((whole, b"y"), (apart, b"z")):
            expected = hashlib.sha256(held_out).hexdigest()
            self.assertEqual(corpus.description["validation_sha256"], expected)
        self.assertEqual(whole.description["sha256"], apart.description["sha256"])

    def test_compressed_token_files_are_read_and_several_are_joined(self):
        packed = self.write("a.bin.xz", lzma.compress(np.asarray([1, 2, 300], "<u2").tobytes()))
        plain = self.write_tokens("b.bin", [4])
        corpus = data.load_files([packed, plain], packed)
        self.assertEqual(corpus.train.tolist(), [1, 2, 300, 4])
        self.assertEqual(corpus.validation.tolist(), [1, 2, 300])
        self.assertEqual(corpus.description["source"], "a.bin.xz, b.bin, as tokens")
        with self.assertRaisesRegex(ValueError, "got both kinds"):
            data.load_files([packed, self.write("c.txt", b"abcd")])
        with self.assertRaisesRegex(ValueError, "with 3 bytes"):
            data.load_files(self.write("d.bin.xz", lzma.compress(b"abc")))

    def test_a_missing_file_is_an_error(self):
        with self.assertRaisesRegex(FileNotFoundError, r"nowhere.txt.*not there.*--data_file"):
            data.load_files(self.folder / "nowhere.txt")

    def test_a_missing_validation_file_is_an_error(self):
        path = self.write("train.txt", b"abc")
        with self.assertRaisesRegex(FileNotFoundError, "nowhere.txt"):
            data.load_files(path, self.folder / "nowhere.txt")

    def test_a_folder_is_an_error(self):
        with self.assertRaisesRegex(FileNotFoundError, "is a folder"):
            data.load_files(self.folder)

    def test_an_empty_file_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "empty"):
            data.load_files(self.write("train.txt", b""))

    def test_half_a_token_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "with 3 bytes"):
            data.load_files(self.write("train.bin", b"abc"))

    def test_an_id_outside_the_vocabulary_is_an_error(self):
        path = self.write_tokens("train.bin", [0, 100, *[0] * 50])
        with self.assertRaisesRegex(ValueError, r"vocabulary_size=100, got 100"):
            data.load_files(path, vocabulary_size=100)

    def test_text_beside_tokens_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "two text files or two token files"):
            data.load_files(self.write("a.txt", b"abcd"), self.write("b.bin", b"abcd"))

    @parameterized.parameters((33, 9, ""), (32, 9, "33 training tokens"), (33, 8, "9 validation"))
    def test_less_than_one_batch_is_an_error(self, train: int, validation: int, message: str):
        corpus = data.load_files(
            self.write("a.txt", b"x" * train), self.write("b.txt", b"x" * validation)
        )
        if not message:
            data.require_enough(corpus, context=8, batch_size=4)
            return
        with self.assertRaisesRegex(ValueError, f"{message}.*--batch_size or --context"):
            data.require_enough(corpus, context=8, batch_size=4)


class WindowsTest(absltest.TestCase):
    def test_the_seed_decides_where_batches_begin(self):
        def draw(seed: int) -> np.ndarray:
            return data.training_starts(seed, steps=5, batch_size=3, context=8, length=1000)

        np.testing.assert_array_equal(draw(1), draw(1))
        self.assertTrue(np.any(draw(1) != draw(2)))
        self.assertEqual(draw(1).shape, (5, 3))

    def test_training_windows_reach_the_last_token_and_no_further(self):
        starts = data.training_starts(0, steps=200, batch_size=4, context=8, length=12)
        self.assertEqual((starts.min(), starts.max()), (0, 3))
        tokens = np.arange(12, dtype=np.uint8)
        self.assertEqual(data.windows_at(tokens, starts, 8).max(), 11)

    def test_a_window_holds_one_token_more_than_the_context(self):
        windows = data.windows_at(np.arange(10, dtype=np.uint16), np.asarray([[2], [5]]), 3)
        self.assertEqual(windows.tolist(), [[[2, 3, 4, 5]], [[5, 6, 7, 8]]])

    def test_validation_windows_are_spread_without_predicting_a_token_twice(self):
        tokens = np.arange(101, dtype=np.uint16)
        windows = data.validation_windows(tokens, context=10, count=4)
        self.assertEqual(windows.shape, (4, 11))
        targets = windows[:, 1:].ravel()
        self.assertLen(set(targets.tolist()), 40)
        self.assertEqual((windows.min(), windows.max()), (0, 100))

    def test_a_short_validation_text_gives_fewer_windows(self):
        windows = data.validation_windows(np.arange(36, dtype=np.uint8), context=10, count=100)
        self.assertEqual(windows.shape, (3, 11))
        self.assertLen(set(windows[:, 1:].ravel().tolist()), 30)


if __name__ == "__main__":
    absltest.main()
