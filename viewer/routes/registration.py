"""Registration and paging of pages: every page has a JSON twin under the same address with `.json`."""

from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)
PageFunction = TypeVar("PageFunction", bound=Callable[..., Awaitable[Response]])


def page_route(router: APIRouter, path: str) -> Callable[[PageFunction], PageFunction]:
    """Register the function for `path` and for its JSON twin, which comes first because its path is more special."""

    def register(function: PageFunction) -> PageFunction:
        for one in (f"{path}.json", path):
            router.add_api_route(one, function, methods=["GET"], response_model=None)
        return function

    return register


def found(value: _T | None, what: str) -> _T:
    """Return the value. Raises a 404 that names what does not exist."""
    if value is None:
        raise HTTPException(404, f"{what} does not exist")
    return value


def next_link(request: Request, **changed: object) -> str:
    """Return this page's address with other values of some parameters; None removes one."""
    path = quote(request.scope["path"].removesuffix(".json"))
    pairs = [(name, value) for name, value in request.query_params.multi_items() if name not in changed]
    pairs += [(name, str(value)) for name, value in changed.items() if value is not None]
    return path + (f"?{urlencode(pairs)}" if pairs else "")


def read_number(kind: Callable[[str], _N], name: str, text: str) -> _N | None:
    """Return the number of a form's field; None for an empty text. Raises a 422 that names the parameter."""
    try:
        return kind(text) if text else None
    except ValueError:
        raise HTTPException(422, f"{name} is a number, not {text[:40]!r}") from None
