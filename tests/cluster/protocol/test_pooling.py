"""What a checkpoint's files say of its embeddings; what is not computed is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ModelError
from cluster.protocol.pooling import Embedding, Pooling

CONFIG = {"hidden_size": 8}


def files(
    directory: Path, pooling: dict[str, Any], *kinds: str, path: str = "1_Pooling", settings: Any = None
) -> Path:
    modules = [
        {"path": path if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"}
        for kind in kinds or ("Transformer", "Pooling", "Normalize")
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if settings is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps(settings))
    return directory


OLDER = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
NEWER = {"embedding_dimension": 8, "pooling_mode": "mean"}


def test_older_and_newer_files_are_read(tmp_path):
    assert Embedding.read(tmp_path, CONFIG) is None
    found = Embedding.read(files(tmp_path, OLDER, settings={"max_seq_length": 40}), CONFIG)
    assert found == Embedding(Pooling.LAST_TOKEN, 8, normalised=True, max_tokens=40)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(NEWER))
    found = Embedding.read(tmp_path, {**CONFIG, "matryoshka_dimensions": [4, 2]})
    assert found is not None and (found.pooling, found.shorter) == (Pooling.MEAN, (2, 4, 8))


@pytest.mark.parametrize(
    ("pooling", "more", "field"),
    [
        ({**OLDER, "pooling_mode_cls_token": True}, {}, "pooling_mode"),
        ({**NEWER, "pooling_mode": "weightedmean"}, {}, "pooling_mode"),
        ({**NEWER, "embedding_dimension": 9}, {}, "word_embedding_dimension"),
        (NEWER, {"path": "../x"}, "modules.json"),
        (NEWER, {"settings": {"do_lower_case": True}}, "do_lower_case"),
        (NEWER, {"settings": {"max_seq_length": 0}}, "max_seq_length"),
    ],
)
def test_what_is_not_computed_is_refused(pooling, more, field, tmp_path):
    with pytest.raises(ModelError) as raised:
        Embedding.read(files(tmp_path, pooling, **more), CONFIG)
    assert raised.value.field == field


def test_further_modules_are_refused(tmp_path):
    with pytest.raises(ModelError, match="Dense"):
        Embedding.read(files(tmp_path, NEWER, "Transformer", "Pooling", "Dense"), CONFIG)
