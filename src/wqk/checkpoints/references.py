"""References to checkpoints, without secrets, for display and storage."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from wqk.errors import CheckpointError, shortened

# Parts of a query that say which file is meant; everything else may be a secret.
HARMLESS = ("download", "ref", "revision", "version", "versionId", "filename", "path", "subfolder")


def presentable(reference: str) -> str:
    r"""A reference for messages, tables and file names, without secrets.

    An address loses its user, password and query, except for parts of the query known to be
    harmless. Bytes that are not text become escapes.

    Examples
    --------
    >>> presentable("https://me:secret@example.org/model.safetensors?download=true&signature=x")
    'https://example.org/model.safetensors?download=true'
    >>> presentable("owner/model"), presentable("run-\udcff")
    ('owner/model', 'run-\\udcff')
    """
    reference = reference.encode("utf-8", "backslashreplace").decode()
    if not re.match(r"https?://", reference, re.IGNORECASE):
        return reference
    try:
        parts = urlsplit(reference)
        query = urlencode([(k, v) for k, v in parse_qsl(parts.query) if k in HARMLESS])
    except ValueError:
        return re.split(r"[?#]", re.sub(r"//[^/]*@", "//", reference))[0]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def split_address(url: str) -> SplitResult:
    """The parts of an address; `CheckpointError` if it is not one."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is not a number
    except ValueError as error:
        raise CheckpointError(f"{shortened(presentable(url))}: not a valid URL ({error})") from None
    return parts
