"""Packs documents into rows of one length. Tokens that fill no row yet wait in a buffer, which is saved too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from bytecheckpoint.data.shuffle_buffer import refuse_streams
from bytecheckpoint.data.sources import END, PassEnd, check_source, cursor_of, read_next, source_name, state_after
from bytecheckpoint.data.stream_position import StreamPosition, position_of
from bytecheckpoint.runtime.integers import integer_of

_HOST = torch.device("cpu")
"""Device of all rows, also where another one is torch's default: tokens that a load gives lie there."""


class Packer:
    """Rows of exactly `length` tokens, cut from the documents of one source laid end to end.

    Tokens that fill no row are carried over, also into the next epoch, so that none is lost and none padded. State is
    these tokens, as one tensor, and the state of the source.
    """

    def __init__(self, source: Any, length: int, *, key: str | None = None) -> None:
        """Reads nothing yet.

        Args:
            source: a sequence or an iterable of documents, as in `Streams`. A document is a list, an array or a tensor
                of tokens, of one dtype throughout; lists are int64.
            length: tokens of a row.
            key: where samples are dicts, the key of a document's tokens.

        Raises:
            ValueError: `length` is no integer of 1 or more, or the source cannot be read, or is `Streams`: wrap the
                source of each stream instead.
        """
        refuse_streams("Packer", source)
        check_source("the source of a Packer", source)
        num_tokens = integer_of(length)
        if num_tokens is None or num_tokens < 1:
            raise ValueError(f"a Packer makes rows of {length} tokens; a row has a whole number of them, 1 or more")
        self.wrapped_source = source
        self.name_of_positions = f"{type(self).__name__}[{num_tokens}]"
        """Name that is saved with positions. It has the row length, because they count rows: those of another length do
        not fit.
        """
        self._length, self._key = num_tokens, key
        self._cursor = cursor_of(source)
        self._source_position = StreamPosition()
        self._epoch = 0
        self._row: torch.Tensor | None = None
        """Tokens that are left, flat; None before the first document."""
        self._documents: list[torch.Tensor] = []
        """Documents whose tokens come after those in `_row`, not yet joined: many short ones make one row."""
        self._num_tokens = 0
        """Tokens in `_row` and `_documents`."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (row := self._next()) is not END:
            yield row

    def state_dict(self) -> dict[str, Any]:
        """Returns the tokens that are left and what it takes to go on."""
        tokens = self._tokens()
        # Room for more, in powers of two: a shape that stays the same lets the next save reuse its plan.
        room = 1 << (max(tokens.numel(), self._length) - 1).bit_length()
        tail = torch.zeros(room, dtype=tokens.dtype, device=_HOST)
        tail[: tokens.numel()] = tokens
        return {
            "epoch": self._epoch,
            "length": self._length,
            "is_empty": self._row is None,
            "num_tokens": tokens.numel(),
            "tokens": tail,
            "source": state_after(self.wrapped_source, self._cursor, self._source_position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where this state was taken.

        Raises:
            ValueError: the state is of rows of another length, and positions count rows.
            CheckpointMismatchError: the state does not fit the source.
        """
        if state["length"] != self._length:
            raise ValueError(
                f"the state of a Packer was saved with rows of {state['length']} tokens, and this one makes rows of "
                f"{self._length}: positions count rows. Nothing was loaded into it"
            )
        self._source_position = position_of("in a Packer", state["source"], source_name(self.wrapped_source))
        self._cursor.lose_place()
        self._epoch = state["epoch"]
        self._row = None if state["is_empty"] else state["tokens"][: state["num_tokens"]].clone()
        self._documents, self._num_tokens = [], state["num_tokens"]

    def _next(self) -> torch.Tensor | Literal[PassEnd.END]:
        while self._num_tokens < self._length:
            if self._source_position.epoch > self._epoch:
                self._epoch += 1
                return END
            document, self._source_position = read_next(self.wrapped_source, self._cursor, self._source_position)
            if document is not END:
                self._add(document)
        tokens = self._tokens()
        self._row, self._documents, self._num_tokens = tokens[self._length :], [], self._num_tokens - self._length
        # Copied, because a worker would send all that a view shares memory with.
        return tokens[: self._length].clone()

    def _tokens(self) -> torch.Tensor:
        if self._row is None:
            return torch.empty(0, dtype=torch.int64, device=_HOST)
        return torch.cat([self._row, *self._documents]) if self._documents else self._row

    def _add(self, document: Any) -> None:
        if self._key is not None:
            document = document[self._key]
        if isinstance(document, Mapping | str):
            raise ValueError(
                f"a Packer takes documents that are lists, arrays or tensors of tokens, and got a "
                f"{type(document).__name__}: tokenize first, or pass key= to say where in a dict the tokens are"
            )
        dtype = torch.int64 if isinstance(document, list) else None
        tokens = torch.as_tensor(document, dtype=dtype, device=_HOST)
        if tokens.dim() != 1:
            raise ValueError(f"a document is one-dimensional; this one has the shape {tuple(tokens.shape)}")
        if self._row is None:
            self._row = torch.empty(0, dtype=tokens.dtype, device=_HOST)
        if tokens.dtype != self._row.dtype:
            raise ValueError(f"a document has tokens of {tokens.dtype} and those before it of {self._row.dtype}")
        self._num_tokens += tokens.numel()
        # A source may reuse the memory of an array or a tensor for its next document, while this one waits for it.
        is_waiting = self._num_tokens < self._length
        self._documents.append(tokens.clone() if is_waiting and not isinstance(document, list) else tokens)
