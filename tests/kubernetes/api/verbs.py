"""The effect of each method on a target."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.api import deletion, subresources
from tests.kubernetes.api.access import Access, Action
from tests.kubernetes.api.errors import ApiError, bad_request
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.objects import Objects
from tests.kubernetes.api.request import APPLY, Request, Target
from tests.kubernetes.api.selectors import field_test, label_test

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


def verb_of(request: Request, target: Target) -> str:
    if request.method == "GET":
        if request.flag("watch"):
            return "watch"
        return "get" if target.name else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method not in _VERBS:
        raise ApiError(405, "MethodNotAllowed", f"{request.method} is not allowed here")
    return _VERBS[request.method]


def action_of(request: Request, target: Target) -> Action:
    return Action(verb_of(request, target), target.kind.group, target.resource, target.namespace, target.name)


class Verbs:
    def __init__(self, objects: Objects, access: Access):
        self._objects = objects
        self._access = access

    def answer(self, request: Request, target: Target) -> tuple[int, Object]:
        """(status, object). Raises ApiError."""
        if target.subresource in ("scale", "eviction", "binding", "token"):
            return self._special(request, target)
        match verb_of(request, target):
            case "get":
                return 200, self._objects.get(target.kind, target.namespace, target.name)
            case "list":
                return 200, self.listed(request, target)
            case "create":
                return 201, self._create(request, target)
            case "update":
                return 200, self._update(request, target)
            case "patch":
                return self._patch(request, target)
            case "delete":
                options = deletion.Options.of({**_from_query(request), **request.document()})
                return 200, deletion.delete(
                    self._objects, target.kind, target.namespace, target.name, options
                )
        return 200, self._delete_all(request, target)

    def listed(self, request: Request, target: Target) -> Object:
        labels = label_test(request.query.get("labelSelector", ""))
        fields = field_test(request.query.get("fieldSelector", ""))
        with self._objects.store.lock:
            revision = self._objects.store.revision
            items = [
                one
                for one in self._objects.store.of_kind(target.kind, target.namespace)
                if labels(one) and fields(one)
            ]
        return {
            "kind": f"{target.kind.name}List",
            "apiVersion": target.kind.api_version,
            "metadata": {"resourceVersion": str(revision)},
            "items": items,
        }

    def _create(self, request: Request, target: Target) -> Object:
        document = request.document()
        if target.kind.name == "SelfSubjectAccessReview":
            return self._review(request, document)
        self._fits(document, target)
        keep = target.kind.name == "Node"
        return self._objects.create(target.kind, document, request.manager, keep_status=keep, dry=request.dry)

    def _fits(self, document: Object, target: Target) -> None:
        """Raises ApiError unless body and path agree."""
        meta = document.setdefault("metadata", {})
        named = (document.get("apiVersion", target.kind.api_version), document.get("kind", target.kind.name))
        if named != (target.kind.api_version, target.kind.name):
            raise bad_request(f"the body is {named[0]} {named[1]}, the path is of {target.kind.resource}")
        document |= {"apiVersion": target.kind.api_version, "kind": target.kind.name}
        if target.namespace and meta.setdefault("namespace", target.namespace) != target.namespace:
            raise bad_request("the namespace of the object does not match the namespace of the request")
        if target.name and meta.setdefault("name", target.name) != target.name:
            raise bad_request("the name of the object does not match the name of the request")

    def _update(self, request: Request, target: Target) -> Object:
        document = request.document()
        self._fits(document, target)
        return self._objects.update(
            target.kind, document, request.manager, subresource=target.subresource, dry=request.dry
        )

    def _patch(self, request: Request, target: Target) -> tuple[int, Object]:
        where = (target.kind, target.namespace, target.name)
        if request.content_type == APPLY:
            if not request.query.get("fieldManager"):
                raise bad_request(
                    "PatchOptions.meta.k8s.io is invalid: fieldManager: is required for apply patch"
                )
            document = request.document()
            self._fits(document, target)
            stored, new = self._objects.apply(
                *where,
                document,
                request.manager,
                force=request.flag("force"),
                subresource=target.subresource,
                dry=request.dry,
            )
            return (201 if new else 200), stored
        return 200, self._objects.patch(
            *where,
            request.body(),
            request.content_type,
            request.manager,
            subresource=target.subresource,
            dry=request.dry,
        )

    def _delete_all(self, request: Request, target: Target) -> Object:
        listed = self.listed(request, target)
        options = deletion.Options.of(request.document())
        for one in listed["items"]:
            meta = one["metadata"]
            deletion.delete(self._objects, target.kind, meta.get("namespace", ""), meta["name"], options)
        return listed

    def _special(self, request: Request, target: Target) -> tuple[int, Object]:
        space, name = target.namespace, target.name
        if target.subresource == "eviction":
            return 201, subresources.evict(self._objects, space, name, request.document())
        if target.subresource == "binding":
            return 201, subresources.bind(self._objects, space, name, request.document())
        document = self._objects.get(target.kind, space, name)
        if target.subresource == "token":
            return 201, {"kind": "TokenRequest", "status": {"token": self._access.token(space, name)}}
        verb = verb_of(request, target)
        if verb == "get":
            return 200, subresources.scale_of(target.kind, document)
        if verb == "update":
            scale = request.document()
            return 200, subresources.set_scale(self._objects, target.kind, document, scale, request.manager)
        body: Any = request.body()
        return 200, subresources.patch_scale(
            self._objects, target.kind, document, body, request.content_type, request.manager
        )

    def _review(self, request: Request, document: Object) -> Object:
        asked = document["spec"].get("resourceAttributes") or {}
        resource = asked.get("resource", "")
        if asked.get("subresource"):
            resource = f"{resource}/{asked['subresource']}"
        action = Action(
            asked.get("verb", ""),
            asked.get("group", ""),
            resource,
            asked.get("namespace", ""),
            asked.get("name", ""),
        )
        allowed = self._access.allows(self._access.account(request.token), action)
        return {**document, "metadata": {}, "status": {"allowed": allowed}}


def _from_query(request: Request) -> Object:
    found: Object = {}
    if "propagationPolicy" in request.query:
        found["propagationPolicy"] = request.query["propagationPolicy"]
    if "gracePeriodSeconds" in request.query:
        found["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
    if "dryRun" in request.query:
        found["dryRun"] = ["All"]
    return found
