"""Bodies of the form multipart/form-data: fields and files by name (RFC 7578)."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser

from starlette.requests import Request

from slotline.server.errors import HttpError
from slotline.server.http import read_body

_MOST_PARTS = 100


async def read_form(request: Request, most: int) -> dict[str, list[bytes]]:
    """Return the contents of each field of a form, in their order.

    Raises:
        HttpError: if the body is too large, is no such form, or has more than 100 parts.
    """
    said = Message()
    said["content-type"] = request.headers.get("content-type", "")
    boundary = said.get_param("boundary")
    if said.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary.isascii():
        raise HttpError(
            400, "the body is no form; send multipart/form-data with a file", param=None, code="invalid_form"
        )
    return _parts(await read_body(request, most), boundary.encode())


def _parts(body: bytes, boundary: bytes) -> dict[str, list[bytes]]:
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if len(parts) < 2 or not parts[-1].startswith(b"--") or len(parts) > _MOST_PARTS + 2:
        raise HttpError(
            400,
            f"the body does not end with the form's boundary, or has more than {_MOST_PARTS} parts",
            code="invalid_form",
        )
    fields: dict[str, list[bytes]] = {}
    for part in parts[1:-1]:
        head, found, content = part.partition(b"\r\n\r\n")
        headers = HeaderParser().parsestr(head.strip().decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if not found or not isinstance(name, str):
            raise HttpError(400, "a part of the form has no name", code="invalid_form")
        fields.setdefault(name, []).append(content)
    return fields
