"""The parts that the managers of verl's FSDP and Megatron workers share."""

from __future__ import annotations

from typing import Any, ClassVar

from bytecheckpoint.integrations.verl.steps import RoleSaves, check_committed
from bytecheckpoint.options import LoadOptions, SaveOptions


class RoleManager:
    """Base of both managers, placed before verl's own class in the order of their bases."""

    bcp_options: ClassVar[SaveOptions] = SaveOptions()
    """Options of all saves. `staging_bytes` bounds the host memory of a save."""
    bcp_load_options: ClassVar[LoadOptions] = LoadOptions()
    checkpoint_save_contents: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = RoleSaves(self.bcp_options, self.bcp_load_options)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,  # noqa: FBT001, FBT002 - verl's signature
    ) -> None:
        """Loads what `load_contents` names, with all ranks together, from the folder that `save_checkpoint` was given;
        does nothing for None. The other arguments have no effect.

        A checkpoint of adapters alone fills the adapters and leaves the base model as it is.

        Raises:
            CheckpointNotFoundError: There is no committed checkpoint (`not_committed`, `not_found`).
            CheckpointMismatchError: verl itself has written the checkpoint (`conflict`), or it does not fit.
            CheckpointError: As `bytecheckpoint.load` raises it.
        """
        if local_path is None:
            return
        del hdfs_path, del_local_after_load  # for copies, which are not made here
        check_committed(local_path)
        self._load(local_path)

    def wait(self) -> None:
        """Waits until the save in the background is committed, and on rank 0 until old checkpoints are deleted. Raises
        the error of the save if it failed.
        """
        self._saves.wait()

    def _load(self, local_path: str) -> None:
        """Loads what `load_contents` names from a committed checkpoint."""
        raise NotImplementedError
