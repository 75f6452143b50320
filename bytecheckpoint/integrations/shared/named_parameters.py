"""Names of an optimizer's parameters that no module of a save or a load has: it takes only a part of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from bytecheckpoint.adapters.collect import entries_of
from bytecheckpoint.adapters.native.modules import ModuleEntry
from bytecheckpoint.adapters.native.parameter_names import MODEL_FQN
from bytecheckpoint.manifest.plain_wire import join_fqn


@contextmanager
def parameters_named(modules: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Adds to the optimizers' groups, for the time of the block, the names that their parameters have in `modules`: the
    whole modules of a state, each under its FQN. Groups that have names are left alone.
    """
    names: dict[int, str] = {}
    for fqn, module in modules.items():
        for entry in entries_of({fqn: module}, "auto"):
            for parameter_id, name in entry.parameter_names.items() if isinstance(entry, ModuleEntry) else ():
                names.setdefault(parameter_id, name if fqn == MODEL_FQN else join_fqn(fqn, name))
    groups = [group for each in optimizers for group in each.param_groups if names and "param_names" not in group]
    for group in groups:
        group["param_names"] = [names.get(id(parameter)) for parameter in group["params"]]
    try:
        yield
    finally:
        for group in groups:  # else torch refuses a group without names that the program adds later
            group.pop("param_names", None)  # the group of an optimizer that stands twice in the state is here twice
