"""What tests of the dispatcher share."""

from __future__ import annotations

import pytest

from router.text.tokenizer import ModelText


@pytest.fixture(scope="module")
def text(checkpoint):
    made = ModelText(checkpoint("llama"))
    yield made
    made.close()
