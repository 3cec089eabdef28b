"""The three kinds of patches, and protobuf, on objects as Helm sends them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.kubernetes import samples
from tests.kubernetes.api import patches, protobuf
from tests.kubernetes.api.errors import ApiError
from tests.kubernetes.api.kinds import Kinds, Object

KINDS = Kinds()


def strategic(document: Object, patch: Object) -> Object:
    return patches.patched(KINDS.named(document["kind"]), document, patch, patches.STRATEGIC)


def container_of(document: Object) -> Object:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return dict(container)


def in_container(**change: Any) -> Object:
    return {"spec": {"template": {"spec": {"containers": [{"name": "main", **change}]}}}}


def test_a_strategic_patch_merges_lists_by_their_keys() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    before = samples.deployment("web", env=env)
    after = strategic(before, in_container(env=[{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]))
    assert [(one["name"], one["value"]) for one in container_of(after)["env"]] == [
        ("A", "1"),
        ("B", "3"),
        ("C", "4"),
    ]
    assert container_of(after)["image"] == container_of(before)["image"]
    assert container_of(before)["env"] == env


def test_a_strategic_patch_deletes_orders_and_replaces() -> None:
    before = samples.deployment(
        "web", env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], args=["x", "y"]
    )
    change = {
        "env": [{"name": "A", "$patch": "delete"}, {"name": "C", "value": "3"}],
        "$setElementOrder/env": [{"name": "C"}, {"name": "B"}],
        "args": ["z"],
        "imagePullPolicy": None,
    }
    after = container_of(strategic(before, in_container(**change)))
    assert [one["name"] for one in after["env"]] == ["C", "B"]
    assert after["args"] == ["z"]
    assert "imagePullPolicy" not in after


def test_a_merge_patch_replaces_lists_and_drops_nulls() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    after = patches.patched(KINDS.named("ConfigMap"), before, {"a": {"b": None, "c": [3]}}, patches.MERGE)
    assert after == {"a": {"c": [3]}, "d": 1}


def test_a_json_patch_tests_adds_moves_and_removes() -> None:
    operations = [
        {"op": "test", "path": "/a/0", "value": 1},
        {"op": "add", "path": "/a/1", "value": 9},
        {"op": "add", "path": "/a/-", "value": 8},
        {"op": "move", "from": "/b", "path": "/c~1d"},
        {"op": "replace", "path": "/a/0", "value": 0},
        {"op": "remove", "path": "/a/2"},
    ]
    kind = KINDS.named("ConfigMap")
    after = patches.patched(kind, {"a": [1, 2], "b": "x"}, operations, patches.JSON)
    assert after == {"a": [0, 9, 8], "c/d": "x"}
    with pytest.raises(ApiError, match="test"):
        patches.patched(kind, {"a": 1}, [{"op": "test", "path": "/a", "value": 2}], patches.JSON)
    with pytest.raises(ApiError, match="nothing is at"):
        patches.patched(kind, {"a": 1}, [{"op": "remove", "path": "/b"}], patches.JSON)


def test_custom_resources_take_no_strategic_patches() -> None:
    from tests.kubernetes.api.kinds import Kind

    kind = Kind("example.com/v1", "Thing", "things", schema={"type": "object"})
    with pytest.raises(ApiError) as refused:
        patches.patched(kind, {}, {}, patches.STRATEGIC)
    assert refused.value.code == 415


def field(number: int, content: bytes) -> bytes:
    length, size = b"", len(content)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def message(kind: str, raw: bytes) -> bytes:
    types = field(1, b"v1") + field(2, kind.encode())
    return protobuf.MAGIC + field(1, types) + field(2, raw)


def test_a_secret_in_protobuf_is_the_secret() -> None:
    meta = field(1, b"sh.helm.release.v1.one.v1") + field(11, field(1, b"owner") + field(2, b"helm"))
    release = b"\x00\xff" * 200
    raw = (
        field(1, meta) + field(2, field(1, b"release") + field(2, release)) + field(3, b"helm.sh/release.v1")
    )
    assert protobuf.decode(message("Secret", raw)) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "sh.helm.release.v1.one.v1", "labels": {"owner": "helm"}},
        "data": {"release": base64.b64encode(release).decode()},
        "type": "helm.sh/release.v1",
    }


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        message("Secret", field(1, b"x" * 20))[:-5],
        message("Pod", b""),
        message("Secret", field(9, b"x")),
    ],
)
def test_protobuf_that_is_not_understood_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        protobuf.decode(body)
