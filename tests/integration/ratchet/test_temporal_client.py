"""A client with TLS and a certificate of its own (mTLS) or an API key, as the variables of Temporal's SDKs name them.

The server is Temporal's own, behind a proxy that ends TLS and asks for the client's certificate or the key.
"""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ratchet import temporal_client
from ratchet.errors import MachineError
from ratchet.types import SEARCH_ATTRIBUTES
from stack import temporal_namespace
from tests.temporal_services import TemporalServices, own_server, services

__all__ = ["own_server", "services"]


def make_certificates(directory: Path) -> None:
    """Make ca.pem, and a certificate and a key that it has signed for the server and for the client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (directory / "names").write_text("subjectAltName=DNS:temporal.example.com\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)


@contextlib.asynccontextmanager
async def tls_proxy(directory: Path, target: str) -> AsyncIterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem", directory / "server.key")
    context.load_verify_locations(directory / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()


async def test_a_client_with_a_certificate_is_served_and_one_without_is_not(
    own_server: TemporalServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path)
    await own_server.client()
    async with tls_proxy(tmp_path, own_server.settings.address) as address:
        monkeypatch.setenv("TEMPORAL_ADDRESS", address)
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(tmp_path / "ca.pem"))
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_NAME", "temporal.example.com")
        with pytest.raises(MachineError, match=address):
            await temporal_client.connect_temporal(own_server.settings, wait_seconds=0)
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(tmp_path / "client.pem"))
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_KEY_PATH", str(tmp_path / "client.key"))
        client = await temporal_client.connect_temporal(own_server.settings, wait_seconds=10)
        assert client.namespace == own_server.settings.namespace


class UsersOnly(grpc.GenericRpcHandler):
    """Passes calls on to a server if they have the key, except those of the operator service, as Temporal Cloud does.

    Messages are passed on as bytes.
    """

    def __init__(self, target: grpc.aio.Channel, key: str) -> None:
        self.target = target
        self.key = key

    def service(self, handler_call_details: Any) -> Any:
        method: str = handler_call_details.method

        async def call(request: bytes, context: Any) -> bytes:
            metadata = dict(context.invocation_metadata())
            if metadata.get("authorization") != f"Bearer {self.key}":
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")
            if "operatorservice" in method:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "Request unauthorized.")
            try:
                return bytes(await self.target.unary_unary(method)(request, timeout=60))
            except grpc.aio.AioRpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                await context.abort(error.code(), error.details())
                raise

        return grpc.unary_unary_rpc_method_handler(call)


@contextlib.asynccontextmanager
async def users_only(directory: Path, target: str, key: str) -> AsyncIterator[str]:
    certificate = ((directory / "server.key").read_bytes(), (directory / "server.pem").read_bytes())
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([UsersOnly(channel, key)])
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([certificate]))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def test_an_api_key_is_enough_for_a_server_whose_operators_are_others(
    own_server: TemporalServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing search attributes are named with what adds them; nothing asks for the operator service."""
    make_certificates(tmp_path)
    await temporal_client.connect_temporal(own_server.settings, wait_seconds=240)
    async with users_only(tmp_path, own_server.settings.address, "key-1") as address:
        monkeypatch.setenv("TEMPORAL_ADDRESS", address)
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(tmp_path / "ca.pem"))
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_NAME", "temporal.example.com")
        monkeypatch.setenv("TEMPORAL_API_KEY", "key-2")
        with pytest.raises(MachineError, match="no such key"):
            await temporal_client.connect_temporal(own_server.settings, wait_seconds=0)
        monkeypatch.setenv("TEMPORAL_API_KEY", "key-1")
        client = await temporal_client.connect_temporal(own_server.settings, wait_seconds=10)
        with pytest.raises(MachineError) as refused:
            await temporal_namespace._require_search_attributes(client)
        said = str(refused.value)
        for name, kind in SEARCH_ATTRIBUTES.items():
            assert f"--name {name} --type {kind}" in said and f"--search-attribute {name}={kind}" in said
        for name in ("TEMPORAL_ADDRESS", "TEMPORAL_API_KEY", "TEMPORAL_TLS_SERVER_CA_CERT_PATH"):
            monkeypatch.delenv(name)
        monkeypatch.delenv("TEMPORAL_TLS_SERVER_NAME")
        await own_server.client()  # of the operators, who add them
        await temporal_namespace._require_search_attributes(client)
