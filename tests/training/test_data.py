"""Data sets: the same items in every process, splits that do not meet, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from models.data import Digits, Synthetic, Text


def items(data: Dataset[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [data[i] for i in range(len(data))]  # type: ignore[arg-type]


# ---- digits ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_digits_are_those_of_scikit_learn() -> None:
    """At their own size and before normalisation, every picture of the two splits is one of scikit-learn's, once."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    for split, chosen in (("train", [i for i in range(1797) if i % 5]), ("test", list(range(0, 1797, 5)))):
        data = Digits(size=8, channels=1, split=split)
        pictures = torch.stack([x for x, _ in items(data)]).flatten(1)
        expected = torch.from_numpy(bundle.data[chosen]).float()
        scale = (pictures.max() - pictures.min()) / 16
        torch.testing.assert_close((pictures - pictures.min()) / scale, expected, atol=1e-3, rtol=0)
        assert [int(y) for _, y in items(data)] == bundle.target[chosen].tolist()


def test_digits_have_the_asked_shape_and_are_normalised() -> None:
    data = Digits(size=20, channels=3)
    assert (len(data), len(Digits(size=20, split="test"))) == (1437, 360)
    x, y = data[7]
    assert (x.shape, x.dtype, y.dtype) == ((3, 20, 20), torch.float32, torch.int64)
    assert torch.equal(x[0], x[2])
    every = torch.stack([x for x, _ in items(data)])
    assert float(every.mean()) == pytest.approx(0, abs=1e-4)
    assert float(every.std()) == pytest.approx(1, abs=1e-3)


def test_digits_collate() -> None:
    x, y = next(iter(DataLoader(Digits(size=12), batch_size=5)))
    assert (x.shape, y.shape) == ((5, 3, 12, 12), (5,))


# ---- text --------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=40, max_size=200), st.integers(1, 6))
def test_text_predicts_the_next_byte_and_its_splits_do_not_meet(data: bytes, context: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "book.txt")
        path.write_bytes(data)
        train, test = (Text(str(path), context, split, held_out=0.25) for split in ("train", "test"))
    border = len(data) - len(data) // 4
    for part, split in ((train, data[:border]), (test, data[border:])):
        assert len(part) == (len(split) - 1) // context
        inputs = [int(token) for x, _ in items(part) for token in x]
        targets = [int(token) for _, y in items(part) for token in y]
        assert bytes(inputs) == split[: len(inputs)]
        assert bytes(targets) == split[1 : len(targets) + 1]
        with pytest.raises(IndexError):
            part[len(part)]


def test_text_joins_a_folder_in_the_order_of_paths_and_leaves_hidden_files_out(tmp_path: Path) -> None:
    for name, content in {"b.txt": "BBBB", "a/z.txt": "AZAZ", ".git/x": "hidden", "a/.y": "hidden"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    data = Text(str(tmp_path), context=1, held_out=0.3)
    assert bytes(int(x) for x, _ in items(data)) == b"AZAZB"
    assert bytes(int(x) for x, _ in items(Text(str(tmp_path), 1, max_bytes=5, held_out=0.3))) == b"AZA"


def test_text_path_is_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("x" * 100)
    monkeypatch.chdir(tmp_path)
    assert len(Text("mine.txt", context=10)) == 8


def test_text_is_the_standard_library_by_default() -> None:
    import abc

    data = Text(context=64, max_bytes=100_000)
    text = bytes(int(token) for x, _ in items(data) for token in x)
    assert text.startswith(Path(str(abc.__file__)).parent.joinpath("__future__.py").read_bytes()[:1000])
    assert len(data) == (90_000 - 1) // 64
    x, y = data[3]
    assert (x.dtype, y.dtype, x.shape) == (torch.int64, torch.int64, (64,))
    assert torch.equal(x[1:], y[:-1])


def test_text_says_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.path=no/such: there is no such file or folder \(looked for /"):
        Text("no/such")
    with pytest.raises(ValueError, match="the folder holds no files"):
        Text(str(tmp_path))
    (tmp_path / "short.txt").write_text("x" * 500)
    with pytest.raises(ValueError, match="the test split has 50 bytes, a sample takes 129; give more text"):
        Text(str(tmp_path), split="test")
    with pytest.raises(ValueError, match=r"the train split has 9 bytes, a sample takes 129.*data.max_bytes"):
        Text(str(tmp_path), max_bytes=10)


# ---- synthetic ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 9))
def test_synthetic_follows_from_its_arguments(samples: int, shape: list[int], classes: int, seed: int) -> None:
    one = Synthetic(samples, shape, classes, seed=seed)
    longer = Synthetic(samples + 5, shape, classes, seed=seed)
    assert len(one) == samples
    for (x, y), (x2, y2) in zip(items(one), items(longer)[:samples], strict=True):
        assert torch.equal(x, x2)
        assert y == y2
        assert x.shape == tuple(shape)
        assert y.dtype == torch.int64
        assert 0 <= int(y) < classes


def test_synthetic_splits_and_seeds_differ() -> None:
    base, test, other = Synthetic(20), Synthetic(20, split="test"), Synthetic(20, seed=1)
    assert not any(torch.equal(x, z) for x, _ in items(base) for z, _ in items(test))
    assert not any(torch.equal(x, z) for x, _ in items(base) for z, _ in items(other))


def test_synthetic_is_learnable_beyond_its_training_samples() -> None:
    """The nearest class mean of the training split classifies the held-out split."""
    train, test = items(Synthetic(300)), items(Synthetic(100, split="test"))
    means = torch.stack([torch.stack([x for x, y in train if int(y) == k]).mean(0) for k in range(10)])
    right = [int((means - x).pow(2).sum(1).argmin()) == int(y) for x, y in test]
    assert sum(right) > 90


def test_synthetic_regression() -> None:
    data = Synthetic(50, [6], classes=None, dtype="float64")
    x, y = data[0]
    assert (x.dtype, y.dtype, y.shape) == (torch.float64, torch.float64, (1,))
    a, b = torch.stack([x for x, _ in items(data)]), torch.stack([y for _, y in items(data)])
    fit = torch.linalg.lstsq(a, b).solution
    torch.testing.assert_close(a @ fit, b)


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Digits(split="val"), "data.split=val is not one of train, test"),
        (lambda: Digits(size=0), "data.size=0"),
        (lambda: Text(split="val"), "data.split=val is not one of train, test"),
        (lambda: Text(context=0), "data.context=0 must be at least 1"),
        (lambda: Text(held_out=1.0), "data.held_out=1.0 between 0 and 1"),
        (lambda: Synthetic(split="val"), "data.split=val is not one of train, test"),
        (lambda: Synthetic(samples=0), "data.samples=0"),
        (lambda: Synthetic(shape=[3, 0]), r"data.shape=\[3, 0\] must be at least 1"),
        (lambda: Synthetic(classes=0), "data.classes=0 must be at least 1, or null"),
        (lambda: Synthetic(dtype="int8"), "data.dtype=int8 is not one of float32, float64, bfloat16"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
