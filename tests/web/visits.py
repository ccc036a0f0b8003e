"""A browser's requests to the application, without a server: logged in, and with the token of its forms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.testclient import TestClient

from gpuherd.web.access import FORM_FIELD, Rules
from gpuherd.web.app import create_app
from gpuherd.web.hosts import Hosts

ORIGIN = "http://127.0.0.1:8642"


class Visitor:
    """Somebody whose browser has opened the link."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        assert client.get("/?token=t0ken").status_code == 200

    def get(self, path: str, status: int = 200) -> str:
        """The text of a page."""
        response = self.client.get(path)
        assert response.status_code == status, response.text
        return response.text

    def figures(self, path: str) -> str:
        """The text of a page that may fetch its figures when it is open: with them."""
        response = self.client.get(path, headers={"hx-request": "true"})
        assert response.status_code == 200, response.text
        return response.text

    def post(self, path: str, fields: dict[str, str], status: int = 200) -> str:
        """Sends a form of the page at this path; the text of the page that follows."""
        found = re.search(f'name="{FORM_FIELD}" value="([0-9a-f]+)"', self.get("/machines"))
        assert found is not None
        form = {FORM_FIELD: found[1], **fields}
        response = self.client.post(path, data=form, headers={"origin": ORIGIN})
        assert response.status_code == status, response.text
        return response.text


@contextmanager
def visiting(hosts: Sequence[str] = ()) -> Iterator[Visitor]:
    """A visitor of an application of this process's user."""
    rules = Rules(frozenset({"127.0.0.1"}), token="t0ken", port=8642)
    app = create_app(rules, user="alice", machine="gpu-1", hosts=Hosts(hosts))
    with TestClient(app, base_url=ORIGIN) as client:
        yield Visitor(client)
