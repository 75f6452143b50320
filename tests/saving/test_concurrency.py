"""Saves from several threads of one process."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import bytecheckpoint as bcp


def test_asynchronous_saves_from_two_threads_do_not_share_staging_memory(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def save(number: int) -> None:
        state = {"w": torch.full((1 << 20,), float(number))}
        barrier.wait()
        for step in range(3):
            bcp.save(tmp_path / str(number), state, step=step, async_save=True).result()

    threads = [threading.Thread(target=save, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2):
        for step in range(3):
            assert bcp.open(tmp_path / str(number), step)["w"][:].unique().tolist() == [float(number)]


def test_a_callback_may_save_again(tmp_path: Path) -> None:
    ended = threading.Event()

    def save_again(_: object) -> None:
        bcp.save(tmp_path / "second", {"w": torch.ones(3)}, async_save=True).add_done_callback(lambda _: ended.set())

    bcp.save(tmp_path / "first", {"w": torch.ones(3)}, async_save=True).add_done_callback(save_again)
    assert ended.wait(30)
    assert torch.equal(bcp.open(tmp_path / "second")["w"][:], torch.ones(3))
