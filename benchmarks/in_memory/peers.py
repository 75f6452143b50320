"""Local checkpoints of nvidia-resiliency-ext and the HTTP transport of torchft, on states of host tensors."""

from __future__ import annotations

import http.server
import importlib
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = tuple[str, Callable[[], Any], Callable[[Any], object]]
State = dict[str, torch.Tensor]
_PATIENCE = timedelta(seconds=120)


def peer_works(folder: Path, state: State, into: State) -> Iterator[Work]:
    """Yields the works of the peers that can be imported, and says of the others why not."""
    for package, works in (("nvidia-resiliency-ext", _nvrx_works), ("torchft-nightly", _torchft_works)):
        try:
            name = f"{package} {importlib.metadata.version(package)}"
            yield from works(folder, state, into, name)
        except (ImportError, OSError) as error:
            print(f"(without {package}: {type(error).__name__}: {error})", flush=True)


def nvrx_manager(folder: Path) -> tuple[Any, type]:
    """Returns a manager of local checkpoints, and the class of its states, here for tensors of the host."""
    local = "nvidia_resiliency_ext.checkpointing.local"
    base = importlib.import_module(f"{local}.basic_state_dict").BasicTensorAwareStateDict
    manager = importlib.import_module(f"{local}.ckpt_managers.local_manager").LocalCheckpointManager
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    return manager(folder / "nvrx"), _host_state(base)


def _host_state(base: type) -> type:
    """Returns the class without its demand for CUDA, under a name by which torch.load finds it."""

    def init(self: Any, state_dict: State) -> None:
        self.state_dict, self._is_hollow = state_dict, False

    members = {"__init__": init, "restore_tensor_device": lambda _self, **_: None, "__module__": __name__}
    globals()["HostState"] = type("HostState", (base,), members)
    return globals()["HostState"]  # type: ignore[no-any-return]


def _nvrx_works(folder: Path, state: State, into: State, name: str) -> Iterator[Work]:
    manager, host_state = nvrx_manager(folder)
    step = 0

    def save() -> None:
        nonlocal step
        step += 1
        manager.save(host_state(dict(state)), step)

    def load() -> None:
        manager.find_latest()
        found, _ = manager.load()
        for key, tensor in found.state_dict.items():
            into[key].copy_(tensor)

    yield f"{name}: LocalCheckpointManager.save", save, _nothing
    yield f"{name}: load and a copy", load, _nothing
    shutil.rmtree(folder / "nvrx")


def _torchft_works(_: Path, state: State, into: State, name: str) -> Iterator[Work]:
    module = importlib.import_module("torchft.checkpointing.http_transport")
    http.server.BaseHTTPRequestHandler.log_message = lambda *_: None  # a line for each request
    sender, receiver = (module.HTTPTransport(timeout=_PATIENCE, num_chunks=4) for _ in range(2))

    def send() -> None:
        sender.send_checkpoint([1], 1, dict(state), _PATIENCE)
        found = receiver.recv_checkpoint(0, sender.metadata(), 1, _PATIENCE)
        for key, tensor in found.items():
            into[key].copy_(tensor)
        sender.disallow_checkpoint()

    yield f"{name}: HTTPTransport, both ends", send, _nothing
    sender.shutdown()
    receiver.shutdown()


def _nothing(_: Any) -> None:
    """The call has done all."""
