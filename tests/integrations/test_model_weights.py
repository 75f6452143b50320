"""Weights alone, in the format of Hugging Face, in a store that needs options."""

from __future__ import annotations

import torch
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint.integrations.shared.model_weights import load_weights, save_weights


def test_weights_are_saved_and_loaded_with_the_options_of_the_store(s3: S3Service, s3_prefix: str) -> None:
    path = f"s3://{s3.bucket}/{s3_prefix}/step-1"
    weights = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
    for _ in range(2):  # the second one replaces the first
        save_weights(path, weights, options=bcp.SaveOptions(), storage_options=s3.options)
    loaded = {"layer.weight": torch.zeros(2, 3)}
    load_weights(path, loaded, options=bcp.LoadOptions(), storage_options=s3.options)
    assert torch.equal(loaded["layer.weight"], weights["layer.weight"])
    assert list(bcp.open(path, storage_options=s3.options)) == ["layer.weight"]
    assert not [name for name in s3.objects(s3_prefix) if "step-1.weights" in name]
