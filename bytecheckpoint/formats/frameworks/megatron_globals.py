"""Names that the pickles of Megatron may have besides tensors and plain data: its settings, in `args`, and the state of
its checks. They are read as plain data: an enumeration as its value, an object as a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bytecheckpoint.formats.torch_save.unpickler import PickleError
from bytecheckpoint.formats.torch_save.unpickler_globals import Call, instances, with_values


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
_CLASSES: Mapping[str, Any] = MappingProxyType(
    {
        **instances(
            _CORE + "optimizer.OptimizerConfig",
            _CORE + "optimizer.optimizer_config.OptimizerConfig",
            _CORE + "optimizer.optimizer_config.AdamOptimizerConfig",
            _CORE + "optimizer.optimizer_config.SGDOptimizerConfig",
            _CORE + "rerun_state_machine.RerunStateMachine",
        ),
        **dict.fromkeys(
            (
                _CORE + "transformer.enums.AttnBackend",
                _CORE + "transformer.enums.AttnMaskType",
                _CORE + "transformer.enums.AttnType",
                _CORE + "transformer.enums.CudaGraphModule",
                _CORE + "transformer.enums.CudaGraphScope",
                _CORE + "transformer.enums.InferenceCudaGraphScope",
                _CORE + "transformer.enums.LayerType",
                _CORE + "transformer.enums.ModelType",
                _CORE + "enums.ModelType",
                _CORE + "enums.Fp8Recipe",
                _CORE + "enums.Fp4Recipe",
                _CORE + "rerun_state_machine.RerunDiagnostic",
                _CORE + "rerun_state_machine.RerunMode",
                _CORE + "rerun_state_machine.RerunState",
                "megatron.model.enums.AttnMaskType",
                "megatron.model.enums.AttnType",
                "megatron.model.enums.LayerType",
                "megatron.model.enums.ModelType",
                "megatron.legacy.model.enums.AttnMaskType",
                "megatron.legacy.model.enums.AttnType",
                "megatron.legacy.model.enums.LayerType",
                "megatron.legacy.model.enums.ModelType",
                "signal.Signals",
            ),
            _Enumeration(_value),
        ),
        "builtins.getattr": Call(_member),
        "__builtin__.getattr": Call(_member),
    }
)


find_megatron_value = with_values(_CLASSES)
"""Returns the stand-in for a global. Raises UnsafeCheckpointError (pickle_refused) for every name that is not known."""
