"""Bodies of answers from S3, read from the connection straight into the memory that they are for: botocore and urllib3
copy every byte once more, which costs as much as receiving it. Knows nothing of objects and ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from typing import Any

from botocore.exceptions import ReadTimeoutError, ResponseStreamingError
from botocore.response import StreamingBody


def reader_of(body: Any) -> Callable[[memoryview], int]:
    """Returns what fills memory with the next bytes of a body, and returns how many: 0 at the end. Raises the errors of
    botocore's own `readinto`, which it is where another version of the libraries keeps the connection elsewhere, or has
    to look at the bytes.
    """
    raw: Any = getattr(body, "_raw_stream", None)
    answer = getattr(raw, "_fp", None)
    is_known = type(body) is StreamingBody and hasattr(raw, "release_conn")
    if not is_known or not isinstance(answer, HTTPResponse) or answer.getheader("Content-Encoding"):
        own: Callable[[memoryview], int] = body.readinto
        return own

    def readinto(memory: memoryview) -> int:
        try:
            num_bytes = answer.readinto(memory)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=None, error=error) from error
        except (OSError, HTTPException) as error:
            raise ResponseStreamingError(error=error) from error
        if num_bytes and answer.isclosed():  # all was read, and the connection can serve another request
            raw.release_conn()
        return num_bytes

    return readinto
