"""Servers that others wrote, on this machine: moto for S3, azurite for Azure, nginx for https.

Google's XML interface, which `obstore` speaks, is that of S3, so moto stands in for it, too:
gcp-storage-emulator has the JSON interface alone.
"""

from __future__ import annotations

import base64
import contextlib
import grp
import hashlib
import hmac
import os
import pwd
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

SECRET = "hunter2/Secret+Key=="
ACCOUNT = "devstoreaccount1"
# azurite's own, published with it
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


class Bucket:
    """A bucket of a running server."""

    def __init__(self, scheme: str, requests: list[str] | None = None) -> None:
        self.scheme, self.requests = scheme, requests
        self.url = f"{scheme}://bucket"

    def put(self, path: str, content: bytes) -> None:
        """Store an object."""
        import obstore

        from wqk.storage.stores import open_bucket

        store, _ = open_bucket("s3://bucket" if self.scheme == "gs" else self.url)
        obstore.put(store, path, content)

    def upload(self, folder: Path, path: str, last: str = "") -> None:
        """Store a folder's files, one of them after all others."""
        files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.name == last)
        for file in files:
            self.put(f"{path}/{file.relative_to(folder)}", file.read_bytes())


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_for(port: int, seconds: float = 60) -> None:
    """Wait until something listens."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.05)


def put_request(url: str, **headers: str) -> None:
    """Send a PUT without a body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Content-Length"] = "0"
    request = urllib.request.Request(url, method="PUT", headers=named)
    urllib.request.urlopen(request, timeout=30).close()


@contextlib.contextmanager
def moto(environment: dict[str, str]) -> Iterator[list[str]]:
    """S3, as moto has it; yields the requests that came in."""
    pytest.importorskip("moto", reason="needs moto (pip install moto[s3] flask flask-cors)")
    pytest.importorskip("flask_cors", reason="needs flask-cors")
    from moto.server import ThreadedMotoServer
    from werkzeug.serving import WSGIRequestHandler

    requests: list[str] = []

    def note(handler: Any, *_: Any) -> None:
        requests.append(f"{handler.command} {handler.path}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WSGIRequestHandler, "log_request", note)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        port = server.get_host_and_port()[1]
        environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
            "CLOUDSDK_AUTH_ACCESS_TOKEN": SECRET,
        }
        try:
            put_request(f"http://127.0.0.1:{port}/bucket")
            yield requests
        finally:
            server.stop()


def azurite_program() -> str:
    """The path of azurite; the test is skipped where it is not installed."""
    modules = os.environ.get("AZURITE", "")
    program = shutil.which("azurite-blob") or (modules if Path(modules).is_file() else "")
    if not program:
        pytest.skip("needs azurite (npm install -g azurite)")
    return program


@contextlib.contextmanager
def azurite(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Azure's blob storage, as azurite has it."""
    program, port = azurite_program(), free_port()
    options = ["--blobPort", str(port), "--location", str(folder), "--silent"]
    # Its telemetry would search for a network.
    options += ["--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        date = formatdate(usegmt=True)
        signed = (
            "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
            f"/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
        )
        digest = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
        put_request(
            f"http://127.0.0.1:{port}/{ACCOUNT}/bucket?restype=container",
            x_ms_date=date,
            x_ms_version="2021-08-06",
            Authorization=f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        )
        environment |= {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        }
        yield
    finally:
        process.terminate()
        process.wait(20)


def nginx_program() -> str:
    """The path of nginx; the test is skipped where it is not installed."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if not program:
        pytest.skip("needs nginx (Debian: apt-get install nginx-light)")
    return program


@contextlib.contextmanager
def nginx_with_tls(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Nginx over https, with a certificate of a private authority; yields address and bundle."""
    program, port = nginx_program(), free_port()
    openssl = shutil.which("openssl") or pytest.skip("needs openssl")
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    for command in (
        "req -x509 -days 2 -newkey rsa:2048 -nodes -subj /CN=authority "
        "-keyout authority.key -out authority.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key.pem -out request.pem",
        "x509 -req -days 2 -in request.pem -CA authority.pem -CAkey authority.key "
        "-extfile names -out certificate.pem",
    ):
        subprocess.run([openssl, *command.split()], cwd=folder, check=True, capture_output=True)
    # Workers of a user who may read the folder: pytest's folders are their owner's alone, and each
    # session that starts on this machine makes them so again. Others than root have no choice.
    user = f"user {pwd.getpwuid(0)[0]} {grp.getgrgid(0)[0]};\n" if os.geteuid() == 0 else ""
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"{user}daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\n"
        f"http {{ access_log {folder}/access.log;\n{temporary}"
        f"server {{ listen 127.0.0.1:{port} ssl; root {root};\n"
        f"ssl_certificate {folder}/certificate.pem; ssl_certificate_key {folder}/key.pem; }} }}\n"
    )
    process = subprocess.Popen(
        [program, "-c", str(configuration), "-e", f"{folder}/error.log"],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port)
        yield f"https://localhost:{port}", folder / "authority.pem"
    finally:
        process.terminate()
        process.wait(20)
