"""The control plane of a service with E2B's API, by the SDK's own HTTP client.

The SDK's own calls lose the status of an answer that is not JSON, refuse rows that lack a field, and know the newest
routes only, which most self-hosted services do not have yet.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from ratchet.errors import RatchetError, SandboxBusyError, SandboxGoneError, SandboxRefusesError, UnknownImageError
from sandbox_gateway.settings import GATEWAY_MARK, SILENT_HOSTS
from sandboxes.e2b_errors import CONTENT_REFUSED, error_of_status, translated_errors

_PAGE_SIZE = 100
_PREFIXES = ("/v2", "")
"""Of the routes that create and connect: of the SDK's version, then of services that are older than it."""
_NO_ROUTE = re.compile(r"no matching (operation|route)|method (is )?not allowed", re.IGNORECASE)
_IMAGE = re.compile(r"template|image|alias", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """`body`: the JSON that was sent, None if it was empty or something else."""

    call: str
    status: int
    body: Any
    words: str
    headers: Mapping[str, str]

    @property
    def is_of_service(self) -> bool:
        """False for the page of a proxy on the way to the service."""
        return isinstance(self.body, dict)

    def required(self, subject: str, final: Container[int] = ()) -> Any:
        """Return the body, None if empty. Raises as `error_of_status`; only the service can refuse for good."""
        words = f"{subject}: {self.call} answers {self.status}: {self.words}"
        if not 200 <= self.status < 300:
            raise error_of_status(self.status, words, final if self.is_of_service else (), UnknownImageError)
        if self.body is None and self.words:
            raise SandboxRefusesError(f"{words} (which is no JSON)")
        return self.body

    def has_no_route(self, image: str) -> bool:
        """Return whether the service does not know the call, as opposed to the image that a box is created with."""
        if self.status == 400:
            return bool(_NO_ROUTE.search(self.words))
        is_about_image = self.is_of_service and (_IMAGE.search(self.words) or image in self.words)
        return self.status in (404, 405) and not is_about_image


class ControlPlane:
    """`options`: those of the SDK's connection, which reads what they leave out from the environment."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._prefixes: tuple[str, ...] = _PREFIXES
        self._is_own_gateway: bool | None = None

    @property
    def url(self) -> str:
        from e2b.connection_config import ConnectionConfig

        return ConnectionConfig(**self._options).api_url

    async def send(self, method: str, path: str, subject: str, **request: Any) -> Answer:
        """Make one call. Raises SandboxBusyError if nothing answers."""
        from e2b.api.client_async import get_api_client
        from e2b.connection_config import ConnectionConfig

        with translated_errors(subject):
            client = get_api_client(ConnectionConfig(**self._options)).get_async_httpx_client()
            reply = await client.request(method, path, **request)
        try:
            body = reply.json() if reply.content else None
        except ValueError:
            body = None
        words = body.get("message") if isinstance(body, dict) else None
        text = str(words or reply.content[:200].decode(errors="replace"))
        call = f"{method} {self.url}{path}"
        return Answer(call, reply.status_code, body, text, reply.headers)

    async def is_own_gateway(self) -> bool:
        """Return whether the service is a gateway of this program, wherever it runs."""
        if self._is_own_gateway is not None:
            return self._is_own_gateway
        answer = await self.send("GET", "/health", "the sandbox service")
        found = GATEWAY_MARK in answer.headers
        if answer.status < 500:  # else a proxy may have answered for it
            self._is_own_gateway = found
        return found

    async def create(self, body: Mapping[str, Any], key: str, image: str) -> dict[str, Any]:
        """Create a box, or return the one that an earlier call with this key has made, if the service honours keys."""
        subject = f"the new box of {image}"
        answers = []
        for prefix in self._prefixes:
            sent = {**body} if prefix else {**body, "secure": True}  # without it older services leave a box open
            headers = {"Idempotency-Key": key}
            answer = await self.send("POST", f"{prefix}/sandboxes", subject, json=sent, headers=headers)
            if not answer.has_no_route(image):
                row = answer.required(subject, CONTENT_REFUSED)
                self._prefixes = (prefix,)
                return self._row(row, answer.call)
            answers.append(f"{answer.call} answers {answer.status}: {answer.words}")
        raise SandboxRefusesError(
            f"{self.url} has no route that creates a box ({'; '.join(answers)}): set E2B_API_URL or E2B_DOMAIN to a "
            "service with E2B's API"
        )

    async def connect(self, box_id: str, seconds: int) -> dict[str, Any]:
        """Resume a paused box, and return how to reach it. Some services set its end to so many seconds from now."""
        answer = None
        for prefix in _PREFIXES:
            path = f"{prefix}/sandboxes/{quote(box_id, safe='')}/connect"
            answer = await self.send("POST", path, box_id, json={"timeout": seconds})
            if not answer.has_no_route(box_id):
                break
        assert answer is not None
        return self._row(answer.required(box_id), answer.call)

    async def ask(self, method: str, box_id: str, path: str = "", **request: Any) -> Any:
        """Make a call about one box. Raises SandboxGoneError if the service does not know the box. A 404 that does not
        have the form of the service's answers counts only if its list of boxes lacks the box, too."""
        answer = await self.send(method, f"/sandboxes/{quote(box_id, safe='')}{path}", box_id, **request)
        if answer.status == 404 and (answer.is_of_service or not await self._lists(box_id)):
            raise SandboxGoneError(f"{box_id}: {answer.words}")
        return answer.required(box_id)

    async def row(self, box_id: str) -> dict[str, Any]:
        """Return what the service tells of a live box."""
        call = f"GET {self.url}/sandboxes/{box_id}"
        found = self._row(await self.ask("GET", box_id), call)
        name = str(found["sandboxID"])
        if name.partition("-")[0] != box_id.partition("-")[0]:  # E2B appends its machine to a box's name
            raise SandboxBusyError(f"the service was asked about box {box_id} and answers about box {name}")
        return found

    async def rows(self, metadata: Mapping[str, str], *, whole: bool = False) -> list[dict[str, Any]]:
        """Return the rows that the service lists for these metadata entries, which may be of other boxes, too. Raises
        SandboxBusyError if the list must be `whole`, and lacks the boxes of a host that does not answer."""
        # Quoted twice, as the SDK does.
        query = urlencode({quote(name): quote(value) for name, value in metadata.items()})
        parameters = {"limit": str(_PAGE_SIZE), **({"metadata": query} if query else {})}
        found: list[dict[str, Any]] = []
        tokens = {""}
        while True:
            answer = await self.send("GET", "/v2/sandboxes", "the list of boxes", params=parameters)
            rows = answer.required("the list of boxes")
            if whole and (silent := answer.headers.get(SILENT_HOSTS)):
                raise SandboxBusyError(f"the list of boxes lacks those of {silent}, which does not answer")
            if not isinstance(rows, list):
                raise SandboxRefusesError(f"{answer.call} answers {answer.words}, which is no list of boxes")
            found += [self._row(row, answer.call) for row in rows]
            token = answer.headers.get("x-next-token", "")
            if not token:
                return found
            if token in tokens:
                raise SandboxBusyError(f"the list of boxes comes back to its page {token!r} for ever")
            tokens.add(token)
            parameters["nextToken"] = token

    async def _lists(self, box_id: str) -> bool:
        """Return whether the box is listed; True if the list cannot be had."""
        try:
            rows = await self.rows({}, whole=True)
            return any(row["sandboxID"].partition("-")[0] == box_id.partition("-")[0] for row in rows)
        except RatchetError:
            return True

    def _row(self, row: Any, call: str) -> dict[str, Any]:
        if not isinstance(row, dict) or not isinstance(row.get("sandboxID"), str):
            raise self.lacks("sandboxID", call)
        return row

    def lacks(self, field: str, call: str) -> SandboxRefusesError:
        """Return the error of an answer without a field that is needed."""
        return SandboxRefusesError(f"the answer of {call} lacks `{field}`, which E2B's API requires")
