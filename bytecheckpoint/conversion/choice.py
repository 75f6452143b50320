"""Refuses a conversion whose include, exclude and rename do what nobody can mean: they match nothing, name an entry and
take nothing below it, or take a part of the state that an optimizer keeps for a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from bytecheckpoint.adapters.key_map import Globs, SortedNames
from bytecheckpoint.adapters.optimizers.stored_optimizer import split_state_path
from bytecheckpoint.adapters.plain.manifest_trees import all_trees
from bytecheckpoint.adapters.plain.plain_data import decode_plain, without_content
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.loading.select import Selection, SelectionRequest, optimizers_in
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import join_fqn

_NUM_MATCHED = 1000
"""Names that are compared with one that matches nothing, the shortest."""


def check_choice(manifest: Manifest, request: SelectionRequest, selection: Selection) -> None:
    """Raises CheckpointMismatchError (conflict) for a glob or a pattern that matches nothing; and, unless the target is
    "hf", which has tensors alone, for a glob of an entry's own name, which takes nothing of what is below it, and for a
    part of the state of a parameter, with which the next step of its optimizer would fail.
    """
    if request.takes_all and not request.rename:
        return
    names = {*manifest.tensors, *manifest.aliases}
    entries = [fqn for fqn, _ in all_trees(manifest)]
    for fqn, data in all_trees(manifest):
        names.update(leaves(decode_plain(data), fqn, may_repeat=True))
    names.update([without_content(name) for name in names])
    if request.to != "hf":
        _refuse_globs_of_entries(entries, names, request)
        _refuse_torn_states(manifest, selection)
    _refuse_unmatched({*names, *entries}, request)


def _refuse_unmatched(names: set[str], request: SelectionRequest) -> None:
    unmatched = []
    for option, rules in (("include", request.include), ("exclude", request.exclude)):
        globs = Globs(rules)
        for name in names:
            globs.match(name)
        unmatched += [(option, rule) for rule in globs.unused]
    renamed = names
    for pattern, replacement in request.rename:
        if not any(re.search(pattern, name) for name in renamed):
            unmatched.append(("rename", pattern))
        renamed = {re.sub(pattern, replacement, name) for name in renamed}
    for option, rule in unmatched:
        parts = (name.split(".") for name in names)
        above = {".".join(of_name[:count]) for of_name in parts for count in range(1, len(of_name))}
        candidates = sorted(names | above, key=len)[:_NUM_MATCHED]
        near = get_close_matches(rule.replace("\\", "").strip("^$.*"), candidates, n=1, cutoff=0.5)
        raise CheckpointMismatchError(
            f"{option} {rule!r} matches nothing in the checkpoint{f' (near: {near[0]})' if near else ''}; nothing was "
            "written: correct it, or leave it out",
            kind="conflict",
        )


def _refuse_globs_of_entries(entries: Sequence[str], names: set[str], request: SelectionRequest) -> None:
    """Raises CheckpointMismatchError (conflict) for a glob that matches the own name of an entry, and no name in it or
    in another one.
    """
    below = SortedNames(names).below
    for fqn in (fqn for fqn in entries if fqn not in names):
        is_taken = any(map(request.takes, below(fqn)))
        option, globs = ("exclude", request.exclude) if is_taken else ("include", request.include)
        for glob in globs:
            if fnmatchcase(fqn, glob) and not any(fnmatchcase(name, glob) for name in names):
                raise CheckpointMismatchError(
                    f"{option} {glob!r} matches nothing in the checkpoint, which has names below {fqn!r:.200}: "
                    f"{glob + '.*'!r} matches them; nothing was written",
                    kind="conflict",
                )


def _refuse_torn_states(manifest: Manifest, selection: Selection) -> None:
    names = SortedNames([*manifest.tensors, *manifest.aliases])
    for fqn, tree in optimizers_in(selection.trees).items():
        known = {name for group in tree["groups"].values() for name in group["params"]}
        state_fqn = join_fqn(fqn, "state")
        of_state = names.below(state_fqn)
        parameters = {name: split_state_path(name[len(state_fqn) + 1 :], known)[0] for name in of_state}
        taken = {parameters[name] for name in of_state if name in selection.names} - {""}
        left_out = (name for name in of_state if name not in selection.names)
        torn = next((name for name in left_out if parameters[name] in taken), None)
        if torn is not None:
            raise CheckpointMismatchError(
                f"include and exclude leave out {torn!r:.200} and take other state of the same parameter, with "
                "which the next step of an optimizer would fail; nothing was written: choose all or nothing of a "
                "parameter's state",
                kind="conflict",
            )
