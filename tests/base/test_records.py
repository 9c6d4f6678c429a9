"""Records against the standard library's dataclasses: the same class, defined both ways, answers alike."""

from __future__ import annotations

import copy
import dataclasses
import pprint
from typing import Any

import pytest

from fusewright.base import records

BOTH = pytest.mark.parametrize("module", [dataclasses, records], ids=["dataclasses", "records"])


def classes(module: Any) -> tuple[Any, Any, Any]:
    @module.dataclass(frozen=True, slots=True)
    class Base:
        a: int
        b: tuple[int, ...] = (1, 2)

    @module.dataclass(frozen=True, slots=True)
    class Derived(Base):
        c: object = module.field(default="x", compare=False, repr=False)

    @module.dataclass(slots=True)
    class Open:
        a: int
        items: list[int] = module.field(default_factory=list)
        total: int = module.field(init=False)

        def __post_init__(self) -> None:
            self.total = self.a + len(self.items)

    return Base, Derived, Open


def outcome(work: Any) -> object:
    try:
        return work()
    except Exception as error:
        return type(error).__name__


@BOTH
def test_construction(module: Any) -> None:
    base, derived, opened = classes(module)
    assert (base(1).a, base(1).b, base(b=(), a=2).b) == (1, (1, 2), ())
    assert (derived(1, (3,), "y").c, derived(5).c) == ("y", "x")
    assert opened(1, [4, 5]).total == 3 and opened(1).items is not opened(1).items
    for wrong in (lambda: base(), lambda: base(1, 2, 3), lambda: base(1, d=4), lambda: opened(1, total=2)):
        with pytest.raises(TypeError, match="__init__"):
            wrong()


@BOTH
def test_equality_hash_and_text(module: Any) -> None:
    base, derived, opened = classes(module)
    assert base(1) == base(1) != base(2) and base(1) != derived(1) and derived(1, c=1) == derived(1, c=2)
    assert hash(base(1)) == hash(base(1)) and hash(derived(1, c=1)) == hash(derived(1, c=2))
    assert opened(1) == opened(1) and opened.__hash__ is None
    assert [repr(base(1)).split(".")[-1], repr(derived(1)).split(".")[-1]] == [
        "Base(a=1, b=(1, 2))",
        "Derived(a=1, b=(1, 2))",
    ]
    looped = opened(1)
    looped.items.append(looped)  # type: ignore[arg-type]
    assert "..." in repr(looped)


@BOTH
def test_frozen_and_slotted(module: Any) -> None:
    base, derived, opened = classes(module)
    for record in (base(1), derived(1)):
        for change in (lambda: setattr(record, "a", 2), lambda: delattr(record, "a"), lambda: setattr(record, "z", 2)):
            assert outcome(change) in (
                "FrozenInstanceError",
                "TypeError",
            )  # the standard one trips over slots in a subclass, on 3.11
        assert not hasattr(record, "__dict__")
    changed = opened(1)
    changed.a = 7
    assert changed.a == 7 and outcome(lambda: setattr(changed, "z", 1)) == "AttributeError"


@BOTH
def test_copies_and_the_modules_functions(module: Any) -> None:
    base, derived, _ = classes(module)
    for record in (base(1, (2,)), derived(1, (2,), [3])):
        assert copy.copy(record) == record == copy.deepcopy(record)
        assert module.replace(record, a=9).a == 9 and [f.name for f in module.fields(record)][:2] == ["a", "b"]


def test_a_hash_is_kept() -> None:
    asked = []

    class Key:
        def __hash__(self) -> int:
            asked.append(self)
            return 5

    @records.dataclass(frozen=True, slots=True)
    class Path(records.KeepsHash):
        base: object

    path = Path(Path(Key()))
    assert hash(path) == hash(path) and len(asked) == 1
    again = copy.copy(path)
    assert again == path and hash(again) == hash(path)


def test_what_the_class_defines_is_kept() -> None:
    @records.dataclass(frozen=True, slots=True)
    class Mine:
        a: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 3

        def __repr__(self) -> str:
            return "mine"

    assert Mine(1) == 4 and hash(Mine(1)) == 3 and repr(Mine(1)) == "mine"


@BOTH
def test_what_the_standard_library_asks_of_them(module: Any) -> None:
    base, derived, opened = classes(module)
    assert dataclasses.is_dataclass(base(1)) and [field.name for field in dataclasses.fields(derived)] == [
        "a",
        "b",
        "c",
    ]
    assert dataclasses.asdict(base(1)) == {"a": 1, "b": (1, 2)} and dataclasses.replace(opened(1), a=5).total == 5
    assert base.__match_args__ == ("a", "b") and opened.__match_args__ == ("a", "items")
    assert pprint.pformat(base(1)) == repr(base(1))
    assert (base.__qualname__, base.__module__) == ("classes.<locals>.Base", __name__)
    match derived(1, (2,), "c"):
        case base(a, b):
            assert (a, b) == (1, (2,))
