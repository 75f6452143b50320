"""Loaders that read the batches of a pass again to go on, as torchdata's StatefulDataLoader does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import bytecheckpoint as bcp


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Recounting:
    """A loader of numbers. It counts those that it reads again a second time, with workers also in a snapshot."""

    def __init__(self, *, has_workers: bool, interval: int | None = 1) -> None:
        self.dataset = Numbers()
        self.next_iter_state: dict[str, Any] | None = None
        self._interval = interval if has_workers else None
        self._iterator: Any = None

    def _get_iterator(self) -> Any:
        state, self.next_iter_state = self.next_iter_state, None
        found = SimpleNamespace(_num_yielded=0, numbers=iter(self.dataset))
        if self._interval is not None:
            found._snapshot, found._snapshot_interval = {"_snapshot_step": 0}, self._interval
        self._iterator = found
        if state is not None:
            snapshot = state.get("_snapshot", {"_snapshot_step": state.get("_num_yielded")})
            num_again = found._num_yielded = snapshot["_snapshot_step"]
            for _ in range(num_again + state.get("_steps_since_snapshot", 0)):
                next(self)
        return found

    def __iter__(self) -> Recounting:
        self._get_iterator()
        return self

    def __next__(self) -> int:
        self._iterator._num_yielded += 1
        interval = getattr(self._iterator, "_snapshot_interval", 0)
        if interval and self._iterator._num_yielded % interval == 0:
            self._iterator._snapshot["_snapshot_step"] = self._iterator._num_yielded
        return int(next(self._iterator.numbers))

    def state_dict(self) -> dict[str, Any]:
        num_yielded = (self._iterator or self._get_iterator())._num_yielded
        if self._interval is None:
            return {"_num_yielded": num_yielded}
        snapshot = dict(self._iterator._snapshot)
        return {"_snapshot": snapshot, "_steps_since_snapshot": num_yielded - snapshot["_snapshot_step"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_iter_state = state


WRAPS: dict[str, Callable[[Any], Any]] = {
    "data": lambda loader: bcp.DataLoaderState(loader, rank=0, size=1, elastic="same"),
    "alone": lambda loader: loader,
    "of a rank": bcp.RankLocal,
}


@pytest.mark.parametrize("case", WRAPS)
@pytest.mark.parametrize(
    ("has_workers", "intervals"),
    [(False, [None] * 4), (True, [1] * 4), (True, [2] * 4), (True, [3, 2, 50, 1]), (True, [1, 7, 2, 4])],
    ids=str,
)
def test_a_loader_goes_on_after_each_of_several_resumes_in_one_pass(
    tmp_path: Path, case: str, has_workers: bool, intervals: list[int | None]
) -> None:
    """Also where the interval of its snapshots is another one in each run, which may not divide their counts."""
    seen: list[int] = []
    for run, interval in enumerate(intervals):
        loader = Recounting(has_workers=has_workers, interval=interval)
        if run:
            bcp.load(tmp_path / str(run - 1), {"loader": WRAPS[case](loader)})
        numbers = iter(loader)
        seen += [next(numbers) for _ in range(3)]
        bcp.save(tmp_path / str(run), {"loader": WRAPS[case](loader)})
    assert seen == list(range(12))


def test_the_pass_after_the_resumed_one_counts_from_its_start(tmp_path: Path) -> None:
    loader, target = Recounting(has_workers=False), Recounting(has_workers=False)
    next(iter(loader))
    bcp.save(tmp_path, {"loader": loader})
    bcp.load(tmp_path, {"loader": target})
    iter(target)
    assert [next(iter(target)), target.state_dict()] == [0, {"_num_yielded": 1}]
