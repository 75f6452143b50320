"""Which codec the chunks of a tensor are stored with. It knows names and nothing of the bytes: whether compression pays
is found when they are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

CodecOption = str | Mapping[str, str] | Sequence[tuple[str, str]]


def codec_of(fqn: str, codec: CodecOption) -> str:
    """The codec for a tensor. `codec` is `SaveOptions.codec`: one for all tensors, or globs of FQNs, each with its own.

    The first glob that matches counts; where none does, the codec is `none`.
    """
    if isinstance(codec, str):
        return codec
    rules = codec.items() if isinstance(codec, Mapping) else codec
    return next((name for glob, name in rules if fnmatchcase(fqn, glob)), "none")
