"""Ranks that ask for the same: every order of events that timing alone would rarely show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from muon_compile.run import together
from muon_compile.run.together import _follow, _lead, _note

RANKS = (1, 4, 6)


@pytest.fixture
def store() -> HashStore:
    """Everybody asks."""
    made = HashStore()
    for rank in RANKS:
        made.set(str(rank), "asks")
    return made


def notes(store: HashStore) -> list[str]:
    return [_note(store, rank) for rank in RANKS]


def later(action: Callable[[], None], seconds: float = 0.1) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def test_all_who_ask_are_told_to_go(store: HashStore) -> None:
    assert _lead(store, RANKS, 1.0) == []
    assert notes(store) == ["go"] * 3
    assert _follow(store, 1, 4, 1.0) == []


def test_who_asks_is_told_who_did_not(store: HashStore) -> None:
    store.set("6", "left")
    assert _lead(store, RANKS, 0.1) == [6]
    assert notes(store) == ["no 6", "no 6", "left"]
    assert _follow(store, 1, 4, 1.0) == [6]


def test_one_that_comes_late_is_waited_for(store: HashStore) -> None:
    store.delete_key("6")
    timer = later(lambda: store.set("6", "asks"))
    assert _lead(store, RANKS, 10.0) == []
    timer.join()


def test_one_that_leaves_as_it_is_counted_on_keeps_all_from_going(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = together._change

    def leaving(where: HashStore, rank: int, note: str) -> bool:
        if rank == 6:
            where.set("6", "left")
        return change(where, rank, note)

    monkeypatch.setattr(together, "_change", leaving)
    assert _lead(store, RANKS, 1.0) == [6]
    assert notes(store) == ["no 6", "no 6", "left"]


def test_one_that_is_counted_on_does_not_leave(store: HashStore) -> None:
    store.set("4", "taken")
    timer = later(lambda: store.set("4", "go"), 0.3)
    assert _follow(store, 1, 4, 0.2) == []
    timer.join()


def test_one_that_nobody_answers_leaves(store: HashStore) -> None:
    started = time.monotonic()
    assert _follow(store, 1, 4, 0.2) == [1]
    assert 0.2 <= time.monotonic() - started < 5 and _note(store, 4) == "left"
    # So does one whose note is in the hand of a rank that died.
    store.set("6", "taken")
    assert _follow(store, 1, 6, 0.1) == [1]
