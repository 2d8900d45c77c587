"""The attention time of one model on one kind of device, as ``dualpath profile`` measured it.

A JSON file, by default ``<root>/profiles/<digest of the key>.json``. The key says what the times
depend on; a server whose own key differs refuses the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualpath_sglang.scheduling.quota import AttentionModel

FORM = "dualpath-profile-1"
_MOST_BYTES = 1 << 20


class ProfileError(ValueError):
    """A profile cannot be used; the message is one plain sentence for the operator."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What attention times depend on.

    Args:
        model: configuration of the model, as in the identity of its pages; not its weights.
        device: name of the GPU, or of the CPU with its threads.
        attention_backend: SGLang's name of the one that prefills.
        tp: over how many ranks attention is sharded.
        dtype: of the computation.
        sglang: version.
    """

    model: str
    device: str
    attention_backend: str
    tp: int
    dtype: str
    sglang: str

    def digest(self) -> str:
        """16 hex digits, for a file's name."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_WORDS: Mapping[str, str] = {
    "model": "another model",
    "device": "another device",
    "attention_backend": "another attention backend",
    "tp": "another number of tensor-parallel ranks",
    "dtype": "another dtype",
    "sglang": "another version of SGLang",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted model, and how good it is.

    Args:
        key: what it was measured on.
        model: the prediction.
        points: batches that were measured.
        held_out: of them, those that were kept from the fit.
        error: median relative error of the prediction over those.
        error_p90: nine in ten are better.
        most_tokens: longest context that was measured; beyond, the prediction extrapolates.
    """

    key: ProfileKey
    model: AttentionModel
    points: int
    held_out: int
    error: float
    error_p90: float
    most_tokens: int

    def save(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"form": FORM, **asdict(self)}, file, indent=1)
                file.write("\n")
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def require(self, key: ProfileKey, path: Path) -> None:
        """Refuse a server that is not what was measured.

        Raises:
            ProfileError: it differs.
        """
        for name, words in _WORDS.items():
            ours, theirs = getattr(self.key, name), getattr(key, name)
            if ours != theirs:
                raise ProfileError(
                    f"The profile {path} is of {words}: {ours}, where this server has {theirs}; "
                    "run dualpath profile with this server's flags."
                )


def default_path(root: Path, key: ProfileKey) -> Path:
    """Where the profile for a key lies under a store's root."""
    return root / "profiles" / f"{key.digest()}.json"


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: there is none, or it is not of the known form.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        return _parse(found)
    except FileNotFoundError:
        raise ProfileError(
            f"There is no profile {path}; run dualpath profile with this server's flags."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProfileError(
            f"The profile {path} cannot be used ({error}); run dualpath profile again."
        ) from error


def _parse(found: Any) -> Profile:
    if not isinstance(found, dict) or found.get("form") != FORM:
        raise ValueError(f"its form is not {FORM}")
    fields = {name: value for name, value in found.items() if name != "form"}
    key, model = ProfileKey(**fields.pop("key")), AttentionModel(**fields.pop("model"))
    profile = Profile(key=key, model=model, **fields)
    if not all(type(n) is int for n in (profile.points, profile.held_out, profile.most_tokens)):
        raise ValueError("its counts are no whole numbers")
    if not all(math.isfinite(value) for value in (profile.error, profile.error_p90)):
        raise ValueError("its errors are no numbers")
    if model.predict([]) + model.pair_s + model.token_s + model.square_s <= 0:
        raise ValueError("it predicts that nothing takes time")
    return profile
