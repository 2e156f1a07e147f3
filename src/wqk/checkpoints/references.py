"""References to checkpoints: shown without secrets, and the training step in a name."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from wqk.errors import CheckpointError, shortened

# Parts of a query that say which file is meant; everything else may be a secret.
HARMLESS = ("download", "ref", "revision", "version", "versionId", "filename", "path", "subfolder")

# step1000, checkpoint-1000, stage1-step1000-tokens5B, global_step1000, iter_0001000; not step1.5M.
STEP = re.compile(
    r"(?:^|[-_])(?:global_?)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})(?![0-9A-Za-z.])"
)


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


def step_in(name: str | None) -> int | None:
    """The training step that a revision or a folder is named after.

    Examples
    --------
    >>> [step_in(name) for name in ("step1000", "checkpoint-20", "stage1-step150-tokens1B", "v2.0")]
    [1000, 20, 150, None]
    """
    match = STEP.search(name or "")
    return int(match[1]) if match else None
