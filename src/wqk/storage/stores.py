"""Stores behind addresses: a web server, or a bucket of S3, Google Cloud Storage or Azure.

`obstore` reads from all these stores. Credentials, endpoints and regions come from the environment
variables of the vendors' own tools (``AWS_…``, ``GOOGLE_…``, ``AZURE_…``). Proxies and the
certificates of authorities come from the usual variables (``HTTPS_PROXY``, ``SSL_CERT_FILE``, …).
These values are never stored or shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlunsplit

from wqk.errors import CheckpointError, HubError
from wqk.storage import patience
from wqk.storage.references import redacted, split_address

# Scheme of a bucket → the variable that holds the address of another server than the vendor's.
BUCKETS = {
    "s3": "AWS_ENDPOINT_URL",
    "gs": "GOOGLE_BASE_URL",
    "az": "AZURE_STORAGE_ENDPOINT",
}
# Bundles of certificates, as OpenSSL, Requests and curl find them.
BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class Location(NamedTuple):
    """Address of an object in a store; the object may not exist."""

    store: Any  # one of obstore's
    path: str  # within the store; empty where the store's own address is the object's
    address: str  # without secrets


def endpoint_of(scheme: str) -> str:
    """Address of the server that a user set for a scheme; empty for the vendor's own server."""
    endpoint = os.environ.get(BUCKETS[scheme], "")
    if scheme == "s3":
        return (
            os.environ.get("AWS_ENDPOINT_URL_S3") or endpoint or os.environ.get("AWS_ENDPOINT", "")
        )
    if scheme == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() == "true":
        return endpoint or "http://127.0.0.1:10000"
    return endpoint


def open_bucket(address: str) -> tuple[Any, str]:
    """Open the store of a bucket's address.

    Returns
    -------
    store
        The store of `obstore` for the whole bucket.
    prefix
        The path of the address within the bucket; empty for the bucket itself.

    Raises
    ------
    CheckpointError
        The address names no bucket, or a setting of the store is missing.
    """
    from obstore.store import from_url

    parts = split_address(address)
    scheme = parts.scheme.lower()
    if not parts.netloc:
        raise CheckpointError(f"names no bucket; expected {scheme}://BUCKET/FOLDER")
    settings: Any = {}
    endpoint = endpoint_of(scheme)
    if scheme == "gs" and endpoint:
        settings["base_url"] = endpoint
    elif endpoint and os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() != "true":
        settings["endpoint"] = endpoint
    if scheme == "gs" and os.environ.get("GOOGLE_SKIP_SIGNATURE", "").lower() == "true":
        settings["skip_signature"] = True  # which the library reads for the other two alone
    if scheme == "gs" and os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"):  # as gcloud itself does
        settings["bearer_token"] = os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"]
    if scheme == "s3" and not os.environ.get("AWS_ACCESS_KEY_ID"):
        settings |= profile_credentials()
    try:
        store = from_url(
            urlunsplit((scheme, parts.netloc, "", "", "")),
            client_options=client_options(plain=endpoint.startswith("http://")),
            retry_config=one_attempt(),
            **settings,
        )
    except Exception as error:  # of the library's own classes, with its internals in the message
        raise CheckpointError(setting_problem(scheme, str(error))) from None
    return store, unquote(parts.path).strip("/")


def profile_credentials() -> dict[str, Any]:
    """Credentials of the profile that ``aws configure`` has written, if boto3 is installed."""
    if not (os.environ.get("AWS_PROFILE") or Path("~/.aws").expanduser().is_dir()):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return {"credential_provider": Boto3CredentialProvider()}
    except Exception:  # no boto3, or no credentials in the profile
        return {}


def setting_problem(scheme: str, message: str) -> str:
    """Sentence about the setting that prevents a store from being opened."""
    if "Account must be specified" in message:
        return "names no storage account; set AZURE_STORAGE_ACCOUNT_NAME"
    return f"{scheme}:// cannot be opened with these settings; check {BUCKETS[scheme]} and others"


def web_location(address: str, headers: Mapping[str, str] | None = None) -> Location:
    """Return the object under a web address; ``headers`` are sent to the address's own host.

    Redirects from https to http are refused, and credentials stay with their host.

    Raises
    ------
    CheckpointError
        The address is not a valid web address.
    """
    from obstore.store import HTTPStore

    parts: SplitResult = split_address(address)
    if parts.username is not None or parts.password is not None:
        raise CheckpointError("an address with a user and a password is not read; use a token")
    options = client_options(plain=parts.scheme.lower() == "http")
    if headers:
        options["default_headers"] = dict(headers)
    try:
        store = HTTPStore(address, client_options=options, retry_config=one_attempt())
    except Exception:  # the message quotes the address
        raise CheckpointError(f"{redacted(address)} is no address") from None
    return Location(store, "", redacted(address))


def client_options(plain: bool) -> Any:
    """Options of every connection; ``plain`` allows connections without TLS."""
    from datetime import timedelta

    options: dict[str, Any] = {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=patience.PATIENCE.connect),
        "read_timeout": timedelta(seconds=patience.PATIENCE.silence),
        # The rate of a body is watched piece by piece, so the whole request has all day.
        "timeout": timedelta(days=1),
    }
    bundle = next((path for name in BUNDLES if (path := os.environ.get(name))), None)
    if bundle:
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise HubError(
                f"{bundle}: certificates cannot be read ({error.strerror}); check SSL_CERT_FILE"
            ) from None
    return options


def one_attempt() -> Any:
    """Return the options that leave repetition to `wqk.storage.transfers`."""
    from datetime import timedelta

    return {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
