"""References to checkpoints: without secrets, the step in a name, the keywords that open them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any, TypedDict
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from wqk.errors import CheckpointError, shortened

# Parts of a query that say which file is meant; everything else may be a secret.
HARMLESS = ("download", "ref", "revision", "version", "versionId", "filename", "path", "subfolder")

# Parts of a query that only say that its bearer may read the file; a renewed address has others.
SIGNATURES = re.compile(
    r"(x-)?(amz|goog|ms)-.*|(.*[-_])?(sig|signature|expires|expiry|policy|token|key|secret|password"
    r"|auth)([-_]?id)?|awsaccesskeyid|key-pair-id|s[a-z]|sk[a-z]+|ses",
    re.IGNORECASE,
)

ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*:[/\\]+)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*:[/\\]+[^\s'\"<>|]+", re.IGNORECASE)
# Where the path of an address ends, plain or escaped.
PATH_END = re.compile(r"[?#;&]|%3[fFbB]|%2[36]")

# step1000, checkpoint-1000, stage1-step1000-tokens5B, global_step1000, iter_0001000; not step1.5M.
STEP = re.compile(
    r"(?:^|[-_])(?:global_?)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})(?![0-9A-Za-z.])"
)


def redacted(reference: str) -> str:
    r"""A reference for messages, tables and file names, without secrets.

    An existing path stays as it is. Anything else may be an address, however misspelled: it loses
    its user, password and query, except for parts of the query known to be harmless. Bytes that
    are not text become escapes.

    Examples
    --------
    >>> redacted("https://me:secret@example.org/model.safetensors?download=true&signature=x")
    'https://example.org/model.safetensors?download=true'
    >>> redacted(" http:/me:secret@example.org/m;sig=x"), redacted("me:secret@example.org/m")
    ('http:/example.org/m', 'example.org/m')
    >>> redacted("owner/model"), redacted("run-\udcff")
    ('owner/model', 'run-\\udcff')
    """
    exists = _exists(reference)
    reference = reference.encode("utf-8", "backslashreplace").decode()
    if exists or not set(reference) & set("@?#;&:%"):
        return reference
    stripped = reference.strip().strip("\"'`<>()[]{},").strip()
    address = ADDRESS.search(stripped)
    scheme, rest = (address["scheme"], address["rest"]) if address else ("", stripped)
    # What precedes the scheme is nothing that an address has.
    path = PATH_END.split(_without_user(rest, bool(address)), maxsplit=1)[0]
    query = urlencode(
        [
            (key, value)
            for key, value in _query(rest)
            if key in HARMLESS and not set(value) & set("@:;")
        ]
    )
    return f"{scheme}{path}{'?' * bool(query)}{query}"


def without_secrets(text: str) -> str:
    """A text with its addresses redacted.

    Examples
    --------
    >>> without_secrets("cannot reach 'ftp://me:pw@host/x?sig=y', nor b")
    "cannot reach 'ftp://host/x', nor b"
    """
    return IN_TEXT.sub(lambda found: redacted(found[0]), text)


def digest_of_query(reference: str) -> str:
    """Tells apart addresses that `redacted` shows alike; empty if nothing but a signature does.

    Examples
    --------
    >>> signed = [f"https://example.org/m?id=7&signature={n}" for n in range(2)]
    >>> digest_of_query(signed[0]) == digest_of_query(signed[1]) != ""
    True
    >>> digest_of_query("https://example.org/m?signature=7")
    ''
    """
    if _exists(reference) or not ADDRESS.match(reference.strip()):
        return ""
    private = [
        pair
        for pair in _query(reference)
        if pair[0] not in HARMLESS and not SIGNATURES.fullmatch(pair[0])
    ]
    return hashlib.blake2b(repr(private).encode(), digest_size=4).hexdigest() if private else ""


def _exists(reference: str) -> bool:
    try:
        return os.path.lexists(reference)
    except (OSError, ValueError):
        return False


def _query(reference: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(reference.partition("?")[2].partition("#")[0], keep_blank_values=True)
    except ValueError:
        return []


def _without_user(text: str, is_address: bool) -> str:
    """An address's host and path without users and passwords, wherever they stand."""
    host = re.split(r"[/\\?#]", text, maxsplit=1)[0]
    colon = host.rpartition("@")[2].partition(":")[2]
    if "@" in text and colon and not colon.isdigit() and not host.startswith("["):
        return text.rpartition("@")[2]  # a password with a slash in it
    if is_address:
        return re.sub(r"[^/\\?#]*@", "", text)
    start, slash, rest = text.partition("/")
    if re.search(r"@[\w-]+(\.[\w-]+)*(:\d+)?$", start):
        start = start.rpartition("@")[2]
    return start + slash + re.sub(r"[^/]*:[^/]*@", "", rest)


def split_address(url: str) -> SplitResult:
    """The parts of an address; `CheckpointError` if it is not one."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is not a number
    except ValueError as error:
        raise CheckpointError(f"{shortened(redacted(url))}: not a valid URL ({error})") from None
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


class HubAccess(TypedDict, total=False):
    """How to reach the hub: keywords with the hub's usual names."""

    token: str | bool | None  # True for the one that ``hf auth login`` has stored
    cache_dir: str | os.PathLike[str] | None  # where downloads are kept, if not in the usual place
    local_files_only: bool  # whether to do without the network


class HubFolder(HubAccess, total=False):
    """`HubAccess`, and where in the repository."""

    subfolder: str | None  # the folder, of a repository or a local folder, that contains the model


class HubOptions(HubFolder, total=False):
    """`HubFolder`, and which revision of the repository."""

    revision: str | None  # a branch, a tag or a commit


def check_options(function: str, options: Mapping[str, Any], names: type = HubOptions) -> None:
    """Refuse an unknown keyword with a `TypeError`, as if the function spelled out its keywords."""
    for name in options:
        if name not in names.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
