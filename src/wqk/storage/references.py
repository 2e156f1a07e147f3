"""References to checkpoints: secrets, training steps in names, keywords of `wqk.open`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict
from urllib.parse import SplitResult, parse_qsl, urlsplit

from wqk.errors import CheckpointError, keyword_advice, shortened

# Parts of a query that only say that its bearer may read the file; a renewed address has others.
SIGNATURES = re.compile(
    r"(x-)?(amz|goog|ms)-.*|(.*[-_])?(sig|signature|expires|expiry|policy|token|key|secret|password"
    r"|auth)([-_]?id)?|awsaccesskeyid|key-pair-id|s[a-z]|sk[a-z]+|ses",
    re.IGNORECASE,
)

# Where the path of an address ends, plain or escaped.
PATH_END = re.compile(r"[?#;&]|%3[fFbB]|%2[36]")
ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,20}:[/\\]+)(?P<rest>.*)", re.IGNORECASE | re.DOTALL
)
# Possible secrets in a sentence: an address from the slashes on, or the end of an address.
IN_TEXT = re.compile(r"(?<=:)[/\\]+[^\s'\"<>|]+")
END_IN_TEXT = re.compile(rf"({PATH_END.pattern})[^\s'\"<>|=?#;&%]*=[^\s'\"<>|)]*")
HOST = re.compile(r"(\[[0-9a-f:.%]*\]|[^:\[\]]*)(:[0-9]*)?", re.IGNORECASE)
AT = r"(@|%40)"

# step1000, checkpoint-1000, stage1-step1000-tokens5B, global_step1000, iter_0001000; not step1.5M.
STEP = re.compile(
    r"(?:^|[-_])(?:global_?)?(?:step|checkpoint|iter)[-_]?([0-9]{1,18})(?![0-9A-Za-z.])"
)


class Reference(NamedTuple):
    """A reference in two parts."""

    identity: str  # names the checkpoint in messages, tables and file names
    private: str = ""  # the rest of an address: version and permission


def parsed(reference: str) -> Reference:
    r"""Return a reference without secrets, and the part that was cut from the end.

    An existing path stays as it is. Any other text may be a misspelled address: users, passwords
    and all text after the path are removed. Bytes that are not text become escapes.

    Examples
    --------
    >>> parsed("https://me:secret@example.org/model.safetensors?versionId=3")
    Reference(identity='https://example.org/model.safetensors', private='?versionId=3')
    >>> parsed("owner/model"), parsed("run-\udcff").identity
    (Reference(identity='owner/model', private=''), 'run-\\udcff')
    """
    try:
        exists = os.path.lexists(reference)
    except (OSError, ValueError):
        exists = False
    reference = reference.encode("utf-8", "backslashreplace").decode()
    if exists or not set(reference) & set("@?#;&:%"):
        return Reference(reference)
    stripped = reference.strip().strip("\"'`<>()[]{},").strip()
    # The text before the scheme is not part of an address.
    address = ADDRESS.search(stripped)
    scheme, location = (address["scheme"], address["rest"]) if address else ("", stripped)
    named = _without_users(location, bool(address))
    path = PATH_END.split(named, maxsplit=1)[0]
    return Reference(scheme + path, named[len(path) :])


def redacted(reference: str) -> str:
    """Return a reference for messages, tables and file names: its `Reference.identity`.

    Examples
    --------
    >>> redacted(" http:/me:secret@example.org/m;sig=x"), redacted("me:secret@example.org/m")
    ('http:/example.org/m', 'example.org/m')
    """
    return parsed(reference).identity


def without_secrets(text: str) -> str:
    """Return a text with its addresses redacted and the queries of addresses removed.

    Examples
    --------
    >>> without_secrets("cannot reach 'ftp://me:pw@host/x?sig=y', nor owner/b?sig=y")
    "cannot reach 'ftp://host/x', nor owner/b"
    """
    text = IN_TEXT.sub(lambda found: redacted(f"x:{found[0]}").removeprefix("x:"), text)
    # The sentence's own punctuation stays.
    return END_IN_TEXT.sub(lambda found: found[0][len(found[0].rstrip(":;,.")) :], text)


def digest_of_query(reference: str) -> str:
    """Return a digest that distinguishes addresses with equal `redacted` forms.

    The digest is empty if the addresses differ in nothing but a signature.

    Examples
    --------
    >>> signed = [f"https://example.org/m?id=7&signature={n}" for n in range(2)]
    >>> digest_of_query(signed[0]) == digest_of_query(signed[1]) != ""
    True
    >>> digest_of_query("https://example.org/m?signature=7")
    ''
    """
    query = parsed(reference).private.partition("?")[2].partition("#")[0]
    try:
        pairs = parse_qsl(query, keep_blank_values=True)
    except ValueError:
        return ""
    private = [pair for pair in pairs if not SIGNATURES.fullmatch(pair[0])]
    if not private:
        return ""
    return hashlib.blake2b(repr(private).encode(), digest_size=4).hexdigest()


def _without_users(text: str, is_address: bool) -> str:
    """Return an address without users and passwords; ``…`` for an unclear host."""
    if not is_address:
        start, slash, end = text.partition("/")
        if slash and re.search(rf"{AT}[\w-]+(\.[\w-]+)*(:\d+)?$", start):
            start = re.split(AT, start)[-1]
        parts = end.split("/")
        for number, part in enumerate(parts):
            if ":" in part:
                parts[number] = re.split(AT, part)[-1]
        return start + slash + "/".join(parts)
    authority = re.split(r"[/\\?#]", text, maxsplit=1)[0]
    remainder = text[len(authority) :]
    host = re.split(AT, authority)[-1]
    # A password may contain any character, also a character that ends an authority.
    cut_short = authority == host and re.match(r"[?#]", remainder) and re.search(AT, remainder)
    if cut_short or not HOST.fullmatch(host):
        return "…"
    return host + re.sub(r"[^/\\?#]+", lambda part: re.split(AT, part[0])[-1], remainder)


def is_url(ref: str) -> bool:
    """Return whether a reference is the address of a web server or of a bucket.

    Examples
    --------
    >>> is_url("https://example.org/model.safetensors"), is_url("s3://a/b"), is_url("owner/model")
    (True, True, False)
    """
    return ref.lower().startswith(("https://", "http://", *(f"{s}://" for s in BUCKET_SCHEMES)))


# Amazon's S3 and what speaks its protocol, Google Cloud Storage, Azure's blob storage.
BUCKET_SCHEMES = ("s3", "gs", "az")


def is_bucket(address: str) -> bool:
    """Return whether an address names a bucket or an object in a bucket.

    Examples
    --------
    >>> is_bucket("s3://bucket/run"), is_bucket("https://example.org/run")
    (True, False)
    """
    scheme, separator, _ = address.partition("://")
    return bool(separator) and scheme.lower() in BUCKET_SCHEMES


def split_address(url: str) -> SplitResult:
    """Return the parts of an address; `CheckpointError` if the address is invalid."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is not a number
    except ValueError:  # the message may quote a password
        raise CheckpointError(f"{shortened(redacted(url))}: not a valid URL") from None
    return parts


def step_in(name: str | None) -> int | None:
    """Return the training step that a revision or a folder is named after.

    Examples
    --------
    >>> [step_in(name) for name in ("step1000", "checkpoint-20", "stage1-step150-tokens1B", "v2.0")]
    [1000, 20, 150, None]
    """
    match = STEP.search(name or "")
    return int(match[1]) if match else None


class HubAccess(TypedDict, total=False):
    """Access to the Hub: keywords with the Hub's usual names."""

    token: str | bool | None  # True for the token stored by ``hf auth login``
    cache_dir: str | os.PathLike[str] | None  # where downloads are kept, if not in the usual place
    local_files_only: bool  # whether to do without the network


class HubFolder(HubAccess, total=False):
    """`HubAccess`, and a folder of the repository."""

    subfolder: str | None  # the folder, of a repository or a local folder, that contains the model


class HubOptions(HubFolder, total=False):
    """`HubFolder`, a revision of the repository, and the base model of an adapter."""

    revision: str | None  # a branch, a tag or a commit
    base: str | os.PathLike[str] | None  # base model of an adapter, if not the named one


def check_options(
    function: str,
    options: Mapping[str, Any],
    names: type = HubOptions,
    known: Sequence[str] = (),
) -> None:
    """Refuse an unknown keyword with a `TypeError`, as if the function spelled out its keywords."""
    for name in options:
        if name not in names.__annotations__:
            advice = keyword_advice(name, [*known, *names.__annotations__])
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")
