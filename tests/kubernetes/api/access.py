"""Access control: a service account's token is held to its Roles, every other token may do everything."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tests.kubernetes.api.errors import ApiError
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.objects import Objects


@dataclass(frozen=True)
class Account:
    namespace: str
    name: str

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"


@dataclass(frozen=True)
class Action:
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


class Access:
    def __init__(self, objects: Objects):
        self._objects = objects
        self._tokens: dict[str, Account] = {}
        self._denied: set[Action] = set()

    def token(self, namespace: str, account: str) -> str:
        """A new token of a service account."""
        made = f"{namespace}.{account}.{secrets.token_hex(16)}"
        self._tokens[made] = Account(namespace, account)
        return made

    def deny(self, verb: str, resource: str, group: str = "") -> None:
        """Take this right from every user, so that a test sees what a user without it sees."""
        self._denied.add(Action(verb, group, resource))

    def account(self, token: str) -> Account | None:
        return self._tokens.get(token)

    def check(self, token: str, action: Action) -> None:
        """Raises ApiError (Forbidden)."""
        account = self._tokens.get(token)
        if self.allows(account, action):
            return
        user = account.user if account else "tester"
        where = f' in the namespace "{action.namespace}"' if action.namespace else " at the cluster scope"
        raise ApiError(
            403,
            "Forbidden",
            f'{action.resource} is forbidden: User "{user}" cannot {action.verb} resource "{action.resource}" in '
            f'API group "{action.group}"{where}',
        )

    def allows(self, account: Account | None, action: Action) -> bool:
        if Action(action.verb, action.group, action.resource) in self._denied:
            return False
        if account is None or action.group == "authorization.k8s.io":
            return True
        return any(_matches(rule, action) for rule in self._rules(account, action.namespace))

    def _rules(self, account: Account, namespace: str) -> list[Object]:
        store, kinds = self._objects.store, self._objects.kinds
        bindings = list(store.of_kind(kinds.named("ClusterRoleBinding")))
        if namespace:
            bindings += store.of_kind(kinds.named("RoleBinding"), namespace)
        rules: list[Object] = []
        for binding in bindings:
            if any(_is_subject(subject, account, binding) for subject in binding.get("subjects") or ()):
                role = binding["roleRef"]
                key = self._objects.key(
                    kinds.named(role["kind"]), binding["metadata"].get("namespace", ""), role["name"]
                )
                rules += (store.find(key) or {}).get("rules") or []
        return rules


def _is_subject(subject: Object, account: Account, binding: Object) -> bool:
    space = subject.get("namespace", binding["metadata"].get("namespace", ""))
    return subject["kind"] == "ServiceAccount" and (space, subject["name"]) == (
        account.namespace,
        account.name,
    )


def _matches(rule: Object, action: Action) -> bool:
    names = rule.get("resourceNames")
    return (
        bool({"*", action.verb} & set(rule["verbs"]))
        and bool({"*", action.group} & set(rule.get("apiGroups") or ()))
        and bool({"*", action.resource} & set(rule.get("resources") or ()))
        and (not names or action.name in names)
    )
