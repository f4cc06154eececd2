"""Every part of RATCHET_DATABASE_URL that is wrong is named, and what a server can be asked with is accepted."""

from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from store.database import Database, async_url

SERVER = "postgresql://u:secret@127.0.0.1"


@pytest.fixture(autouse=True)
def no_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        (f"{SERVER}:99999/r", "the port 99999 is no number from 1 to 65535"),
        (f"{SERVER}:0/r", "the port 0 is no number"),
        (f"{SERVER}:abc/r", "the port 'abc' is no number"),
        ("postgresql://u:secret@h:1:2/r", "the port '1:2' is no number"),
        (f"{SERVER}/r?host=a:1&host=b:99999", "the port 99999"),
        (f"postgresql://u:secret@{'a' * 70}.example/r", f"'{'a' * 70}.example' is no name of a host"),
        ("postgresql://u:secret@a..b/r", "'a..b' is no name of a host"),
        (f"{SERVER}/r?sslmode=bogus", "sslmode is 'bogus' and not one of disable, allow, prefer, require"),
        (f"{SERVER}/r?sslmode=require&sslrootcert=/ca.pem", "no option 'sslrootcert', only .*named by PGSSLROOTCERT"),
        (f"{SERVER}/r?application_name=x", "there is no option 'application_name'"),
        (f"{SERVER}/r?sslmode=verify-full", r"\.postgresql/root\.crt does not exist: set PGSSLROOTCERT"),
        (f"{SERVER}/r?prepared_statement_cache_size=x", "prepared_statement_cache_size is 'x' and no number"),
        (f"{SERVER}/r?target_session_attrs=x", "target_session_attrs is 'x' and not one of any, primary"),
        (f"{SERVER}/r\udcff", "bytes that are no UTF-8"),
    ],
)
async def test_a_wrong_part_is_named(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^RATCHET_DATABASE_URL: .*{named}") as refused:
        Database(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["PGSSLROOTCERT", "PGSSLCERT"])
def test_a_certificate_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("PGSSLROOTCERT", str(tmp_path))
    monkeypatch.setenv(name, "/nowhere.pem")
    (tmp_path / "ca.pem").write_text("")
    if name != "PGSSLROOTCERT":
        monkeypatch.setenv("PGSSLROOTCERT", str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match=rf"{name} names /nowhere\.pem, which is no file"):
        async_url(f"{SERVER}/r?sslmode=verify-full")
    async_url(f"{SERVER}/r")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///r",
        "postgresql://u:p%40ss@127.0.0.1:5432/r?sslmode=require",
        "postgresql://u:p/w@s@127.0.0.1/r",
        "postgresql://u@[::1]:5432/r",
        "postgresql://u@bücher.example/r",
        "postgresql://u@/r?host=/var/run/postgresql",
        f"{SERVER}/r?host=a:1&host=b:2&target_session_attrs=read-write&prepared_statement_cache_size=0",
    ],
)
def test_a_usable_address_is_accepted(url: str) -> None:
    assert async_url(url).startswith("postgresql+asyncpg://")
