"""Reads the arrays of one large JSON object item by item: memory holds one item, not the file.

COCO annotations of a million images are half a gigabyte of text and several as Python objects.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from kfp_gate.errors import InvalidInput

_PIECE = 1 << 20
_BLANK = " \t\r\n"


def stream_items(handle: BinaryIO, where: str) -> Iterator[tuple[str, int, Any]]:
    """Items of every array of the top-level object, as (key, index, item); other values as (key, -1, value).

    Raises:
        InvalidInput: not JSON, not an object, or cut off; the message gives the character position.
    """
    reader = _Reader(handle, where)
    reader.expect("{")
    if reader.peek() == "}":
        return
    while True:
        key = reader.value()
        reader.expect(":")
        if reader.peek() == "[":
            reader.expect("[")
            index = 0
            while reader.peek() != "]":
                yield key, index, reader.value()
                index += 1
                if reader.peek() == ",":
                    reader.expect(",")
                elif reader.peek() != "]":
                    raise reader.bad("expected ',' or ']'")
            reader.expect("]")
        else:
            yield key, -1, reader.value()
        if reader.peek() == ",":
            reader.expect(",")
        else:
            reader.expect("}")
            return


class _Reader:
    def __init__(self, handle: BinaryIO, where: str) -> None:
        self.handle, self.where = handle, where
        self.decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.scan = json.JSONDecoder().raw_decode
        self.text, self.at, self.before, self.ended = "", 0, 0, False

    def peek(self) -> str:
        """The next character that is not blank, "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANK:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()

    def expect(self, char: str) -> None:
        if self.peek() != char:
            raise self.bad(f"expected {char!r}")
        self.at += 1

    def value(self) -> Any:
        if not self.peek():
            raise self.bad("the file ends here")
        while True:
            try:
                value, end = self.scan(self.text, self.at)
                # A number at the end of what was read may go on.
                if end < len(self.text) or self.ended:
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                if self.ended:
                    self.at = error.pos
                    raise self.bad(error.msg) from None
            except (RecursionError, ValueError) as error:  # nested without end; a number of thousands of digits
                raise self.bad(str(error)) from None
            self.more()

    def more(self) -> None:
        """Read on; twice as much as is waiting, so that a large item is not scanned again for each piece."""
        try:
            piece = self.handle.read(max(_PIECE, 2 * (len(self.text) - self.at)))
            fresh = self.decode.decode(piece, final=not piece)
        except (UnicodeDecodeError, EOFError, OSError) as error:
            raise self.bad(f"{type(error).__name__}: {error}") from None
        self.before += self.at
        self.text, self.at, self.ended = self.text[self.at :] + fresh, 0, not piece

    def bad(self, what: str) -> InvalidInput:
        near = self.text[self.at : self.at + 30]
        return InvalidInput(
            f"not JSON at character {self.before + self.at}: {what}, found {near!r}"
            if near
            else f"not JSON at character {self.before + self.at}: {what}",
            expected="a complete JSON object in UTF-8", where=self.where, next_step="write or copy the file again",
        )  # fmt: skip
