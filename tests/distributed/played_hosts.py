"""Ranks that take one another for processes on other hosts, by the label of their kernel; all are on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bytecheckpoint.distributed.liveness import peer_watch


@contextmanager
def on_host(host: int) -> Iterator[None]:
    """Within the block this rank is on the host with this number."""
    own = peer_watch.own_presence()
    labelled = type(own)(f"{own.kernel}-{host}", own.host, own.pid, own.started)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_watch, "own_presence", lambda: labelled)
        yield
