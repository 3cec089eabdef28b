"""Jobs: pods until enough have succeeded, or too many failed."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.objects import timestamp
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client


class Jobs:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for owner in self._client.all("Job"):
            mine = pods.owned(self._client.all("Pod", owner["metadata"]["namespace"]), owner)
            if pods.is_going(owner):
                continue
            if _is_finished(owner):
                self._clean(owner)
            else:
                self._advance(owner, mine)

    def _advance(self, owner: Object, mine: list[Object]) -> None:
        spec = owner["spec"]
        done = len([pod for pod in mine if pods.phase(pod) == "Succeeded"])
        failed = len([pod for pod in mine if pods.phase(pod) == "Failed"])
        active = [pod for pod in mine if not pods.is_over(pod)]
        old = owner.get("status") or {}
        status: Object = {
            "startTime": old.get("startTime") or timestamp(),
            "conditions": old.get("conditions") or [],
        }
        status |= {"active": len(active), "ready": len([pod for pod in active if pods.is_ready(pod)])}
        status |= {"succeeded": done, "failed": failed}
        late = _age_seconds(status["startTime"]) > spec.get("activeDeadlineSeconds", float("inf"))
        if done >= spec["completions"]:
            status = pods.with_condition(status, "SuccessCriteriaMet", True, "CompletionsReached")
            status = pods.with_condition(status, "Complete", True, "CompletionsReached")
            status["completionTime"] = timestamp()
        elif failed > spec["backoffLimit"] or late:
            reason = "DeadlineExceeded" if late else "BackoffLimitExceeded"
            status = pods.with_condition(status, "FailureTarget", True, reason)
            status = pods.with_condition(status, "Failed", True, reason)
            for pod in active:
                self._client.delete(pod)
        elif not spec["suspend"]:
            for _ in range(min(spec["parallelism"], spec["completions"] - done) - len(active)):
                self._client.create(pods.made_from(spec["template"], owner, f"{owner['metadata']['name']}-"))
        self._client.set_status(owner, status)

    def _clean(self, owner: Object) -> None:
        seconds = owner["spec"].get("ttlSecondsAfterFinished")
        ended = (
            owner["status"].get("completionTime") or owner["status"]["conditions"][-1]["lastTransitionTime"]
        )
        if seconds is not None and _age_seconds(ended) >= seconds:
            self._client.delete(owner)


def _is_finished(owner: Object) -> bool:
    return pods.is_true(owner, "Complete") or pods.is_true(owner, "Failed")


def _age_seconds(moment: str) -> float:
    began = datetime.strptime(moment, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return (datetime.now(UTC) - began).total_seconds()
