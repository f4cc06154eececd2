"""Access: a token is asked for outside of loopback, and other sites' names do not reach a viewer on loopback."""

from base64 import b64encode

import httpx

from store.database import Database
from tests.integration.viewer.filled_store import FilledRun
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

TOKEN = "a-long-token"


async def test_a_token_is_asked_for(database: Database, filled: FilledRun) -> None:
    app = create_viewer_app(ViewerSettings(database.url, host="0.0.0.0", token=TOKEN))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://viewer.example") as client,
    ):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic !"},
            {"cookie": "ratchet_viewer=x"},
        ):
            for path in ("/runs", f"/rollouts/{filled.solved}.json", "/static/viewer.css", "/live/runs"):
                assert (await client.get(path, headers=headers)).status_code == 401, (path, headers)
        basic = b64encode(f"ann:{TOKEN}".encode()).decode()
        for headers in ({"authorization": f"Bearer {TOKEN}"}, {"authorization": f"Basic {basic}"}):
            assert (await client.get("/runs", headers=headers)).status_code == 200
        login = await client.get(f"/rollouts?run={filled.run_id}&token={TOKEN}")
        assert (login.status_code, login.headers["location"]) == (303, f"/rollouts?run={filled.run_id}")
        assert "httponly" in login.headers["set-cookie"].lower()
        assert (await client.get("/runs")).status_code == 200, "the cookie is kept"
        assert (await client.get("/health", headers={"cookie": ""})).text == "ok"


async def test_a_login_leads_to_no_other_site(database: Database) -> None:
    app = create_viewer_app(ViewerSettings(database.url, host="0.0.0.0", token=TOKEN))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://viewer.example") as client:
        answer = await client.get(f"http://viewer.example//evil.example/?token={TOKEN}")
        assert answer.headers["location"] == "/evil.example/"


async def test_another_sites_name_does_not_reach_a_viewer_on_loopback(client: httpx.AsyncClient) -> None:
    assert (await client.get("/runs", headers={"host": "evil.example"})).status_code == 400
    assert (await client.get("/runs", headers={"host": "localhost:8420"})).status_code == 200
