"""Map-style data sets that need no download; items are (input, target), the same in every process.

digits      scikit-learn's handwritten digits, enlarged        a picture  -> its class
text        a text folder or file, byte by byte                bytes      -> the bytes that follow them
masked      the same with some bytes masked                    bytes      -> the bytes that are masked
reversal    random words, to be written backwards              words      -> the same in reverse
synthetic   mixtures of fixed patterns                         any shape  -> a class, or a number
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

Sample = tuple[Tensor, Tensor]

_SPLITS = ("train", "test")


def _check_split(split: str) -> None:
    if split not in _SPLITS:
        raise ValueError(f"data.split={split} is not one of {', '.join(_SPLITS)}")


class Digits(Dataset[Sample]):
    """1797 pictures of handwritten digits (E. Alpaydin, C. Kaynak: UCI, 1998). Every fifth is held out: 360 of them.

    Item: (float32 [channels, size, size] of mean 0 and variance 1 over the training pictures, class 0..9 as int64).
    The channels are equal.
    """

    def __init__(self, size: int = 64, channels: int = 3, split: str = "train") -> None:
        _check_split(split)
        if size < 1 or channels < 1:
            raise ValueError(f"data.size={size} and data.channels={channels} must be at least 1")
        pictures, classes = _read_digits()
        held_out = torch.arange(len(classes)) % 5 == 0
        large = F.interpolate(pictures.view(-1, 1, 8, 8), size=(size, size), mode="bilinear", align_corners=False)
        spread, mean = torch.std_mean(large[~held_out])
        chosen = held_out if split == "test" else ~held_out
        self._pictures = (large[chosen] - mean) / spread
        self._classes = classes[chosen]
        self._channels = channels

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> Sample:
        return self._pictures[index].expand(self._channels, -1, -1), self._classes[index]


def _read_digits() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's bundled file: pictures, float32 [1797, 64], and classes, int64 [1797].

    Importing scikit-learn takes longer than a wrong key may take to be refused; the file alone does not.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ValueError("data=digits reads the pictures bundled with scikit-learn, which is not installed: install it")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not path.exists():
        raise ValueError(f"this scikit-learn has no {path}; data=digits reads that file")
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    return table[:, :64], table[:, 64].long()


class Text(Dataset[Sample]):
    """Windows of consecutive bytes that do not overlap: (int64 [context], int64 [context] one byte further).

    `path`: a file, or a folder whose files are joined in the order of their paths (hidden ones left out), relative to
    the folder the program was started from; None takes the modules of Python's own standard library. At most
    `max_bytes` are read; the last `held_out` of them, a fraction, are the "test" split.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 128,
        split: str = "train",
        max_bytes: int = 2**20,
        held_out: float = 0.1,
    ) -> None:
        _check_split(split)
        if context < 1 or not 0 < held_out < 1:
            raise ValueError(f"data.context={context} must be at least 1, data.held_out={held_out} between 0 and 1")
        data = _read_text(path, max_bytes)
        border = len(data) - int(len(data) * held_out)
        part = data[border:] if split == "test" else data[:border]
        if len(part) <= context:
            raise ValueError(
                f"data.path={path}: the {split} split has {len(part)} bytes, a sample takes {context + 1}; "
                "give more text, a larger data.max_bytes, or a smaller data.context"
            )
        self._bytes = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]


class MaskedText(Text):
    """As `Text`, but some bytes are replaced by `mask`, and these are the targets; -100 stands for the others.

    `masked`: the fraction. Which bytes these are depends on the index alone.
    """

    def __init__(self, masked: float = 0.15, mask: int = 256, **keywords: Any) -> None:
        super().__init__(**keywords)
        if not 0 < masked < 1:
            raise ValueError(f"data.masked={masked} must be between 0 and 1")
        self._masked, self._mask = masked, mask

    def __getitem__(self, index: int) -> Sample:
        given, _ = super().__getitem__(index)
        hidden = torch.rand(len(given), generator=torch.Generator().manual_seed(index)) < self._masked
        hidden[0] = True
        return given.masked_fill(hidden, self._mask), given.masked_fill(~hidden, -100)


class Reversal(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Random words to be written backwards: ({names[0]: words, names[1]: answer so far}, answer), int64 [length] each.

    The words are 2 .. `vocabulary` - 1; the answer so far begins with 1. Everything follows from `seed` and the index.
    """

    def __init__(
        self,
        samples: int = 1024,
        length: int = 12,
        vocabulary: int = 32,
        names: Sequence[str] = ("source", "target"),
        seed: int = 0,
    ) -> None:
        if samples < 1 or length < 1 or vocabulary < 3 or len(names) != 2:
            raise ValueError(
                f"data.samples={samples} and data.length={length} must be at least 1, data.vocabulary={vocabulary} at "
                f"least 3, and data.names={list(names)} two names"
            )
        self._names, draw = tuple(names), torch.Generator().manual_seed(seed)
        self._words = torch.randint(2, vocabulary, (samples, length), generator=draw)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        words = self._words[index]
        answer = words.flip(0)
        so_far = torch.cat([torch.ones(1, dtype=torch.int64), answer[:-1]])
        return dict(zip(self._names, (words, so_far), strict=True)), answer


def _read_text(path: str | None, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = max_bytes
    for file in _text_files(path):
        if left <= 0:
            break
        with file.open("rb") as stream:
            parts.append(stream.read(left))
        left -= len(parts[-1])
    return b"".join(parts)


def _text_files(path: str | None) -> list[Path]:
    if path is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(f"data.path={path}: there is no such file or folder (looked for {root.absolute()})")
    relative = sorted(file.relative_to(root) for file in root.rglob("*") if file.is_file())
    files = [root / file for file in relative if not any(part.startswith(".") for part in file.parts)]
    if not files:
        raise ValueError(f"data.path={path}: the folder holds no files")
    return files


class Synthetic(Dataset[Sample]):
    """Random samples that can be learnt: the pattern of a class, and up to half as much of another one.

    Item: (`dtype` [*shape], class as int64), or where `classes` is None, (`dtype` [*shape], `dtype` [1]): how much of
    the first pattern is in it. Everything follows from `seed`, and a longer data set begins with the shorter one. The
    splits share nothing but the patterns.
    """

    def __init__(
        self,
        samples: int = 1024,
        shape: Sequence[int] = (64,),
        classes: int | None = 10,
        dtype: str = "float32",
        seed: int = 0,
        split: str = "train",
    ) -> None:
        _check_split(split)
        if samples < 1 or any(size < 1 for size in shape):
            raise ValueError(f"data.samples={samples} and the sizes in data.shape={list(shape)} must be at least 1")
        if classes is not None and classes < 1:
            raise ValueError(f"data.classes={classes} must be at least 1, or null for a number as target")
        kinds = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.bfloat16)}
        if dtype not in kinds:
            raise ValueError(f"data.dtype={dtype} is not one of {', '.join(kinds)}")
        self._dtype, self._classes = kinds[dtype], classes
        patterns = np.random.default_rng(seed).standard_normal((classes or 2, *shape), dtype=np.float32)
        self._patterns = torch.from_numpy(patterns).to(self._dtype)
        self._drawn = np.random.default_rng([seed, 1 + _SPLITS.index(split)]).random((samples, 3))

    def __len__(self) -> int:
        return len(self._drawn)

    def __getitem__(self, index: int) -> Sample:
        first, other, much = self._drawn[index].tolist()
        count = len(self._patterns)
        if self._classes is None:
            value = (2 * much - 1) * self._patterns[0] + other * self._patterns[1]
            return value, torch.tensor([2 * much - 1], dtype=self._dtype)
        kind = int(first * count)
        value = torch.add(self._patterns[kind], self._patterns[int(other * count)], alpha=0.5 * much)
        return value, torch.tensor(kind)
