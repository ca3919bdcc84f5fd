"""How the names of a file's tensors meet those of the model: prefixes that differ, and what does not match.

Pure: names and shapes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MODEL = "model.safetensors"  # what a run leaves
MOST_NAMED = 5
COUNTER = "num_batches_tracked"  # BatchNorm's counter, which older files do not have; it then begins at 0

Shape = tuple[int, ...]


def parse_prefixes(rules: Sequence[str]) -> list[tuple[str, str]]:
    """Return (old, new) of each rule OLD:NEW; ValueError for a rule that is none."""
    found = []
    for rule in rules:
        old, colon, new = rule.partition(":")
        if not colon or not (old or new):
            raise ValueError(
                f"init.prefix: {rule!r} is not OLD:NEW, what names in the file begin with and what the model's begin "
                "with instead, like [module.:] or [backbone.:layers.]"
            )
        found.append((old, new))
    return found


def renamed(names: Iterable[str], rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the model's name -> the file's name, the first rule that fits applied to each.

    ValueError where two names of the file become one.
    """
    found: dict[str, str] = {}
    for name in names:
        old, new = next(((o, n) for o, n in rules if name.startswith(o)), ("", ""))
        becomes = new + name[len(old) :]
        if becomes in found:
            raise ValueError(
                f"init.prefix makes one name, {becomes}, of two in the file: {found[becomes]} and {name}; give rules "
                "that keep them apart"
            )
        found[becomes] = name
    return found


@dataclass(frozen=True)
class Match:
    """What of a model's and a file's tensors goes together, by the model's names.

    `missing`: only the model has it; `unknown`: only the file; `shapes`: (name, the file's, the model's) that differ.
    """

    shared: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    shapes: tuple[tuple[str, Shape, Shape], ...]

    @property
    def whole(self) -> bool:
        """Whether everything matches."""
        return not (self.missing or self.unknown or self.shapes)

    def __str__(self) -> str:
        parts = []
        for what, names in (("does not have", self.missing), ("has more than the model with", self.unknown)):
            parts += [f"it {what} {listed(names)}"] if names else []
        if self.shapes:
            parts.append(
                listed([f"{name} is {given} in it and {own} in the model" for name, given, own in self.shapes])
            )
        return "; ".join(parts) or "all names match"


def match(model: Mapping[str, Shape], file: Mapping[str, Shape]) -> Match:
    """Compare names and shapes; `file` by the names that the model uses. A BatchNorm counter may be missing."""
    shared = [name for name in model if name in file]
    return Match(
        shared=tuple(name for name in shared if model[name] == file[name]),
        missing=tuple(name for name in model if name not in file and name.rpartition(".")[2] != COUNTER),
        unknown=tuple(name for name in file if name not in model),
        shapes=tuple((name, file[name], model[name]) for name in shared if model[name] != file[name]),
    )


def suggestion(model: Iterable[str], file: Iterable[str]) -> str | None:
    """Return the rule of `init.prefix` under which more names would match than now; None where there is none."""
    own, given = set(model), set(file)
    best, most = None, len(own & given)
    for name in sorted(given)[:100]:
        for wanted in sorted(own):
            old, new = _heads(name, wanted)
            if (old or new) and (old, new) != best:
                matched = sum(new + each[len(old) :] in own for each in given if each.startswith(old))
                if matched > max(most, 1):
                    best, most = (old, new), matched
        if best is not None:
            break
    return None if best is None else f"{best[0]}:{best[1]}"


def _heads(name: str, wanted: str) -> tuple[str, str]:
    """What two names begin with before the dotted part that they share at the end; ("", "") where they share none."""
    if name.endswith(f".{wanted}"):
        return name.removesuffix(wanted), ""
    if wanted.endswith(f".{name}"):
        return "", wanted.removesuffix(name)
    return "", ""


def listed(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
