"""Names that the pickles of Megatron may have besides tensors and plain data: its settings, in `args`, and the state of
its checks. They are read as plain data: an enumeration as its value, an object as a dict.
"""

from __future__ import annotations

from typing import Any

from bytecheckpoint.formats.torch_save.unpickler import PickleError
from bytecheckpoint.formats.torch_save.unpickler_globals import Call, full_names, instances, with_values


class _Enumeration(Call):
    """Stands for a class of named values."""


def _value(value: Any, *_: Any) -> Any:
    if type(value) not in {int, str}:
        raise PickleError("it has a named value that is neither a number nor a text")
    return value


def _member(owner: Any, name: Any) -> str:
    """Stands for getattr, which Python 3.11 calls for a member of an enumeration."""
    if not isinstance(owner, _Enumeration) or type(name) is not str:
        raise PickleError("it asks for an attribute")
    return name


_CORE = "megatron.core."
_OBJECTS = {
    _CORE + "optimizer": "OptimizerConfig",
    _CORE + "optimizer.optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    _CORE + "rerun_state_machine": "RerunStateMachine",
}
_OLD_ENUMERATIONS = "AttnMaskType AttnType LayerType ModelType"
_ENUMERATIONS = {
    _CORE + "transformer.enums": (
        "AttnBackend AttnMaskType AttnType CudaGraphModule CudaGraphScope InferenceCudaGraphScope LayerType ModelType"
    ),
    _CORE + "enums": "ModelType Fp8Recipe Fp4Recipe",
    _CORE + "rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.model.enums": _OLD_ENUMERATIONS,
    "megatron.legacy.model.enums": _OLD_ENUMERATIONS,
    "signal": "Signals",
}

find_megatron_value = with_values(
    {
        **instances(_OBJECTS),
        **dict.fromkeys(full_names(_ENUMERATIONS), _Enumeration(_value)),
        **dict.fromkeys(("builtins.getattr", "__builtin__.getattr"), Call(_member)),
    }
)
"""Returns the stand-in for a global. Raises UnsafeCheckpointError (pickle_refused) for every name that is not known."""
