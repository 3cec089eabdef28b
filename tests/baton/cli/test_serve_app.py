"""The application that is sent to an external Ray cluster."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baton.cli.pools import beside, with_secrets
from baton.ray_pools.serve_app import AppArguments, build
from cluster.errors import ConfigError

OURS = {
    "proxy_location": "Disabled",
    "applications": [{"name": "baton", "import_path": "baton.ray_pools.serve_app:build"}],
}


def test_secrets_come_from_the_environment_only() -> None:
    made = with_secrets(OURS, {"BATON_SECRET": "s", "BATON_REDIS_URL": "redis://r", "OTHER": "x"})
    assert made["applications"][0]["runtime_env"] == {
        "env_vars": {"BATON_SECRET": "s", "BATON_REDIS_URL": "redis://r"}
    }
    with pytest.raises(ConfigError, match="BATON_REDIS_URL is not set"):
        with_secrets(OURS, {"BATON_SECRET": "s"})


def test_applications_of_others_stay() -> None:
    theirs = {"name": "theirs", "import_path": "theirs:app"}
    details = {
        "applications": {
            "theirs": {"deployed_app_config": theirs},
            "baton": {"deployed_app_config": {"name": "baton", "import_path": "old"}},
            "by hand": {"deployed_app_config": None},
        }
    }
    assert beside(details, OURS) == {"applications": [theirs, *OURS["applications"]]}
    assert beside(details, {"applications": []}, without="baton") == {"applications": [theirs]}
    assert beside({"applications": {}}, OURS) == OURS


def test_arguments_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"decode\.replicas"):
        build({"prefill": {"replicas": 1, "config": {}}, "decode": {"replicas": -1, "config": {}}})
    with pytest.raises(ValidationError):
        AppArguments.model_validate({"prefill": {}})
