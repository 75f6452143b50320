"""A file of torch.save: one archive of the whole state."""

from __future__ import annotations

from bytecheckpoint.conversion.plain_trees import PlainData, without_numpy
from bytecheckpoint.conversion.selecting import LeftOut, Selection
from bytecheckpoint.conversion.target_files import Target, TargetFile, spread
from bytecheckpoint.conversion.torch_pickles import save_runs
from bytecheckpoint.manifest import Manifest


def plan_torch(manifest: Manifest, selection: Selection, plain: PlainData, *, name: str, num_ranks: int) -> Target:
    """The file of this name."""
    state = without_numpy(plain.nested(), "")
    file = TargetFile(name, save_runs(state, selection.wanted))
    return Target([file], spread([file.byte_length], num_ranks), name, None, left_out_metadata(manifest))


def left_out_metadata(manifest: Manifest) -> list[LeftOut]:
    """What torch's own formats have no place for."""
    return [LeftOut(f"metadata {key}", 0, 0, "metadata") for key in manifest.metadata]
