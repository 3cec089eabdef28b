"""The page's files: all referenced ones exist, none comes from elsewhere, and a policy forbids the rest."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import httpx
import pytest

from router.frontends.http.ui.pages import HEADERS, PATHS, read_pages
from tests.harness.router import run_router

STATIC = resources.files("router.frontends.http.ui").joinpath("static")
TEXTS = {file.name: file.read_text() for file in STATIC.iterdir()}


def test_every_file_is_served_and_every_path_has_its_file() -> None:
    served = {path.rpartition("/")[2] for path in PATHS - {"/ui"}} | {"index.html"}
    assert served == set(TEXTS)
    assert set(read_pages()) == PATHS


def test_every_referenced_file_exists() -> None:
    named = set(re.findall(r'(?:src|href)="ui/([^"]+)"', TEXTS["index.html"]))
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named | {"index.html"} == set(TEXTS)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_is_loaded_from_elsewhere_and_text_never_becomes_markup(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/", "")
    assert not re.search(r"https?://|//cdn|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=", text)


def test_the_policy_allows_this_router_only() -> None:
    policy = dict(part.partition(" ")[::2] for part in HEADERS["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_the_page_is_served_and_not_sent_twice(
    checkpoint: Any, redis_url: str, namespace: str, tmp_path: Any
) -> None:
    config = {"model": str(checkpoint("llama")), "redis_url": redis_url, "namespace": namespace}
    with run_router(tmp_path / "on", config) as router, httpx.Client(base_url=router.http) as client:
        for path in PATHS:
            answer = client.get(path)
            assert answer.status_code == 200
            assert HEADERS.items() <= dict(answer.headers).items()
            again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.get("/ui").headers["content-type"].startswith("text/html")
        assert client.get("/ui/app.js").headers["content-type"].startswith("text/javascript")
        assert client.get("/ui/%2e%2e/pages.py").status_code == 404


def test_it_can_be_switched_off(checkpoint: Any, redis_url: str, namespace: str, tmp_path: Any) -> None:
    config = {"model": str(checkpoint("llama")), "redis_url": redis_url, "namespace": namespace, "ui": False}
    with run_router(tmp_path, config) as router:
        for path in ("/ui", "/ui/app.js"):
            assert httpx.get(router.http + path).status_code == 404
