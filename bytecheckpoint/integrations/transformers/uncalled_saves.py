"""A warning for classes under the Trainer mixin whose own save is not called."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable

logger = logging.getLogger("bytecheckpoint")

_ONLY_ADDS_CARD = re.compile(r"trl\.trainer\.(?:dpo|kto|reward|rloo|sft|distillation)_trainer\Z")
"""Modules of trainers whose own save adds no state, only the model card, which `create_model_card` writes as well."""
_WARNED_OF: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that a warning has named."""


def warn_of_saves(classes: Iterable[type]) -> None:
    """Warns, once in a process, of each class that has a save of its own, which the mixin does not call."""
    for each in classes:
        adds_more = "_save_checkpoint" in vars(each) and not _ONLY_ADDS_CARD.match(each.__module__)
        if adds_more and each not in _WARNED_OF:
            _WARNED_OF.add(each)
            logger.warning(
                "%s._save_checkpoint is not called, because BcpTrainerMixin saves in its place: move what it adds "
                "to an on_save callback, or to a class before the mixin",
                each.__name__,
            )
