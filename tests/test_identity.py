from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dualpath_sglang import identity
from dualpath_sglang.identity import Checkpoint, Identity, ModelFacts, identify, weight_files
from dualpath_storage import StoreError

CONFIG = {"architectures": ["TinyForCausalLM"], "hidden_size": 8, "rope_theta": 10000.0}


def checkpoint(home: Path, seed: int = 0, config: dict[str, object] | None = None) -> Checkpoint:
    """Two weight files of ten tensors each."""
    home.mkdir()
    (home / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    source = torch.Generator().manual_seed(seed)
    for part in (1, 2):
        tensors = {f"layer.{i}": torch.randn(64, 64, generator=source) for i in range(10)}
        save_file(tensors, home / f"model-{part}.safetensors")
    return Checkpoint(str(home))


def of(checkpoint: Checkpoint, **settings: object) -> Identity:
    return identify(ModelFacts(checkpoint, settings))


def test_a_copy_has_the_same_identity(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert of(one) == of(two)
    assert of(one).model.startswith("TinyForCausalLM:")


def test_other_weights_of_the_same_shapes_differ(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", seed=1)
    assert of(one).model == of(two).model
    assert of(one).weights != of(two).weights


@pytest.mark.parametrize("tensor", range(10))
def test_one_retrained_tensor_is_noticed(tmp_path: Path, tensor: int) -> None:
    one = checkpoint(tmp_path / "a")
    before = of(one).weights
    file = tmp_path / "a" / "model-2.safetensors"
    data = bytearray(file.read_bytes())
    body = len(data) - 10 * 64 * 64 * 4
    start = body + tensor * 64 * 64 * 4
    data[start : start + 64 * 64 * 4] = bytes(64 * 64 * 4)
    file.write_bytes(data)
    assert of(one).weights != before


def test_a_file_that_is_no_safetensors_is_sampled_at_even_distances(tmp_path: Path) -> None:
    home = tmp_path / "gguf"
    home.mkdir()
    (home / "config.json").write_text("{}")
    weights = bytearray(4 << 20)
    (home / "model.gguf").write_bytes(weights)
    before = of(Checkpoint(str(home))).weights
    weights[2_000_000:2_200_000] = b"\1" * 200_000
    (home / "model.gguf").write_bytes(weights)
    assert of(Checkpoint(str(home))).weights != before
    assert of(Checkpoint(str(home / "model.gguf"))).weights == of(Checkpoint(str(home))).weights


def test_another_configuration_differs_and_bookkeeping_does_not(tmp_path: Path) -> None:
    plain = of(checkpoint(tmp_path / "a"))
    scaled = of(checkpoint(tmp_path / "b", config={**CONFIG, "rope_theta": 5e5}))
    saved = of(checkpoint(tmp_path / "c", config={**CONFIG, "transformers_version": "9.9"}))
    assert scaled.model != plain.model
    assert saved == plain


def test_launch_settings_that_change_kv_differ_and_neutral_ones_do_not(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "a")
    plain = of(here)
    assert of(here, json_model_override_args='{"rope_theta": 1}').model != plain.model
    assert of(here, quantization="fp8").model != plain.model
    assert of(here, json_model_override_args="{}", quantization=None) == plain


def test_a_given_revision_stands_for_the_weights(tmp_path: Path) -> None:
    facts = ModelFacts(checkpoint(tmp_path / "a"))
    assert identify(facts, weights_revision="r7").weights == "r7"
    assert identify(facts, weights_revision="r7").model == identify(facts).model
    absent = ModelFacts(Checkpoint("nobody/nothing"))
    assert identify(absent, weights_revision="r7", model_id="m").model.startswith("m:")


def test_weights_that_cannot_be_found_are_refused_with_a_sentence() -> None:
    with pytest.raises(StoreError, match=r"no weight files of nobody/nothing .* weights_revision"):
        identify(ModelFacts(Checkpoint("nobody/nothing")))


def test_weights_made_up_by_the_engine_are_never_those_of_the_files(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "a")
    assert identify(ModelFacts(here, random_weights=True)).weights != of(here).weights


def test_adapters_and_drafts_count(tmp_path: Path) -> None:
    here, other = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", seed=1)
    third = checkpoint(tmp_path / "c", seed=2)
    adapted = identify(ModelFacts(here, adapters=[other]))
    assert adapted.weights not in (of(here).weights, of(other).weights)
    assert identify(ModelFacts(here, adapters=[third])).weights != adapted.weights
    drafted = identify(ModelFacts(here, draft=other))
    assert (drafted.model, drafted.weights) == (of(here).model, of(here).weights)
    assert drafted.draft not in ("", identify(ModelFacts(here, draft=third)).draft)


def test_optimizer_states_are_no_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    (tmp_path / "a" / "optimizer.pt").write_bytes(b"x")
    names = [file.name for file in weight_files(tmp_path / "a")]
    assert names == ["model-1.safetensors", "model-2.safetensors"]


def test_a_fingerprint_is_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = checkpoint(tmp_path / "a")
    facts, cache = ModelFacts(here), tmp_path / "store"
    first = identify(facts, cache_dir=cache)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "fingerprint", lambda files: pytest.fail("sampled again"))
        assert identify(facts, cache_dir=cache) == first
    file = tmp_path / "a" / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert identify(facts, cache_dir=cache).weights != first.weights


def test_a_damaged_or_unwritable_memory_of_fingerprints_is_no_failure(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "a")
    cache = tmp_path / "store"
    cache.mkdir()
    (cache / "fingerprints.json").write_text("{ not json")
    assert identify(ModelFacts(here), cache_dir=cache) == of(here)
    assert identify(ModelFacts(here), cache_dir=tmp_path / "a" / "config.json") == of(here)
